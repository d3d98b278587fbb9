"""Open-addressing hash index from 128-bit digests to locations.

Table: ``uint64[capacity, 4]``, rows of (digest low, digest high, location, aux). A location of 0 marks an empty row.
Linear probing; deletion shifts the rows behind it back, so there are no tombstones and look-ups never degrade.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel

Digests = npt.NDArray[np.uint64]
Table = npt.NDArray[np.uint64]

_FIRST_CAPACITY = 1 << 10
_MAX_LOAD = 0.7


@kernel
def _home(low: Any, high: Any, mask: Any) -> Any:
    """Row at which the search for a digest begins; mixed, so that digests of low entropy spread too."""
    mixed = np.uint64((low ^ np.uint64(high >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(mixed ^ np.uint64(mixed >> np.uint64(32))) & mask


@kernel
def _find(table: Table, low: Any, high: Any) -> Any:
    """Row of the digest, or of the empty row where it would go."""
    mask = np.uint64(table.shape[0] - 1)
    row = _home(low, high, mask)
    while table[row, 2] != np.uint64(0) and (table[row, 0] != low or table[row, 1] != high):
        row = np.uint64(row + np.uint64(1)) & mask
    return row


@kernel
def lookup_many(table: Table, digests: Digests, locations: Digests) -> None:
    """``locations[i]`` = location of ``digests[i]``, 0 where it is absent; ``uint64[n, 2]`` to ``uint64[n]``."""
    for i in range(digests.shape[0]):
        locations[i] = table[_find(table, digests[i, 0], digests[i, 1]), 2]


@kernel
def leading_run(table: Table, digests: Digests) -> int:
    """How many of ``digests`` are present before the first that is not."""
    for i in range(digests.shape[0]):
        if table[_find(table, digests[i, 0], digests[i, 1]), 2] == np.uint64(0):
            return i
    return len(digests)


@kernel
def insert_many(table: Table, digests: Digests, locations: Digests, aux: Digests, old: Digests) -> int:
    """Insert or replace; ``old[i]`` = the location before, 0 if none. Returns the number of new rows.

    The table must have room for all of them.
    """
    added = 0
    for i in range(digests.shape[0]):
        row = _find(table, digests[i, 0], digests[i, 1])
        old[i] = table[row, 2]
        if table[row, 2] == np.uint64(0):
            added += 1
        table[row, 0] = digests[i, 0]
        table[row, 1] = digests[i, 1]
        table[row, 2] = locations[i]
        table[row, 3] = aux[i]
    return added


@kernel
def remove_one(table: Table, low: Any, high: Any, expected: Any) -> bool:
    """Remove a digest whose location is ``expected`` (any location for 0); False when there is none."""
    mask = np.uint64(table.shape[0] - 1)
    one = np.uint64(1)
    hole = _find(table, low, high)
    if table[hole, 2] == np.uint64(0) or (expected != np.uint64(0) and table[hole, 2] != expected):
        return False
    row = hole
    while True:
        row = np.uint64(row + one) & mask
        if table[row, 2] == np.uint64(0):
            break
        home = _home(table[row, 0], table[row, 1], mask)
        # The row may move into the hole unless its home lies behind the hole, going round.
        if np.uint64(row - home) & mask >= np.uint64(row - hole) & mask:
            table[hole] = table[row]
            hole = row
    table[hole] = np.uint64(0)
    return True


class DigestIndex:
    """A growing table behind one lock; kernels run without the GIL while it is held."""

    def __init__(self) -> None:
        """An empty index."""
        self._lock = threading.Lock()
        self._table: Table = np.zeros((_FIRST_CAPACITY, 4), np.uint64)
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

    def leading_run(self, digests: Digests) -> int:
        """How many of ``digests``, uint64[n, 2], are present before the first that is not."""
        with self._lock:
            return int(leading_run(self._table, digests))

    def put(self, digest: Digests, location: int, aux: int = 0) -> int:
        """Insert or replace one digest, uint64[2]; returns its old location, 0 if it had none.

        Raises:
            ValueError: ``location`` is 0, which stands for "absent".
        """
        old = self.put_many(digest.reshape(1, 2), np.array([location], np.uint64), np.array([aux], np.uint64))
        return int(old[0])

    def put_many(self, digests: Digests, locations: Digests, aux: Digests | None = None) -> Digests:
        """Insert or replace ``digests``, uint64[n, 2]; returns their old locations, uint64[n].

        Raises:
            ValueError: A location is 0, which stands for "absent".
        """
        if not locations.all():
            raise ValueError("location 0 stands for an absent digest and cannot be stored")
        old = np.empty(len(digests), np.uint64)
        with self._lock:
            self._reserve(len(digests))
            given = np.zeros(len(digests), np.uint64) if aux is None else aux
            self._count += int(insert_many(self._table, digests, locations, given, old))
        return old

    def remove(self, digest: Digests, expected_location: int = 0) -> bool:
        """Remove one digest, uint64[2]; with an expected location only if it has that one. False if nothing was."""
        with self._lock:
            removed = bool(remove_one(self._table, digest[0], digest[1], np.uint64(expected_location)))
            self._count -= removed
        return removed

    def items(self) -> tuple[Digests, Digests]:
        """All digests, uint64[n, 2], and their locations, uint64[n], in no particular order; copies."""
        with self._lock:
            rows = self._table[self._table[:, 2] != 0]
        return np.ascontiguousarray(rows[:, :2]), np.ascontiguousarray(rows[:, 2])

    def clear(self) -> None:
        """Remove everything."""
        with self._lock:
            self._table = np.zeros((_FIRST_CAPACITY, 4), np.uint64)
            self._count = 0

    def _reserve(self, more: int) -> None:
        capacity = len(self._table)
        while self._count + more > capacity * _MAX_LOAD:
            capacity *= 2
        if capacity == len(self._table):
            return
        rows = self._table[self._table[:, 2] != 0]
        table: Table = np.zeros((capacity, 4), np.uint64)
        old = np.empty(len(rows), np.uint64)
        insert_many(
            table,
            np.ascontiguousarray(rows[:, :2]),
            np.ascontiguousarray(rows[:, 2]),
            np.ascontiguousarray(rows[:, 3]),
            old,
        )
        self._table = table
