"""Pools beside the main one, and pools that are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

from sgl_kvtier.errors import GeometryError
from sgl_kvtier.hostpool import AddressedPool, CopiedPool, StridedPool, adapt
from sgl_kvtier.testing.dialects import V1, V2
from sgl_kvtier.testing.pools import (
    LatentShape,
    PoolShape,
    all_pages,
    fill_like_kv,
    fill_with_any_bits,
    fill_with_zeros,
    mha_pool,
    mla_pool,
    page_bytes,
    page_indices,
    page_keys,
)

SLOTS = 6


def _mamba(layout: str = "page_first", *, side_state: bool = False) -> Any:
    """SGLang's Mamba host pool over device states of 3 layers."""
    from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
    from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

    info = MambaStateBufferInfo(
        temporal=torch.zeros((3, SLOTS, 2, 4, 8), dtype=torch.float32),
        conv=(torch.zeros((3, SLOTS, 5, 4), dtype=torch.bfloat16), torch.zeros((3, SLOTS, 2), dtype=torch.bfloat16)),
        extra_checkpoint_buffers=(torch.zeros((SLOTS, 3), dtype=torch.int16),) if side_state else (),
    )
    return MambaPoolHost(info, 1.0, 0, device_capacity=SLOTS, pin_memory=False, layout=layout)


def _states(pool: Any) -> list[bytes]:
    """Bytes of every slot of a Mamba pool."""
    return [pool.get_data_page(slot).numpy().tobytes() for slot in range(int(pool.size))]


def _fill_states(pool: Any, seed: int) -> None:
    fill_with_any_bits(SimpleNamespace(kv_buffer=pool.kv_buffer), seed)


def _indexer(layout: str, anchor: Any) -> Any:
    """SGLang's DSA indexer host pool; the device pool is reduced to the buffers that it is built from."""
    from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
    from sglang.srt.mem_cache.pool_host.host_pool_decl import HostPoolStorageInfo

    page_bytes_per_layer = 32 * anchor.page_size
    device_pool = SimpleNamespace(
        store_dtype=torch.bfloat16,
        start_layer=0,
        end_layer=2,
        layer_num=3,
        device="cpu",
        layer_shard_enabled=False,
        index_k_with_scale_buffer=[torch.zeros((4, page_bytes_per_layer), dtype=torch.uint8) for _ in range(3)],
    )
    decl = SimpleNamespace(
        device_pool=device_pool,
        owned_device_layers=None,
        storage_info=HostPoolStorageInfo(bytes_per_token_per_layer=32, dtype=torch.uint8),
    )
    anchor = SimpleNamespace(page_size=anchor.page_size, layout=layout, size=anchor.size, page_num=anchor.page_num)
    return DSAIndexerPoolHost(decl, anchor, pin_memory=False)


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
@pytest.mark.parametrize(("side_state", "kind"), [(False, AddressedPool), (True, CopiedPool)])
def test_mamba_states_come_back(open_store: Any, layout: str, side_state: bool, kind: type) -> None:
    """By addresses where the pool gives them all; as copies where it keeps state that it lists no address of."""
    main, pool = mha_pool(PoolShape(pages=8)), _mamba(layout, side_state=side_state)
    assert isinstance(adapt(pool), kind)
    backend, keys, mamba = open_store(main), page_keys(SLOTS), V2(PoolName.MAMBA)
    backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    _fill_states(pool, 1)
    stored = _states(pool)
    assert mamba.put(backend, pool, keys, range(SLOTS)) == [True] * SLOTS
    _fill_states(pool, 2)
    expected = _states(pool)
    expected[1], expected[4] = stored[5], stored[0]
    assert mamba.get(backend, pool, [keys[5], "absent", keys[0]], [1, 2, 4]) == [True, False, True]
    assert _states(pool)[:2] + _states(pool)[3:] == expected[:2] + expected[3:]


def test_mamba_state_survives_a_restart(open_store: Any) -> None:
    main, pool = mha_pool(PoolShape(pages=8)), _mamba()
    keys, mamba = page_keys(SLOTS), V2(PoolName.MAMBA)
    _fill_states(pool, 3)
    stored = _states(pool)
    backend = open_store(main)
    backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    mamba.put(backend, pool, keys, range(SLOTS))
    backend.close()
    other = _mamba()
    backend = open_store(main)
    backend.register_mem_host_pool_v2(other, PoolName.MAMBA)
    assert mamba.get(backend, other, keys, range(SLOTS)) == [True] * SLOTS
    assert _states(other)[:SLOTS] == stored[:SLOTS]


