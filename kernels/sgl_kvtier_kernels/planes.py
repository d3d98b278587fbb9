"""Plane split fused with the reorder to canonical order, and the fused inverse.

The coded plane holds what an entropy coder gains on, one byte per word; the raw plane holds the rest::

    BF16   coded = bits 14..7 (exponent)      raw[n]  = sign << 7 | mantissa
    FP16   coded = high byte                  raw[n]  = low byte
    FP32   coded = bits 30..23 (exponent)     raw[3n] = for each part three planes of its length:
                                                        sign << 7 | bits 22..16; bits 15..8; bits 7..0
    BYTES  coded = the byte                   raw[0]

Pages are walked by a :class:`~sgl_kvtier_kernels.layout.PagePlan`. Every bit pattern survives a round trip.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier_kernels._jit import kernel
from sgl_kvtier_kernels._prefetch import AHEAD_BYTES, CHUNK_BYTES, prefetch
from sgl_kvtier_kernels.layout import PagePlan, Table, Words, gather_words, scatter_words

Bytes = npt.NDArray[np.uint8]

BYTES, BF16, FP16, FP32 = 0, 1, 2, 3

WORD_TYPES: dict[int, np.dtype[Any]] = {
    BYTES: np.dtype(np.uint8),
    BF16: np.dtype(np.uint16),
    FP16: np.dtype(np.uint16),
    FP32: np.dtype(np.uint32),
}

#: Bytes of the raw plane for each word.
RAW_BYTES = {BYTES: 0, BF16: 1, FP16: 1, FP32: 3}


def split(kind: int, plan: PagePlan, first_token: int, coded: Bytes, raw: Bytes) -> None:
    """Split a page into its planes: ``coded`` uint8[n] and ``raw`` uint8[n * RAW_BYTES[kind]].

    Raises:
        ValueError: Unknown kind, no such page, or planes of other lengths.
    """
    _check(kind, plan, first_token, coded, raw)
    if kind == BF16:
        _split_bf16(plan.words, plan.table, first_token, coded, raw)
    elif kind == FP16:
        _split_fp16(plan.words, plan.table, first_token, coded, raw)
    elif kind == FP32:
        _split_fp32(plan.words, plan.table, first_token, coded, raw)
    else:
        gather_words(plan.words, plan.table, first_token, coded)


def merge(kind: int, plan: PagePlan, first_token: int, coded: Bytes, raw: Bytes) -> None:
    """Inverse of :func:`split`: fill a page from its planes; words outside the page stay as they are.

    Raises:
        ValueError: As for :func:`split`.
    """
    _check(kind, plan, first_token, coded, raw)
    if kind == BF16:
        _merge_bf16(plan.words, plan.table, first_token, coded, raw)
    elif kind == FP16:
        _merge_fp16(plan.words, plan.table, first_token, coded, raw)
    elif kind == FP32:
        _merge_fp32(plan.words, plan.table, first_token, coded, raw)
    else:
        scatter_words(plan.words, plan.table, first_token, coded)


def _check(kind: int, plan: PagePlan, first_token: int, coded: Bytes, raw: Bytes) -> None:
    if plan.words.dtype != WORD_TYPES.get(kind):
        raise ValueError(f"kind {kind} with words of {plan.words.dtype}; known kinds and words: {WORD_TYPES}")
    words = plan.page_words
    if not plan.fits(first_token) or coded.size != words or raw.size != words * RAW_BYTES[kind]:
        raise ValueError(
            f"page at token {first_token} of 0 to {plan.last_first_token}, planes of {coded.size} and {raw.size} "
            f"bytes; a page has {words} and {words * RAW_BYTES[kind]}"
        )


# One kernel for each kind and direction, alike but for the innermost loop: a call of a shared walk with a row function
# makes array slices cross function boundaries, which is four times slower. Literals are wrapped, since uint16 and int
# literals mix to int64, four times the vector width.


@kernel
def _split_bf16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin = table[part, 2]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        source = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        r = raw[at : at + length]
                        for x in range(length):
                            w = source[x]
                            c[x] = np.uint8(np.uint16(w >> np.uint16(7)) & np.uint16(0xFF))
                            sign = np.uint16(np.uint16(w >> np.uint16(8)) & np.uint16(0x80))
                            r[x] = np.uint8(sign | np.uint16(w & np.uint16(0x7F)))


@kernel
def _merge_bf16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin = table[part, 2]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        target = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        r = raw[at : at + length]
                        for x in range(length):
                            m = np.uint16(r[x])
                            sign = np.uint16(np.uint16(m & np.uint16(0x80)) << np.uint16(8))
                            high = np.uint16(sign | np.uint16(np.uint16(c[x]) << np.uint16(7)))
                            target[x] = high | np.uint16(m & np.uint16(0x7F))


@kernel
def _split_fp16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin = table[part, 2]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        source = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        r = raw[at : at + length]
                        for x in range(length):
                            w = source[x]
                            c[x] = np.uint8(w >> np.uint16(8))
                            r[x] = np.uint8(w & np.uint16(0xFF))


@kernel
def _merge_fp16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin = table[part, 2]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        target = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        r = raw[at : at + length]
                        for x in range(length):
                            target[x] = np.uint16(np.uint16(c[x]) << np.uint16(8)) | np.uint16(r[x])


@kernel
def _split_fp32(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin, n = table[part, 2], table[part, 3]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        source = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        at = 3 * begin + inner + start
                        r0 = raw[at : at + length]
                        r1 = raw[at + n : at + n + length]
                        r2 = raw[at + 2 * n : at + 2 * n + length]
                        for x in range(length):
                            w = source[x]
                            sign = np.uint32(np.uint32(w >> np.uint32(24)) & np.uint32(0x80))
                            c[x] = np.uint8(np.uint32(w >> np.uint32(23)) & np.uint32(0xFF))
                            r0[x] = np.uint8(sign | np.uint32(np.uint32(w >> np.uint32(16)) & np.uint32(0x7F)))
                            r1[x] = np.uint8(np.uint32(w >> np.uint32(8)) & np.uint32(0xFF))
                            r2[x] = np.uint8(w & np.uint32(0xFF))


@kernel
def _merge_fp32(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    ahead, chunk = AHEAD_BYTES // words.itemsize, CHUNK_BYTES // words.itemsize
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        begin, n = table[part, 2], table[part, 3]
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
                    inner = i * c0 + j * c1 + k * c2
                    for start in range(0, row, chunk):
                        length = min(chunk, row - start)
                        later = k * h2 + start + ahead
                        prefetch(words, run + later if later < span else following + later - span)
                        target = words[host + start : host + start + length]
                        at = begin + inner + start
                        c = coded[at : at + length]
                        at = 3 * begin + inner + start
                        r0 = raw[at : at + length]
                        r1 = raw[at + n : at + n + length]
                        r2 = raw[at + 2 * n : at + 2 * n + length]
                        for x in range(length):
                            m = np.uint32(r0[x])
                            sign = np.uint32(np.uint32(m & np.uint32(0x80)) << np.uint32(24))
                            top = np.uint32(sign | np.uint32(np.uint32(c[x]) << np.uint32(23)))
                            high = np.uint32(np.uint32(m & np.uint32(0x7F)) << np.uint32(16))
                            middle = np.uint32(high | np.uint32(np.uint32(r1[x]) << np.uint32(8)))
                            target[x] = np.uint32(top | middle) | np.uint32(r2[x])
