"""Every host layout and type of SGLang's KV pools: one canonical form, whatever the pool's own order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kvtier.hostpool import StridedPool, adapt
from sgl_kvtier.testing.dialects import DIALECTS, V1
from sgl_kvtier.testing.pools import (
    ASYMMETRIC_LAYOUTS,
    MHA_LAYOUTS,
    MLA_LAYOUTS,
    LatentShape,
    PoolShape,
    all_pages,
    buffers,
    fill_like_kv,
    fill_with_any_bits,
    fill_with_zeros,
    mha_pool,
    mla_pool,
    page_bytes,
    page_keys,
    split_mla_pool,
)

DTYPES = {
    name: getattr(torch, name) for name in ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "uint8")
}
PAGES = 8

_dtypes = pytest.mark.parametrize("dtype", DTYPES)


def _mha(layout: str, dtype: str) -> Any:
    return mha_pool(PoolShape(layout, DTYPES[dtype], page_tokens=4, pages=PAGES, layers=3, heads=2, dim=8))


def _asymmetric(layout: str, dtype: str) -> Any:
    return mha_pool(PoolShape(layout, DTYPES[dtype], page_tokens=4, pages=PAGES, layers=3, heads=2, dim=12, v_dim=8))


def _mla(layout: str, dtype: str) -> Any:
    return mla_pool(LatentShape(layout, DTYPES[dtype], page_tokens=4, pages=PAGES, layers=3, rank=24, rope=8))


def _split(layout: str, dtype: str) -> Any:
    assert layout == "page_first_kv_split"
    shape = LatentShape(layout, DTYPES[dtype], page_tokens=4, pages=PAGES, layers=3, rank=24, rope=8)
    return split_mla_pool(shape)


def _split_with_indexer(layout: str, dtype: str) -> Any:
    assert layout == "page_first_kv_split"
    shape = LatentShape(layout, DTYPES[dtype], page_tokens=4, pages=PAGES, layers=3, rank=24, rope=8)
    return split_mla_pool(shape, index_layers=2, index_dim=16, scales=True)


FAMILIES: dict[str, tuple[Callable[[str, str], Any], tuple[str, ...]]] = {
    "mha": (_mha, MHA_LAYOUTS),
    "asymmetric": (_asymmetric, ASYMMETRIC_LAYOUTS),
    "mla": (_mla, MLA_LAYOUTS),
    "split": (_split, ("page_first_kv_split",)),
    "split-indexer": (_split_with_indexer, ("page_first_kv_split",)),
}
CASES = [(family, layout) for family, (_, layouts) in FAMILIES.items() for layout in layouts]
FLAT_CASES = [(family, layout) for family, layout in CASES if family in ("mha", "mla")]


def _pool(family: str, layout: str, dtype: str) -> Any:
    return FAMILIES[family][0](layout, dtype)


@_dtypes
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_canonical_form_is_the_explicit_transpose(family: str, layout: str, dtype: str) -> None:
    pool = _pool(family, layout, dtype)
    fill_with_any_bits(pool, 1)
    adapted = adapt(pool)
    assert isinstance(adapted, StridedPool)
    pages = adapted.sources([page * 4 for page in range(PAGES)])
    for number, page in enumerate(pages):
        canonical = np.empty(page.nbytes, np.uint8)
        page.gather(canonical)
        assert canonical.tobytes() == page_bytes(pool, number)


@_dtypes
@pytest.mark.parametrize(("family", "layout"), CASES)
def test_geometry_covers_every_byte_of_the_pool(family: str, layout: str, dtype: str) -> None:
    pool = _pool(family, layout, dtype)
    assert adapt(pool).geometry.nbytes * PAGES == sum(tensor.nbytes for tensor in buffers(pool))


@_dtypes
@pytest.mark.parametrize("codec", ["zstd", "raw"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_layout_reads_what_each_other_wrote(open_store: Any, family: str, codec: str, dtype: str) -> None:
    layouts = FAMILIES[family][1]
    for writer_number, writer_layout in enumerate(layouts):
        writer, keys = _pool(family, writer_layout, dtype), page_keys(PAGES, salt=writer_layout)
        (fill_like_kv if writer_number % 2 else fill_with_any_bits)(writer, writer_number)
        assert V1().put(open_store(writer, codec=codec), writer, keys, range(PAGES)) == [True] * PAGES
        for reader_layout in layouts:
            reader = _pool(family, reader_layout, dtype)
            backend = open_store(reader)
            assert V1().get(backend, reader, keys[::2], range(1, PAGES, 2)) == [True] * (PAGES // 2)
            expected = [bytes(len(page_bytes(writer, 0)))] * PAGES
            expected[1::2] = all_pages(writer)[::2]
            assert all_pages(reader) == expected, (writer_layout, reader_layout)


@_dtypes
@pytest.mark.parametrize(("family", "layout"), FLAT_CASES)
def test_flat_tensors_and_indices_name_the_same_pages(open_store: Any, family: str, layout: str, dtype: str) -> None:
    pool = _pool(family, layout, dtype)
    fill_with_any_bits(pool, 2)
    stored, keys, backend = all_pages(pool), page_keys(PAGES), open_store(pool)
    DIALECTS["v1"].put(backend, pool, keys[:4], range(4))
    DIALECTS["generic"].put(backend, pool, keys[4:], range(4, 8))
    fill_with_zeros(pool)
    assert DIALECTS["generic"].get(backend, pool, keys[:4], range(4)) == [True] * 4
    assert DIALECTS["v1"].get(backend, pool, keys[4:], range(4, 8)) == [True] * 4
    assert all_pages(pool) == stored


@pytest.mark.parametrize(("family", "layout"), FLAT_CASES)
def test_flat_tensors_of_one_layout_are_read_under_another(open_store: Any, family: str, layout: str) -> None:
    writer = _pool(family, layout, "bfloat16")
    fill_with_any_bits(writer, 3)
    keys = page_keys(PAGES)
    DIALECTS["generic"].put(open_store(writer), writer, keys, range(PAGES))
    for other in FAMILIES[family][1]:
        reader = _pool(family, other, "bfloat16")
        assert DIALECTS["generic"].get(open_store(reader), reader, keys, range(PAGES)) == [True] * PAGES
        assert all_pages(reader) == all_pages(writer), other


def test_flat_tensor_of_a_page_of_unequal_halves(open_store: Any) -> None:
    """SGLang hands out no flat pages where K and V differ; one of a page's size is K, then V, and comes back whole."""
    pool = _asymmetric("page_first", "bfloat16")
    backend, words = open_store(pool), pool.size_per_token * 4 // 2
    flat = torch.arange(words, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    assert backend.set("page", flat)
    found = backend.get("page", torch.zeros(words, dtype=torch.bfloat16))
    assert found is not None
    assert torch.equal(found.view(torch.int16), flat.view(torch.int16))
    assert V1().get(backend, pool, ["page"], [5]) == [True]
    assert page_bytes(pool, 5) == flat.view(torch.uint8).numpy().tobytes()


def test_flat_tensors_that_are_no_page_are_kept_apart(open_store: Any) -> None:
    """The generic interface takes any tensor; other sizes and types share no namespace with pages."""
    pool = _mha("page_first", "bfloat16")
    backend = open_store(pool)
    page = pool.get_dummy_flat_data_page()
    tensors = [
        torch.arange(7, dtype=torch.int64),
        torch.ones(page.numel(), dtype=torch.float16),
        torch.full((page.numel() * 2,), 7, dtype=torch.uint8),
        torch.tensor(3.5),
        torch.randn(5, 6).t(),
    ]
    for number, tensor in enumerate(tensors):
        assert backend.set("key", tensor), number
        target = torch.zeros_like(tensor)
        assert backend.get("key", target) is target
        assert torch.equal(target, tensor), number
    assert not backend.exists("key")
    assert V1().get(backend, pool, ["key"], [0]) == [False]


def test_first_and_last_page(open_store: Any) -> None:
    """First and last page of a pool: offsets reach the pool's end exactly, and no further."""
    for layout in MHA_LAYOUTS:
        pool = _mha(layout, "float32")
        fill_with_any_bits(pool, 4)
        backend, first, last = open_store(pool), page_bytes(pool, 0), page_bytes(pool, PAGES - 1)
        keys = page_keys(2, salt=layout)
        assert V1().put(backend, pool, keys, [0, PAGES - 1]) == [True, True]
        assert V1().get(backend, pool, keys, [PAGES - 1, 0]) == [True, True]
        assert (page_bytes(pool, PAGES - 1), page_bytes(pool, 0)) == (first, last)
