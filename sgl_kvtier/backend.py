"""``KVTierStorage``: SGLang's HiCache storage interface, translated into calls on the tier. Nothing else.

SGLang calls from its backup, prefetch and scheduler threads at the same time, in three dialects: generic
(``batch_get``, flat tensors), v1 (``batch_get_v1``, indices into the host pool), v2 (``batch_get_v2``, several
pools). An exception would kill one of those threads, so none leaves this class: it is logged, counted, and
answered as a miss. Only setting up raises, because that is how an attach is refused.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from sgl_kvtier import hits, metrics, sglang_compat
from sgl_kvtier.config import load_config
from sgl_kvtier.registry import KV, PoolRegistry, RegisteredPool
from sgl_kvtier.store import Store
from sgl_kvtier.tier.ssd import Chain, SsdTier
from sgl_kvtier_kernels import warm_up

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_Method = Callable[..., _Answer]


def _answers(miss: Callable[..., _Answer]) -> Callable[[_Method[_Answer]], _Method[_Answer]]:
    """Answer ``miss(*arguments)`` where the method raises; log each kind of failure of a method once."""

    def decorate(method: _Method[_Answer]) -> _Method[_Answer]:
        @functools.wraps(method)
        def guarded(self: KVTierStorage, *args: Any, **kwargs: Any) -> _Answer:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the boundary: SGLang's threads must not see one
                self._note_fault(method.__name__, error)
                return miss(*args, **kwargs)

        return guarded

    return decorate


# The arguments of a failed call may be what is wrong with it, so the answers to it take nothing of them for granted.


def _no_pages(keys: Any = None, *_args: Any, **_kwargs: Any) -> list[bool]:
    return [False] * _length(keys)


def _no_tensors(keys: Any = None, *_args: Any, **_kwargs: Any) -> list[None]:
    return [None] * _length(keys)


def _no_transfers(transfers: Any = None, *_args: Any, **_kwargs: Any) -> dict[Any, list[bool]]:
    listed = transfers if isinstance(transfers, (list, tuple)) else []
    return {t.name: [False] * _length(getattr(t, "keys", None)) for t in listed if hasattr(t, "name")}


def _length(keys: Any) -> int:
    return len(keys) if isinstance(keys, (list, tuple)) else 0


class KVTierStorage(HiCacheStorage):  # type: ignore[misc] # sglang ships no types
    """HiCache L3 backend that keeps pages compressed in mmap-backed segment files.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``.
        kwargs: ``{"mem_pool_host": pool, "plugin": True}`` from the plugin, ``{}`` from SGLang's ``dynamic``.

    Raises:
        ConfigError, StoreError: The configuration or the directory cannot be used.
        GeometryError: The host pool's pages cannot be stored whole.
    """

    def __init__(self, storage_config: Any, kwargs: dict[str, Any] | None = None) -> None:
        """Open the store; see the class."""
        self._sglang = storage_config
        self._faults: set[tuple[str, str]] = set()
        self.registered_pools: dict[str, Any] = {}
        self._loads, self._stores = metrics.TransferLog(), metrics.TransferLog()
        self._stats_type = sglang_compat.storage_metrics_type() if storage_config.enable_storage_metrics else None
        config = load_config(storage_config.extra_config)
        if (kwargs or {}).get("plugin"):
            sglang_compat.check_hooks()
        self._tier = SsdTier(Store(config), config)
        self._config = config
        try:
            self._pools = PoolRegistry(storage_config, self._tier.store, config.model_id)
            if (pool := (kwargs or {}).get("mem_pool_host")) is not None:
                self.register_mem_pool_host(pool)
        except Exception:
            self._tier.close()
            raise
        threading.Thread(target=warm_up, name="sgl-kvtier-warm-up", daemon=True).start()

    # ------------------------------------------------------------------ set-up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the main KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools.register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool of the v2 interface."""
        self.registered_pools[host_pool_name] = host_pool
        self._pools.register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Say in one line what the backend runs with."""
        main, shares = self._pools.main, self._pools.shares(KV)
        logger.info(
            "sgl_kvtier: directory=%s capacity=%d bytes codec=%s namespace=%s page=%s layout=%s path=%s pools=%s",
            self._config.directory,
            self._tier.store.capacity_bytes,
            self._tier.codecs.write_name,
            ",".join(share.namespace[:8].hex() for share in shares) or "none",
            shares[0].pool.geometry if shares else "logical",
            getattr(main.host_pool, "layout", "?") if main is not None else "?",
            "zero-copy" if sglang_compat.zero_copy(self._sglang) else "generic (copies each page)",
            ",".join(self._pools.names),
        )

    # ------------------------------------------------------------------ v1: indices into the host pool

    @_answers(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load the pages under ``keys`` into the host pool; one bool each."""
        return self._load(self._pools[KV], keys, host_indices)

    @_answers(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store the host pool's pages under ``keys``; one bool each."""
        prefix = getattr(extra_info, "prefix_keys", None)
        return self._save(self._pools[KV], keys, host_indices, Chain.after(prefix))

    @_answers(lambda *_args, **_kwargs: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Length of the leading run of ``keys`` that is stored. Memory only: no disk I/O."""
        runs = [self._tier.leading_run(share.namespace, keys) for share in self._pools.shares(KV)]
        return int(min(runs, default=0))

    @_answers(lambda *_args, **_kwargs: False)
    def exists(self, key: str) -> bool:
        """Whether ``key`` is stored."""
        return bool(self.batch_exists([key]) == 1)

    # ------------------------------------------------------------------ v2: several pools

    @_answers(lambda *_args, **_kwargs: sglang_compat.pool_result(0, {}, []))
    def batch_exists_v2(self, keys: list[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:
        """Usable prefix over all pools, by each pool's hit policy.

        Returns:
            A ``PoolTransferResult``: the longest restorable prefix in pages; each pool's own boundary; and every
            prefix length at which all gating pools can be restored.
        """
        # A logical main pool holds no bytes: the side pools alone decide.
        logical = self._pools.main is not None and not self._pools.shares(KV)
        kv_pages = len(keys) if logical else self.batch_exists(keys, extra_info)
        found: dict[Any, int] = {sglang_compat.kv_pool_name(): kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            if policy == "block_groups":  # a verdict of its own, which gates nothing
                block, group = transfer.block_pages, transfer.group_pages
                present = self._present(str(transfer.name), hits.group_keys(keys, transfer.keys, block, group))
                boundary = min(hits.covered_pages(present, block, group), len(keys))
            elif restorable:
                present = self._present(str(transfer.name), keys[:kv_pages])
                window = None if policy == "all_pages" else max(1, len(transfer.keys or ()))
                usable = hits.restorable_prefixes(present, window)
                boundary = max(usable, default=0)
                restorable = [length for length in restorable if length in usable]
            else:
                continue
            if boundary:
                found[transfer.name] = boundary
        return sglang_compat.pool_result(restorable[-1] if restorable else 0, found, restorable)

    @_answers(_no_transfers)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load each transfer's pages into its pool; one bool per key, by pool name."""
        return {t.name: self._transfer(t, self._load) for t in transfers}

    @_answers(_no_transfers)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store each transfer's pages from its pool; one bool per key, by pool name."""
        return {t.name: self._transfer(t, self._save) for t in transfers}

    def _transfer(
        self, transfer: Any, move: Callable[[RegisteredPool, list[str], torch.Tensor], list[bool]]
    ) -> list[bool]:
        """Move one transfer; a failure of one pool leaves the others their results."""
        keys = list(transfer.keys or [])
        try:
            return move(self._pools[str(transfer.name)], keys, transfer.host_indices)
        except Exception as error:  # noqa: BLE001 - see _answers
            self._note_fault(move.__name__, error)
            return [False] * len(keys)

    def _present(self, pool_name: str, keys: Sequence[str]) -> list[bool]:
        found = [self._tier.present(share.namespace, keys) for share in self._pools.shares(pool_name)]
        return [all(row) for row in zip(*found, strict=True)] if found else [False] * len(keys)

    # ------------------------------------------------------------------ generic: flat tensors

    @_answers(lambda *_args, **_kwargs: None)
    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        """Fill the flat tensor ``target_location`` with the page under ``key``; None when it is not stored."""
        found: list[torch.Tensor | None] = self.batch_get([key], [target_location], target_sizes)
        return found[0]

    @_answers(_no_tensors)
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """Fill flat tensors, laid out as the host pool's ``get_data_page`` gives them; None for pages not stored."""
        targets = target_locations if target_locations is not None else [None] * len(keys)
        return [self._get_flat(key, target) for key, target in zip(keys, targets, strict=True)]

    @_answers(lambda *_args, **_kwargs: False)
    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store the flat tensor ``value`` under ``key``."""
        return self._set_flat(key, value if value is not None else target_location)

    @_answers(lambda *_args, **_kwargs: False)
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store flat tensors; True when all are stored."""
        given = values if values is not None else target_locations
        befores = [None, *keys]
        return all(
            self._set_flat(key, value, before)
            for key, value, before in zip(keys, given, befores[: len(keys)], strict=True)
        )

    def _get_flat(self, key: str, target: torch.Tensor | None) -> torch.Tensor | None:
        if target is None:
            return None
        if not target.is_contiguous():
            buffer = torch.empty_like(target, memory_format=torch.contiguous_format)
            return target.copy_(buffer) if self._get_flat(key, buffer) is not None else None
        loaded = [self._tier.get(ns, [key], [page])[0] for ns, page in self._pools.flat_pages(target)]
        return target if all(loaded) else None

    def _set_flat(self, key: str, value: torch.Tensor, before: str | None = None) -> bool:
        pages = self._pools.flat_pages(value.detach().cpu().contiguous())
        return all(self._tier.put(ns, [key], [page], Chain(before=before))[0] for ns, page in pages)

    # ------------------------------------------------------------------ shared by the dialects

    def _load(self, registered: RegisteredPool, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        started = time.perf_counter()
        firsts = registered.first_tokens(keys, host_indices)
        loaded = [True] * len(keys)
        for share in registered.shares:
            pages = share.pool.targets(firsts)
            results = self._tier.get(share.namespace, keys, pages)
            share.pool.commit(firsts, pages, results)
            loaded = [before and now for before, now in zip(loaded, results, strict=True)]
        self._note_transfer(self._loads, registered, sum(loaded), started)
        return loaded

    def _save(
        self,
        registered: RegisteredPool,
        keys: list[str],
        host_indices: torch.Tensor,
        chain: Chain | None = None,
    ) -> list[bool]:
        started = time.perf_counter()
        firsts = registered.first_tokens(keys, host_indices)
        saved = [True] * len(keys)
        for share in registered.shares:
            results = self._tier.put(share.namespace, keys, share.pool.sources(firsts), chain)
            saved = [before and now for before, now in zip(saved, results, strict=True)]
        self._note_transfer(self._stores, registered, sum(saved), started)
        return saved

    @staticmethod
    def _note_transfer(log: metrics.TransferLog, registered: RegisteredPool, pages: int, started: float) -> None:
        log.add(pages, pages * registered.page_bytes, time.perf_counter() - started)

    def _note_fault(self, operation: str, error: Exception) -> None:
        kind = type(error).__name__
        metrics.FAULTS.labels(operation, kind).inc()
        if (operation, kind) not in self._faults:
            self._faults.add((operation, kind))
            logger.error("sgl_kvtier: %s failed and is answered as a miss", operation, exc_info=error)

    # ------------------------------------------------------------------ the rest of the interface

    @_answers(lambda *_args, **_kwargs: False)
    def clear(self) -> bool:
        """Forget all pages of this server's namespaces; pages of others in the directory stay."""
        count = self._tier.store.clear(self._pools.namespaces())
        logger.info("sgl_kvtier: cleared %d pages", count)
        return True

    @_answers(lambda *_args, **_kwargs: None)
    def get_stats(self) -> Any:
        """Batches moved since the last call, in SGLang's ``StorageMetrics``; memory only, called on every step."""
        if self._stats_type is None:
            return None
        loads, stores = self._loads.drain(), self._stores.drain()
        stats = self._stats_type()
        stats.prefetch_pgs.extend(t.pages for t in loads)
        stats.prefetch_bandwidth.extend(t.gb_per_second for t in loads)
        stats.backup_pgs.extend(t.pages for t in stores)
        stats.backup_bandwidth.extend(t.gb_per_second for t in stores)
        return stats

    @_answers(lambda *_args, **_kwargs: None)
    def close(self) -> None:
        """Close the store; later calls find nothing and store nothing."""
        self._tier.close()
