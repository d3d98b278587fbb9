"""Open-addressing hash index from 128-bit digests to locations.

Table: ``uint64[3 x capacity]``, rows of (digest low, digest high, location). A location of 0 marks an empty row. Linear
probing; deletion shifts the rows behind it back, so there are no tombstones and look-ups never degrade. A row's home
follows from the low half alone, so that a digest of which only that half is known can be looked up too.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel
from sgl_kvtier_kernels._memory import prefetch_line, store_u32

Digests = npt.NDArray[np.uint64]
Table = npt.NDArray[np.uint64]

_ROW_WORDS = 3
_FIRST_CAPACITY = 1 << 10
_MAX_LOAD = 0.7

#: Rows whose cache lines are asked for before the first of them is looked at: as many misses as a core has in flight.
_IN_FLIGHT = 16


@kernel
def _home(low: Any, mask: Any) -> Any:
    """Row at which the search for a digest begins; mixed, so that digests of low entropy spread too."""
    mixed = np.uint64(low * np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(mixed ^ np.uint64(mixed >> np.uint64(32))) & mask


@kernel
def _find(table: Table, mask: Any, low: Any, high: Any) -> Any:
    """First word of the digest's row, or of the empty row where it would go."""
    row = _home(low, mask)
    three = np.uint64(3)
    word = row * three
    while table[word + np.uint64(2)] != np.uint64(0) and (table[word] != low or table[word + np.uint64(1)] != high):
        row = np.uint64(row + np.uint64(1)) & mask
        word = row * three
    return word


