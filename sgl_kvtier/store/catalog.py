"""Which record lies in which slot, over all open segments: the digest index, and what it was built from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_kvtier.store.segment import Segment
from sgl_kvtier_kernels.index import DigestIndex

Digests = npt.NDArray[np.uint64]

#: A location is the segment's handle and the slot; handles begin at 1, so that no location is 0.
_SLOT_BITS = 32


class Place(NamedTuple):
    """A slot of an open segment."""

    segment: Segment
    slot: int


class Catalog:
    """The index over the records of all open segments.

    Look-ups may come from any thread at any time; everything else from one thread at a time.
    """

    def __init__(self) -> None:
        """An empty catalog."""
        self._index = DigestIndex()
        self._by_handle: dict[int, Segment] = {}
        self._next_handle = 1
        #: For segments of other processes: the digest each slot was indexed under, uint64[slots, 2].
        self._known: dict[int, Digests] = {}

    def __len__(self) -> int:
        """Number of records."""
        return len(self._index)

    @property
    def segments(self) -> list[Segment]:
        """All open segments."""
        return list(self._by_handle.values())

    @property
    def owned(self) -> list[Segment]:
        """The open segments that this process writes to."""
        return [segment for segment in self.segments if segment.owned]

    def leading_run(self, digests: Digests) -> int:
        """How many of ``digests``, uint64[n, 2], are present before the first that is not."""
        return self._index.leading_run(digests)

    def present(self, digests: Digests) -> npt.NDArray[np.bool_]:
        """Which of ``digests``, uint64[n, 2], are present."""
        found: npt.NDArray[np.bool_] = self._index.get(digests) != 0
        return found

    def find(self, digest: Digests) -> Place | None:
        """Where the record with ``digest``, uint64[2], lies."""
        location = int(self._index.get(digest.reshape(1, 2))[0])
        segment = self._by_handle.get(location >> _SLOT_BITS)
        return Place(segment, location & ((1 << _SLOT_BITS) - 1)) if segment is not None else None

    def put(self, digest: Digests, segment: Segment, slot: int) -> None:
        """Record that ``slot`` holds the record with ``digest``."""
        self._index.put(digest, segment.handle << _SLOT_BITS | slot)

    def forget(self, digest: Digests, segment: Segment, slot: int) -> bool:
        """Forget the record with ``digest`` if it is said to lie in ``slot``; False if it is not."""
        return self._index.remove(digest, segment.handle << _SLOT_BITS | slot)

    def add(self, segment: Segment, cleared_us: Mapping[int, int]) -> list[int]:
        """Index all records of a newly opened segment, but those cleared since they were written.

        Args:
            segment: The segment. Its ``used`` flags are set when it is owned.
            cleared_us: Time of the last clearing by namespace prefix.

        Returns:
            The slots whose records were cleared: their entries are valid, and nobody may find them.
        """
        segment.handle = self._next_handle
        self._next_handle += 1
        self._by_handle[segment.handle] = segment
        slots, entries = segment.live_entries()
        current = np.ones(len(slots), bool)
        for prefix, stamp in cleared_us.items():
            current &= (entries["namespace"] != prefix) | (entries["written_us"] > stamp)
        stale = slots[~current]
        slots, entries = slots[current], entries[current]
        digests = np.ascontiguousarray(entries["digest"]).astype(np.uint64)
        self._index.put_many(digests, slots.astype(np.uint64) | np.uint64(segment.handle << _SLOT_BITS))
        if segment.owned:
            segment.used[slots] = True
        else:
            known = np.zeros((segment.header.slot_count, 2), np.uint64)
            known[slots] = digests
            self._known[segment.handle] = known
        return [int(slot) for slot in stale]

    def reindex(self, segment: Segment, slot: int, cleared_us: Mapping[int, int]) -> None:
        """Read one slot of another process's segment again."""
        known = self._known[segment.handle][slot]
        entry = segment.entry(slot)
        digest = np.zeros(2, np.uint64)
        if entry is not None and entry.written_us > cleared_us.get(entry.namespace, 0):
            digest[:] = entry.digest_lo, entry.digest_hi
        if known.any() and (known != digest).any():
            self.forget(known, segment, slot)
        if digest.any():
            self.put(digest, segment, slot)
        known[:] = digest

    def remove(self, segment: Segment) -> int:
        """Forget a segment and all of its records; returns how many they were."""
        slots, entries = segment.live_entries()
        digests = np.ascontiguousarray(entries["digest"]).astype(np.uint64)
        removed = sum(self.forget(digest, segment, slot) for slot, digest in zip(slots.tolist(), digests, strict=True))
        known = self._known.pop(segment.handle, None)
        if known is not None:
            for slot in np.flatnonzero(known.any(axis=1)).tolist():
                removed += self.forget(known[slot], segment, slot)
        self._by_handle.pop(segment.handle, None)
        return removed

    def holds(self, segment: Segment) -> bool:
        """Whether the segment is among the open ones."""
        return self._by_handle.get(segment.handle) is segment

    def clear(self) -> None:
        """Forget everything."""
        self._index.clear()
        self._by_handle.clear()
        self._known.clear()
