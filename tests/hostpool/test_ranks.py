"""Which ranks share pages: tensor parallel ones of several sizes over one store, MLA replicas, and who never does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from sgl_kvtier.errors import GeometryError
from sgl_kvtier.testing.dialects import DIALECTS, V1, V2, Dialect
from sgl_kvtier.testing.pools import (
    MHA_LAYOUTS,
    LatentShape,
    PoolShape,
    all_pages,
    fill_like_kv,
    fill_with_zeros,
    mha_pool,
    mla_pool,
    page_bytes,
    page_keys,
)

HEADS, LAYERS, TOKENS, DIM, PAGES = 8, 3, 4, 8, 4
LCM = 4
#: The model's KV, all heads: [K or V, token, layer, head, dim].
MODEL = torch.randn((2, PAGES * TOKENS, LAYERS, HEADS, DIM), generator=torch.Generator().manual_seed(1)).bfloat16()


def _rank_pool(layout: str, tp_size: int, *, heads: int = HEADS) -> Any:
    return mha_pool(PoolShape(layout, page_tokens=TOKENS, pages=PAGES, layers=LAYERS, heads=heads // tp_size, dim=DIM))


def _fill_share(pool: Any, rank: int) -> None:
    """Put the rank's heads of :data:`MODEL` into its pool, by the layout's definition."""
    heads = pool.head_num
    share = MODEL[:, :, :, rank * heads : (rank + 1) * heads]
    paged = share.reshape(2, PAGES, TOKENS, LAYERS, heads, DIM)
    pool.kv_buffer.copy_(
        {
            "layer_first": share.permute(0, 2, 1, 3, 4),
            "page_first": share,
            "page_first_direct": paged.permute(0, 1, 3, 2, 4, 5),
            "page_head": paged.permute(0, 1, 4, 2, 3, 5),
        }[pool.layout]
    )


def _open_rank(open_store: Any, pool: Any, rank: int, tp_size: int, lcm: int = LCM) -> Any:
    """A rank's backend with the configuration that SGLang derives from ``tp_lcm_size``."""
    split = pool.layout == "page_head" and lcm > tp_size
    return open_store(pool, tp_rank=rank, tp_size=tp_size, tp_lcm_size=lcm, should_split_heads=split)


@pytest.mark.parametrize("dialect", [DIALECTS["v1"], DIALECTS["generic"]], ids=["v1", "generic"])
@pytest.mark.parametrize("writer_layout", MHA_LAYOUTS)
@pytest.mark.parametrize("writer_tp", [1, 2, 4])
def test_ranks_of_any_size_read_each_other(
    open_store: Any, writer_tp: int, writer_layout: str, dialect: Dialect
) -> None:
    keys = page_keys(PAGES)
    for rank in range(writer_tp):
        pool = _rank_pool(writer_layout, writer_tp)
        _fill_share(pool, rank)
        backend = _open_rank(open_store, pool, rank, writer_tp)
        assert dialect.put(backend, pool, keys, range(PAGES)) == [True] * PAGES
    for reader_tp in (1, 2, 4):
        for rank in range(reader_tp):
            for layout in ("page_head", "page_first"):
                pool, expected = _rank_pool(layout, reader_tp), _rank_pool(layout, reader_tp)
                _fill_share(expected, rank)
                backend = _open_rank(open_store, pool, rank, reader_tp)
                assert backend.batch_exists(keys) == PAGES
                assert dialect.get(backend, pool, keys, range(PAGES)) == [True] * PAGES
                assert all_pages(pool) == all_pages(expected), (reader_tp, rank, layout)


def test_a_page_is_there_when_all_of_its_heads_are(open_store: Any) -> None:
    """One of two writers is missing: half of the smaller ranks find their heads, the larger one does not."""
    keys, pool = page_keys(PAGES), _rank_pool("page_head", 2)
    _fill_share(pool, 0)
    V1().put(_open_rank(open_store, pool, 0, 2), pool, keys, range(PAGES))
    found = [_open_rank(open_store, _rank_pool("page_head", 4), rank, 4).batch_exists(keys) for rank in range(4)]
    assert found == [PAGES, PAGES, 0, 0]
    whole = _rank_pool("page_head", 1)
    backend = _open_rank(open_store, whole, 0, 1)
    assert backend.batch_exists(keys) == 0
    assert V1().get(backend, whole, keys, range(PAGES)) == [False] * PAGES
    assert V1().get(_open_rank(open_store, pool, 1, 2), pool, keys, range(PAGES)) == [False] * PAGES


