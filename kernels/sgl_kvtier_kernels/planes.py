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


# In all kernels below: literals are wrapped, since uint16 and int literals mix to int64, which is four times the
# vector width; and loops run over slices, which LLVM vectorises.


@kernel
def _split_bf16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    seven, eight, sign, mantissa = np.uint16(7), np.uint16(8), np.uint16(0x80), np.uint16(0x7F)
    low = np.uint16(0xFF)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    source = words[host : host + row]
                    c = coded[at : at + row]
                    r = raw[at : at + row]
                    for x in range(row):
                        w = source[x]
                        c[x] = np.uint8(np.uint16(w >> seven) & low)
                        r[x] = np.uint8(np.uint16(np.uint16(w >> eight) & sign) | np.uint16(w & mantissa))


@kernel
def _merge_bf16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    seven, eight, sign, mantissa = np.uint16(7), np.uint16(8), np.uint16(0x80), np.uint16(0x7F)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    target = words[host : host + row]
                    c = coded[at : at + row]
                    r = raw[at : at + row]
                    for x in range(row):
                        m = np.uint16(r[x])
                        high = np.uint16(np.uint16(m & sign) << eight) | np.uint16(np.uint16(c[x]) << seven)
                        target[x] = np.uint16(high) | np.uint16(m & mantissa)


@kernel
def _split_fp16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    eight, low = np.uint16(8), np.uint16(0xFF)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    source = words[host : host + row]
                    c = coded[at : at + row]
                    r = raw[at : at + row]
                    for x in range(row):
                        w = source[x]
                        c[x] = np.uint8(w >> eight)
                        r[x] = np.uint8(w & low)


@kernel
def _merge_fp16(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    eight = np.uint16(8)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    at = table[part, 2] + i * c0 + j * c1 + k * c2
                    target = words[host : host + row]
                    c = coded[at : at + row]
                    r = raw[at : at + row]
                    for x in range(row):
                        target[x] = np.uint16(np.uint16(c[x]) << eight) | np.uint16(r[x])


@kernel
def _split_fp32(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    exponent_shift, sign_shift, high_shift, middle_shift = np.uint32(23), np.uint32(24), np.uint32(16), np.uint32(8)
    sign, mantissa, low = np.uint32(0x80), np.uint32(0x7F), np.uint32(0xFF)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        start, n = table[part, 2], table[part, 3]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    inner = i * c0 + j * c1 + k * c2
                    plane = 3 * start + inner
                    source = words[host : host + row]
                    c = coded[start + inner : start + inner + row]
                    r0 = raw[plane : plane + row]
                    r1 = raw[plane + n : plane + n + row]
                    r2 = raw[plane + 2 * n : plane + 2 * n + row]
                    for x in range(row):
                        w = source[x]
                        top = np.uint32(np.uint32(w >> sign_shift) & sign)
                        c[x] = np.uint8(np.uint32(w >> exponent_shift) & low)
                        r0[x] = np.uint8(top | np.uint32(np.uint32(w >> high_shift) & mantissa))
                        r1[x] = np.uint8(np.uint32(w >> middle_shift) & low)
                        r2[x] = np.uint8(w & low)


@kernel
def _merge_fp32(words: Words, table: Table, first_token: int, coded: Bytes, raw: Bytes) -> None:
    exponent_shift, sign_shift, high_shift, middle_shift = np.uint32(23), np.uint32(24), np.uint32(16), np.uint32(8)
    sign, mantissa = np.uint32(0x80), np.uint32(0x7F)
    for part in range(len(table)):
        base = table[part, 0] + first_token * table[part, 1]
        start, n = table[part, 2], table[part, 3]
        n0, h0, c0 = table[part, 4], table[part, 5], table[part, 6]
        n1, h1, c1 = table[part, 7], table[part, 8], table[part, 9]
        n2, h2, c2 = table[part, 10], table[part, 11], table[part, 12]
        row = table[part, 13]
        for i in range(n0):
            for j in range(n1):
                for k in range(n2):
                    host = base + i * h0 + j * h1 + k * h2
                    inner = i * c0 + j * c1 + k * c2
                    plane = 3 * start + inner
                    target = words[host : host + row]
                    c = coded[start + inner : start + inner + row]
                    r0 = raw[plane : plane + row]
                    r1 = raw[plane + n : plane + n + row]
                    r2 = raw[plane + 2 * n : plane + 2 * n + row]
                    for x in range(row):
                        m = np.uint32(r0[x])
                        high = np.uint32(np.uint32(m & sign) << sign_shift)
                        high = np.uint32(high | np.uint32(np.uint32(c[x]) << exponent_shift))
                        middle = np.uint32(np.uint32(m & mantissa) << high_shift)
                        middle = np.uint32(middle | np.uint32(np.uint32(r1[x]) << middle_shift))
                        target[x] = np.uint32(np.uint32(high | middle) | np.uint32(r2[x]))
