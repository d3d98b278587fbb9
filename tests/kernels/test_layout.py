"""Gather and scatter against NumPy, and plans that reach outside their buffer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sgl_kvtier_kernels.layout import HostPart, PagePlan
from tests.kernels import naive
from tests.kernels.strategies import LAYOUTS, Pool, examples, host_part, pools


@examples
@given(pools(), st.integers(0, 2))
def test_gather_and_scatter_equal_numpy(pool: Pool, page: int) -> None:
    first = page % pool.pages * pool.page_tokens
    expected = np.concatenate(naive.canonical(pool.words, pool.parts, first))
    gathered = np.zeros_like(expected)
    pool.plan.gather(first, gathered)
    assert np.array_equal(gathered, expected)

    whole = pool.words.copy()
    for part in pool.parts:
        naive.strided(pool.words, part, first)[...] = 0
    gathered.flags.writeable = False
    pool.plan.scatter(first, gathered)
    assert np.array_equal(pool.words, whole)


@examples
@given(pools())
def test_contiguous_parts_are_the_canonical_words_in_place(pool: Pool) -> None:
    views = pool.plan.contiguous_parts(0)
    if views is not None:
        for view, expected in zip(views, naive.canonical(pool.words, pool.parts, 0), strict=True):
            assert np.shares_memory(view, pool.words)
            assert np.array_equal(view, expected)


def test_pages_of_page_first_pools_are_contiguous() -> None:
    parts = [host_part("page_first", base, 32, (16, 3, 2, 8)) for base in (0, 32 * 48)]
    views = PagePlan(np.arange(2 * 32 * 48, dtype=np.uint16), parts, 16).contiguous_parts(16)
    assert views is not None
    assert [(view[0], view.size) for view in views] == [(16 * 48, 16 * 48), (48 * 48, 16 * 48)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_part_that_reaches_outside_its_buffer_is_refused(layout: str) -> None:
    part = host_part(layout, 0, 8, (4, 2, 2, 4))
    PagePlan(np.zeros(8 * 16, np.uint16), [part], 4)
    with pytest.raises(ValueError, match="buffer of 127"):
        PagePlan(np.zeros(8 * 16 - 1, np.uint16), [part], 4)


@pytest.mark.parametrize(
    "part",
    [
        HostPart(0, 1, (0, 1, 1, 1), (1, 1, 1)),
        HostPart(0, 1, (1, 1, 1, 1), (-1, 1, 1)),
        HostPart(-1, 1, (1, 1, 1, 1), (1, 1, 1)),
    ],
)
def test_impossible_parts_are_refused(part: HostPart) -> None:
    with pytest.raises(ValueError, match="axes must be at least 1"):
        PagePlan(np.zeros(8, np.uint16), [part], 0)


def test_a_buffer_that_is_not_flat_is_refused() -> None:
    with pytest.raises(ValueError, match="flat"):
        PagePlan(np.zeros((2, 4), np.uint16), [], 0)


def test_canonical_arrays_of_another_length_or_type_are_refused() -> None:
    plan = PagePlan(np.zeros(8, np.uint16), [HostPart(0, 1, (1, 1, 1, 8), (8, 8, 8))], 0)
    for array in (np.zeros(7, np.uint16), np.zeros(8, np.uint8)):
        with pytest.raises(ValueError, match="a page has"):
            plan.gather(0, array)
        with pytest.raises(ValueError, match="a page has"):
            plan.scatter(0, array)
    with pytest.raises(ValueError, match="page at token 1"):
        plan.gather(1, np.zeros(8, np.uint16))