def test_clear_covers_every_share(open_store: Any) -> None:
    keys, pool = page_keys(PAGES), _rank_pool("page_head", 1)
    backend = _open_rank(open_store, pool, 0, 1)
    V1().put(backend, pool, keys, range(PAGES))
    backend.clear()
    for rank in range(4):
        assert _open_rank(open_store, _rank_pool("page_head", 4), rank, 4).batch_exists(keys) == 0


def test_without_a_common_multiple_sizes_never_mix(open_store: Any) -> None:
    keys, pool = page_keys(PAGES), _rank_pool("page_first", 2)
    V1().put(open_store(pool, tp_rank=0, tp_size=2), pool, keys, range(PAGES))
    assert open_store(_rank_pool("page_first", 4), tp_rank=0, tp_size=4).batch_exists(keys) == 0
    assert open_store(_rank_pool("page_first", 1), tp_rank=0, tp_size=1).batch_exists(keys) == 0
    assert open_store(pool, tp_rank=1, tp_size=2).batch_exists(keys) == 0


def test_a_common_multiple_equal_to_the_size_changes_nothing(open_store: Any) -> None:
    """``tp_lcm_size`` may be added to a deployment of the largest size without losing its store."""
    keys, pool = page_keys(PAGES), _rank_pool("page_first", 4)
    V1().put(open_store(pool, tp_rank=3, tp_size=4), pool, keys, range(PAGES))
    assert _open_rank(open_store, pool, 3, 4).batch_exists(keys) == PAGES


@pytest.mark.parametrize(("heads", "lcm"), [(3, 2), (2, 4), (6, 4)])
def test_heads_that_cannot_be_cut_are_refused(open_store: Any, heads: int, lcm: int) -> None:
    with pytest.raises(GeometryError, match=f"{lcm}.*{heads} KV heads"):
        _open_rank(open_store, _rank_pool("page_head", 1, heads=heads), 0, 1, lcm)


@pytest.mark.parametrize("kind", ["pp", "attn_cp"])
def test_pipeline_and_context_ranks_never_mix(open_store: Any, kind: str) -> None:
    """Equal geometry, equal keys, another part of the model or of the page."""
    pool, keys = _rank_pool("page_first", 1), page_keys(PAGES)
    fill_like_kv(pool, 2)
    first = open_store(pool, **{f"{kind}_rank": 0, f"{kind}_size": 2})
    V1().put(first, pool, keys, range(PAGES))
    for config in ({f"{kind}_rank": 1, f"{kind}_size": 2}, {f"{kind}_rank": 0, f"{kind}_size": 4}, {}):
        other = open_store(pool, **config)
        assert other.batch_exists(keys) == 0
        assert V1().get(other, pool, keys, range(PAGES)) == [False] * PAGES
    assert open_store(pool, **{f"{kind}_rank": 0, f"{kind}_size": 2}).batch_exists(keys) == PAGES


def test_layers_of_a_stage_are_part_of_its_identity(open_store: Any) -> None:
    """Stages may be cut unevenly: the same rank and size with other layers is another share."""
    pool, keys = _rank_pool("page_first", 1), page_keys(PAGES)
    V1().put(open_store(pool, pp_rank=0, pp_size=2), pool, keys, range(PAGES))
    other = _rank_pool("page_first", 1)
    other.start_layer, other.end_layer = 1, LAYERS
    assert open_store(other, pp_rank=0, pp_size=2).batch_exists(keys) == 0


def test_data_parallel_ranks_share(open_store: Any) -> None:
    pool, keys = _rank_pool("page_first", 1), page_keys(PAGES)
    fill_like_kv(pool, 3)
    stored = all_pages(pool)
    V1().put(open_store(pool, dp_rank=0), pool, keys, range(PAGES))
    fill_with_zeros(pool)
    assert V1().get(open_store(pool, dp_rank=3), pool, keys, range(PAGES)) == [True] * PAGES
    assert all_pages(pool) == stored


# ---------------------------------------------------------------------- MLA: one writer, all read


def test_latents_are_shared_by_all_ranks_of_any_size(open_store: Any) -> None:
    pool, keys = mla_pool(LatentShape(pages=PAGES)), page_keys(PAGES)
    fill_like_kv(pool, 4)
    writer = open_store(pool, is_mla_model=True, tp_rank=0, tp_size=4)
    readers = [(rank, size) for size in (1, 2, 4) for rank in range(size)]
    backends = [open_store(pool, is_mla_model=True, tp_rank=rank, tp_size=size) for rank, size in readers]
    V1().put(writer, pool, keys, range(PAGES))
    stored = all_pages(pool)
    for backend in backends:
        fill_with_zeros(pool)
        assert backend.batch_exists(keys) == PAGES
        assert V1().get(backend, pool, keys, range(PAGES)) == [True] * PAGES
        assert all_pages(pool) == stored


