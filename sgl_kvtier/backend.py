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
from typing import Any, NamedTuple, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from sgl_kvtier import metrics, sglang_compat
from sgl_kvtier.config import load_config
from sgl_kvtier.errors import ConfigError, GeometryError
from sgl_kvtier.hostpool import PagedPool, StridedPool, adapt, dtype_name, flat_parts, tensor_words
from sgl_kvtier.identity import Namespace, Shard, weights_fingerprint
from sgl_kvtier.page import HostPart, PageGeometry, PageMap, PageView, flat_page, part_geometry
from sgl_kvtier.store import Store
from sgl_kvtier.tier.ssd import SsdTier
from sgl_kvtier_kernels import warm_up

logger = logging.getLogger(__name__)

KV = "kv"

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


class _Share(NamedTuple):
    """A pool's pages under one namespace: the whole page, or some of its heads."""

    namespace: bytes
    pool: PagedPool


class _Registered(NamedTuple):
    """A registered pool. ``shares`` is empty for a logical pool, which holds no bytes of its own."""

    host_pool: Any
    shares: tuple[_Share, ...]
    tokens_per_page: int
    #: Indices of a DCP pool count the tokens of all its ranks.
    index_divisor: int


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
        self._pools: dict[str, _Registered] = {}
        self.registered_pools: dict[str, Any] = {}
        self._flat_namespaces: dict[tuple[str, int], bytes] = {}
        self._loads, self._stores = metrics.TransferLog(), metrics.TransferLog()
        self._stats_type = sglang_compat.storage_metrics_type() if storage_config.enable_storage_metrics else None
        config = load_config(storage_config.extra_config)
        if (kwargs or {}).get("plugin"):
            sglang_compat.check_hooks()
        self._weights, self._variant = self._model_identity(config.model_id)
        self._tier = SsdTier(Store(config), config)
        self._config = config
        try:
            if (pool := (kwargs or {}).get("mem_pool_host")) is not None:
                self.register_mem_pool_host(pool)
        except Exception:
            self._tier.store.close()
            raise
        threading.Thread(target=warm_up, name="sgl-kvtier-warm-up", daemon=True).start()

    # ------------------------------------------------------------------ set-up

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the main KV pool."""
        super().register_mem_pool_host(mem_pool_host)
        self._register(KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take a pool of the v2 interface."""
        self.registered_pools[host_pool_name] = host_pool
        self._register(str(host_pool_name), host_pool)

    def on_host_pools_registered(self) -> None:
        """Say in one line what the backend runs with."""
        main = self._pools.get(KV)
        shares = main.shares if main is not None else ()
        logger.info(
            "sgl_kvtier: directory=%s capacity=%d bytes codec=%s namespace=%s page=%s layout=%s path=%s pools=%s",
            self._config.directory,
            self._tier.store.capacity_bytes,
            self._tier.codecs.write_name,
            ",".join(share.namespace[:8].hex() for share in shares) or "none",
            shares[0].pool.geometry if shares else "logical",
            getattr(main.host_pool, "layout", "?") if main is not None else "?",
            "zero-copy" if sglang_compat.zero_copy(self._sglang) else "generic (copies each page)",
            ",".join(self._pools),
        )

    def _register(self, name: str, host_pool: Any) -> None:
        known = self._pools.get(name)
        if known is not None and known.host_pool is host_pool:
            return
        if hasattr(host_pool, "kv_buffer") and host_pool.kv_buffer is None:
            self._pools[name] = _Registered(host_pool, (), int(host_pool.page_size), 1)
            return
        paged = adapt(host_pool)
        replicated = self._is_replicated(name, host_pool)
        shares = tuple(
            _Share(self._tier.store.register(self._namespace(name, view.geometry, view.order, shard, host_pool)), view)
            for view, shard in self._split_by_rank(paged, replicated)
        )
        divisor = int(getattr(host_pool, "dcp_size", 1) or 1)
        self._pools[name] = _Registered(host_pool, shares, int(host_pool.page_size) * divisor, divisor)

    def _is_replicated(self, name: str, host_pool: Any) -> bool:
        """Whether all TP ranks hold the same bytes: MLA latents do; Mamba states and MHA side pools are sharded."""
        return bool(self._sglang.is_mla_model) and name != "mamba" and "MHA" not in type(host_pool).__name__

    def _split_by_rank(self, paged: PagedPool, replicated: bool) -> list[tuple[PagedPool, Shard]]:
        """The pool's pages, cut by heads into those of ``tp_lcm_size`` ranks where deployments of several TP share."""
        cfg = self._sglang
        whole = Shard(
            tp_rank=0 if replicated else cfg.tp_rank,
            tp_size=1 if replicated else cfg.tp_size,
            pp_rank=cfg.pp_rank,
            pp_size=cfg.pp_size,
            cp_rank=getattr(cfg, "attn_cp_rank", 0),
            cp_size=getattr(cfg, "attn_cp_size", 1),
            dcp_rank=getattr(cfg, "dcp_rank", 0),
            dcp_size=getattr(cfg, "dcp_size", 1),
        )
        lcm = getattr(cfg, "tp_lcm_size", None) or cfg.tp_size
        factor = lcm // cfg.tp_size
        if replicated or factor == 1 or not isinstance(paged, StridedPool):
            return [(paged, whole)]
        heads = min(part.heads for part in paged.geometry.parts)
        if any(part.heads != heads for part in paged.geometry.parts) or heads % factor:
            raise GeometryError(f"tp_lcm_size: {lcm} asks to cut a rank's {heads} KV heads into {factor} equal shares")
        share = heads // factor
        return [
            (
                paged.heads(i * share, share),
                Shard(**{**_fields(whole), "tp_rank": cfg.tp_rank * factor + i, "tp_size": lcm}),
            )
            for i in range(factor)
        ]

    def _namespace(
        self, pool_name: str, geometry: PageGeometry, order: str, shard: Shard, host_pool: Any = None
    ) -> Namespace:
        layers = f"{getattr(host_pool, 'start_layer', 0)}-{getattr(host_pool, 'end_layer', 0)}"
        return Namespace(
            model=self._sglang.model_name or "",
            weights=self._weights,
            pool=pool_name,
            geometry=geometry,
            shard=shard,
            order=order,
            variant=f"{self._variant};layers={layers}",
        )

    def _model_identity(self, model_id: str | None) -> tuple[str, str]:
        """Fingerprint of the weights, and the server settings that change KV bytes under equal weights."""
        model_path, variant = sglang_compat.model_settings()
        if model_id is not None:
            return model_id, variant
        try:
            fingerprint = weights_fingerprint(model_path) if model_path else None
        except OSError as error:
            raise ConfigError(
                f"model_id: the weights in {model_path} cannot be read for a fingerprint ({error}); "
                "set model_id to a name of your own for these weights"
            ) from error
        return fingerprint or f"name:{model_path or self._sglang.model_name}", variant

    # ------------------------------------------------------------------ v1: indices into the host pool

    @_answers(_no_pages)
    def batch_get_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load the pages under ``keys`` into the host pool; one bool each."""
        return self._load(self._pools[KV], keys, host_indices)

    @_answers(_no_pages)
    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store the host pool's pages under ``keys``; one bool each."""
        return self._save(self._pools[KV], keys, host_indices, _prefix(extra_info))

    @_answers(lambda *_args, **_kwargs: 0)
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        """Length of the leading run of ``keys`` that is stored. Memory only: no disk I/O."""
        registered = self._pools.get(KV)
        if registered is None or not registered.shares:
            return 0
        runs = [self._tier.leading_run(share.namespace, keys) for share in registered.shares]
        return int(min(runs))

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
        main = self._pools.get(KV)
        logical = main is not None and not main.shares
        kv_pages = len(keys) if logical else self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {sglang_compat.kv_pool_name(): kv_pages} if kv_pages else {}
        restorable = list(range(1, kv_pages + 1))
        for transfer in pool_transfers or []:
            policy = getattr(transfer.hit_policy, "value", transfer.hit_policy)
            if policy == "block_groups":
                boundary = self._complete_groups(keys, transfer) * transfer.block_pages
                boundary = min(boundary, len(keys))
            elif restorable:
                present = self._present(str(transfer.name), keys[:kv_pages])
                window = 0 if policy == "all_pages" else max(1, len(transfer.keys or ()))
                usable = _restorable_prefixes(present, window)
                boundary = max(usable, default=0)
                restorable = [length for length in restorable if length in usable]
            else:
                continue
            if boundary:
                hits[transfer.name] = boundary
        return sglang_compat.pool_result(restorable[-1] if restorable else 0, hits, restorable)

    @_answers(_no_transfers)
    def batch_get_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Load each transfer's pages into its pool; one bool per key, by pool name."""
        return {t.name: self._transfer(t, self._load) for t in transfers}

    @_answers(_no_transfers)
    def batch_set_v2(self, transfers: Sequence[Any], extra_info: Any = None) -> dict[Any, list[bool]]:
        """Store each transfer's pages from its pool; one bool per key, by pool name."""
        return {t.name: self._transfer(t, self._save) for t in transfers}

    def _transfer(
        self, transfer: Any, move: Callable[[_Registered, list[str], torch.Tensor], list[bool]]
    ) -> list[bool]:
        """Move one transfer; a failure of one pool leaves the others their results."""
        keys = list(transfer.keys or [])
        try:
            return move(self._pools[str(transfer.name)], keys, transfer.host_indices)
        except Exception as error:  # noqa: BLE001 - see _answers
            self._note_fault(move.__name__, error)
            return [False] * len(keys)

    def _present(self, pool_name: str, keys: Sequence[str]) -> list[bool]:
        registered = self._pools.get(pool_name)
        if registered is None or not registered.shares:
            return [False] * len(keys)
        found = [self._tier.present(share.namespace, keys) for share in registered.shares]
        return [all(row) for row in zip(*found, strict=True)]

    def _complete_groups(self, keys: Sequence[str], transfer: Any) -> int:
        """Number of leading complete key groups of a BLOCK_GROUPS pool.

        A block of ``block_pages`` pages of the span has a second form of ``group_pages`` pages in this pool. The
        transfer lists the groups' keys one after the other; without a list, a group is keyed by the last pages of
        its block, whose chained hashes cover the block's tokens.
        """
        block, group = transfer.block_pages, transfer.group_pages
        if block < 1 or group < 1:
            raise ConfigError(f"pool {transfer.name}: BLOCK_GROUPS of {block} pages a block, {group} keys a group")
        if transfer.keys:
            listed = list(transfer.keys)
        else:
            ends = range(block, len(keys) + 1, block)
            listed = [key for end in ends for key in keys[max(0, end - group) : end]]
        present = self._present(str(transfer.name), listed)
        run = present.index(False) if False in present else len(present)
        return int(run // group)

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
        return all(self._set_flat(key, value) for key, value in zip(keys, given, strict=True))

    def _get_flat(self, key: str, target: torch.Tensor | None) -> torch.Tensor | None:
        if target is None:
            return None
        if not target.is_contiguous():
            buffer = torch.empty_like(target, memory_format=torch.contiguous_format)
            return target.copy_(buffer) if self._get_flat(key, buffer) is not None else None
        loaded = [self._tier.get(ns, [key], [page])[0] for ns, page in self._flat_pages(target)]
        return target if all(loaded) else None

    def _set_flat(self, key: str, value: torch.Tensor) -> bool:
        pages = self._flat_pages(value.detach().cpu().contiguous())
        return all(self._tier.put(ns, [key], [page])[0] for ns, page in pages)

    def _flat_pages(self, tensor: torch.Tensor) -> list[tuple[bytes, PageView]]:
        """The tensor as pages by namespace: the main pool's when it is one page of it, else one of its own kind."""
        main = self._pools.get(KV)
        if main is not None and main.shares:
            geometry = PageGeometry(0, tuple(p for s in main.shares for p in s.pool.geometry.parts))
            if tensor.numel() * tensor.element_size() == geometry.nbytes and tensor.dtype == main.host_pool.dtype:
                if len(main.shares) == 1 and main.shares[0].pool.order:
                    return [(main.shares[0].namespace, flat_page(tensor_words(tensor), dtype_name(tensor.dtype)))]
                if parts := flat_parts(main.host_pool, tensor):
                    return self._by_share(main, parts)
        dtype = dtype_name(tensor.dtype)
        namespace = self._flat_namespaces.get((dtype, tensor.numel()))
        if namespace is None:
            part = part_geometry("flat", 1, 1, 1, tensor.numel(), dtype, tensor.element_size())
            described = self._namespace("generic", PageGeometry(1, (part,)), "flat", self._whole_shard())
            namespace = self._flat_namespaces[dtype, tensor.numel()] = self._tier.store.register(described)
        return [(namespace, flat_page(tensor_words(tensor), dtype))]

    @staticmethod
    def _by_share(main: _Registered, parts: Sequence[HostPart]) -> list[tuple[bytes, PageView]]:
        """One flat page as the pages of the main pool's shares, which are consecutive groups of heads."""
        pages, first_head = [], 0
        for share in main.shares:
            heads = share.pool.geometry.parts[0].heads
            own = parts if len(main.shares) == 1 else [part.heads(first_head, heads) for part in parts]
            pages.append((share.namespace, PageMap(own, parts[0].geometry.tokens).page(0)))
            first_head += heads
        return pages

    def _whole_shard(self) -> Shard:
        cfg = self._sglang
        return Shard(tp_rank=cfg.tp_rank, tp_size=cfg.tp_size, pp_rank=cfg.pp_rank, pp_size=cfg.pp_size)

    # ------------------------------------------------------------------ shared by the dialects

    def _load(self, registered: _Registered, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        started = time.perf_counter()
        firsts = _first_tokens(registered, keys, host_indices)
        loaded = [True] * len(keys)
        for share in registered.shares:
            pages = share.pool.targets(firsts)
            results = self._tier.get(share.namespace, keys, pages)
            share.pool.commit(firsts, pages, results)
            loaded = [before and now for before, now in zip(loaded, results, strict=True)]
        self._note_transfer(self._loads, registered, sum(loaded), started)
        return loaded

    def _save(
        self, registered: _Registered, keys: list[str], host_indices: torch.Tensor, prefix: Sequence[str] | None = None
    ) -> list[bool]:
        started = time.perf_counter()
        firsts = _first_tokens(registered, keys, host_indices)
        saved = [True] * len(keys)
        for share in registered.shares:
            results = self._tier.put(share.namespace, keys, share.pool.sources(firsts), prefix)
            saved = [before and now for before, now in zip(saved, results, strict=True)]
        self._note_transfer(self._stores, registered, sum(saved), started)
        return saved

    @staticmethod
    def _note_transfer(log: metrics.TransferLog, registered: _Registered, pages: int, started: float) -> None:
        nbytes = pages * sum(share.pool.geometry.nbytes for share in registered.shares)
        log.add(pages, nbytes, time.perf_counter() - started)

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
        own = [share.namespace for registered in self._pools.values() for share in registered.shares]
        count = self._tier.store.clear([*own, *self._flat_namespaces.values()])
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
        self._tier.store.close()


def _prefix(extra_info: Any) -> Sequence[str] | None:
    prefix: Sequence[str] | None = getattr(extra_info, "prefix_keys", None)
    return prefix


def _first_tokens(registered: _Registered, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int]:
    """Token index in the pool at which each page starts; SGLang gives one index per token.

    Raises:
        GeometryError: The indices are not one page for each key.
    """
    given = 0 if host_indices is None else host_indices.numel()
    if given != len(keys) * registered.tokens_per_page:
        raise GeometryError(f"{given} host indices for {len(keys)} pages of {registered.tokens_per_page} tokens")
    if host_indices is None:
        return []
    firsts: list[int] = host_indices[:: registered.tokens_per_page].tolist()
    return [first // registered.index_divisor for first in firsts]


def _restorable_prefixes(present: Sequence[bool], window: int) -> set[int]:
    """Prefix lengths at which a pool can be restored: with ``window`` 0 all pages must be there, else the last ones."""
    if window == 0:
        run = present.index(False) if False in present else len(present)
        return set(range(1, run + 1))
    return {n for n in range(1, len(present) + 1) if all(present[max(0, n - window) : n])}


def _fields(shard: Shard) -> dict[str, int]:
    return {name: getattr(shard, name) for name in shard.__struct_fields__}
