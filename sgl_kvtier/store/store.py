"""The segment store: records by (namespace, key), found through one index over all writers of a folder.

Writing a record: void entry -> payload -> entry -> index -> feed. A record is visible only when it is whole; a
failed, short or crashed write leaves a void slot. Reading takes no lock: the reader copies the slot's entry, uses
the payload, and looks at the entry again (:meth:`StoredRecord.intact`). A slot is voided before it is rewritten, so
an unchanged entry proves that the bytes were the record's all along; this holds across processes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_kvtier.codec.base import HEADER_BYTES, Encoded, RecordHeader, payload_checksum
from sgl_kvtier.config import AUTO_CAPACITY_LIMIT_BYTES, MIB, TierConfig
from sgl_kvtier.errors import RecordError, StoreError, StoreFullError
from sgl_kvtier.identity import Namespace
from sgl_kvtier.store import toc
from sgl_kvtier.store.catalog import Catalog, Digests, Place
from sgl_kvtier.store.directory import StoreDirectory, namespace_prefix, segment_number
from sgl_kvtier.store.feed import WHOLE_SEGMENT
from sgl_kvtier.store.record import ChainPlace, RecordKey, StoredRecord, verified_record
from sgl_kvtier.store.segment import Segment, slot_class
from sgl_kvtier.store.space import SlotPool, oldest_slots
from sgl_kvtier.store.toc import TocEntry
from sgl_kvtier.store.writer import Writer

logger = logging.getLogger(__name__)

#: A store of few segments could neither mix slot sizes nor evict in small steps.
_SEGMENTS_PER_STORE = 16


class StoreStats(NamedTuple):
    """What this process sees of the store, without disk I/O."""

    pages: int
    capacity_bytes: int
    own_segment_bytes: int
    evicted_pages: int


class Store:
    """All segments of a folder: those of this process to write and read, those of the others to read."""

    def __init__(self, config: TierConfig) -> None:
        """Open the store in ``config.directory``, creating it when there is none.

        Raises:
            StoreError: The folder cannot be used, or has no room for a single segment.
        """
        self.directory = StoreDirectory(Path(config.directory))
        self._config = config
        used, free = self.directory.segment_files_bytes(), self.directory.free_bytes()
        if used == 0 and free < config.min_free_bytes + MIB:
            raise StoreError(
                f"directory: no room in {config.directory}: {free} bytes are free, and min_free keeps "
                f"{config.min_free_bytes} of them for others"
            )
        self.capacity_bytes = config.capacity_bytes or min((used + free) // 2, AUTO_CAPACITY_LIMIT_BYTES)
        self._segment_bytes = max(MIB, min(config.segment_bytes, self.capacity_bytes // _SEGMENTS_PER_STORE))
        self._lock = threading.RLock()
        self._writes_done = threading.Condition(self._lock)
        self._writers: dict[str, Writer] = {}
        self._catalog = Catalog()
        self._slots = SlotPool()
        self._cleared: dict[int, int] = {}
        self._changed_ns = 0
        self._last_stamp_us = 0
        self._evicted = 0
        self._closed = False
        with self._lock:
            self._read_cleared()
            self._find_writers()

    # ------------------------------------------------------------------ identity

    def register(self, namespace: Namespace) -> bytes:
        """Make ``namespace`` known to the store; returns its digest."""
        return self.directory.register(namespace)

    # ------------------------------------------------------------------ reading

    def leading_run(self, digests: Digests) -> int:
        """How many of ``digests``, uint64[n, 2], are present before the first that is not."""
        self._refresh()
        return self._catalog.leading_run(digests)

    def present(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Which of ``digests``, uint64[n, 2], are present."""
        self._refresh()
        return self._catalog.present(digests)

    def contains(self, name: RecordKey) -> bool:
        """Whether a record is present under ``name``, as far as this process knows."""
        return self._catalog.find(name.digest) is not None

    def read(self, name: RecordKey) -> StoredRecord | None:
        """The record under ``name``, its checksum verified; None when there is none.

        Raises:
            RecordError: There was one, and it is damaged. It is dropped, so that the next look finds none.
        """
        place = self._catalog.find(name.digest)
        if place is None:
            self._refresh()  # another process may have stored it since the last look
            place = self._catalog.find(name.digest)
        if place is None:
            return None
        segment, slot = place
        raw = segment.raw_entry(slot)
        entry = segment.entry(slot, raw)
        if entry is None or entry.digest_lo != int(name.digest[0]) or entry.digest_hi != int(name.digest[1]):
            with self._lock:
                self._catalog.forget(name.digest, segment, slot)
            return None
        try:
            record = verified_record(name, place, raw, entry)
        except RecordError:
            if segment.raw_entry(slot) != raw:  # rewritten while we read: not damage, just gone
                return None
            self._drop(name.digest, place)
            raise
        segment.last_use_us[slot] = time.time_ns() // 1000
        return record

    def drop(self, name: RecordKey) -> None:
        """Forget the record under ``name``, if there is one."""
        place = self._catalog.find(name.digest)
        if place is not None:
            self._drop(name.digest, place)

    # ------------------------------------------------------------------ writing

    def put(self, name: RecordKey, encoded: Encoded, page_bytes: int, place: ChainPlace) -> bool:
        """Store a record; True when it is stored and visible, or already was.

        Raises:
            StoreFullError: No space can be had.
            OSError: The write failed; nothing became visible.
        """
        if self.contains(name):
            return True
        checksum, payload_bytes = payload_checksum(encoded.buffers), encoded.nbytes
        segment, slot = self._reserve(HEADER_BYTES + payload_bytes)
        written_us = self._stamp()
        header = RecordHeader(
            encoded.codec,
            page_bytes,
            payload_bytes,
            encoded.coded_bytes,
            checksum,
            name.namespace,
            name.key,
            written_us,
        )
        entry = TocEntry(
            int(name.digest[0]),
            int(name.digest[1]),
            namespace_prefix(name.namespace),
            place.parent,
            checksum,
            payload_bytes,
            page_bytes,
            written_us,
            encoded.codec,
            0,
            place.position,
        )
        try:
            segment.write(slot, [header.pack(), *encoded.buffers])
            with self._lock:
                self._publish(name, segment, slot, entry)
        except OSError:
            # The entry may be half written: the slot is used again only once it is void for certain.
            with self._lock:
                self._void(segment, slot)
            raise
        finally:
            with self._writes_done:
                segment.pending_writes -= 1
                self._writes_done.notify_all()
        return True

    def _publish(self, name: RecordKey, segment: Segment, slot: int, entry: TocEntry) -> None:
        """Make a written record visible, unless another thread stored the same page first."""
        if self.contains(name):
            self._slots.give(segment, slot)
            return
        segment.publish(slot, entry)
        segment.used[slot] = True
        segment.last_use_us[slot] = entry.written_us
        self._catalog.put(name.digest, segment, slot)
        self._post(segment, slot)

    def clear(self, namespaces: Iterable[bytes]) -> int:
        """Forget every page of ``namespaces``; returns how many. Pages of other namespaces stay."""
        digests = list(namespaces)
        prefixes = np.array([namespace_prefix(digest) for digest in digests], np.uint64)
        cleared = 0
        with self._lock:
            self._refresh()
            stamp = self._stamp()
            for digest in digests:
                self.directory.mark_cleared(digest, stamp)
                self._cleared[namespace_prefix(digest)] = stamp
            self._adopt()
            for segment in self._catalog.segments:
                slots, entries = segment.live_entries()
                chosen = np.isin(entries["namespace"], prefixes)
                for slot, entry in zip(slots[chosen].tolist(), entries[chosen], strict=True):
                    cleared += self._catalog.forget(entry["digest"], segment, slot)
                    if segment.owned:
                        self._void(segment, slot)
        return cleared

    def stats(self) -> StoreStats:
        """Counts in memory: no disk I/O, and no lock of the store."""
        own = sum(segment.nbytes for segment in self._catalog.owned)
        return StoreStats(len(self._catalog), self.capacity_bytes, own, self._evicted)

    def close(self) -> None:
        """Close all files and give up the writer folders. Calls after it find nothing and store nothing."""
        with self._writes_done:
            self._closed = True
            # Closing a file under a write could let the write hit another file of the same number.
            self._writes_done.wait_for(lambda: not any(s.pending_writes for s in self._catalog.segments))
            self._catalog.clear()
            self._slots.clear()
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()

    # ------------------------------------------------------------------ space; all under the lock

    def _reserve(self, record_bytes: int) -> tuple[Segment, int]:
        """A void slot that holds ``record_bytes``, taken out of the pool."""
        wanted = slot_class(record_bytes)
        with self._lock:
            if self._closed:
                raise StoreFullError("the store is closed")
            self._refresh()
            self._yield_to_peers()
            found = self._slots.take(wanted)
            if found is None and self._may_hold(wanted):
                self._grow(wanted)
                found = self._slots.take(wanted)
                # Giving up a segment of other slots makes room on disk, not yet a slot; it may take several.
                while found is None and self._evict(wanted):
                    if (found := self._slots.take(wanted)) is None:
                        self._grow(wanted)
                        found = self._slots.take(wanted)
                self._own_writer().feed.want = found is None
            if found is not None:
                found[0].pending_writes += 1
                return found
        raise StoreFullError(
            f"no slot of {wanted} bytes: capacity {self.capacity_bytes} is spent, and nothing here may be evicted"
        )

    def _segment_shape(self, slot_bytes: int) -> toc.TocHeader:
        return toc.TocHeader(slot_bytes, max(1, self._segment_bytes // slot_bytes), bytes(16))

    def _may_hold(self, slot_bytes: int) -> bool:
        """Whether a segment of such slots fits into the capacity at all."""
        return self._segment_shape(slot_bytes).nbytes <= self.capacity_bytes

    def _grow(self, slot_bytes: int) -> None:
        """Add a segment of ``slot_bytes`` slots, if budget and disk allow."""
        shape = self._segment_shape(slot_bytes)
        writer = self._own_writer()
        with self.directory.lock():
            if self.directory.segment_files_bytes() + shape.nbytes > self.capacity_bytes:
                return
            if self.directory.free_bytes() < shape.nbytes + self._config.min_free_bytes:
                return
            try:
                segment = writer.new_segment(slot_bytes, shape.slot_count)
            except StoreFullError as error:
                logger.warning("%s", error)
                return
        self._add(segment)

    def _evict(self, slot_bytes: int) -> bool:
        """Void the least recently used slots that fit, or give up the least recently used segment that does not.

        Returns:
            Whether anything was given up.
        """
        owned = self._catalog.owned or (self._adopt() and self._catalog.owned)
        if not owned:
            return False
        fitting = [segment for segment in owned if self._slots.fits(slot_bytes, segment.header.slot_bytes)]
        oldest_other = self._least_recent(segment for segment in owned if segment not in fitting)
        victims = oldest_slots(fitting)
        if victims and oldest_other is not None:
            segment, slot = victims[0]
            if int(oldest_other.last_use_us.max()) < int(segment.last_use_us[slot]):
                victims = []
        for segment, slot in victims:
            entry = segment.entry(slot)
            if entry is not None:
                digest = np.array([entry.digest_lo, entry.digest_hi], np.uint64)
                self._evicted += self._catalog.forget(digest, segment, slot)
            self._void(segment, slot)
        if not victims and oldest_other is not None:
            self._delete(oldest_other)
        return bool(victims) or oldest_other is not None

    def _yield_to_peers(self) -> None:
        """Give a segment back when another live process finds no space and we hold more than our share."""
        waiting = [w for w in self._writers.values() if not w.owned and w.feed.want]
        if not waiting:
            return
        live = [w for w in waiting if w.is_live()]
        owned = self._catalog.owned
        share = self.capacity_bytes // (1 + len([w for w in self._writers.values() if not w.owned and w.is_live()]))
        if live and len(owned) > 1 and sum(segment.nbytes for segment in owned) > share:
            oldest = self._least_recent(owned)
            if oldest is not None:
                self._delete(oldest)

    @staticmethod
    def _least_recent(segments: Iterable[Segment]) -> Segment | None:
        """The segment whose newest use is the oldest, among those that nobody writes to at the moment."""
        idle = (segment for segment in segments if not segment.pending_writes)
        return min(idle, key=lambda segment: int(segment.last_use_us.max()), default=None)

    def _own_writer(self) -> Writer:
        """The folder this process writes to: one that nobody owns any more, or a new one."""
        own = next((writer for writer in self._writers.values() if writer.owned), None)
        if own is not None:
            return own
        with self.directory.lock():
            for writer in self._writers.values():
                if self._take_over(writer):
                    return writer
            writer = Writer.create(self.directory.new_writer_folder())
        self._writers[writer.folder.name] = writer
        return writer

    def _adopt(self) -> bool:
        """Own every folder whose process is gone; True when there was one."""
        with self.directory.lock():
            taken = [self._take_over(writer) for writer in self._writers.values() if not writer.owned]
        return any(taken)

    def _take_over(self, writer: Writer) -> bool:
        if writer.owned:
            return False
        known = list(writer.segments.values())
        if not writer.try_own():
            return False
        for segment in known:
            self._catalog.remove(segment)
        for segment in writer.open_segments():
            self._add(segment)
        # A crash may have cut off the feed after a slot changed: readers look at everything again.
        for number in writer.segments:
            writer.feed.post(number, WHOLE_SEGMENT)
        writer.seen = writer.feed.head
        return True

    def _void(self, segment: Segment, slot: int) -> None:
        """Void an owned slot and make it free; a slot that cannot be voided stays out of use."""
        segment.used[slot] = False
        try:
            segment.void(slot)
        except OSError as error:
            logger.warning("slot %d of %s cannot be voided: %s", slot, segment.directory, error)
            return
        segment.last_use_us[slot] = 0
        self._slots.give(segment, slot)
        self._post(segment, slot)

    def _delete(self, segment: Segment) -> None:
        """Give up a whole owned segment."""
        self._evicted += self._catalog.remove(segment)
        self._slots.forget(segment)
        writer = self._writers[segment.directory.parent.name]
        try:
            writer.delete_segment(segment)
        except OSError as error:
            logger.warning("segment %s cannot be deleted: %s", segment.directory, error)

    def _post(self, segment: Segment, slot: int) -> None:
        self._writers[segment.directory.parent.name].feed.post(segment_number(segment.directory), slot)

    def _stamp(self) -> int:
        """Time in microseconds since the epoch, rising from call to call."""
        with self._lock:
            self._last_stamp_us = max(self._last_stamp_us + 1, time.time_ns() // 1000)
            return self._last_stamp_us

    # ------------------------------------------------------------------ what other processes did; under the lock

    def _refresh(self) -> None:
        """Take in what other writers announced since the last look. Reads shared memory only, unless they grew."""
        # Whoever holds the lock may wait for the disk; a look must not, and an older view only forgets.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._closed:
                return
            if self.directory.changed_ns() != self._changed_ns:
                self._find_writers()
            for writer in self._writers.values():
                if not writer.owned and writer.feed.head != writer.seen:
                    self._follow(writer)
        finally:
            self._lock.release()

    def _find_writers(self) -> None:
        self._changed_ns = self.directory.changed_ns()
        for folder in self.directory.writer_folders():
            if folder.name in self._writers:
                continue
            try:
                writer = Writer(folder)
            except FileNotFoundError:  # being created: its feed is not there yet
                self._changed_ns = 0
                continue
            except (OSError, StoreError) as error:
                logger.warning("writer folder %s is left out: %s", folder, error)
                continue
            self._writers[folder.name] = writer
            writer.seen = writer.feed.head
            for segment in writer.open_segments():
                self._add(segment)

    def _follow(self, writer: Writer) -> None:
        writer.seen, events = writer.feed.since(writer.seen)
        if events is None:
            events = [(number, WHOLE_SEGMENT) for number in list(writer.segments)]
            events += [(segment_number(s.directory), WHOLE_SEGMENT) for s in writer.open_segments()]
        # Only the last event of a slot matters: its entry is read as it is now.
        for number, slot in dict.fromkeys(events):
            segment = writer.segments.get(number)
            if slot == WHOLE_SEGMENT:
                if segment is not None:
                    self._catalog.remove(segment)
                    writer.segments.pop(number).close()
                if (opened := writer.open_segment(number)) is not None:
                    self._add(opened)
            elif segment is not None and slot < segment.header.slot_count:
                self._catalog.reindex(segment, slot, self._cleared)

    def _add(self, segment: Segment) -> None:
        """Index a newly opened segment; the free slots of an owned one become usable."""
        cleared = self._catalog.add(segment, self._cleared)
        if segment.owned:
            for slot in np.flatnonzero(~segment.used).tolist():
                if slot not in cleared:
                    self._slots.give(segment, slot)
            # Readers take an unchanged entry as proof of what a slot holds: it must go before the slot is rewritten.
            for slot in cleared:
                self._void(segment, slot)

    def _read_cleared(self) -> None:
        self._cleared = {
            prefix: record.cleared_us for prefix, record in self.directory.namespaces().items() if record.cleared_us
        }

    # ------------------------------------------------------------------ bad records

    def _drop(self, digest: Digests, place: Place) -> None:
        """Forget a record, and void its slot when it is ours, so that it does not come back at the next open."""
        with self._lock:
            if not place.segment.owned and self._adopt():
                # Its writer is gone. Had we left the folder alone, the record would be back once we write to it.
                now = self._catalog.find(digest)
                if now is None or (now.segment.directory, now.slot) != (place.segment.directory, place.slot):
                    return
                place = now
            if self._catalog.forget(digest, *place) and place.segment.owned:
                self._void(*place)