def test_mha_side_pool_of_an_mla_model_is_sharded(open_store: Any) -> None:
    """A draft model with heads beside an MLA model: its ranks differ, although the latents do not."""
    main, draft, keys = mla_pool(LatentShape(pages=PAGES)), _rank_pool("page_first", 2), page_keys(PAGES)
    ranks = [open_store(main, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    for backend in ranks:
        backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    V2().put(ranks[0], draft, keys, range(PAGES))
    assert V2().get(ranks[1], draft, keys, range(PAGES)) == [False] * PAGES


def test_dcp_ranks_hold_parts_of_a_page(open_store: Any) -> None:
    """Under decode context parallelism an index counts the tokens of all ranks, and a rank keeps its share of them."""
    shape = LatentShape(page_tokens=TOKENS, pages=PAGES)
    keys, pools = page_keys(2), [mla_pool(shape) for _ in range(2)]
    for rank, pool in enumerate(pools):
        pool.dcp_size, pool.dcp_rank = 2, rank
        fill_like_kv(pool, 5 + rank)
    shared: dict[str, Any] = {
        "is_mla_model": True,
        "tp_size": 2,
        "dcp_size": 2,
        "logical_page_size": 2 * TOKENS,
    }
    backends = [open_store(pool, tp_rank=rank, dcp_rank=rank, **shared) for rank, pool in enumerate(pools)]
    logical = torch.arange(2 * 2 * TOKENS, dtype=torch.int64)  # pages 0 and 1, as all ranks together count them
    for rank, (backend, pool) in enumerate(zip(backends, pools, strict=True)):
        stored = all_pages(pool)
        assert backend.batch_set_v1(keys, logical) == [True, True]
        assert backends[1].batch_exists(keys) == 2 * rank
        assert backend.batch_get_v1(keys, logical + 2 * 2 * TOKENS) == [True, True]
        assert [page_bytes(pool, page) for page in (2, 3)] == stored[:2]
        assert backend.batch_get_v1(keys, torch.arange(2 * TOKENS)) == [False, False]


_READER = """
import hashlib, json, sys
from sgl_kvtier.backend import KVTierStorage
from sgl_kvtier.testing.pools import LatentShape, mla_pool, page_bytes, page_indices, storage_config

pool = mla_pool(LatentShape(layout="layer_first", pages=4))
extra = {"directory": sys.argv[1], "capacity": "128MiB", "segment_size": "1MiB"}
config = storage_config(is_mla_model=True, tp_rank=1, tp_size=2, extra_config=extra)
backend = KVTierStorage(config, {"mem_pool_host": pool})
print("ready", flush=True)
for line in sys.stdin:
    keys = json.loads(line)
    there = backend.batch_exists(keys)
    loaded = backend.batch_get_v1(keys, page_indices(pool, range(len(keys))))
    digests = [hashlib.sha256(page_bytes(pool, page)).hexdigest() for page in range(len(keys))]
    print(json.dumps([there, loaded, digests]), flush=True)
backend.close()
"""


def test_rank_in_another_process_sees_what_the_writer_stores(open_store: Any, tmp_path: Path) -> None:
    """While both live: before, between and after the writer's batches; through another host layout."""
    pool, keys = mla_pool(LatentShape(pages=PAGES)), page_keys(PAGES)
    fill_like_kv(pool, 6)
    writer = open_store(pool, is_mla_model=True, tp_rank=0, tp_size=2)
    digests = [hashlib.sha256(page_bytes(pool, page)).hexdigest() for page in range(PAGES)]
    reader = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", _READER, str(tmp_path / "store")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    with reader:
        assert reader.stdin is not None
        assert reader.stdout is not None

        def ask() -> Any:
            assert reader.stdin is not None
            assert reader.stdout is not None
            print(json.dumps(keys), file=reader.stdin, flush=True)
            return json.loads(reader.stdout.readline())

        try:
            assert reader.stdout.readline() == "ready\n"
            assert ask()[:2] == [0, [False] * 4]
            V1().put(writer, pool, keys[:2], [0, 1])
            there, loaded, found = ask()
            assert (there, loaded, found[:2]) == (2, [True, True, False, False], digests[:2])
            V1().put(writer, pool, keys[2:], [2, 3])
            assert ask() == [4, [True] * 4, digests]
            writer.clear()
            assert ask()[:2] == [0, [False] * 4]
        finally:
            reader.stdin.close()
            reader.wait(60)
    assert reader.returncode == 0
