"""Drives a storage backend through SGLang's own radix tree and HiCache controller, without a server.

SGLang's test fixtures build the tree, its pools and requests on the CPU. Here they are set up with a backend by its
name, in any host layout; and all layers of all pools are filled and compared, not only the first.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
import types
import unittest
import warnings
from array import array
from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch

if importlib.util.find_spec("datasets") is None:
    # SGLang's fixtures import its benchmarks, and those the package of data sets; nothing here reads one.
    sys.modules["datasets"] = types.ModuleType("datasets")
    sys.modules["datasets"].load_dataset = None  # type: ignore[attr-defined]
try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang warns of each accelerator that it does not find
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
        from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import get_parallel
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
        from sglang.test.kits.unified_radix_cache.config import CacheConfig, ComponentType
        from sglang.test.kits.unified_radix_cache.fixtures import (
            build_fixture,
            drop_hicache_atexit_pin,
            match_prefix,
            node_device_value,
        )
        from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
finally:
    if getattr(sys.modules.get("datasets"), "load_dataset", ...) is None:
        del sys.modules["datasets"]


class Side:
    """One server's side: a tree, its device pools, and the requests' pool."""

    def __init__(self, cache: Any, allocator: Any, requests: Any) -> None:
        """As ``build_fixture`` gives them."""
        self.cache = cache
        self.allocator = allocator
        self.requests = requests

    @property
    def backend(self) -> Any:
        """The storage backend that SGLang attached."""
        return self.cache.cache_controller.storage_backend

    def path(self, tokens: Sequence[int]) -> torch.Tensor:
        """Device indices of the prefix ``tokens``, as far as the tree has it on the device."""
        return self.cache.path_device_indices(match_prefix(self.cache, list(tokens)).last_device_node)

    def kv(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """Copies of the KV of every full-attention layer at ``indices``, bit for bit."""
        pool = self.allocator.get_kvcache()
        return _rows(getattr(pool, "full_kv_pool", pool), indices)

    def window_kv(self, indices: torch.Tensor) -> list[torch.Tensor]:
        """The same for the sliding-window layers, whose pool has indices of its own."""
        return _rows(self.allocator.get_kvcache().swa_kv_pool, self.allocator.full_to_swa_index_mapping[indices])

    def states(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Copies of the recurrent state that the tree keeps at the end of ``tokens``, bit for bit."""
        slots = self._state_slots(tokens)
        return [buffer[:, slots].view(torch.uint8) for buffer in self._state_buffers()]

    def fill(self, tokens: Sequence[int], seed: int) -> None:
        """Fill the KV of ``tokens`` on the device, of every layer and every pool, with normal values."""
        pool, generator, indices = self.allocator.get_kvcache(), torch.Generator().manual_seed(seed), self.path(tokens)
        _randomize(_layers(getattr(pool, "full_kv_pool", pool)), indices, generator)
        if hasattr(pool, "swa_kv_pool"):
            _randomize(_layers(pool.swa_kv_pool), self.allocator.full_to_swa_index_mapping[indices], generator)
        if hasattr(self.requests, "mamba_pool"):
            states = [buffer.transpose(0, 1) for buffer in self._state_buffers()]
            _randomize(states, self._state_slots(tokens), generator)

    def _state_buffers(self) -> list[torch.Tensor]:
        """Recurrent states and convolution states: [layer, slot, ...]."""
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal, *cache.conv]

    def _state_slots(self, tokens: Sequence[int]) -> torch.Tensor:
        leaf = match_prefix(self.cache, list(tokens)).last_device_node
        slots: torch.Tensor = node_device_value(self.cache, leaf, ComponentType.MAMBA)
        return slots


def _layers(pool: Any) -> list[torch.Tensor]:
    return [*pool.k_buffer, *pool.v_buffer]


