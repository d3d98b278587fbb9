"""Split and merge against NumPy, bit for bit, in every layout."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier_kernels import planes
from sgl_kvtier_kernels.layout import HostPart, PagePlan
from tests.kernels import naive
from tests.kernels.strategies import Pool, examples, pools


def _planes(pool: Pool) -> tuple[np.ndarray, np.ndarray]:
    words = pool.plan.page_words
    return np.zeros(words, np.uint8), np.zeros(words * planes.RAW_BYTES[pool.kind], np.uint8)


def _flat_plan(kind: int, words: np.ndarray) -> PagePlan:
    assert words.dtype == planes.WORD_TYPES[kind]
    return PagePlan(words, [HostPart(0, 1, (1, 1, 1, words.size), (words.size,) * 3)], 0)


@examples
@given(pools(), st.integers(0, 2))
def test_split_equals_numpy(pool: Pool, page: int) -> None:
    first = page % pool.pages * pool.page_tokens
    before = pool.words.copy()
    coded, raw = _planes(pool)
    planes.split(pool.kind, pool.plan, first, coded, raw)
    expected_coded, expected_raw = naive.split(pool.kind, naive.canonical(pool.words, pool.parts, first))
    assert np.array_equal(coded, expected_coded)
    assert np.array_equal(raw, expected_raw)
    assert np.array_equal(pool.words, before)


@examples
@given(pools(), st.integers(0, 2))
def test_merge_restores_the_page_and_nothing_else(pool: Pool, page: int) -> None:
    first = page % pool.pages * pool.page_tokens
    coded, raw = _planes(pool)
    planes.split(pool.kind, pool.plan, first, coded, raw)
    expected = pool.words.copy()
    for part in pool.parts:
        naive.strided(pool.words, part, first)[...] ^= pool.words.dtype.type(0x5A)
    for plane in (coded, raw):
        plane.flags.writeable = False
    planes.merge(pool.kind, pool.plan, first, coded, raw)
    assert np.array_equal(pool.words, expected)


@pytest.mark.parametrize("kind", [planes.BF16, planes.FP16])
def test_every_16_bit_pattern_survives(kind: int) -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    coded, raw = np.empty(words.size, np.uint8), np.empty(words.size, np.uint8)
    planes.split(kind, _flat_plan(kind, words), 0, coded, raw)
    expected_coded, expected_raw = naive.split(kind, [words])
    assert np.array_equal(coded, expected_coded)
    assert np.array_equal(raw, expected_raw)
    restored = np.zeros_like(words)
    planes.merge(kind, _flat_plan(kind, restored), 0, coded, raw)
    assert np.array_equal(restored, words)


def test_every_byte_survives() -> None:
    words = np.arange(256, dtype=np.uint8)
    coded, raw = np.empty(256, np.uint8), np.empty(0, np.uint8)
    planes.split(planes.BYTES, _flat_plan(planes.BYTES, words), 0, coded, raw)
    restored = np.zeros_like(words)
    planes.merge(planes.BYTES, _flat_plan(planes.BYTES, restored), 0, coded, raw)
    assert np.array_equal(coded, words)
    assert np.array_equal(restored, words)


def test_every_exponent_and_the_special_values_of_fp32_survive() -> None:
    specials = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 1.1754942e-38], np.float32).view(np.uint32)
    exponents = np.arange(512, dtype=np.uint32) << 23
    payloads = np.array([0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFFFFFFFF], np.uint32)
    words = np.concatenate([specials, exponents, exponents | 0x2AAAAA, payloads])
    coded, raw = np.empty(words.size, np.uint8), np.empty(3 * words.size, np.uint8)
    planes.split(planes.FP32, _flat_plan(planes.FP32, words), 0, coded, raw)
    restored = np.zeros_like(words)
    planes.merge(planes.FP32, _flat_plan(planes.FP32, restored), 0, coded, raw)
    assert np.array_equal(restored, words)


@pytest.mark.parametrize(
    ("kind", "first", "coded", "raw"),
    [
        (planes.BF16, -1, 8, 8),
        (planes.BF16, 1, 8, 8),
        (planes.BF16, 0, 7, 8),
        (planes.BF16, 0, 8, 9),
        (planes.FP32, 0, 8, 24),
        (planes.BYTES, 0, 8, 0),
        (99, 0, 8, 8),
    ],
)
def test_what_does_not_fit_is_refused(kind: int, first: int, coded: int, raw: int) -> None:
    plan = _flat_plan(planes.BF16, np.zeros(8, np.uint16))
    for move in (planes.split, planes.merge):
        with pytest.raises(ValueError, match=r"\d"):
            move(kind, plan, first, np.zeros(coded, np.uint8), np.zeros(raw, np.uint8))
