"""What every HiCache storage backend must do, as a class of pytest methods to subclass.

::

    class TestMine(BackendConformance):
        def make_backend(self, directory, storage_config, host_pool):
            return MyStorage(storage_config, directory, host_pool)

The checks drive the backend through SGLang's own host pools in all three dialects. They ask for what SGLang relies
on (one answer per key, no exception, no wrong byte), and for what an operator does: pages survive a restart, damaged
files are misses, disk use stays under its cap, models do not mix.
"""

from __future__ import annotations

import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kvtier.testing.dialects import DIALECTS, V2
from sgl_kvtier.testing.machine import check_backend
from sgl_kvtier.testing.oracle import restorable
from sgl_kvtier.testing.pools import (
    MHA_LAYOUTS,
    PoolShape,
    all_pages,
    fill_like_kv,
    fill_with_any_bits,
    fill_with_zeros,
    mha_pool,
    page_bytes,
    page_indices,
    page_keys,
    storage_config,
)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each accelerator that it does not find
    from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer

#: Changes of identity: two deployments that differ in one of them never see each other's pages.
_OTHER_CONFIGS: dict[str, dict[str, Any]] = {
    "model": {"model_name": "conformance/other"},
    "model-of-like-name": {"model_name": "conformance-model"},
    "tp-size": {"tp_size": 2},
    "tp-rank": {"tp_rank": 1, "tp_size": 2},
    "pp-rank": {"pp_rank": 1, "pp_size": 2},
    "cp-rank": {"attn_cp_rank": 1, "attn_cp_size": 2},
}
_OTHER_SHAPES: dict[str, PoolShape] = {
    "dtype": PoolShape(dtype=torch.float16),
    "page-size": PoolShape(page_tokens=4, layers=8),
    "head-split": PoolShape(heads=8, dim=8),
    "layer-count": PoolShape(layers=8, heads=2),
}

_CONTENTS: dict[str, Callable[[Any], None]] = {
    "like-kv": lambda pool: fill_like_kv(pool, 2),
    "any-bits": lambda pool: fill_with_any_bits(pool, 2),
    "zeros": fill_with_zeros,
}

#: What no caller should give as keys.
_BAD_KEYS: list[Any] = [None, [], [None], [7], [b"bytes"], ["\ud800"], ["\0/../" * 99], "text", {"set"}, [["list"]]]

_damages = pytest.mark.parametrize("damage", ["flips", "many-flips", "cut"])
_dialects = pytest.mark.parametrize("dialect", DIALECTS)


