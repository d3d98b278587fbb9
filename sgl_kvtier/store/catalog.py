"""Which record lies in which slot, over all open segments: the digest index, and what it was built from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_kvtier.store.segment import Segment
from sgl_kvtier_kernels.index import DigestIndex, promise

Digests = npt.NDArray[np.uint64]
Slots = npt.NDArray[np.intp]

#: A location is the segment's handle and the slot; handles begin at 1, so that no location is 0.
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class Place(NamedTuple):
    """A slot of an open segment."""

    segment: Segment
    slot: int


class _Leases(NamedTuple):
    """Where the segments' leases lie in memory, by handle. Never changed; ``keeps`` holds the maps open."""

    addresses: npt.NDArray[np.uint64]
    slots: npt.NDArray[np.uint64]
    keeps: tuple[npt.NDArray[np.uint32], ...]

    @classmethod
    def of(cls, segments: Iterable[Segment], handles: int) -> _Leases:
        addresses, slots = np.zeros(handles, np.uint64), np.zeros(handles, np.uint64)
        keeps = []
        for segment in segments:
            addresses[segment.handle] = segment.lease_s.ctypes.data
            slots[segment.handle] = segment.header.slot_count
            keeps.append(segment.lease_s)
        return cls(addresses, slots, tuple(keeps))


