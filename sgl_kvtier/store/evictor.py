"""Which records to give up first: a scan over all slots of this process, and the queue of victims it leaves.

The order comes from :mod:`sgl_kvtier_kernels.eviction`: what is least likely to be read again goes first, and a page
never before the pages that follow it in its chain. A scan looks at all slots, so it is made for many victims at a time;
a victim that was used since is passed over, and with it the pages before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier.store.catalog import Catalog, Digests, Place
from sgl_kvtier.store.segment import Segment
from sgl_kvtier_kernels import chains

#: Share of the pages that one scan names as victims, and the least number.
_QUEUE_FRACTION = 1 / 64
_QUEUE_MINIMUM = 64


class Candidates:
    """All used slots of some segments as they were at one moment, one row each."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        """Look at ``segments``; takes no lock."""
        self.segments = list(segments)
        used = [np.flatnonzero(segment.used) for segment in self.segments]
        self.owner = np.repeat(np.arange(len(used)), [len(slots) for slots in used])
        self.slot = np.concatenate(used) if used else np.zeros(0, np.intp)

        def column(read: Callable[[Segment], npt.NDArray[Any]], dtype: type[np.generic]) -> npt.NDArray[Any]:
            parts = [read(segment)[slots] for segment, slots in zip(self.segments, used, strict=True)]
            return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)

        self.low: Digests = column(lambda s: s.entries["digest"][:, 0], np.uint64)
        self.parent: Digests = column(lambda s: s.entries["parent"], np.uint64)
        self.position = column(lambda s: s.entries["position"], np.int64)
        self.last_use_us = column(lambda s: s.last_use_us, np.int64)
        self.lease_s = column(lambda s: s.lease_s, np.int64)
        self.heat = column(lambda s: s.heat, np.uint8)

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.slot)

    def place(self, row: int) -> Place:
        """The slot of a row."""
        return Place(self.segments[self.owner[row]], int(self.slot[row]))

    def parent_rows(self, catalog: Catalog) -> npt.NDArray[np.int64]:
        """Row of each row's predecessor; ``UNKNOWN`` where it has none or is another process's, ``ORPHAN`` if gone."""
        rows = chains.parent_rows(self.low, self.parent)
        orphans = np.flatnonzero(rows == chains.ORPHAN)
        rows[orphans[catalog.has_low(self.parent[orphans])]] = chains.UNKNOWN
        return rows


class Victims:
    """The queue that a scan leaves: records to give up, in order, each checked again when it is taken."""

    def __init__(self, candidates: Candidates, order: npt.NDArray[np.intp]) -> None:
        """Rows of ``candidates`` in ``order``."""
        self._candidates = candidates
        self._order = order
        self._next = 0
        #: Low digests of pages that stay because a page behind them does.
        self._kept: set[int] = set()

    def left(self) -> int:
        """How many rows have not been looked at."""
        return len(self._order) - self._next

    def take(self, catalog: Catalog) -> Place | None:
        """The next victim; None when the queue is used up."""
        rows, now_s = self._candidates, time.time()
        while self._next < len(self._order):
            row = int(self._order[self._next])
            self._next += 1
            place = rows.place(row)
            segment, slot = place
            low = int(rows.low[row])
            if not catalog.holds(segment) or not segment.used[slot] or int(segment.entries["digest"][slot, 0]) != low:
                continue
            if low in self._kept or segment.last_use_us[slot] > rows.last_use_us[row] or segment.lease_s[slot] > now_s:
                self._kept.add(int(rows.parent[row]))
                continue
            return place
        return None


class Evictor:
    """Learns from what is used and given up, and makes queues of victims."""

    def __init__(self, catalog: Catalog) -> None:
        """An evictor that has seen nothing yet, over the slots of this process in ``catalog``."""
        self._catalog = catalog
        self._lock = threading.Lock()
        self._victims: Victims | None = None

    def used(self, places: Sequence[Place], now_us: int) -> None:
        """Note that the records in ``places`` were read, or stored again."""
        for segment, slot in places:
            segment.last_use_us[slot] = now_us

    def stored(self, segment: Segment, slots: Sequence[int], digests: Digests, now_us: int) -> None:
        """Note that ``slots`` were filled with records with ``digests``, uint64[n, 2]."""
        segment.last_use_us[slots] = now_us
        segment.lease_s[slots] = 0
        segment.heat[slots] = 0

    def evicted(self, segment: Segment, slots: Sequence[int]) -> None:
        """Note that the records in ``slots`` are given up for their space."""

    def is_running_out(self) -> bool:
        """Whether it is time for the next scan."""
        return self._victims is None or self._victims.left() == 0

    def scan(self, segments: Sequence[Segment]) -> None:
        """Make a new queue over ``segments``. Needs no lock of the store; takes a third of a second for 10^6 pages."""
        rows = Candidates(segments)
        priority = rows.last_use_us.astype(np.float64)
        priority[rows.lease_s > time.time()] = np.inf
        parents = rows.parent_rows(self._catalog)
        order = chains.leaves_first(parents)
        chains.raise_to_followers(parents, order, priority)
        priority[chains.lost_rows(parents, order)] = -np.inf
        rank = np.empty(len(rows), np.int64)
        rank[order] = np.arange(len(rows))
        count = min(len(rows), max(_QUEUE_MINIMUM, int(len(rows) * _QUEUE_FRACTION)))
        order = np.lexsort((rank, priority))[:count]
        self._victims = Victims(rows, order[priority[order] < np.inf])

    def victims(self, segments: Sequence[Segment]) -> Iterator[Place]:
        """Records to give up, coldest first; scans when the last queue is used up. Call under the store's lock."""
        fresh = False
        while True:
            place = self._victims.take(self._catalog) if self._victims is not None else None
            if place is not None:
                yield place
            elif fresh:
                return
            else:
                self.scan(segments)
                fresh = True

    def orphans(self, segments: Sequence[Segment]) -> list[Place]:
        """Records whose predecessor is gone, and all that follow them."""
        rows = Candidates(segments)
        parents = rows.parent_rows(self._catalog)
        lost = chains.lost_rows(parents, chains.leaves_first(parents))
        return [rows.place(row) for row in np.flatnonzero(lost).tolist()]

    def forget(self) -> None:
        """Drop the queue, and with it the maps it holds open."""
        self._victims = None
