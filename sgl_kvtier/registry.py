"""Which pools SGLang registered, under which namespaces their pages are stored, and which flat tensor is whose page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from sgl_kvtier import sglang_compat
from sgl_kvtier.errors import ConfigError, GeometryError
from sgl_kvtier.hostpool import PagedPool, StridedPool, adapt, dtype_name, flat_parts, tensor_words
from sgl_kvtier.identity import Namespace, Shard, weights_fingerprint
from sgl_kvtier.page import HostPart, PageGeometry, PageMap, PageView, flat_page, part_geometry
from sgl_kvtier.store import Store

#: Name of the main KV pool.
KV = "kv"


class Share(NamedTuple):
    """A pool's pages under one namespace: the whole page, or some of its heads."""

    namespace: bytes
    pool: PagedPool


class RegisteredPool(NamedTuple):
    """A host pool of SGLang's, and how its pages are stored.

    Attributes:
        host_pool: SGLang's object.
        shares: What of a page goes under which namespace; empty for a logical pool, which holds no bytes of its own.
        tokens_per_page: Host indices that SGLang gives for a page.
        index_divisor: Ranks whose tokens the indices count together, more than 1 under DCP.
    """

    host_pool: Any
    shares: tuple[Share, ...]
    tokens_per_page: int
    index_divisor: int

    @property
    def page_bytes(self) -> int:
        """Size of a page, all shares together."""
        return sum(share.pool.geometry.nbytes for share in self.shares)

    def first_tokens(self, keys: Sequence[str], host_indices: torch.Tensor | None) -> list[int]:
        """Token index in the pool at which each page starts; SGLang gives one index per token.

        Raises:
            GeometryError: The indices are not one page for each key.
        """
        given = 0 if host_indices is None else host_indices.numel()
        if given != len(keys) * self.tokens_per_page:
            raise GeometryError(f"{given} host indices for {len(keys)} pages of {self.tokens_per_page} tokens")
        if host_indices is None:
            return []
        firsts: list[int] = host_indices[:: self.tokens_per_page].tolist()
        return [first // self.index_divisor for first in firsts]


class PoolRegistry:
    """The pools of one backend object."""

    def __init__(self, storage_config: Any, store: Store, model_id: str | None) -> None:
        """An empty registry for a rank that SGLang describes by ``storage_config``.

        Raises:
            ConfigError: The model's weights cannot be read for a fingerprint, and no ``model_id`` stands for them.
        """
        self._sglang = storage_config
        self._store = store
        self._weights, self._variant = _model_identity(model_id, storage_config.model_name)
        self._pools: dict[str, RegisteredPool] = {}
        self._flat_namespaces: dict[tuple[str, int], bytes] = {}

    @property
    def main(self) -> RegisteredPool | None:
        """The main KV pool, once it is registered."""
        return self._pools.get(KV)

    @property
    def names(self) -> list[str]:
        """Names of the registered pools."""
        return list(self._pools)

    def __getitem__(self, name: str) -> RegisteredPool:
        """The pool called ``name``; raises KeyError when there is none."""
        return self._pools[name]

    def shares(self, name: str) -> tuple[Share, ...]:
        """The shares of a pool; none for a logical pool and for one that is not registered."""
        found = self._pools.get(name)
        return found.shares if found is not None else ()

    def namespaces(self) -> list[bytes]:
        """Digests of all namespaces under which this rank stores pages."""
        return [s.namespace for pool in self._pools.values() for s in pool.shares] + list(
            self._flat_namespaces.values()
        )

    def register(self, name: str, host_pool: Any) -> None:
        """Take a pool under ``name``; one that is registered already stays.

        Raises:
            GeometryError: The pool's pages cannot be stored whole, or not cut as ``tp_lcm_size`` asks.
        """
        known = self._pools.get(name)
        if known is not None and known.host_pool is host_pool:
            return
        if hasattr(host_pool, "kv_buffer") and host_pool.kv_buffer is None:
            self._pools[name] = RegisteredPool(host_pool, (), int(host_pool.page_size), 1)
            return
        shares = tuple(
            Share(self._store.register(self._namespace(name, view.geometry, view.order, shard, host_pool)), view)
            for view, shard in self._split_by_rank(adapt(host_pool), self._is_replicated(name, host_pool))
        )
        divisor = int(getattr(host_pool, "dcp_size", 1) or 1)
        self._pools[name] = RegisteredPool(host_pool, shares, int(host_pool.page_size) * divisor, divisor)

    def flat_pages(self, tensor: torch.Tensor) -> list[tuple[bytes, PageView]]:
        """A flat tensor as pages by namespace: the main pool's when it is one page of it, else one of its own kind."""
        main = self.main
        if main is not None and main.shares:
            nbytes = tensor.numel() * tensor.element_size()
            if nbytes == main.page_bytes and tensor.dtype == main.host_pool.dtype:
                if len(main.shares) == 1 and main.shares[0].pool.order:
                    return [(main.shares[0].namespace, flat_page(tensor_words(tensor), dtype_name(tensor.dtype)))]
                if parts := flat_parts(main.host_pool, tensor):
                    return _by_share(main, parts)
        dtype = dtype_name(tensor.dtype)
        namespace = self._flat_namespaces.get((dtype, tensor.numel()))
        if namespace is None:
            part = part_geometry("flat", 1, 1, 1, tensor.numel(), dtype, tensor.element_size())
            described = self._namespace("generic", PageGeometry(1, (part,)), "flat", self._shard(replicated=False))
            namespace = self._flat_namespaces[dtype, tensor.numel()] = self._store.register(described)
        return [(namespace, flat_page(tensor_words(tensor), dtype))]

    def _is_replicated(self, name: str, host_pool: Any) -> bool:
        """Whether all TP ranks hold the same bytes: MLA latents do; Mamba states and MHA side pools are sharded."""
        return bool(self._sglang.is_mla_model) and name != "mamba" and "MHA" not in type(host_pool).__name__

    def _shard(self, *, replicated: bool) -> Shard:
        config = self._sglang
        return Shard(
            tp_rank=0 if replicated else config.tp_rank,
            tp_size=1 if replicated else config.tp_size,
            pp_rank=config.pp_rank,
            pp_size=config.pp_size,
            cp_rank=getattr(config, "attn_cp_rank", 0),
            cp_size=getattr(config, "attn_cp_size", 1),
            dcp_rank=getattr(config, "dcp_rank", 0),
            dcp_size=getattr(config, "dcp_size", 1),
        )

    def _split_by_rank(self, paged: PagedPool, replicated: bool) -> list[tuple[PagedPool, Shard]]:
        """The pool's pages, cut by heads into those of ``tp_lcm_size`` ranks where deployments of several TP share."""
        shard = self._shard(replicated=replicated)
        lcm = getattr(self._sglang, "tp_lcm_size", None) or self._sglang.tp_size
        factor = lcm // self._sglang.tp_size
        if replicated or factor == 1 or not isinstance(paged, StridedPool):
            return [(paged, shard)]
        heads = min(part.heads for part in paged.geometry.parts)
        if any(part.heads != heads for part in paged.geometry.parts) or heads % factor:
            raise GeometryError(f"tp_lcm_size: {lcm} asks to cut a rank's {heads} KV heads into {factor} equal shares")
        share = heads // factor
        first = shard.tp_rank * factor
        return [
            (paged.heads(i * share, share), msgspec.structs.replace(shard, tp_rank=first + i, tp_size=lcm))
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


def _by_share(main: RegisteredPool, parts: Sequence[HostPart]) -> list[tuple[bytes, PageView]]:
    """One flat page as the pages of the main pool's shares, which are consecutive groups of heads."""
    pages, first_head = [], 0
    for share in main.shares:
        heads = share.pool.geometry.parts[0].heads
        own = parts if len(main.shares) == 1 else [part.heads(first_head, heads) for part in parts]
        pages.append((share.namespace, PageMap(own, parts[0].geometry.tokens).page(0)))
        first_head += heads
    return pages


def _model_identity(model_id: str | None, model_name: str | None) -> tuple[str, str]:
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
    return fingerprint or f"name:{model_path or model_name}", variant