class BackendConformance:
    """Checks of a HiCache backend; see the module. Subclasses define :meth:`make_backend`."""

    #: Whether a stored page may be missing although the backend has room for it.
    may_forget = False

    # ------------------------------------------------------------------ hooks

    def make_backend(self, directory: Path, storage_config: Any, host_pool: Any) -> Any:
        """A backend that keeps its pages in ``directory``; ``host_pool`` is registered with it afterwards."""
        raise NotImplementedError

    def capped_config(self, capacity_bytes: int) -> dict[str, Any]:
        """Extra configuration that caps the backend's disk use."""
        return {"capacity": capacity_bytes}

    def damage(self, directory: Path, kind: str) -> None:
        """Damage every stored page of a closed backend: here every file of more than 4 KiB.

        Args:
            directory: The backend's directory.
            kind: ``"flips"``: one byte in each 4 KiB; ``"many-flips"``: one in each 256 bytes; ``"cut"``: the last two
                thirds are gone.
        """
        for path in sorted(path for path in directory.rglob("*") if path.is_file() and path.stat().st_size > 4096):
            content = bytearray(path.read_bytes())
            if kind == "cut":
                del content[len(content) // 3 :]
            else:
                places = slice(2048, None, 4096) if kind == "flips" else slice(0, None, 256)
                content[places] = bytes(byte ^ 0xA5 for byte in content[places])
            path.write_bytes(content)

    def disk_bytes(self, directory: Path) -> int:
        """Disk space that the backend takes."""
        return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())

    # ------------------------------------------------------------------ fixtures

    @pytest.fixture(autouse=True)
    def _workplace(self, tmp_path: Path) -> Iterator[None]:
        self.directory = tmp_path / "store"
        self._open_backends: list[Any] = []
        yield
        for backend in self._open_backends:
            self.close(backend)

    def open(self, host_pool: Any, *, directory: Path | None = None, **config: Any) -> Any:
        """A backend as SGLang sets it up: made, then told of its pools, the main one also as side pool."""
        where = directory or self.directory
        where.mkdir(mode=0o700, exist_ok=True)
        backend = self.make_backend(where, storage_config(**config), host_pool)
        self._open_backends.append(backend)
        backend.register_mem_pool_host(host_pool)
        backend.register_mem_host_pool_v2(host_pool, PoolName.DRAFT)
        backend.on_host_pools_registered()
        return backend

    def close(self, backend: Any) -> None:
        """Close a backend the way SGLang does."""
        self._open_backends = [other for other in self._open_backends if other is not backend]
        if hasattr(backend, "close"):
            backend.close()

    @staticmethod
    def pool(shape: PoolShape | None = None, *, seed: int | None = None) -> Any:
        """A host pool, empty or filled from ``seed``."""
        pool = mha_pool(shape or PoolShape())
        if seed is not None:
            fill_like_kv(pool, seed)
        return pool

    # ------------------------------------------------------------------ pages in, pages out

    @_dialects
    def test_unknown_key_is_a_miss(self, dialect: str) -> None:
        """Nothing is stored: every key misses, and the pool stays as it was."""
        pool = self.pool(seed=1)
        backend, before = self.open(pool), all_pages(pool)
        assert DIALECTS[dialect].get(backend, pool, page_keys(3), [0, 1, 2]) == [False] * 3
        assert backend.batch_exists(page_keys(3)) == 0
        assert not backend.exists(page_keys(1)[0])
        assert all_pages(pool) == before

    @_dialects
    @pytest.mark.parametrize("content", _CONTENTS)
    def test_pages_come_back_byte_for_byte(self, dialect: str, content: str) -> None:
        """Whatever the bytes are, NaN and infinity among them."""
        pool = self.pool()
        _CONTENTS[content](pool)
        backend, keys = self.open(pool), page_keys(6)
        expected = [page_bytes(pool, page) for page in range(6)]
        assert DIALECTS[dialect].put(backend, pool, keys, range(6)) == [True] * 6
        fill_like_kv(pool, 3)
        assert DIALECTS[dialect].get(backend, pool, keys, range(10, 16)) == [True] * 6
        assert [page_bytes(pool, page) for page in range(10, 16)] == expected

    @_dialects
    @pytest.mark.parametrize("count", [0, 1, 128])
    def test_batches_of_any_size(self, dialect: str, count: int) -> None:
        """SGLang's batches have 128 pages; an empty one is answered by an empty list."""
        pool = self.pool(seed=4)
        backend, keys, expected = self.open(pool), page_keys(count), all_pages(pool)[:count]
        assert DIALECTS[dialect].put(backend, pool, keys, range(count)) == [True] * count
        fill_with_zeros(pool)
        assert DIALECTS[dialect].get(backend, pool, keys, range(count)) == [True] * count
        assert all_pages(pool)[:count] == expected
        if dialect != "v2":
            assert backend.batch_exists(keys) == count

    @_dialects
    def test_neighbours_stay_untouched(self, dialect: str) -> None:
        """Loading writes the asked-for pages and nothing beside them, in any order of pages."""
        pool = self.pool(seed=5)
        backend, keys, stored = self.open(pool), page_keys(3), all_pages(pool)
        DIALECTS[dialect].put(backend, pool, keys, [7, 8, 9])
        fill_like_kv(pool, 6)
        expected = all_pages(pool)
        expected[20], expected[3], expected[159] = stored[7:10]
        assert DIALECTS[dialect].get(backend, pool, keys, [20, 3, 159]) == [True] * 3
        assert all_pages(pool) == expected

    @_dialects
    def test_missing_page_leaves_the_others_their_answers(self, dialect: str) -> None:
        """One bool for each key: a miss in the middle costs nothing around it."""
        pool = self.pool(seed=7)
        backend, keys, stored = self.open(pool), page_keys(5), all_pages(pool)
        DIALECTS[dialect].put(backend, pool, [keys[0], keys[2], keys[4]], [0, 2, 4])
        fill_with_zeros(pool)
        answers = DIALECTS[dialect].get(backend, pool, keys, [10, 11, 12, 13, 14])
        assert answers == [True, False, True, False, True]
        assert [page_bytes(pool, page) for page in (10, 12, 14)] == [stored[0], stored[2], stored[4]]
        untouched = bytes(len(stored[0]))
        assert all(page_bytes(pool, page) == untouched for page in range(160) if page not in (10, 11, 12, 13, 14))

    @_dialects
    def test_one_key_several_times_in_a_batch(self, dialect: str) -> None:
        """Equal keys are equal pages: stored once, loaded as often as asked."""
        pool = self.pool(seed=8)
        backend, key, stored = self.open(pool), page_keys(1)[0], page_bytes(pool, 0)
        assert DIALECTS[dialect].put(backend, pool, [key, key, key], [0, 0, 0]) == [True] * 3
        assert DIALECTS[dialect].get(backend, pool, [key, key], [5, 6]) == [True] * 2
        assert [page_bytes(pool, page) for page in (5, 6)] == [stored, stored]

    @_dialects
    def test_storing_again_is_success(self, dialect: str) -> None:
        """Stored before is stored: SGLang stops a backup at the first False."""
        pool = self.pool(seed=9)
        backend, keys = self.open(pool), page_keys(2)
        assert DIALECTS[dialect].put(backend, pool, keys, [0, 1]) == [True, True]
        assert DIALECTS[dialect].put(backend, pool, keys, [0, 1]) == [True, True]

    def test_flat_pages_and_indices_name_the_same_pages(self) -> None:
        """What the generic dialect stored, v1 loads, and the other way round."""
        pool = self.pool(seed=10)
        backend, keys, stored = self.open(pool), page_keys(4), all_pages(pool)
        DIALECTS["v1"].put(backend, pool, keys[:2], [0, 1])
        DIALECTS["generic"].put(backend, pool, keys[2:], [2, 3])
        fill_with_zeros(pool)
        assert DIALECTS["generic"].get(backend, pool, keys[:2], [4, 5]) == [True, True]
        assert DIALECTS["v1"].get(backend, pool, keys[2:], [6, 7]) == [True, True]
        assert all_pages(pool)[4:8] == stored[:4]

    def test_single_page_calls(self) -> None:
        """``set``, ``get`` and ``exists`` move one flat page."""
        pool = self.pool(seed=11)
        backend, key, flat = self.open(pool), page_keys(1)[0], pool.get_data_page(0, flat=True)
        assert backend.set(key, flat)
        assert backend.exists(key)
        target = pool.get_dummy_flat_data_page()
        found = backend.get(key, target)
        assert torch.equal(found.view(torch.uint8), flat.view(torch.uint8))

    @_dialects
    @pytest.mark.parametrize("writer_layout", MHA_LAYOUTS)
    def test_host_layout_does_not_matter(self, dialect: str, writer_layout: str) -> None:
        """A page written under one host layout is readable under every other."""
        pool = self.pool(PoolShape(layout=writer_layout, pages=8), seed=12)
        backend, keys, stored = self.open(pool), page_keys(8), all_pages(pool)
        assert DIALECTS[dialect].put(backend, pool, keys, range(8)) == [True] * 8
        self.close(backend)
        for layout in MHA_LAYOUTS:
            reader_pool = self.pool(PoolShape(layout=layout, pages=8))
            reader = self.open(reader_pool)
            assert DIALECTS[dialect].get(reader, reader_pool, keys, range(8)) == [True] * 8, layout
            assert all_pages(reader_pool) == stored, layout
            self.close(reader)

    # ------------------------------------------------------------------ what is there

    def test_leading_run(self) -> None:
        """``batch_exists`` counts up to the first missing key, whatever lies behind it."""
        pool = self.pool(seed=13)
        backend, keys = self.open(pool), page_keys(6)
        DIALECTS["generic"].put(backend, pool, [keys[0], keys[1], keys[3]], [0, 1, 3])
        assert backend.batch_exists(keys) == 2
        assert backend.batch_exists(keys[3:]) == 1
        assert backend.batch_exists(keys[2:]) == 0
        assert backend.batch_exists([]) == 0

    @pytest.mark.parametrize("seed", range(12))
    def test_restorable_prefixes_against_brute_force(self, seed: int) -> None:
        """ALL_PAGES and TRAILING_PAGES over random holes in the main pool and in two side pools."""
        chance = random.Random(seed)
        pool = self.pool(PoolShape(pages=16), seed=14)
        backend, keys = self.open(pool), page_keys(12, salt=str(seed))
        names = (PoolName.DRAFT, PoolName.SWA)
        backend.register_mem_host_pool_v2(pool, PoolName.SWA)
        for _ in range(6):
            density, run = chance.choice([0.6, 0.85, 0.95]), chance.randint(0, 12)
            offered = {"kv": keys[:run], **{name: [k for k in keys if chance.random() < density] for name in names}}
            backend.clear()
            if offered["kv"]:
                DIALECTS["generic"].put(backend, pool, offered["kv"], range(run))
            for name in names:
                V2(name).put(backend, pool, offered[name], range(len(offered[name])))
            transfers = [
                PoolTransfer(
                    name=name,
                    hit_policy=chance.choice([PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES]),
                    keys=keys[: chance.randint(0, 4)] or None,
                )
                for name in chance.sample(names, chance.randint(1, 2))
            ]
            expected = restorable(keys, set(offered["kv"]), transfers, {n: set(offered[n]) for n in names})
            answer = backend.batch_exists_v2(keys, transfers)
            shown = (offered, transfers)
            assert answer.kv_hit_pages == expected.pages, shown
            assert list(answer.restorable_prefix_pages) == expected.prefixes, shown
            assert {str(k): v for k, v in answer.extra_pool_hit_pages.items()} == {
                str(k): v for k, v in expected.hits.items()
            }, shown

    @pytest.mark.parametrize("seed", range(4))
    def test_block_groups_never_gate(self, seed: int) -> None:
        """A BLOCK_GROUPS pool reports the pages its leading whole groups cover, and shortens nothing."""
        chance = random.Random(seed)
        pool = self.pool(PoolShape(pages=16), seed=15)
        backend, keys = self.open(pool), page_keys(12, salt=str(seed))
        DIALECTS["generic"].put(backend, pool, keys, range(12))
        group_keys = page_keys(6, salt=f"groups {seed}")  # three blocks of four pages, two keys each
        present = [key for key in group_keys if chance.random() < 0.8]
        V2().put(backend, pool, present, range(len(present)))
        leading = next((i for i, key in enumerate(group_keys) if key not in present), len(group_keys))
        transfer = PoolTransfer(
            name=PoolName.DRAFT, hit_policy=PoolHitPolicy.BLOCK_GROUPS, keys=group_keys, block_pages=4, group_pages=2
        )
        answer = backend.batch_exists_v2(keys, [transfer])
        assert answer.kv_hit_pages == 12
        assert list(answer.restorable_prefix_pages) == list(range(1, 13))
        assert answer.extra_pool_hit_pages.get(PoolName.DRAFT, 0) == leading // 2 * 4

    def test_exists_without_side_pools(self) -> None:
        """``batch_exists_v2`` without transfers is ``batch_exists``."""
        pool = self.pool(seed=16)
        backend, keys = self.open(pool), page_keys(4)
        DIALECTS["generic"].put(backend, pool, keys[:3], range(3))
        answer = backend.batch_exists_v2(keys)
        assert (answer.kv_hit_pages, list(answer.restorable_prefix_pages)) == (3, [1, 2, 3])

    # ------------------------------------------------------------------ identity

    @pytest.mark.parametrize("change", [*_OTHER_CONFIGS, *_OTHER_SHAPES])
    def test_other_deployments_never_hit(self, change: str) -> None:
        """Another model, rank, type or geometry: the same key names other bytes."""
        pool = self.pool(seed=17)
        backend, keys = self.open(pool), page_keys(3)
        DIALECTS["generic"].put(backend, pool, keys, range(3))
        V2().put(backend, pool, keys, range(3))
        other_pool = self.pool(_OTHER_SHAPES.get(change), seed=18)
        other, before = self.open(other_pool, **_OTHER_CONFIGS.get(change, {})), all_pages(other_pool)
        assert other.batch_exists(keys) == 0
        for dialect in ("generic", "v2"):
            assert DIALECTS[dialect].get(other, other_pool, keys, range(3)) == [False] * 3
        assert all_pages(other_pool) == before

    def test_side_pools_have_their_own_pages(self) -> None:
        """The same key in another pool is another page."""
        pool = self.pool(seed=19)
        backend, keys = self.open(pool), page_keys(2)
        DIALECTS["generic"].put(backend, pool, keys, range(2))
        assert V2().get(backend, pool, keys, range(2)) == [False] * 2
        backend.register_mem_host_pool_v2(pool, PoolName.SWA)
        V2().put(backend, pool, keys, [4, 5])
        assert V2(PoolName.SWA).get(backend, pool, keys, range(2)) == [False] * 2

    def test_data_parallel_ranks_share(self) -> None:
        """Replicas of one model hold equal pages."""
        pool = self.pool(seed=20)
        backend, keys, stored = self.open(pool, dp_rank=0), page_keys(2), all_pages(pool)
        DIALECTS["generic"].put(backend, pool, keys, range(2))
        other = self.open(pool, dp_rank=1)
        assert DIALECTS["generic"].get(other, pool, keys, [8, 9]) == [True] * 2
        assert all_pages(pool)[8:10] == stored[:2]

    # ------------------------------------------------------------------ over time

    @_dialects
    def test_pages_survive_a_restart(self, dialect: str) -> None:
        """Closed and opened again, by an object that knows nothing of the first."""
        pool = self.pool(seed=21)
        backend, keys, stored = self.open(pool), page_keys(40), all_pages(pool)
        DIALECTS[dialect].put(backend, pool, keys, range(40))
        self.close(backend)
        fill_with_zeros(pool)
        backend = self.open(pool)
        assert DIALECTS[dialect].get(backend, pool, keys, range(40)) == [True] * 40
        assert all_pages(pool)[:40] == stored[:40]

    def test_live_backends_see_each_other(self) -> None:
        """Two processes of one deployment share a directory: here two objects, without a restart."""
        pool = self.pool(seed=22)
        first, second, keys, stored = self.open(pool), self.open(pool), page_keys(4), all_pages(pool)
        DIALECTS["generic"].put(first, pool, keys[:2], [0, 1])
        DIALECTS["generic"].put(second, pool, keys[2:], [2, 3])
        for backend in (first, second):
            fill_with_zeros(pool)
            assert backend.batch_exists(keys) == 4
            assert DIALECTS["generic"].get(backend, pool, keys, range(4)) == [True] * 4
            assert all_pages(pool)[:4] == stored[:4]

    def test_pages_of_others_load_unasked(self) -> None:
        """A rank that loads what another wrote after it opened, without having asked whether it exists."""
        pool = self.pool(seed=34)
        writer, reader, keys, stored = self.open(pool), self.open(pool), page_keys(2), all_pages(pool)
        DIALECTS["generic"].put(writer, pool, keys, [0, 1])
        assert DIALECTS["generic"].get(reader, pool, keys, [4, 5]) == [True] * 2
        assert all_pages(pool)[4:6] == stored[:2]

    def test_clear_forgets_own_pages_only(self) -> None:
        """After ``clear`` nothing of this deployment is left, also after a restart; others keep theirs."""
        pool, other_pool = self.pool(seed=23), self.pool(seed=24)
        backend, keys = self.open(pool), page_keys(3)
        other, stored = self.open(other_pool, model_name="conformance/other"), all_pages(other_pool)
        for member, member_pool in ((backend, pool), (other, other_pool)):
            DIALECTS["generic"].put(member, member_pool, keys, range(3))
        V2().put(backend, pool, keys, range(3))
        backend.clear()
        assert backend.batch_exists(keys) == 0
        assert V2().get(backend, pool, keys, range(3)) == [False] * 3
        self.close(backend)
        assert self.open(pool).batch_exists(keys) == 0
        assert DIALECTS["generic"].get(other, other_pool, keys, [5, 6, 7]) == [True] * 3
        assert all_pages(other_pool)[5:8] == stored[:3]

    def test_cleared_backend_stores_again(self) -> None:
        """``clear`` is not the end."""
        pool = self.pool(seed=25)
        backend, keys = self.open(pool), page_keys(3)
        DIALECTS["generic"].put(backend, pool, keys, range(3))
        backend.clear()
        fill_like_kv(pool, 26)
        stored = all_pages(pool)
        DIALECTS["generic"].put(backend, pool, keys, range(3))
        assert DIALECTS["generic"].get(backend, pool, keys, [3, 4, 5]) == [True] * 3
        assert all_pages(pool)[3:6] == stored[:3]

    def test_closed_backend_misses(self) -> None:
        """Threads may still call after ``close``; it may be called twice."""
        pool = self.pool(seed=27)
        backend, keys = self.open(pool), page_keys(2)
        DIALECTS["generic"].put(backend, pool, keys, range(2))
        backend.close()
        assert backend.batch_exists(keys) == 0
        assert DIALECTS["generic"].get(backend, pool, keys, range(2)) == [False] * 2
        assert DIALECTS["v1"].put(backend, pool, keys, range(2)) == [False] * 2
        backend.get_stats()
        backend.clear()
        backend.close()

    # ------------------------------------------------------------------ what goes wrong

    @_dialects
    @_damages
    def test_damaged_files_are_misses(self, damage: str, dialect: str) -> None:
        """Flipped bits and cut files: a miss, neither an exception nor wrong bytes; then ``exists`` says no."""
        pool = self.pool(seed=28)
        backend, keys, stored = self.open(pool), page_keys(60), all_pages(pool)
        DIALECTS[dialect].put(backend, pool, keys, range(60))
        self.close(backend)
        self.damage(self.directory, damage)
        backend = self.open(pool)
        answers = [DIALECTS[dialect].get(backend, pool, [keys[page]], [page])[0] for page in range(60)]
        assert answers == [False] * 60
        assert not any(backend.exists(key) for key in keys)
        assert all_pages(pool)[60:] == stored[60:]

    @_damages
    def test_damaged_store_stores_again(self, damage: str) -> None:
        """Damage costs the pages it hit, not the backend, nor the room they took."""
        pool = self.pool(seed=29)
        config: dict[str, Any] = {"extra_config": self.capped_config(8 << 20)}
        backend, keys, stored = self.open(pool, **config), page_keys(20), all_pages(pool)
        for number in range(8):  # about as much as the cap allows
            fill_with_any_bits(pool, number)
            DIALECTS["generic"].put(backend, pool, page_keys(128, salt=str(number)), range(128))
        fill_like_kv(pool, 29)
        DIALECTS["generic"].put(backend, pool, keys, range(20))
        self.close(backend)
        self.damage(self.directory, damage)
        backend = self.open(pool, **config)
        for page, key in enumerate(keys):
            DIALECTS["generic"].get(backend, pool, [key], [100 + page])
        fill_like_kv(pool, 29)
        assert DIALECTS["generic"].put(backend, pool, keys, range(20)) == [True] * 20
        fill_with_zeros(pool)
        assert DIALECTS["generic"].get(backend, pool, keys, range(20)) == [True] * 20
        assert all_pages(pool)[:20] == stored[:20]

    @pytest.mark.parametrize("dialect", ["v1", "v2"])
    def test_wrong_indices_are_misses(self, dialect: str) -> None:
        """Too few, too many, none, of no page, or outside the pool: False for each key, nothing stored or written."""
        pool = self.pool(seed=30)
        backend, keys, before = self.open(pool), page_keys(2), all_pages(pool)
        right = page_indices(pool, [0, 1])
        wrong = {
            "too few": right[:-1],
            "one page": right[:8],
            "too many": torch.cat([right, right]),
            "none": None,
            "empty": right[:0],
            "negative": right - 16,
            "beyond the pool": right + int(pool.size),
            "far beyond the pool": right + (1 << 40),
            "half a page off": right + 4,
            "past the end": right + (int(pool.size) - 8),
        }
        for name, indices in wrong.items():
            if dialect == "v1":
                stored = backend.batch_set_v1(keys, indices)
                loaded = backend.batch_get_v1(keys, indices)
            else:
                transfers = [PoolTransfer(name=PoolName.DRAFT, keys=keys, host_indices=indices)]
                stored = backend.batch_set_v2(transfers)[PoolName.DRAFT]
                loaded = backend.batch_get_v2(transfers)[PoolName.DRAFT]
            assert (stored, loaded) == ([False] * 2, [False] * 2), name
        assert backend.batch_exists(keys) == 0
        assert all_pages(pool) == before

    @pytest.mark.parametrize("call", ["batch_get_v1", "batch_set_v1"])
    def test_bad_v1_arguments_never_raise(self, call: str) -> None:
        """SGLang's threads die of an exception; every call answers something."""
        pool = self.pool(PoolShape(pages=16), seed=31)
        backend, right = self.open(pool), page_indices(pool, [0])
        for keys, indices in itertools.product(_BAD_KEYS, [None, right, right.float(), right.reshape(2, -1), "text"]):
            getattr(backend, call)(keys, indices)

    @pytest.mark.parametrize("call", ["batch_get", "batch_set"])
    def test_bad_generic_arguments_never_raise(self, call: str) -> None:
        """As above, for flat tensors."""
        pool = self.pool(PoolShape(pages=16), seed=31)
        backend, flat = self.open(pool), pool.get_data_page(0, flat=True)
        values: list[Any] = [None, [], [None], [flat[:-3]], [flat, flat], [torch.empty(0)], ["text"], flat, 7]
        for keys, value in itertools.product(_BAD_KEYS, values):
            getattr(backend, call)(keys, value)

    @pytest.mark.parametrize("call", ["get", "set"])
    def test_bad_single_page_arguments_never_raise(self, call: str) -> None:
        """As above, for one page."""
        pool = self.pool(PoolShape(pages=16), seed=31)
        backend, flat = self.open(pool), pool.get_data_page(0, flat=True)
        for key, value in itertools.product(
            [None, 7, "k", "\ud800", b"b"], [None, flat[:-3], torch.empty(0), "text", 7]
        ):
            getattr(backend, call)(key, value)

    @pytest.mark.parametrize("call", ["exists", "batch_exists", "batch_exists_v2"])
    def test_bad_keys_never_exist(self, call: str) -> None:
        """As above, for questions: nothing is there under a key that is none."""
        backend = self.open(self.pool(PoolShape(pages=16), seed=31))
        for keys in _BAD_KEYS:
            answer = getattr(backend, call)(keys)
            assert not getattr(answer, "kv_hit_pages", answer), keys

    @pytest.mark.parametrize("call", ["batch_get_v2", "batch_set_v2"])
    def test_bad_transfers_never_raise(self, call: str) -> None:
        """As above, for transfers: of a pool that is not registered, without keys or indices, or no transfers."""
        pool = self.pool(PoolShape(pages=16), seed=31)
        backend = self.open(pool)
        unknown = PoolTransfer(name=PoolName.MAMBA, keys=["k"], host_indices=page_indices(pool, [0]))
        empty, bare = PoolTransfer(name=PoolName.DRAFT), PoolTransfer(name=PoolName.DRAFT, keys=["k"])
        for transfers in (None, [], [None], [empty], [bare], "text", 7):
            getattr(backend, call)(transfers)
        right = PoolTransfer(name=PoolName.DRAFT, keys=["k"], host_indices=page_indices(pool, [0]))
        backend.batch_set_v2([right])
        assert getattr(backend, call)([unknown, right]) == {PoolName.MAMBA: [False], PoolName.DRAFT: [True]}

    def test_calls_before_a_pool_is_known_never_raise(self) -> None:
        """As above, before SGLang has registered a host pool."""
        self.directory.mkdir(mode=0o700)
        pool = self.pool(PoolShape(pages=16), seed=31)
        backend, indices = self.make_backend(self.directory, storage_config(), None), page_indices(pool, [0])
        self._open_backends.append(backend)
        transfer = PoolTransfer(name=PoolName.DRAFT, keys=["k"], host_indices=indices)
        assert backend.batch_get_v1(["k"], indices) == [False]
        assert backend.batch_set_v1(["k"], indices) == [False]
        assert backend.batch_exists(["k"]) == 0
        assert backend.batch_exists_v2(["k"], [transfer]).kv_hit_pages == 0
        assert backend.batch_get_v2([transfer]) == {PoolName.DRAFT: [False]}
        assert backend.batch_set_v2([transfer]) == {PoolName.DRAFT: [False]}
        backend.get_stats()
        backend.clear()

    def test_disk_cap_is_honoured(self) -> None:
        """Disk use never passes the cap, and the newest page is always there."""
        pool = self.pool(PoolShape(pages=64))
        capacity = 8 << 20
        backend = self.open(pool, extra_config=self.capped_config(capacity))
        page_size = len(page_bytes(pool, 0))
        rounds = 3 * capacity // (64 * page_size)
        for number in range(rounds):
            fill_with_any_bits(pool, number)
            keys, stored = page_keys(64, salt=str(number)), all_pages(pool)
            assert DIALECTS["generic"].put(backend, pool, keys, range(64)) == [True] * 64
            assert self.disk_bytes(self.directory) <= capacity
            fill_with_zeros(pool)
            assert DIALECTS["generic"].get(backend, pool, keys[-1:], [63]) == [True]
            assert page_bytes(pool, 63) == stored[63]

    # ------------------------------------------------------------------ at the same time

    def test_backup_prefetch_and_clear_at_once(self) -> None:
        """SGLang's threads on one object: pages are right or missing, and nothing raises."""
        source = self.pool(PoolShape(pages=32), seed=32)
        backend, keys, stored = self.open(source), page_keys(32), all_pages(source)
        pools = [self.pool(PoolShape(pages=32)) for _ in range(2)]
        failures: list[str] = []
        done = threading.Event()

        def guarded(work: Any) -> None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - reported by the test
                failures.append(f"{work.__name__}: {error!r}")

        def backup() -> None:
            for turn in range(12):
                DIALECTS["generic"].put(backend, source, keys, range(32))
                if turn % 4 == 3:
                    backend.clear()
            done.set()

        def prefetch(target: Any) -> None:
            while not done.is_set():
                run = backend.batch_exists(keys)
                if run:
                    answers = DIALECTS["generic"].get(backend, target, keys[:run], range(run))
                    wrong = [p for p, ok in enumerate(answers) if ok and page_bytes(target, p) != stored[p]]
                    if wrong:
                        failures.append(f"pages {wrong} came back wrong")

        def watch() -> None:
            while not done.is_set():
                backend.get_stats()
                backend.batch_exists_v2(keys, [PoolTransfer(name=PoolName.DRAFT, keys=keys[-2:])])

        workers: list[Any] = [backup, watch, lambda: prefetch(pools[0]), lambda: prefetch(pools[1])]
        threads = [threading.Thread(target=guarded, args=(work,)) for work in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    # ------------------------------------------------------------------ all together

    @_dialects
    def test_against_a_dictionary(self, dialect: str, tmp_path: Path) -> None:
        """Random sequences of put, get, exists, clear and restart, compared with a dictionary."""
        stores = itertools.count()
        pool = self.pool(PoolShape(pages=8))

        def open_backend(directory: Path) -> Any:
            return self.open(pool, directory=directory)

        check_backend(
            open_backend,
            self.close,
            lambda: tmp_path / f"store-{next(stores)}",
            pool,
            DIALECTS[dialect],
            may_forget=self.may_forget,
        )

    def test_statistics_count_pages(self) -> None:
        """``get_stats`` gives the batches since the last call, in SGLang's own type."""
        pool = self.pool(seed=33)
        backend, keys = self.open(pool), page_keys(5)
        DIALECTS["v1"].put(backend, pool, keys, range(5))
        DIALECTS["v1"].get(backend, pool, keys[:4], range(4))
        stats = backend.get_stats()
        assert (sum(stats.backup_pgs), sum(stats.prefetch_pgs)) == (5, 4)
        assert all(np.isfinite([*stats.backup_bandwidth, *stats.prefetch_bandwidth]))
        drained = backend.get_stats()
        assert (sum(drained.backup_pgs), sum(drained.prefetch_pgs)) == (0, 0)
