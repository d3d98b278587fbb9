"""Geometry and views: where a page lies in a pool of each layout."""

from __future__ import annotations

import numpy as np
import pytest

from sgl_kvtier.errors import GeometryError
from sgl_kvtier.page import PageGeometry, PageMap, flat_page, host_part, part_geometry
from tests.support import HostPool

_P, _L, _H, _D, _PAGES = 4, 3, 2, 8, 5
_T = _P * _PAGES


def _buffer(layout: str, values: np.ndarray) -> np.ndarray:
    """``values`` [2, T, L, H, D] laid out as SGLang's pools are."""
    if layout == "page_first":
        return values
    if layout == "layer_first":
        return values.transpose(0, 2, 1, 3, 4)
    paged = values.reshape(2, _PAGES, _P, _L, _H, _D)
    return paged.transpose(0, 1, 3, 2, 4, 5) if layout == "page_first_direct" else paged.transpose(0, 1, 4, 2, 3, 5)


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_first_direct", "page_head"])
def test_canonical_order_is_that_of_page_first_in_every_layout(layout: str) -> None:
    values = np.arange(2 * _T * _L * _H * _D, dtype=np.uint16).reshape(2, _T, _L, _H, _D)
    words = np.ascontiguousarray(_buffer(layout, values)).reshape(-1)
    geometry = part_geometry("k", _P, _L, _H, _D, "bfloat16", 2)
    parts = [host_part(layout, geometry, words, base, _T) for base in (0, words.size // 2)]
    for number in range(_PAGES):
        expected = values[:, number * _P : (number + 1) * _P]
        out = np.empty(expected.nbytes, np.uint8)
        PageMap(parts, _T).page(number * _P).gather(out)
        assert out.tobytes() == expected.tobytes()
        second_head = PageMap([part.heads(1, 1) for part in parts], _T).page(number * _P)
        out = np.empty(expected[:, :, :, 1:].nbytes, np.uint8)
        second_head.gather(out)
        assert out.tobytes() == expected[:, :, :, 1:].tobytes()


@pytest.mark.parametrize("first", [-16, 1, 15, 48, 1 << 40])
def test_pages_that_do_not_exist_are_refused(first: int) -> None:
    pool = HostPool(3)
    with pytest.raises(GeometryError, match=str(first)):
        pool._map.page(first)


def test_unknown_layouts_short_buffers_and_empty_axes_are_refused() -> None:
    geometry = part_geometry("k", 4, 1, 1, 8, "bfloat16", 2)
    words = np.zeros(32, np.uint16)
    with pytest.raises(GeometryError, match="sideways"):
        host_part("sideways", geometry, words, 0, 4)
    with pytest.raises(GeometryError, match="need 64"):
        host_part("page_first", geometry, words, 0, 8)
    with pytest.raises(GeometryError, match="empty axis"):
        part_geometry("k", 0, 1, 1, 8, "bfloat16", 2)


def test_types_without_a_split_are_bytes() -> None:
    geometry = part_geometry("k", 1, 1, 1, 8, "int32", 4)
    assert (geometry.dim, geometry.word_bytes, geometry.nbytes) == (32, 1, 32)
    page = flat_page(np.arange(8, dtype=np.uint32), "int32")
    assert (page.nbytes, page.coded_bytes, page.plane_bytes) == (32, 32, 0)


def test_sizes_and_the_line_for_logs() -> None:
    geometry = PageGeometry(16, tuple(part_geometry(n, 16, 30, 3, 64, "bfloat16", 2) for n in ("k", "v")))
    assert geometry.nbytes == 368_640
    assert str(geometry) == "16 tokens of k[30x3x64] bfloat16, v[30x3x64] bfloat16 = 368640 bytes"


def test_contiguous_parts_only_where_memory_is_canonical() -> None:
    for layout, contiguous in (("page_first", True), ("layer_first", False), ("page_head", False)):
        parts = HostPool(2, layout).page(1).contiguous_parts()
        assert (parts is not None) == contiguous
