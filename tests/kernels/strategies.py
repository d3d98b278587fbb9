"""Host buffers of every layout, with Hypothesis choosing shapes and content."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import settings
from hypothesis import strategies as st

from sgl_kvtier_kernels import planes
from sgl_kvtier_kernels.layout import HostPart, PagePlan

LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")

#: Without the compiler the kernels are plain Python, a thousand times slower.
examples = settings(max_examples=15 if os.environ.get("NUMBA_DISABLE_JIT") == "1" else 120, deadline=None)


class Pool(NamedTuple):
    """A host buffer that holds ``pages`` pages of K and V."""

    kind: int
    words: npt.NDArray[Any]
    parts: list[HostPart]
    page_tokens: int
    pages: int

    @property
    def plan(self) -> PagePlan:
        """The pool's pages, compiled."""
        return PagePlan(self.words, self.parts, (self.pages - 1) * self.page_tokens)


def host_part(layout: str, base: int, tokens: int, shape: tuple[int, int, int, int]) -> HostPart:
    """One part in one layout, as the layouts' definitions give it."""
    p, layers, h, d = shape
    row = h * d
    strides = {
        "layer_first": (row, tokens * row, d),
        "page_first": (layers * row, row, d),
        "page_first_direct": (row, p * row, d),
        "page_head": (layers * d, d, p * layers * d),
    }[layout]
    return HostPart(base, row if layout == "layer_first" else layers * row, shape, strides)


@st.composite
def pools(draw: st.DrawFn, kinds: tuple[int, ...] = tuple(planes.WORD_TYPES)) -> Pool:
    """A pool with random words, K and V of equal or different width, possibly a cut of the heads."""
    kind = draw(st.sampled_from(kinds))
    layout = draw(st.sampled_from(LAYOUTS))
    p, layers, h = draw(st.integers(1, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    dims = draw(st.lists(st.sampled_from([1, 3, 8, 64, 70, 130, 300]), min_size=1, max_size=2))
    pages = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts, base = [], draw(st.integers(0, 3))
    for d in dims:
        parts.append(host_part(layout, base, p * pages, (p, layers, h, d)))
        base += p * pages * layers * h * d
    if draw(st.booleans()):
        first = draw(st.integers(0, h - 1))
        parts = [
            part._replace(base=part.base + first * part.strides[2], shape=(p, layers, h - first, part.shape[3]))
            for part in parts
        ]
    word_type = planes.WORD_TYPES[kind]
    words = rng.integers(0, np.iinfo(word_type).max, base + 2, word_type, endpoint=True)
    return Pool(kind, words, parts, p, pages)