def test_mamba_states_with_and_without_side_state_never_mix(open_store: Any) -> None:
    main, plain, extended = mha_pool(PoolShape(pages=8)), _mamba(), _mamba(side_state=True)
    backend, mamba = open_store(main), V2(PoolName.MAMBA)
    backend.register_mem_host_pool_v2(plain, PoolName.MAMBA)
    mamba.put(backend, plain, ["state"], [0])
    other = open_store(main)
    other.register_mem_host_pool_v2(extended, PoolName.MAMBA)
    assert mamba.get(other, extended, ["state"], [0]) == [False]


def test_mamba_states_are_sharded_where_mla_is_not(open_store: Any) -> None:
    """With an MLA main pool, ranks share latents; each rank's recurrent state is its own."""
    main, pool, mamba = mla_pool(LatentShape()), _mamba(), V2(PoolName.MAMBA)
    ranks = [open_store(main, is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    for rank in ranks:
        rank.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    V1().put(ranks[0], main, ["page"], [0])
    mamba.put(ranks[0], pool, ["state"], [0])
    assert V1().get(ranks[1], main, ["page"], [1]) == [True]
    assert mamba.get(ranks[1], pool, ["state"], [1]) == [False]
    mamba.put(ranks[1], pool, ["state"], [1])
    assert mamba.get(ranks[1], pool, ["state"], [2]) == [True]


@pytest.mark.parametrize("slot", [-1, SLOTS + 1, 1 << 40])
@pytest.mark.parametrize("side_state", [False, True])
def test_slots_outside_a_side_pool_are_misses(open_store: Any, slot: int, side_state: bool) -> None:
    """A pool computes an address for any index; one outside it is memory of someone else."""
    main, pool = mha_pool(PoolShape(pages=8)), _mamba(side_state=side_state)
    assert int(pool.size) == SLOTS + 1
    backend, mamba = open_store(main), V2(PoolName.MAMBA)
    backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    mamba.put(backend, pool, ["state"], [0])
    before = _states(pool)
    assert mamba.put(backend, pool, ["other"], [slot]) == [False]
    assert mamba.get(backend, pool, ["state"], [slot]) == [False]
    assert _states(pool) == before


@pytest.mark.parametrize("layout", ["page_first", "page_first_direct", "layer_first"])
def test_indexer_pages_come_back(open_store: Any, layout: str) -> None:
    """SGLang's DSA indexer pool: addresses in the page-first layouts, copies in the layer-first one."""
    main = mla_pool(LatentShape(pages=8))
    pool = _indexer(layout, main)
    assert isinstance(adapt(pool), CopiedPool if layout == "layer_first" else AddressedPool)
    backend, keys, indexer = open_store(main, is_mla_model=True), page_keys(6), V2(PoolName.INDEXER)
    backend.register_mem_host_pool_v2(pool, PoolName.INDEXER)
    buffer = SimpleNamespace(kv_buffer=pool.index_k_with_scale_buffer)
    fill_with_any_bits(buffer, 4)
    stored = [pool.get_data_page(page * 8).numpy().tobytes() for page in range(8)]
    assert indexer.put(backend, pool, keys, range(6)) == [True] * 6
    fill_with_zeros(buffer)
    assert indexer.get(backend, pool, keys[::-1], range(2, 8)) == [True] * 6
    assert [pool.get_data_page(page * 8).numpy().tobytes() for page in range(2, 8)] == stored[5::-1]
    assert pool.get_data_page(0).count_nonzero() == 0


@pytest.mark.parametrize("layout", ["page_first", "layer_first", "page_head"])
def test_draft_pool_is_a_pool_of_its_own(open_store: Any, layout: str) -> None:
    """A draft model's KV pool has its own geometry, and its own pages under the main pool's keys."""
    main = mha_pool(PoolShape(pages=8))
    draft = mha_pool(PoolShape(layout, torch.float16, pages=8, layers=1, heads=2, dim=32))
    assert isinstance(adapt(draft), StridedPool)
    backend, keys = open_store(main), page_keys(4)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    fill_like_kv(main, 5)
    fill_like_kv(draft, 6)
    stored = all_pages(main), all_pages(draft)
    V1().put(backend, main, keys, range(4))
    V2().put(backend, draft, keys[:2], range(2))
    transfer = PoolTransfer(name=PoolName.DRAFT, hit_policy=PoolHitPolicy.ALL_PAGES)
    assert backend.batch_exists_v2(keys, [transfer]).kv_hit_pages == 2
    assert V1().get(backend, main, keys, range(4, 8)) == [True] * 4
    assert V2().get(backend, draft, keys[:2], range(4, 6)) == [True] * 2
    assert all_pages(main)[4:] == stored[0][:4]
    assert all_pages(draft)[4:6] == stored[1][:2]


def test_pools_move_in_one_call_and_fail_alone(open_store: Any) -> None:
    """A transfer that cannot be done leaves the others of the call their results."""
    main, pool = mha_pool(PoolShape(pages=8)), _mamba()
    backend = open_store(main)
    backend.register_mem_host_pool_v2(pool, PoolName.MAMBA)
    good = PoolTransfer(name=PoolName.MAMBA, keys=["a", "b"], host_indices=page_indices(pool, [0, 1]))
    bad = PoolTransfer(name=PoolName.KV, keys=["a", "b"], host_indices=page_indices(main, [0])[:-1])
    absent = PoolTransfer(name=PoolName.SWA, keys=["a"], host_indices=page_indices(main, [0]))
    answers = backend.batch_set_v2([bad, good, absent])
    assert answers == {PoolName.KV: [False] * 2, PoolName.MAMBA: [True] * 2, PoolName.SWA: [False]}


def test_logical_anchor_holds_no_bytes(open_store: Any) -> None:
    """With a logical main pool, the span is what the side pools can restore."""
    from sglang.srt.mem_cache.memory_pool_host import LogicalHostPool

    anchor, side = LogicalHostPool(64, 8), mha_pool(PoolShape(pages=8))
    backend, keys = open_store(anchor), page_keys(5)
    backend.register_mem_host_pool_v2(side, PoolName.SWA)
    V2(PoolName.SWA).put(backend, side, keys[:3], range(3))
    transfer = PoolTransfer(name=PoolName.SWA, hit_policy=PoolHitPolicy.ALL_PAGES)
    answer = backend.batch_exists_v2(keys, [transfer])
    assert (answer.kv_hit_pages, answer.extra_pool_hit_pages[PoolName.SWA]) == (3, 3)
    assert backend.batch_set_v1(keys, torch.arange(40)) == [True] * 5
    assert backend.batch_get_v1(keys, torch.arange(40)) == [True] * 5


# ---------------------------------------------------------------------- refused


def _with_scales(pool: Any) -> Any:
    """A pool as one might come with the next version: KV as its parent keeps it, and scales beside it."""
    extended = object.__new__(type("ScaledPool", (type(pool),), {}))
    extended.__dict__.update(pool.__dict__, k_scales=torch.zeros(pool.page_num, pool.layer_num))
    return extended


def test_subclass_with_state_of_its_own_is_refused(open_store: Any) -> None:
    """What its parent lists of a page leaves the scales out; restoring that would be wrong values."""
    with pytest.raises(GeometryError, match="ScaledPool"):
        open_store(_with_scales(mha_pool(PoolShape(pages=4))))


def test_mxfp8_pool_is_refused(open_store: Any) -> None:
    """SGLang's MXFP8 pool keeps scales outside its KV buffer, and says that it has no pages for a storage.

    Its constructor demands a GPU, so the pool is made of a plain one's attributes.
    """
    from sglang.srt.mem_cache.pool_host.mha_mxfp8 import MHATokenToKVPoolMXFP8Host

    pool = object.__new__(MHATokenToKVPoolMXFP8Host)
    pool.__dict__.update(mha_pool(PoolShape(pages=4)).__dict__)
    with pytest.raises(GeometryError, match="MXFP8"):
        open_store(pool)


def test_refused_pool_leaves_the_directory_usable(open_store: Any) -> None:
    plain = mha_pool(PoolShape(pages=4))
    with pytest.raises(GeometryError, match="cannot be stored"):
        open_store(_with_scales(plain))
    backend = open_store(plain)
    assert V1().put(backend, plain, ["page"], [0]) == [True]
    with pytest.raises(GeometryError, match="cannot be stored"):
        backend.register_mem_host_pool_v2(_with_scales(plain), PoolName.SWA)
    assert V1().get(backend, plain, ["page"], [1]) == [True]
    assert page_bytes(plain, 1) == page_bytes(plain, 0)


def test_pool_without_pages_is_refused(open_store: Any) -> None:
    with pytest.raises(GeometryError, match="SimpleNamespace"):
        open_store(SimpleNamespace(page_size=4, size=16, layout="page_first"))


def test_unknown_layout_is_refused(open_store: Any) -> None:
    pool = mha_pool(PoolShape(pages=4))
    pool.layout = "page_spiral"
    with pytest.raises(GeometryError, match="page_spiral"):
        open_store(pool)


def test_buffer_of_another_size_than_the_pool_says_is_refused(open_store: Any) -> None:
    pool = mha_pool(PoolShape(pages=4))
    pool.layer_num += 1
    with pytest.raises(GeometryError, match="words"):
        open_store(pool)
