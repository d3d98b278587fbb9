"""Names and findings of records: what callers of the store pass in and get back."""

from __future__ import annotations

from typing import NamedTuple

from sgl_kvtier.codec.base import HEADER_BYTES, Bytes, RecordHeader, payload_checksum
from sgl_kvtier.errors import RecordError
from sgl_kvtier.store import toc
from sgl_kvtier.store.catalog import Digests, Place
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
    """A record as found: header, payload in the segment's map, and the entry it was found by."""

    header: RecordHeader
    payload: Bytes
    segment: Segment
    slot: int
    raw_entry: bytes

    def intact(self) -> bool:
        """Whether the slot still holds this record: ask after the payload was used, before believing the result."""
        return self.segment.raw_entry(self.slot) == self.raw_entry


def verified_record(name: RecordKey, place: Place, raw_entry: bytes, entry: TocEntry) -> StoredRecord:
    """The record that ``entry`` describes, checked against its name, its entry and its checksum.

    Raises:
        RecordError: It is damaged, or another one.
    """
    segment, slot = place
    end = HEADER_BYTES + entry.payload_bytes
    if end > segment.header.slot_bytes:
        raise RecordError(f"entry claims a record of {end} bytes in a slot of {segment.header.slot_bytes}")
    header = RecordHeader.unpack(segment.data[slot, :HEADER_BYTES].tobytes())
    if header.namespace != name.namespace or header.key != name.key:
        raise RecordError("record belongs to another page than its entry")
    if (header.payload_bytes, header.payload_checksum) != (entry.payload_bytes, entry.payload_checksum):
        raise RecordError("record header and entry disagree")
    payload = segment.data[slot, HEADER_BYTES:end]
    if payload_checksum([payload]) != entry.payload_checksum:
        raise RecordError("payload fails its checksum")
    return StoredRecord(header, payload, segment, slot, raw_entry)
