"""The segment store: records by (namespace, key), found through one index over all writers of a folder.

Writing a record: void entry -> payload -> entry -> index -> feed. A record is visible only when it is whole; a
failed, short or crashed write leaves a void slot. Reading takes no lock: the reader copies the slot's entry, uses
the payload, and looks at the entry again (:meth:`StoredRecord.intact`). A slot is voided before it is rewritten, so
an unchanged entry proves that the bytes were the record's all along; this holds across processes.

Under the store's lock: what is chosen, published, voided, created and deleted. Not under it: look-ups, reading,
encoding, writing payloads, waiting for the disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_kvtier.codec.base import HEADER_BYTES, Bytes, Encoded, RecordHeader, payload_checksum
from sgl_kvtier.config import AUTO_CAPACITY_LIMIT_BYTES, MIB, TierConfig
from sgl_kvtier.errors import RecordError, StoreError, StoreFullError
from sgl_kvtier.identity import Namespace
from sgl_kvtier.store import toc
from sgl_kvtier.store.catalog import Catalog, Digests, Place
from sgl_kvtier.store.directory import StoreDirectory, namespace_prefix, segment_number
from sgl_kvtier.store.evictor import Evictor
from sgl_kvtier.store.feed import WHOLE_SEGMENT
from sgl_kvtier.store.maintenance import Maintenance
from sgl_kvtier.store.record import ChainPlace, PendingRecord, RecordKey, StoredRecord, check_record
from sgl_kvtier.store.segment import Segment, slot_class
from sgl_kvtier.store.space import SlotPool
from sgl_kvtier.store.toc import TocEntry
from sgl_kvtier.store.writer import Writer
from sgl_kvtier_kernels import bus_errors

logger = logging.getLogger(__name__)

#: A store of few segments could neither mix slot sizes nor evict in small steps; one of very many would run out of
#: file descriptors.
_SEGMENTS_PER_STORE = 16
_SEGMENTS_LIMIT = 128

#: Where less than a whole segment fits, one of this fraction of its size is made, but none smaller.
_SMALLEST_SEGMENT = 8

#: A segment is given other slots if these fill that share of its data file.
_RESHAPED_SHARE = 0.98

#: Left of the capacity and of the disk for small files that come later, and for what the file system itself needs.
_SPARE_BYTES = 64 << 10

#: Records that are given up at a time, as a share of all and at most: each batch is one message to the readers.
_BATCH_FRACTION = 1 / 128
_BATCH_LIMIT = 64

#: Longest chain position that entries tell apart.
_LAST_POSITION = toc.UNKNOWN_POSITION - 1


class StoreStats(NamedTuple):
    """What this process sees of the store, without disk I/O.

    Attributes:
        pages: Records that can be found, other processes' included.
        capacity_bytes: Cap over all segments of all processes.
        own_segment_bytes, own_used_bytes: Size of this process's segments, and of their slots that hold a record.
        evicted_pages: Records of this process that were given up for space.
    """

    pages: int
    capacity_bytes: int
    own_segment_bytes: int
    own_used_bytes: int
    evicted_pages: int


class Store:
    """All segments of a folder: those of this process to write and read, those of the others to read.

    A store is not usable in a forked child: there it is closed, and the parent's goes on.
    """

    def __init__(self, config: TierConfig) -> None:
        """Open the store in ``config.directory``, creating it when there is none.

        Raises:
            StoreError: The folder cannot be used, or has no room for a single segment.
        """
        bus_errors.install()
        self._durable = config.durability != "none"
        self.directory = StoreDirectory(Path(config.directory), durable=self._durable)
        self.config = config
        used, free = self.directory.used_bytes(), self.directory.free_bytes()
        if not self.directory.writer_folders() and free < config.min_free_bytes + MIB:
            raise StoreError(
                f"directory: no room in {config.directory}: {free} bytes are free, and min_free keeps "
                f"{config.min_free_bytes} of them for others"
            )
        self.capacity_bytes = config.capacity_bytes or min((used + free) // 2, AUTO_CAPACITY_LIMIT_BYTES)
        largest = max(MIB, min(config.segment_bytes, self.capacity_bytes // _SEGMENTS_PER_STORE))
        self._segment_bytes = max(largest, self.capacity_bytes // _SEGMENTS_LIMIT)
        self._lock = threading.RLock()
        self._writes_done = threading.Condition(self._lock)
        self._writers: dict[str, Writer] = {}
        self._catalog = Catalog()
        self._slots = SlotPool()
        self._evictor = Evictor(self._catalog)
        self._cleared: dict[int, int] = {}
        self._cleared_ns = self._changed_ns = 0
        self._last_stamp_us = 0
        self._evicted = 0
        #: Size of the slots of this process's segments.
        self._own_bytes = 0
        #: Whether the last attempt to add a segment was refused, so that eviction alone makes room.
        self._grown_out = False
        self._closed = False
        with self._lock:
            self._read_cleared()
            self._find_writers()
            for writer in self._writers.values():
                writer.reclaim()
        self.maintenance = Maintenance(self)
        _opened.add(self)

    # ------------------------------------------------------------------ identity

    def register(self, namespace: Namespace) -> bytes:
        """Make ``namespace`` known to the store; returns its digest."""
        return self.directory.register(namespace)

    # ------------------------------------------------------------------ reading

    def leading_run(self, digests: Digests) -> int:
        """How many of ``digests``, uint64[n, 2], are present before the first that is not; they are leased."""
        self._refresh()
        return self._catalog.leading_run(digests, self._lease_until_s())

    def present(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Which of ``digests``, uint64[n, 2], are present; those are leased."""
        self._refresh()
        return self._catalog.present(digests, self._lease_until_s())

    def _lease_until_s(self) -> int:
        lease = self.config.lease_s
        return int(time.time() + lease) + 1 if lease > 0 else 0

    def contains(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Which of ``digests``, uint64[n, 2], are present; nothing is leased."""
        self._refresh()
        return self._catalog.present(digests)

    def find(self, digests: Digests) -> list[Place | None]:
        """Where the records with ``digests``, uint64[n, 2], lie."""
        places = self._catalog.find(digests)
        if None in places:  # another process may have stored them since the last look
            self._refresh()
            places = self._catalog.find(digests)
        return places

    def record(
        self, name: RecordKey, place: Place, raw: bytes | None = None, content: Bytes | None = None
    ) -> StoredRecord | None:
        """The record under ``name`` in ``place``, its payload not yet verified; None when it is gone.

        Args:
            name: What to look for.
            place: Where :meth:`find` saw it.
            raw, content: The slot's entry, and its content uint8[slot_bytes] as read after the entry was, where the
                content was not to be read through the map.

        Raises:
            RecordError: There was one, and it is damaged. It is dropped, so that the next look finds none.
        """
        segment, slot = place
        raw = segment.raw_entry(slot) if raw is None else raw
        entry = segment.entry(slot, raw)
        if entry is None or entry.digest_lo != int(name.digest[0]) or entry.digest_hi != int(name.digest[1]):
            with self._lock:
                self._catalog.forget(name.digest.reshape(1, 2), segment, [slot])
            return None
        content = segment.data[slot] if content is None else content
        try:
            header = check_record(name, entry, content)
        except RecordError:
            if segment.raw_entry(slot) != raw:  # rewritten while we read: not damage, just gone
                return None
            self.drop(name, place)
            raise
        return StoredRecord(header, content[HEADER_BYTES : HEADER_BYTES + entry.payload_bytes], segment, slot, raw)

    def note_use(self, places: Sequence[Place]) -> None:
        """Remember that the records in ``places`` were read, for eviction."""
        self._evictor.used(places, time.time_ns() // 1000)

    def drop_found_bad(self, name: RecordKey, place: Place, reason: RecordError) -> None:
        """As :meth:`drop`, for a record that nobody asked for."""
        logger.warning("slot %d of %s is bad, and voided: %s", place.slot, place.segment.directory, reason)
        self.drop(name, place)

    def drop(self, name: RecordKey, place: Place) -> None:
        """Forget a bad record, and void its slot when it is ours, so that it does not come back at the next open."""
        digest = name.digest.reshape(1, 2)
        with self._lock:
            if self._closed:
                return
            if not place.segment.owned and self._adopt():
                # Its writer is gone. Had we left the folder alone, the record would be back once we write to it.
                now = self._catalog.find(digest)[0]
                if now is None or (now.segment.directory, now.slot) != (place.segment.directory, place.slot):
                    return
                place = now
            if self._catalog.forget(digest, place.segment, [place.slot]) and place.segment.owned:
                self._void([place])
            if place.segment.is_cut_off():
                self._lose(place.segment)

    # ------------------------------------------------------------------ writing

    def write(self, name: RecordKey, encoded: Encoded, page_bytes: int, place: ChainPlace) -> PendingRecord:
        """Write a record to a slot. It is neither visible nor durable before :meth:`publish`; call that, or `abandon`.

        Raises:
            StoreFullError: No space can be had.
            OSError: The write failed.
        """
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
            min(place.position, _LAST_POSITION) if place.position != toc.UNKNOWN_POSITION else place.position,
        )
        pending = PendingRecord(name, segment, slot, entry)
        try:
            segment.write(slot, [header.pack(), *encoded.buffers])
        except BaseException:
            self.abandon([pending])
            raise
        return pending

    def publish(self, pending: Sequence[PendingRecord]) -> None:
        """Make written records visible, in their order; under strict durability they are durable on return.

        Raises:
            OSError: It failed; none that was not present before is acknowledged, and those of ``pending`` are void.
        """
        segments = list({id(record.segment): record.segment for record in pending}.values())
        try:
            if self.config.durability == "strict":
                for segment in segments:
                    segment.sync_data()
            with self._lock:
                self._publish(pending)
            if self.config.durability == "strict":
                for segment in segments:
                    segment.sync_toc()
        except OSError:
            with self._lock:
                self._unpublish(pending)
            raise
        finally:
            self._finish(pending)

    def abandon(self, pending: Sequence[PendingRecord]) -> None:
        """Give the slots of written records back."""
        with self._lock:
            for record in pending:
                self._slots.give(record.segment, [record.slot])
        self._finish(pending)

    def _finish(self, pending: Sequence[PendingRecord]) -> None:
        with self._writes_done:
            for record in pending:
                record.segment.pending_writes -= 1
            self._writes_done.notify_all()

    def _publish(self, pending: Sequence[PendingRecord]) -> None:
        digests = np.stack([record.name.digest for record in pending])
        present = self._catalog.present(digests)
        by_segment: dict[Segment, list[int]] = {}
        for row, record in enumerate(pending):
            if present[row]:  # another thread stored the same page first
                self._slots.give(record.segment, [record.slot])
            else:
                by_segment.setdefault(record.segment, []).append(row)
        now_us = time.time_ns() // 1000
        for segment, rows in by_segment.items():
            rows.sort(key=lambda row: pending[row].slot)
            slots = [pending[row].slot for row in rows]
            self._evictor.stored(segment, slots, digests[rows], now_us)
            segment.publish(slots, [pending[row].entry for row in rows])
            segment.used[slots] = True
            shadowed = self._catalog.put(digests[rows], segment, slots)
            self._writer_of(segment).announce(segment, slots)
            self._void(shadowed)

    def _unpublish(self, pending: Sequence[PendingRecord]) -> None:
        """After a failure: entries may be half written, so slots are used again only once they are void for certain."""
        for record in pending:
            place = self._catalog.find(record.name.digest.reshape(1, 2))[0]
            if place == Place(record.segment, record.slot):
                self._catalog.forget(record.name.digest.reshape(1, 2), record.segment, [record.slot])
            entry = record.segment.entry(record.slot)
            if entry is None or entry.written_us == record.entry.written_us:
                self._slots.withdraw(record.segment, record.slot)
                self._void([Place(record.segment, record.slot)])

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
                cleared += self._catalog.forget(np.ascontiguousarray(entries["digest"][chosen]), segment, slots[chosen])
                if segment.owned:
                    self._void([Place(segment, slot) for slot in slots[chosen].tolist()])
        return cleared

    def stats(self) -> StoreStats:
        """Counts in memory: no disk I/O, and no lock of the store."""
        owned = self._catalog.owned
        return StoreStats(
            len(self._catalog),
            self.capacity_bytes,
            sum(segment.disk_bytes for segment in owned),
            sum(int(segment.used.sum()) * segment.header.slot_bytes for segment in owned),
            self._evicted,
        )

    @property
    def index_bytes(self) -> int:
        """Memory that the index takes in this process."""
        return self._catalog.nbytes

    def close(self) -> None:
        """Close all files and give up the writer folders. Calls after it find nothing and store nothing."""
        with self._writes_done:
            if self._closed:
                return
            self._closed = True
        self.maintenance.stop()
        with self._writes_done:
            # Closing a file under a write could let the write hit another file of the same number.
            self._writes_done.wait_for(lambda: not any(s.pending_writes for s in self._catalog.segments))
            if self._durable:
                self._sync(self._catalog.owned)
            self._catalog.clear()
            self._slots.clear()
            self._evictor.forget()
            for writer in self._writers.values():
                writer.close()
            self._writers.clear()
        _opened.discard(self)

    def _after_fork(self) -> None:
        """In a forked child: no thread of the parent's is here, and its locks may be held for ever."""
        self._lock = threading.RLock()
        self._writes_done = threading.Condition(self._lock)
        self._closed = True
        self.maintenance.after_fork()
        self._catalog.after_fork()
        self._slots.clear()
        self._evictor = Evictor(self._catalog)
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
            found = self._slots.take(wanted)
            if found is None:
                found = self._find_room(wanted)
            if found is not None:
                found[0].pending_writes += 1
            self._yield_to_peers()
            if found is not None:
                self.maintenance.wake_if_needed()
                return found
        raise StoreFullError(
            f"no slot of {wanted} bytes: capacity {self.capacity_bytes} is spent, and nothing here may be evicted"
        )

    def _find_room(self, wanted: int) -> tuple[Segment, int] | None:
        self._refresh()
        if self._segment_shape(wanted, self.capacity_bytes) is None:
            return None
        self._grow(wanted)
        found = self._slots.take(wanted)
        # Giving up a segment of other slots makes room on disk, not yet a slot; it may take several.
        while found is None and self._make_room(wanted):
            if (found := self._slots.take(wanted)) is None:
                self._grow(wanted)
                found = self._slots.take(wanted)
        with contextlib.suppress(OSError, StoreError):  # nothing to write to: then nobody can give us anything
            self._own_writer().feed.want = found is None
        return found

    def _segment_shape(self, slot_bytes: int, room: int) -> toc.TocHeader | None:
        """Shape of a new segment in ``room`` bytes; None when so little is not worth one."""
        count = max(1, min(self._segment_bytes, room) // (slot_bytes + toc.SLOT_BYTES))
        shape = toc.TocHeader(slot_bytes, count, bytes(16))
        while shape.disk_bytes > room and shape.slot_count > 1:
            shape = shape._replace(slot_count=shape.slot_count - 1)
        least = min(self._segment_bytes // _SMALLEST_SEGMENT, self.capacity_bytes)
        return (
            shape if shape.disk_bytes <= room and (shape.disk_bytes >= least or room >= self.capacity_bytes) else None
        )

    def _grow(self, slot_bytes: int) -> None:
        """Add a segment of ``slot_bytes`` slots, if budget and disk allow."""
        self._grown_out = True
        try:
            writer = self._own_writer()
            with self.directory.lock():
                room = min(
                    self.capacity_bytes - self.directory.used_bytes(),
                    self.directory.free_bytes() - self.config.min_free_bytes,
                )
                room -= _SPARE_BYTES
                shape = self._segment_shape(slot_bytes, room)
                if shape is None:
                    return
                segment = writer.new_segment(slot_bytes, shape.slot_count)
        except (OSError, StoreError) as error:
            # What is there already can still be given up for the new record.
            logger.warning("no segment can be added: %s", error)
            return
        self._grown_out = False
        self._add(segment)

    def _make_room(self, wanted: int) -> bool:
        """Give up the coldest records until a slot fits, or else change a segment that does not fit; False if neither.

        Records of other sizes are given up in their turn too: their slots serve the next records of such sizes. Only
        when as much as a segment of those is void is a segment emptied, and made one of the wanted slots.
        """
        if not self._catalog.owned and not self._adopt():
            return False
        before = self._slots.free_bytes
        while self._slots.free_bytes < self._segment_bytes:
            victims = self._give_up(1)
            if any(self._slots.fits(wanted, victim.segment.header.slot_bytes) for victim in victims):
                return True
            if not victims:
                break
        return self._recycle(wanted) or self._slots.free_bytes > before

    def _give_up(self, at_least: int) -> list[Place]:
        """Void the coldest records, a batch of them; returns where they lay."""
        owned = self._catalog.owned
        held = sum(int(segment.used.sum()) for segment in owned)
        count = max(at_least, min(_BATCH_LIMIT, int(held * _BATCH_FRACTION)))
        chosen: list[Place] = []
        for place in self._evictor.victims(owned):
            chosen.append(place)
            if len(chosen) == count:
                break
        self._evict(chosen)
        return chosen

    def _evict(self, places: Sequence[Place]) -> None:
        """Void used slots for their space."""
        for segment, slots in _by_segment(places).items():
            digests = np.ascontiguousarray(segment.entries["digest"][slots])
            self._evictor.evicted(segment, slots)
            self._evicted += self._catalog.forget(digests, segment, slots)
        self._void(places)

    def _recycle(self, wanted: int) -> bool:
        """Empty the sparsest segment whose slots do not fit, and give it slots that do; False when there is none."""
        others = [
            segment
            for segment in self._catalog.owned
            if not segment.pending_writes and not self._slots.fits(wanted, segment.header.slot_bytes)
        ]
        for segment in sorted(others, key=lambda segment: float(segment.used.mean())):
            if self._vacate(segment):
                self._discard(segment, wanted)
                return True
        return False

    def _vacate(self, segment: Segment) -> bool:
        """Empty a segment: move its records to free slots of the same size, and evict the rest; False if it must not.

        Leased records are moved first, and keep the segment if there is no slot for them.
        """
        self._slots.forget(segment)
        slots = np.flatnonzero(segment.used)
        leased = segment.lease_s[slots] > time.time()
        by_use = np.argsort(-segment.last_use_us[slots].astype(np.int64), kind="stable")
        ordered = slots[by_use[np.argsort(~leased[by_use], kind="stable")]].tolist()
        targets = []
        for _ in ordered:
            target = self._slots.take_exactly(segment.header.slot_bytes)
            if target is None:
                break
            targets.append(target)
        if len(targets) < int(leased.sum()):
            for target in targets:
                self._slots.give(target[0], [target[1]])
            self._slots.give(segment, np.flatnonzero(~segment.used).tolist())
            return False
        moved = self._move([Place(segment, slot) for slot in ordered[: len(targets)]], targets)
        rest = [Place(segment, slot) for slot in ordered if segment.used[slot]]
        self._evict(rest)
        self._slots.forget(segment)
        if rest or not moved:
            self._evict(self._evictor.orphans(self._catalog.owned))
            self._slots.forget(segment)
        return not segment.used.any()

    def _move(self, sources: Sequence[Place], targets: Sequence[tuple[Segment, int]]) -> bool:
        """Move records to void slots; False when that failed, and the sources are as they were."""
        try:
            pairs = []
            for (segment, slot), (other, free) in zip(sources, targets, strict=True):
                entry = segment.entry(slot)
                if entry is not None:
                    other.write(free, [segment.data[slot, : HEADER_BYTES + entry.payload_bytes].copy()])
                    pairs.append((Place(segment, slot), Place(other, free), entry))
            if self._durable:
                for other in _by_segment([target for _, target, _ in pairs]):
                    other.sync_data()
            for source, (other, free), entry in pairs:
                other.publish([free], [entry])
                for field in ("last_use_us", "lease_s", "heat"):
                    getattr(other, field)[free] = getattr(source.segment, field)[source.slot]
                other.used[free] = True
            if self._durable:
                for other in _by_segment([target for _, target, _ in pairs]):
                    other.sync_toc()
        except OSError as error:
            logger.warning("records cannot be moved: %s", error)
            self._void([Place(*target) for target in targets])
            return False
        shadowed = []
        for _source, (other, free), entry in pairs:
            digest = np.array([[entry.digest_lo, entry.digest_hi]], np.uint64)
            shadowed += self._catalog.put(digest, other, [free])
            self._writer_of(other).announce(other, [free])
        self._void([place for place in shadowed if place not in {target for _, target, _ in pairs}])
        taken = {(id(other), free) for _, (other, free), _ in pairs}
        for other, free in targets:
            if (id(other), free) not in taken:
                self._slots.give(other, [free])
        return True

    def _yield_to_peers(self) -> None:
        """Give a segment back when another live process finds no space and we hold more than our share."""
        waiting = [w for w in self._writers.values() if not w.owned and w.feed.want]
        if not waiting or not any(w.is_live() for w in waiting):
            return
        owned = self._catalog.owned
        share = self.capacity_bytes // (1 + len([w for w in self._writers.values() if not w.owned and w.is_live()]))
        if len(owned) > 1 and sum(segment.disk_bytes for segment in owned) > share:
            self._give_back()

    def _give_back(self) -> bool:
        """Give up the whole segment that was least recently used; False when there is none to give."""
        idle = [segment for segment in self._catalog.owned if not segment.pending_writes]
        for segment in sorted(idle, key=lambda segment: int(segment.last_use_us.max())):
            if self._vacate(segment):
                self._discard(segment, None)
                return True
        return False

    def _own_writer(self) -> Writer:
        """The folder this process writes to: one that nobody owns any more, or a new one."""
        own = next((writer for writer in self._writers.values() if writer.owned), None)
        if own is not None:
            return own
        with self.directory.lock():
            for writer in self._writers.values():
                if self._take_over(writer):
                    return writer
            writer = Writer.create(self.directory.new_writer_folder(), durable=self._durable)
        self._writers[writer.folder.name] = writer
        return writer

    def _adopt(self) -> bool:
        """Own every folder whose process is gone; True when there was one."""
        with self.directory.lock():
            taken = [self._take_over(writer) for writer in list(self._writers.values()) if not writer.owned]
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
            writer.feed.post(number, [WHOLE_SEGMENT])
        writer.seen = writer.feed.head
        return True

    def _void(self, places: Iterable[Place]) -> None:
        """Void owned slots and make them free; slots that cannot be voided stay out of use."""
        for segment, slots in _by_segment(places).items():
            segment.used[slots] = False
            try:
                segment.void(slots)
            except OSError as error:
                logger.warning("%d slots of %s cannot be voided: %s", len(slots), segment.directory, error)
                continue
            segment.last_use_us[slots] = 0
            self._slots.give(segment, slots)
            self._writer_of(segment).announce(segment, slots)

    def _discard(self, segment: Segment, slot_bytes: int | None) -> None:
        """Delete an owned segment, or give it other slots. Whatever it holds is forgotten."""
        self._evicted += self._catalog.remove(segment)
        self._count_own()
        self._slots.forget(segment)
        writer = self._writer_of(segment)
        try:
            with self.directory.lock():
                count = self._slots_after_reshape(segment, slot_bytes) if slot_bytes is not None else 0
                if slot_bytes is not None and count:
                    self._add(writer.reshape_segment(segment, slot_bytes, count))
                else:
                    writer.delete_segment(segment)
        except (OSError, StoreError) as error:
            logger.warning("segment %s cannot be given up: %s", segment.directory, error)

    def _slots_after_reshape(self, segment: Segment, slot_bytes: int) -> int:
        """How many slots of another size a segment can have within the budget; 0 if a new segment is better."""
        # Smaller slots are more slots, and a longer table of contents.
        room = self.capacity_bytes - self.directory.used_bytes() + toc.disk_bytes(segment.header.toc_bytes)
        room -= room % toc.DISK_BLOCK_BYTES
        count = min(segment.file_bytes // slot_bytes, (room - toc.HEADER_BYTES) // toc.SLOT_BYTES)
        return count if count * slot_bytes >= segment.file_bytes * _RESHAPED_SHARE else 0

    def _lose(self, segment: Segment) -> None:
        """A segment's files were cut off under us: nothing in it can be trusted."""
        if not self._catalog.holds(segment):
            return
        logger.warning("segment %s was cut off, and is given up", segment.directory)
        if segment.owned:
            self._writes_done.wait_for(lambda: not segment.pending_writes)
            self._discard(segment, None)
        else:
            self._catalog.remove(segment)

    def _count_own(self) -> None:
        self._own_bytes = sum(segment.header.data_bytes for segment in self._catalog.owned)

    def _writer_of(self, segment: Segment) -> Writer:
        return self._writers[segment.directory.parent.name]

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
                writer = Writer(folder, durable=self._durable)
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
        changed: dict[int, list[int]] = {}
        for number, slot in dict.fromkeys(events):
            segment = writer.segments.get(number)
            if slot == WHOLE_SEGMENT:
                changed.pop(number, None)
                if segment is not None:
                    self._catalog.remove(segment)
                    writer.segments.pop(number).close()
                if (opened := writer.open_segment(number)) is not None:
                    self._add(opened)
            elif segment is not None and slot < segment.header.slot_count:
                changed.setdefault(number, []).append(slot)
        for number, slots in changed.items():
            if (segment := writer.segments.get(number)) is not None:
                self._catalog.reindex(segment, slots, self._cleared)

    def _add(self, segment: Segment) -> None:
        """Index a newly opened segment; the free slots of an owned one become usable."""
        stale = self._catalog.add(segment, self._cleared)
        self._count_own()
        for place in stale:
            place.segment.used[place.slot] = True  # not to be handed out before it is void
        if segment.owned:
            self._slots.give(segment, np.flatnonzero(~segment.used).tolist())
        # Readers take an unchanged entry as proof of what a slot holds: it must go before the slot is rewritten.
        self._void(stale)

    def _read_cleared(self) -> None:
        self._cleared_ns = self.directory.cleared_ns()
        self._cleared = {
            prefix: record.cleared_us for prefix, record in self.directory.namespaces().items() if record.cleared_us
        }

    # ------------------------------------------------------------------ upkeep; called by the maintenance thread

    def needs_room(self) -> bool:
        """Whether the free slots have fallen below the high watermark, and eviction alone makes room."""
        return self._grown_out and self._used_fraction() > self.config.high_watermark

    def _used_fraction(self) -> float:
        return 1 - self._slots.free_bytes / self._own_bytes if self._own_bytes else 0.0

    def reclaim(self) -> None:
        """Evict down to the low watermark, ahead of the records that will want the space."""
        if not self.needs_room():
            return
        while True:
            with self._lock:
                if self._closed or self._used_fraction() <= self.config.low_watermark or not self._give_up(1):
                    return

    def prepare_victims(self) -> None:
        """Make the next queue of victims, without the lock: the scan is then not made by a thread that waits for it."""
        with self._lock:
            if self._closed or not self._grown_out:
                return
            owned = self._catalog.owned
        if self._evictor.is_running_out():
            self._evictor.scan(owned)

    def sync(self) -> None:
        """Make everything that is published by now durable."""
        with self._lock:
            segments = [s for s in self._catalog.owned if s.data_dirty or s.toc_dirty]
            for segment in segments:
                segment.pending_writes += 1  # keeps them open
        try:
            self._sync(segments)
        finally:
            with self._writes_done:
                for segment in segments:
                    segment.pending_writes -= 1
                self._writes_done.notify_all()

    @staticmethod
    def _sync(segments: Sequence[Segment]) -> None:
        for step in ("sync_data", "sync_toc"):
            for segment in segments:
                try:
                    getattr(segment, step)()
                except OSError as error:
                    logger.warning("segment %s cannot be made durable: %s", segment.directory, error)

    def follow_clears(self) -> None:
        """Take in what other processes cleared, and void what of it is ours."""
        with self._lock:
            if self._closed or self.directory.cleared_ns() == self._cleared_ns:
                return
            before = dict(self._cleared)
            self._read_cleared()
            changed = {prefix: us for prefix, us in self._cleared.items() if us > before.get(prefix, 0)}
            for segment in self._catalog.segments if changed else ():
                slots, entries = segment.live_entries()
                stale = np.zeros(len(slots), bool)
                for prefix, stamp in changed.items():
                    stale |= (entries["namespace"] == prefix) & (entries["written_us"] <= stamp)
                self._catalog.forget(np.ascontiguousarray(entries["digest"][stale]), segment, slots[stale])
                if segment.owned:
                    self._void([Place(segment, slot) for slot in slots[stale].tolist()])

    def keep_disk_free(self) -> None:
        """Give segments back while the file system has less free space than is to be left to others."""
        while self.directory.free_bytes() < self.config.min_free_bytes:
            with self._lock:
                if self._closed or len(self._catalog.owned) <= 1 or not self._give_back():
                    return

    def check_files(self) -> None:
        """Give up segments whose files were cut off."""
        with self._lock:
            if not self._closed:
                for segment in self._catalog.segments:
                    if segment.is_cut_off():
                        self._lose(segment)

    def owned_segments(self) -> list[Segment]:
        """The open segments that this process writes to."""
        return self._catalog.owned


def _by_segment(places: Iterable[Place]) -> dict[Segment, list[int]]:
    """Slots in rising order, each once, by their segment."""
    grouped: dict[Segment, set[int]] = {}
    for segment, slot in places:
        grouped.setdefault(segment, set()).add(slot)
    return {segment: sorted(slots) for segment, slots in grouped.items()}


_opened: weakref.WeakSet[Store] = weakref.WeakSet()


def _close_in_child() -> None:
    for store in list(_opened):
        store._after_fork()
    _opened.clear()


os.register_at_fork(after_in_child=_close_in_child)