@kernel
def _mask(table: Table) -> Any:
    return np.uint64(table.size // 3 - 1)


@kernel
def lookup_many(table: Table, digests: Digests, locations: Digests) -> None:
    """``locations[i]`` = location of ``digests[i]``, 0 where it is absent; ``uint64[n, 2]`` to ``uint64[n]``."""
    mask = _mask(table)
    count = digests.shape[0]
    for start in range(0, count, _IN_FLIGHT):
        end = min(start + _IN_FLIGHT, count)
        for i in range(start, end):
            prefetch_line(table, np.int64(_home(digests[i, 0], mask) * np.uint64(3)))
        for i in range(start, end):
            locations[i] = table[_find(table, mask, digests[i, 0], digests[i, 1]) + np.uint64(2)]


@kernel
def lookup_low(table: Table, lows: Digests, locations: Digests) -> None:
    """``locations[i]`` = location of a digest with the low half ``lows[i]``, 0 if none; uint64[n] to uint64[n]."""
    mask = _mask(table)
    count = lows.shape[0]
    for start in range(0, count, _IN_FLIGHT):
        end = min(start + _IN_FLIGHT, count)
        for i in range(start, end):
            prefetch_line(table, np.int64(_home(lows[i], mask) * np.uint64(3)))
        for i in range(start, end):
            row = _home(lows[i], mask)
            locations[i] = np.uint64(0)
            while table[row * np.uint64(3) + np.uint64(2)] != np.uint64(0):
                if table[row * np.uint64(3)] == lows[i]:
                    locations[i] = table[row * np.uint64(3) + np.uint64(2)]
                    break
                row = np.uint64(row + np.uint64(1)) & mask


@kernel
def promise(locations: Digests, leading: bool, addresses: Digests, slots: Digests, until: Any) -> int:
    """Write ``until`` into the lease of every location, by the maps' addresses.

    Args:
        locations: uint64[n], segment handle << 32 | slot, 0 for absent.
        leading: Stop at the first location that is absent.
        addresses: uint64[handles], where the leases, uint32[slots], of a segment begin; 0 for none.
        slots: uint64[handles], number of slots of each segment.
        until: The lease, uint32.

    Returns:
        How many locations there are before the first that is absent.
    """
    run = -1
    for i in range(locations.size):
        if locations[i] == np.uint64(0):
            if run < 0:
                run = i
            if leading:
                break
            continue
        handle = np.int64(locations[i] >> np.uint64(32))
        slot = locations[i] & np.uint64(0xFFFFFFFF)
        if handle < addresses.size and addresses[handle] != np.uint64(0) and slot < slots[handle]:
            store_u32(addresses[handle] + slot * np.uint64(4), until)
    return locations.size if run < 0 else run


@kernel
def insert_many(table: Table, digests: Digests, locations: Digests, old: Digests) -> int:
    """Insert or replace; ``old[i]`` = the location before, 0 if none. Returns the number of new rows.

    The table must have room for all of them.
    """
    mask = _mask(table)
    added = 0
    count = digests.shape[0]
    for start in range(0, count, _IN_FLIGHT):
        end = min(start + _IN_FLIGHT, count)
        for i in range(start, end):
            prefetch_line(table, np.int64(_home(digests[i, 0], mask) * np.uint64(3)))
        for i in range(start, end):
            word = _find(table, mask, digests[i, 0], digests[i, 1])
            old[i] = table[word + np.uint64(2)]
            if old[i] == np.uint64(0):
                added += 1
            table[word] = digests[i, 0]
            table[word + np.uint64(1)] = digests[i, 1]
            table[word + np.uint64(2)] = locations[i]
    return added


@kernel
def remove_many(table: Table, digests: Digests, expected: Digests, removed: npt.NDArray[np.bool_]) -> int:
    """Remove each digest whose location is ``expected[i]`` (any location for 0); returns how many were.

    ``removed[i]`` says whether ``digests[i]`` was; shapes uint64[n, 2], uint64[n], bool[n].
    """
    mask = _mask(table)
    one, two, three = np.uint64(1), np.uint64(2), np.uint64(3)
    count = 0
    for i in range(digests.shape[0]):
        hole = _find(table, mask, digests[i, 0], digests[i, 1])
        removed[i] = table[hole + two] != np.uint64(0) and (
            expected[i] == np.uint64(0) or table[hole + two] == expected[i]
        )
        if not removed[i]:
            continue
        count += 1
        hole_row = hole // three
        row = hole_row
        while True:
            row = np.uint64(row + one) & mask
            word = row * three
            if table[word + two] == np.uint64(0):
                break
            home = _home(table[word], mask)
            # The row may move into the hole unless its home lies behind the hole, going round.
            if np.uint64(row - home) & mask >= np.uint64(row - hole_row) & mask:
                table[hole] = table[word]
                table[hole + one] = table[word + one]
                table[hole + two] = table[word + two]
                hole, hole_row = word, row
        table[hole] = np.uint64(0)
        table[hole + one] = np.uint64(0)
        table[hole + two] = np.uint64(0)
    return count


class DigestIndex:
    """A growing table behind one lock; kernels run without the GIL while it is held."""

    def __init__(self) -> None:
        """An empty index."""
        self._lock = threading.Lock()
        self._table: Table = np.zeros(_ROW_WORDS * _FIRST_CAPACITY, np.uint64)
        self._count = 0

    def __len__(self) -> int:
        """Number of digests."""
        return self._count

    @property
    def nbytes(self) -> int:
        """Memory of the table in bytes."""
        return self._table.nbytes

    def get(self, digests: Digests) -> Digests:
        """Locations of ``digests``, uint64[n, 2]; 0 where absent."""
        locations = np.empty(len(digests), np.uint64)
        with self._lock:
            lookup_many(self._table, digests, locations)
        return locations

    def get_low(self, lows: Digests) -> Digests:
        """Location of a digest with each of the low halves ``lows``, uint64[n]; 0 where there is none."""
        locations = np.empty(len(lows), np.uint64)
        with self._lock:
            lookup_low(self._table, lows, locations)
        return locations

    def put_many(self, digests: Digests, locations: Digests) -> Digests:
        """Insert or replace ``digests``, uint64[n, 2]; returns their old locations, uint64[n].

        Raises:
            ValueError: A location is 0, which stands for "absent".
        """
        if not locations.all():
            raise ValueError("location 0 stands for an absent digest and cannot be stored")
        old = np.empty(len(digests), np.uint64)
        with self._lock:
            self._reserve(len(digests))
            self._count += int(insert_many(self._table, digests, locations, old))
        return old

    def remove_many(self, digests: Digests, expected_locations: Digests) -> npt.NDArray[np.bool_]:
        """Remove those of ``digests``, uint64[n, 2], that have the expected location, uint64[n]; 0 expects any.

        Returns:
            Which were removed, bool[n].
        """
        removed = np.empty(len(digests), bool)
        with self._lock:
            self._count -= int(remove_many(self._table, digests, expected_locations, removed))
        return removed

    def items(self) -> tuple[Digests, Digests]:
        """All digests, uint64[n, 2], and their locations, uint64[n], in no particular order; copies."""
        with self._lock:
            rows = self._table.reshape(-1, _ROW_WORDS)
            rows = rows[rows[:, 2] != 0]
        return np.ascontiguousarray(rows[:, :2]), np.ascontiguousarray(rows[:, 2])

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._table = np.zeros(_ROW_WORDS * _FIRST_CAPACITY, np.uint64)
            self._count = 0

    def after_fork(self) -> None:
        """In a forked child: a new lock, as another thread of the parent may have held this one."""
        self._lock = threading.Lock()

    def _reserve(self, more: int) -> None:
        capacity = len(self._table) // _ROW_WORDS
        while self._count + more > capacity * _MAX_LOAD:
            capacity *= 2
        if capacity * _ROW_WORDS == len(self._table):
            return
        rows = self._table.reshape(-1, _ROW_WORDS)
        rows = rows[rows[:, 2] != 0]
        table: Table = np.zeros(_ROW_WORDS * capacity, np.uint64)
        old = np.empty(len(rows), np.uint64)
        insert_many(table, np.ascontiguousarray(rows[:, :2]), np.ascontiguousarray(rows[:, 2]), old)
        self._table = table
