"""Chains of pages: who follows whom among the rows of a scan."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel

#: Instead of a predecessor's row: the page has none that is known; the page's is known, and not among the rows.
UNKNOWN = -1
ORPHAN = -2

Rows = npt.NDArray[np.int64]


def parent_rows(low: npt.NDArray[np.uint64], parent: npt.NDArray[np.uint64]) -> Rows:
    """Row of each row's predecessor, int64[n]; :data:`UNKNOWN` or :data:`ORPHAN` where there is none.

    Args:
        low: Low half of each row's digest, uint64[n].
        parent: That of its predecessor, uint64[n]; 0 where it is not known.
    """
    rows = np.empty(low.size, np.int64)
    capacity = 1 << max(4, int(low.size * 2 - 1).bit_length())
    _join(low, parent, np.full(capacity, -1, np.int64), rows)
    return rows


@kernel
def _home(low: Any, mask: Any) -> Any:
    mixed = np.uint64(low * np.uint64(0x9E3779B97F4A7C15))
    return np.uint64(mixed ^ np.uint64(mixed >> np.uint64(32))) & mask


@kernel
def _join(low: Any, parent: Any, table: Rows, rows: Rows) -> None:
    mask = np.uint64(table.size - 1)
    for i in range(low.size):
        at = _home(low[i], mask)
        while table[at] >= 0 and low[table[at]] != low[i]:
            at = np.uint64(at + np.uint64(1)) & mask
        table[at] = i
    for i in range(low.size):
        if parent[i] == np.uint64(0):
            rows[i] = UNKNOWN
            continue
        at = _home(parent[i], mask)
        while table[at] >= 0 and low[table[at]] != parent[i]:
            at = np.uint64(at + np.uint64(1)) & mask
        rows[i] = table[at] if table[at] >= 0 else ORPHAN


@kernel
def leaves_first(rows: Rows) -> npt.NDArray[np.int64]:
    """An order of all rows, int64[n], in which each comes after those that follow it in their chains.

    Rows in a circle, which only damage can make, come last.
    """
    count = rows.size
    children = np.zeros(count, np.int64)
    for i in range(count):
        if rows[i] >= 0:
            children[rows[i]] += 1
    order = np.empty(count, np.int64)
    tail = 0
    for i in range(count):
        if children[i] == 0:
            order[tail] = i
            tail += 1
    head = 0
    while head < tail:
        above = rows[order[head]]
        head += 1
        if above >= 0:
            children[above] -= 1
            if children[above] == 0:
                order[tail] = above
                tail += 1
    for i in range(count):
        if children[i] > 0:
            order[tail] = i
            tail += 1
    return order


@kernel
def raise_to_followers(rows: Rows, order: npt.NDArray[np.int64], priority: npt.NDArray[np.float64]) -> None:
    """Raise each row's priority, float64[n], to the highest of those that follow it; ``order`` is leaves first."""
    for i in order:
        above = rows[i]
        if above >= 0 and priority[above] < priority[i]:
            priority[above] = priority[i]


@kernel
def lost_rows(rows: Rows, order: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Which rows, bool[n], are orphans or follow one; ``order`` is leaves first."""
    lost = np.zeros(rows.size, np.bool_)
    for k in range(order.size - 1, -1, -1):
        i = order[k]
        above = rows[i]
        if above == ORPHAN or (above >= 0 and lost[above]):
            lost[i] = True
    return lost