class Catalog:
    """The index over the records of all open segments.

    Look-ups may come from any thread at any time; everything else from one thread at a time.
    """

    def __init__(self) -> None:
        """An empty catalog."""
        self._index = DigestIndex()
        self._by_handle: dict[int, Segment] = {}
        self._leases = _Leases.of((), 1)
        #: For segments of other processes: the digest each slot was indexed under, uint64[slots, 2].
        self._known: dict[int, Digests] = {}

    def __len__(self) -> int:
        """Number of records."""
        return len(self._index)

    @property
    def nbytes(self) -> int:
        """Memory of the catalog in bytes, maps not included."""
        own = sum(segment.used.nbytes for segment in self.segments)
        return self._index.nbytes + own + sum(known.nbytes for known in self._known.values())

    @property
    def segments(self) -> list[Segment]:
        """All open segments."""
        return list(self._by_handle.values())

    @property
    def owned(self) -> list[Segment]:
        """The open segments that this process writes to."""
        return [segment for segment in self.segments if segment.owned]

    def leading_run(self, digests: Digests, lease_until_s: int = 0) -> int:
        """How many of ``digests``, uint64[n, 2], are present before the first that is not; they are promised.

        Args:
            digests: What to look for.
            lease_until_s: Until when eviction leaves those pages alone, in seconds since the epoch; 0 for no promise.
        """
        locations = self._index.get(digests)
        if not lease_until_s:
            absent = np.flatnonzero(locations == 0)
            return int(absent[0]) if absent.size else len(digests)
        return self._promise(locations, True, lease_until_s)

    def present(self, digests: Digests, lease_until_s: int = 0) -> npt.NDArray[np.bool_]:
        """Which of ``digests``, uint64[n, 2], are present; those are promised, as by :meth:`leading_run`."""
        locations = self._index.get(digests)
        if lease_until_s:
            self._promise(locations, False, lease_until_s)
        found: npt.NDArray[np.bool_] = locations != 0
        return found

    def _promise(self, locations: Digests, leading: bool, until_s: int) -> int:
        leases = self._leases
        return int(promise(locations, leading, leases.addresses, leases.slots, np.uint32(until_s)))

    def has_low(self, lows: Digests) -> npt.NDArray[np.bool_]:
        """For each of ``lows``, uint64[n], whether a record has it as the low half of its digest."""
        found: npt.NDArray[np.bool_] = self._index.get_low(lows) != 0
        return found

    def find_low(self, lows: Digests) -> list[Place | None]:
        """Where records with the low halves ``lows``, uint64[n], of their digests lie."""
        return self._places(self._index.get_low(lows))

    def find(self, digests: Digests) -> list[Place | None]:
        """Where the records with ``digests``, uint64[n, 2], lie."""
        return self._places(self._index.get(digests))

    def _places(self, locations: Digests) -> list[Place | None]:
        places: list[Place | None] = []
        for location in locations.tolist():
            segment = self._by_handle.get(location >> _SLOT_BITS)
            places.append(Place(segment, location & _SLOT_MASK) if segment is not None else None)
        return places

    def put(self, digests: Digests, segment: Segment, slots: Sequence[int] | Slots) -> list[Place]:
        """Record that ``slots`` hold the records with ``digests``, uint64[n, 2].

        Returns:
            The places where those records lay before, in segments of this process: nobody finds them there any more.
        """
        old = self._index.put_many(digests, self._locations(segment, slots))
        shadowed = []
        for location in np.unique(old[old != 0]).tolist():
            before = self._by_handle.get(location >> _SLOT_BITS)
            if before is not None and before.owned:
                shadowed.append(Place(before, location & _SLOT_MASK))
        return shadowed

    def forget(self, digests: Digests, segment: Segment, slots: Sequence[int] | Slots) -> int:
        """Forget the records with ``digests``, uint64[n, 2], that are said to lie in ``slots``; how many those were."""
        return int(self._index.remove_many(digests, self._locations(segment, slots)).sum())

    def add(self, segment: Segment, cleared_us: Mapping[int, int]) -> list[Place]:
        """Index all records of a newly opened segment, but those cleared since they were written.

        Args:
            segment: The segment. Its ``used`` flags are set when it is owned.
            cleared_us: Time of the last clearing by namespace prefix.

        Returns:
            Slots of this process with valid entries that nobody may find: cleared ones of the segment, and those of
            records that are in two slots.
        """
        used = {known.handle for known in self._by_handle.values()}
        segment.handle = next(handle for handle in range(1, len(used) + 2) if handle not in used)
        self._by_handle[segment.handle] = segment
        self._leases = _Leases.of(self.segments, max(self._by_handle) + 1)
        slots, entries = segment.live_entries()
        current = np.ones(len(slots), bool)
        for prefix, stamp in cleared_us.items():
            current &= (entries["namespace"] != prefix) | (entries["written_us"] > stamp)
        stale = [Place(segment, slot) for slot in slots[~current].tolist()] if segment.owned else []
        slots, entries = slots[current], entries[current]
        digests = np.ascontiguousarray(entries["digest"])
        if segment.owned:
            segment.used[slots] = True
        else:
            known = np.zeros((segment.header.slot_count, 2), np.uint64)
            known[slots] = digests
            self._known[segment.handle] = known
        return stale + self.put(digests, segment, slots)

    def reindex(self, segment: Segment, slots: Sequence[int], cleared_us: Mapping[int, int]) -> None:
        """Read ``slots``, each given once, of another process's segment again."""
        known = self._known[segment.handle]
        digests = np.zeros((len(slots), 2), np.uint64)
        for row, slot in enumerate(slots):
            entry = segment.entry(slot)
            if entry is not None and entry.written_us > cleared_us.get(entry.namespace, 0):
                digests[row] = entry.digest_lo, entry.digest_hi
        before = known[slots]
        changed = (before != digests).any(axis=1)
        where = np.array(slots, np.intp)
        gone, new = changed & before.any(axis=1), digests.any(axis=1)
        self.forget(before[gone], segment, where[gone])
        self.put(digests[new], segment, where[new])
        known[slots] = digests

    def remove(self, segment: Segment) -> int:
        """Forget a segment and all of its records; returns how many they were."""
        slots, entries = segment.live_entries()
        removed = self.forget(np.ascontiguousarray(entries["digest"]), segment, slots)
        known = self._known.pop(segment.handle, None)
        if known is not None:
            indexed = np.flatnonzero(known.any(axis=1))
            removed += self.forget(known[indexed], segment, indexed)
        self._by_handle.pop(segment.handle, None)
        self._leases = _Leases.of(self.segments, max(self._by_handle, default=0) + 1)
        return removed

    def holds(self, segment: Segment) -> bool:
        """Whether the segment is among the open ones."""
        return self._by_handle.get(segment.handle) is segment

    def clear(self) -> None:
        """Forget everything."""
        self._index.clear()
        self._by_handle.clear()
        self._known.clear()
        self._leases = _Leases.of((), 1)

    def after_fork(self) -> None:
        """In a forked child: forget everything, whatever other threads of the parent were doing."""
        self._index.after_fork()
        self.clear()

    @staticmethod
    def _locations(segment: Segment, slots: Sequence[int] | Slots) -> Digests:
        return np.asarray(slots, np.uint64) | np.uint64(segment.handle << _SLOT_BITS)
