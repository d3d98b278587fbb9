"""Pages of a host pool in canonical order: the plan by which kernels walk them.

A part of a page (K, V, a latent) lies in a flat array ``words`` over a whole host buffer: its first word at
``base + first_token * token_stride``, its axes ``shape = (P, L, H, D)`` (tokens, layers, heads, dim) with
``strides = (sP, sL, sH)`` in words; D is contiguous. Canonical order is C order of ``[P, L, H, D]``, part after part.

Kernels walk in the order of host memory, which is the large and cold side, and jump in the planes, which are not. They
prefetch what the walk comes to next: further on in the innermost loop's run, or in the run that follows it; behind the
last run they go on straight ahead, where the next page of a batch often lies::

    for i, j, k:  host[base + i*h0 + j*h1 + k*h2 :][:row]  <->  canonical[at + i*c0 + j*c1 + k*c2 :][:row]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel
from sgl_kvtier_kernels._prefetch import AHEAD_BYTES, CHUNK_BYTES, prefetch

Words = npt.NDArray[Any]
Table = npt.NDArray[np.int64]

# Columns of a table's rows: host base and token stride, canonical start and length, three loops, row length.
_BASE, _TOKEN_STRIDE, _AT, _LENGTH, _LOOPS, _ROW = 0, 1, 2, 3, 4, 13
_COLUMNS = 14


class HostPart(NamedTuple):
    """Where one part of every page lies in a host buffer, in words; see the module's docstring."""

    base: int
    token_stride: int
    shape: tuple[int, int, int, int]
    strides: tuple[int, int, int]

    @property
    def words(self) -> int:
        """Number of words in the part."""
        p, l, h, d = self.shape  # noqa: E741 - axis names
        return p * l * h * d

    @property
    def extent(self) -> int:
        """Words from the part's first to its last, both included."""
        p, l, h, d = self.shape  # noqa: E741 - axis names
        s_p, s_l, s_h = self.strides
        return (p - 1) * s_p + (l - 1) * s_l + (h - 1) * s_h + d


class PagePlan:
    """The pages of one host buffer, compiled for the kernels.

    Attributes:
        words: The whole buffer, 1-D.
        table: int64[parts, 14], one row for each part.
        page_words: Words of a page, all parts together.
        last_first_token: Token at which the last page starts.
    """

    __slots__ = ("last_first_token", "page_words", "table", "words")

    def __init__(self, words: Words, parts: Sequence[HostPart], last_first_token: int) -> None:
        """Compile ``parts``; pages start at token 0 to ``last_first_token``.

        Raises:
            ValueError: ``words`` is not flat, an axis is empty, or a page reaches outside ``words``. The kernels
                themselves check nothing.
        """
        if words.ndim != 1 or not words.flags.c_contiguous:
            raise ValueError(f"host buffer of shape {words.shape}: a flat contiguous array is needed")
        for part in parts:
            if min(part.shape) < 1 or min(part.strides) < 0 or min(part.base, part.token_stride, last_first_token) < 0:
                raise ValueError(f"{part}: axes must be at least 1, and offsets and strides not negative")
            end = part.base + last_first_token * part.token_stride + part.extent
            if end > words.size:
                raise ValueError(f"{part}: its last page ends at word {end} of a buffer of {words.size}")
        self.words = words
        self.page_words = sum(part.words for part in parts)
        self.last_first_token = last_first_token
        self.table: Table = np.zeros((len(parts), _COLUMNS), np.int64)
        at = 0
        for row, part in zip(self.table, parts, strict=True):
            loops, length = _loops(part)
            row[:_LOOPS] = part.base, part.token_stride, at, part.words
            row[_LOOPS:_ROW] = [number for loop in loops for number in loop]
            row[_ROW] = length
            at += part.words

    def fits(self, first_token: int) -> bool:
        """Whether a page that starts at ``first_token`` lies inside the buffer."""
        return 0 <= first_token <= self.last_first_token

    def gather(self, first_token: int, out: Words) -> None:
        """Write a page's words to ``out`` [page_words] in canonical order.

        Raises:
            ValueError: No such page, or ``out`` has another length or type.
        """
        self._check_canonical("out", first_token, out)
        gather_words(self.words, self.table, first_token, out)

    def scatter(self, first_token: int, source: Words) -> None:
        """Fill a page from ``source`` [page_words] in canonical order; other words stay as they are.

        Raises:
            ValueError: No such page, or ``source`` has another length or type.
        """
        self._check_canonical("source", first_token, source)
        scatter_words(self.words, self.table, first_token, source)

    def contiguous_parts(self, first_token: int) -> list[Words] | None:
        """Views of the page's parts, when each is one contiguous run in canonical order; else None.

        Raises:
            ValueError: No such page.
        """
        if not self.fits(first_token):
            raise ValueError(f"first token {first_token} is outside 0 to {self.last_first_token}")
        if (self.table[:, _ROW] != self.table[:, _LENGTH]).any():
            return None
        starts = (self.table[:, _BASE] + first_token * self.table[:, _TOKEN_STRIDE]).tolist()
        lengths = self.table[:, _LENGTH].tolist()
        return [self.words[start : start + length] for start, length in zip(starts, lengths, strict=True)]

    def _check_canonical(self, name: str, first_token: int, array: Words) -> None:
        if not self.fits(first_token) or array.size != self.page_words or array.dtype != self.words.dtype:
            raise ValueError(
                f"page at token {first_token} of 0 to {self.last_first_token}, {name} of {array.dtype}[{array.size}]; "
                f"a page has {self.words.dtype}[{self.page_words}]"
            )