def _rows(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    return [buffer[indices].view(torch.uint8) for buffer in _layers(pool)]


def _randomize(buffers: list[torch.Tensor], indices: torch.Tensor, generator: torch.Generator) -> None:
    for buffer in buffers:
        buffer[indices] = torch.randn(buffer[indices].shape, generator=generator).to(buffer.dtype)


class Driver(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc] # sglang ships no types
    """SGLang's storage fixtures over one configuration of the cache; ``doCleanups`` ends it."""

    __test__ = False  # pytest would collect it wherever it is imported

    def __init__(self, cfg: CacheConfig, backend: str, extra_config: dict[str, Any], layout: str, io: str) -> None:
        """Drive a cache of ``cfg`` with host pools in ``layout``, copied by ``io``, over the storage ``backend``."""
        super().__init__("id")
        self.cfg = cfg
        self._backend = backend
        self._extra_config = extra_config
        self._layout = layout
        self._io = io
        load_plugins()
        unpinned = mock.patch.object(
            MambaPoolHost, "__init__", functools.partialmethod(MambaPoolHost.__init__, pin_memory=False)
        )
        unpinned.start()
        self.addCleanup(unpinned.stop)

    def open(self, **options: Any) -> Side:
        """A new side, as a freshly started server has it."""
        side = Side(*build_fixture(self.cfg))
        self._init_hicache(side.cache, **options)
        return side

    def _init_hicache(self, cache: Any, *, host_memory_mode: str = "cache", **_unused: Any) -> None:
        """In place of the fixtures' own, which sets up the file backend in one layout."""
        parallel = get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1)
        parallel.__enter__()
        self.addCleanup(parallel.__exit__, None, None, None)
        args = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend=self._io,
            hicache_mem_layout=self._layout,
            hicache_write_policy="write_through",
            hicache_storage_backend=self._backend,
            hicache_storage_backend_extra_config=json.dumps({**self._extra_config, "prefetch_threshold": 1}),
            hicache_storage_prefetch_policy="wait_complete",
            hicache_host_memory_mode=host_memory_mode,
        )
        args._mamba_cache_chunk_size = max(64, self.cfg.page_size)
        set_global_server_args_for_scheduler(args)
        cache.init_hicache(args, cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30  # backups are asked for, not left to the hit count
        cache.load_back_threshold = 0
        controller = cache.cache_controller
        # The fixtures' host pools are as large as their device pools, which leaves prefetching no room.
        controller.prefetch_capacity_limit = max(controller.prefetch_capacity_limit, controller.mem_pool_host.size)
        self.addCleanup(controller.storage_backend.close)
        self.addCleanup(controller._stop_storage_threads)

    def tokens(self, pages: int, start: int = 1) -> list[int]:
        """A prompt of whole pages."""
        return list(range(start, start + pages * self.cfg.page_size))

    def insert(self, side: Side, tokens: Sequence[int]) -> Any:
        """Put a prompt into the tree; returns its leaf."""
        self._insert(side.cache, side.allocator, side.requests, list(tokens))
        return match_prefix(side.cache, list(tokens)).last_device_node

    def store(self, side: Side, leaf: Any) -> list[str]:
        """Back the path to ``leaf`` up to the host and from there to the storage; returns its page keys."""
        self._backup_node(side.cache, leaf)
        self._write_path_to_l3(side.cache, leaf)
        self._flush_l3_backups(side.cache, timeout=60)
        keys: list[str] = self._all_page_hashes(side.cache, leaf)
        return keys

    def prefetch(self, side: Side, tokens: Sequence[int], request: str = "request") -> Any:
        """Have SGLang fetch a prompt from the storage; returns what the tree then matches."""
        handle = CacheRequestHandle(request, 0)
        side.cache.prefetch_from_storage(handle, side.cache.root_node_handle(), array("q", tokens), None, None)
        self._run_prefetch_to_completion(side.cache, handle, timeout=60)
        return match_prefix(side.cache, list(tokens))

    def store_buffered(self, side: Side, leaf: Any) -> list[str]:
        """As :meth:`store`, where the host pool is a staging buffer only."""
        self._buffer_backup_and_wait(side.cache, leaf)
        keys: list[str] = self._all_page_hashes(side.cache, leaf)
        return keys

    def load(self, side: Side, tokens: Sequence[int]) -> None:
        """Bring what the tree has of ``tokens`` in host memory to the device, as the scheduler admits a request."""
        self._load_back_through_admission(side.cache, side.requests, list(tokens))
        self._finish_pending_loads(side.cache)
