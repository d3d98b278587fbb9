"""Reading stored records for no other reason than to see whether they are still what was written."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from sgl_kvtier.codec.base import HEADER_BYTES, Bytes, RecordHeader, payload_checksum
from sgl_kvtier.errors import RecordError
from sgl_kvtier.identity import index_digests
from sgl_kvtier.store.catalog import Place
from sgl_kvtier.store.directory import namespace_prefix
from sgl_kvtier.store.record import RecordKey, check_record
from sgl_kvtier.store.segment import DIRECT_ALIGNMENT, Segment
from sgl_kvtier.store.toc import TocEntry

if TYPE_CHECKING:
    from sgl_kvtier.store.store import Store


def record_name(content: Bytes) -> RecordKey:
    """The name that the record in a slot's ``content`` claims.

    Raises:
        RecordError: There is no record.
    """
    header = RecordHeader.unpack(content[:HEADER_BYTES].tobytes())
    words = np.frombuffer(header.key, "<u8").reshape(1, 4)
    return RecordKey(header.namespace, header.key, index_digests(header.namespace, words)[0])


def check_whole(entry: TocEntry, content: Bytes) -> RecordKey:
    """Check everything there is to check of a record in a slot's ``content``; returns its name.

    Raises:
        RecordError: It is damaged, or not the one that ``entry`` describes.
    """
    name = record_name(content)
    if (int(name.digest[0]), int(name.digest[1])) != (entry.digest_lo, entry.digest_hi):
        raise RecordError("entry and record have different digests")
    if namespace_prefix(name.namespace) != entry.namespace:
        raise RecordError("entry and record have different namespaces")
    check_record(name, entry, content)
    if payload_checksum([content[HEADER_BYTES : HEADER_BYTES + entry.payload_bytes]]) != entry.payload_checksum:
        raise RecordError("payload fails its checksum")
    return name


class Scrubber:
    """Goes round the records of this process, from a random one on, and drops the bad."""

    def __init__(self, store: Store, rng: np.random.Generator) -> None:
        """Over the segments of ``store`` that this process writes to."""
        self._store = store
        self._rng = rng
        self._round: Iterator[int] = iter(())
        self._allowance = 0.0
        self._buffer = memoryview(b"")
        #: Records that were read, and those of them that were bad.
        self.checked = self.bad = 0

    def run(self, nbytes: float, stop: Callable[[], bool] = lambda: False) -> None:
        """Read about ``nbytes`` bytes of records; what one call reads too much, the next ones read less."""
        self._allowance = min(self._allowance + nbytes, nbytes * 2)
        started_anew = False
        while self._allowance > 0 and not stop():
            read = next(self._round, None)
            if read is None:
                if started_anew:
                    return
                self._round, started_anew = self._go_round(), True
                continue
            self._allowance -= read

    def run_all(self) -> None:
        """Read every record once."""
        for _ in self._go_round():
            pass

    def _go_round(self) -> Iterator[int]:
        """Check record by record; yields the bytes each took."""
        segments = self._store.owned_segments()
        start = int(self._rng.integers(len(segments))) if segments else 0
        for segment in segments[start:] + segments[:start]:
            for slot in np.flatnonzero(segment.used).tolist():
                yield self._check(segment, slot)

    def _check(self, segment: Segment, slot: int) -> int:
        raw = segment.raw_entry(slot)
        entry = segment.entry(slot, raw)
        if entry is None:
            return 0
        content = self._read(segment, slot)
        self.checked += 1
        try:
            check_whole(entry, content)
        except RecordError as error:
            if segment.raw_entry(slot) == raw:
                self.bad += 1
                digest = np.array([entry.digest_lo, entry.digest_hi], np.uint64)
                self._store.drop_found_bad(RecordKey(b"", b"", digest), Place(segment, slot), error)
        return len(content)

    def _read(self, segment: Segment, slot: int) -> Bytes:
        """A slot's content from the disk itself, so that scrubbing neither trusts nor fills the page cache."""
        needed = segment.header.slot_bytes + 2 * DIRECT_ALIGNMENT
        if len(self._buffer) < needed:
            self._buffer = memoryview(mmap.mmap(-1, needed))
        try:
            found = segment.read_direct(slot, 1, self._buffer)
        except OSError:
            return np.zeros(segment.header.slot_bytes, np.uint8)  # what cannot be read is bad
        content: Bytes = segment.data[slot] if found is None else found[0]
        return content