def _loops(part: HostPart) -> tuple[list[tuple[int, int, int]], int]:
    """Three loops (count, host stride, canonical stride), outermost first, and the words in a row.

    Axes are ordered by their host stride; neighbours that are contiguous on both sides become one.
    """
    p, l, h, d = part.shape  # noqa: E741 - axis names
    canonical = (l * h * d, h * d, d)
    axes = sorted(zip(part.strides, canonical, (p, l, h), strict=True))
    row = d
    loops: list[tuple[int, int, int]] = []
    for host_stride, canonical_stride, count in axes:
        if count == 1:
            continue
        if not loops and host_stride == canonical_stride == row:
            row *= count
            continue
        if loops:
            inner_count, inner_host, inner_canonical = loops[0]
            if host_stride == inner_count * inner_host and canonical_stride == inner_count * inner_canonical:
                loops[0] = (inner_count * count, inner_host, inner_canonical)
                continue
        loops.insert(0, (count, host_stride, canonical_stride))
    return [(1, 0, 0)] * (3 - len(loops)) + loops, row


@kernel
def gather_words(words: Words, table: Table, first_token: int, out: Words) -> None:
    """``out[canonical] = words[page]``; checks nothing."""
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        span = max(row, n2 * h2)
        for i in range(n0):
            for j in range(n1):
                run = base + i * h0 + j * h1
                following = run + span
                if j + 1 < n1:
                    following = run + h1
                elif i + 1 < n0:
                    following = base + (i + 1) * h0
                for k in range(n2):
                    host = run + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        source = words[host + start : host + start + length]
                        target = out[at + start : at + start + length]
                        for x in range(length):
                            target[x] = source[x]


@kernel
def scatter_words(words: Words, table: Table, first_token: int, source: Words) -> None:
    """``words[page] = source[canonical]``; checks nothing."""
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        span = max(row, n2 * h2)
        for i in range(n0):
            for j in range(n1):
                run = base + i * h0 + j * h1
                following = run + span
                if j + 1 < n1:
                    following = run + h1
                elif i + 1 < n0:
                    following = base + (i + 1) * h0
                for k in range(n2):
                    host = run + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        target = words[host + start : host + start + length]
                        canonical = source[at + start : at + start + length]
                        for x in range(length):
                            target[x] = canonical[x]
