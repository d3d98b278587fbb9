"""Names and findings of records: what callers of the store pass in and get back."""

from __future__ import annotations

from typing import NamedTuple

from sgl_kvtier.codec.base import HEADER_BYTES, Bytes, RecordHeader
from sgl_kvtier.errors import RecordError
from sgl_kvtier.store import toc
from sgl_kvtier.store.catalog import Digests
from sgl_kvtier.store.segment import Segment
from sgl_kvtier.store.toc import TocEntry


class RecordKey(NamedTuple):
    """Name of a record: its namespace digest (32 bytes), its key (32 bytes), and their index digest ``uint64[2]``."""

    namespace: bytes
    key: bytes
    digest: Digests


class ChainPlace(NamedTuple):
    """Where a page stands in its chain: number of pages before it, and the low index digest of the one before."""

    position: int = toc.UNKNOWN_POSITION
    parent: int = 0


class StoredRecord(NamedTuple):
    """A record as found, its payload not yet verified: header, payload, and the entry it was found by."""

    header: RecordHeader
    payload: Bytes
    segment: Segment
    slot: int
    raw_entry: bytes

    def intact(self) -> bool:
        """Whether the slot still holds this record: ask after the payload was used, before believing the result."""
        return self.segment.raw_entry(self.slot) == self.raw_entry


class PendingRecord(NamedTuple):
    """A record that is written to its slot, and not visible yet."""

    name: RecordKey
    segment: Segment
    slot: int
    entry: TocEntry


def check_record(name: RecordKey, entry: TocEntry, content: Bytes) -> RecordHeader:
    """The header of the record in a slot's ``content``, checked against its name and its entry; the payload is not.

    Raises:
        RecordError: It is damaged, or another one.
    """
    if HEADER_BYTES + entry.payload_bytes > len(content):
        raise RecordError(f"entry claims a record of {HEADER_BYTES + entry.payload_bytes} bytes in {len(content)}")
    header = RecordHeader.unpack(content[:HEADER_BYTES].tobytes())
    if header.namespace != name.namespace or header.key != name.key:
        raise RecordError("record belongs to another page than its entry")
    if (header.payload_bytes, header.payload_checksum) != (entry.payload_bytes, entry.payload_checksum):
        raise RecordError("record header and entry disagree")
    return header
