"""SGLang's host pools without a server: built over small device pools on the CPU, filled, and read back.

:func:`page_bytes` is the tests' own idea of a page's canonical bytes: an explicit NumPy transpose for each layout,
which shares no code with the package.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each accelerator that it does not find
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo, MLASplitBuffers
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

Bytes = npt.NDArray[np.uint8]

MHA_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
MLA_LAYOUTS = ("layer_first", "page_first", "page_first_direct")
#: Layouts that SGLang offers where K and V have heads of different sizes.
ASYMMETRIC_LAYOUTS = ("page_first", "page_first_direct")


class PoolShape(NamedTuple):
    """A small MHA pool: ``dim`` and ``v_dim`` are in elements, sizes in pages and tokens."""

    layout: str = "page_first"
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 8
    pages: int = 160
    layers: int = 4
    heads: int = 4
    dim: int = 16
    v_dim: int | None = None


def mha_pool(shape: PoolShape) -> Any:
    """SGLang's host pool for MHA of ``shape``: the symmetric or the asymmetric class, by K's and V's head sizes."""
    device_tokens = 2 * shape.page_tokens
    device_pool = MHATokenToKVPool(
        size=device_tokens,
        page_size=shape.page_tokens,
        dtype=shape.dtype,
        head_num=shape.heads,
        head_dim=shape.dim,
        v_head_dim=shape.v_dim,
        layer_num=shape.layers,
        device="cpu",
        enable_memory_saver=False,
    )
    info = device_pool.get_device_pool_infos()[0].buffer_info
    return get_mha_host_pool_cls(info)(
        info,
        1,
        0,
        shape.page_tokens,
        shape.layout,
        pin_memory=False,
        device_capacity_tokens=device_tokens,
        start_layer=device_pool.start_layer,
        end_layer=device_pool.end_layer,
        write_back_staging=device_pool.hicache_write_back_staging,
        host_token_capacity=shape.pages * shape.page_tokens,
    )


class LatentShape(NamedTuple):
    """A small MLA pool: a latent of ``rank`` elements and ``rope`` rotary elements a token and layer."""

    layout: str = "page_first"
    dtype: torch.dtype = torch.bfloat16
    page_tokens: int = 8
    pages: int = 16
    layers: int = 3
    rank: int = 48
    rope: int = 16


def mla_pool(shape: LatentShape) -> Any:
    """SGLang's host pool for MLA of ``shape``, in one of :data:`MLA_LAYOUTS`."""
    device_tokens = 2 * shape.page_tokens
    device_pool = MLATokenToKVPool(
        size=device_tokens,
        page_size=shape.page_tokens,
        dtype=shape.dtype,
        kv_lora_rank=shape.rank,
        qk_rope_head_dim=shape.rope,
        layer_num=shape.layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return _mla_host(shape, device_pool.get_device_pool_infos()[0].buffer_info)


def split_mla_pool(shape: LatentShape, *, index_layers: int = 0, index_dim: int = 0, scales: bool = False) -> Any:
    """SGLang's MLA host pool in ``page_first_kv_split``: latent, rope, and where asked the indexer's keys and scales.

    The class is SGLang's own; only the device pool, which exists for Ascend NPUs alone, is replaced by a description
    of buffers of its shapes: ``[layer, page, page_tokens, 1, width]``.
    """

    def buffer(layers: int, width: int, dtype: torch.dtype = shape.dtype) -> torch.Tensor:
        return torch.zeros((layers, 2, shape.page_tokens, 1, width), dtype=dtype)

    native = MLASplitBuffers(
        k=buffer(shape.layers, shape.rank),
        v=buffer(shape.layers, shape.rope),
        index_k=buffer(index_layers, index_dim) if index_layers else None,
        index_scales=buffer(index_layers, 1, torch.float32) if scales else None,
        index_layer_indices=tuple(range(index_layers)),
        k_width=shape.rank,
        v_width=shape.rope,
        index_width=index_dim,
    )
    info = MLABufferInfo(
        buffers=native,
        data_ptrs=None,
        layer_indices=tuple(range(shape.layers)),
        device_layer_num=shape.layers,
        page_size=shape.page_tokens,
        kv_lora_rank=shape.rank,
        qk_rope_head_dim=shape.rope,
        kv_cache_dim=shape.rank + shape.rope,
        dtype=shape.dtype,
        device=torch.device("cpu"),
    )
    return _mla_host(shape._replace(layout="page_first_kv_split"), info)


def _mla_host(shape: LatentShape, info: Any) -> Any:
    return MLATokenToKVPoolHost(
        info,
        1,
        0,
        shape.page_tokens,
        shape.layout,
        pin_memory=False,
        device_capacity_tokens=2 * shape.page_tokens,
        start_layer=0,
        end_layer=shape.layers - 1,
        target_layer_num=shape.layers,
        host_token_capacity=shape.pages * shape.page_tokens,
    )


def storage_config(**changes: Any) -> Any:
    """SGLang's ``HiCacheStorageConfig`` of a single rank, with ``changes``."""
    fields: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "conformance/model",
        "extra_config": {},
    }
    return HiCacheStorageConfig(**{**fields, **changes})


def page_keys(count: int, salt: str = "") -> list[str]:
    """Keys as SGLang makes them: 64 hex digits, each the SHA-256 of what comes before it in the chain."""
    keys, digest = [], hashlib.sha256(salt.encode()).digest()
    for number in range(count):
        digest = hashlib.sha256(digest + number.to_bytes(4, "little")).digest()
        keys.append(digest.hex())
    return keys


def page_indices(pool: Any, pages: Sequence[int]) -> torch.Tensor:
    """Host indices of the pool's ``pages``: int64, one for each token."""
    tokens = int(pool.page_size)
    starts = torch.tensor(list(pages), dtype=torch.int64).reshape(-1, 1) * tokens
    return (starts + torch.arange(tokens, dtype=torch.int64)).reshape(-1)


def buffers(pool: Any) -> list[torch.Tensor]:
    """All tensors in which a host pool keeps pages."""
    if getattr(pool, "layout", None) == "page_first_kv_split":
        named = (pool.k_buffer, pool.v_buffer, pool.index_k_buffer, pool.index_k_scale_buffer)
        return [tensor for tensor in named if tensor is not None]
    buffer = pool.kv_buffer
    return list(buffer) if isinstance(buffer, (tuple, list)) else [buffer]


def fill_like_kv(pool: Any, seed: int) -> None:
    """Fill a pool with normal values of its type, which compress as real KV does."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in buffers(pool):
        values = torch.randn(tensor.shape, generator=generator)
        tensor.copy_((values * 40).to(torch.int16) if not tensor.dtype.is_floating_point else values)


def fill_with_any_bits(pool: Any, seed: int) -> None:
    """Fill a pool with random bits: every NaN, infinity and denormal of its type, and nothing to compress."""
    generator = np.random.default_rng(seed)
    for tensor in buffers(pool):
        raw = tensor.view(torch.uint8).numpy()
        raw[...] = generator.integers(0, 256, raw.shape, np.uint8)


def fill_with_zeros(pool: Any) -> None:
    """Fill a pool with zeros."""
    for tensor in buffers(pool):
        tensor.zero_()


def page_bytes(pool: Any, page: int) -> bytes:
    """Canonical bytes of a page: each part as ``[token, layer, head, dim]``, one part after the other."""
    return b"".join(_canonical(pool, page, part) for part in _page_parts(pool))


def all_pages(pool: Any) -> list[bytes]:
    """Canonical bytes of every page of a pool."""
    return [page_bytes(pool, page) for page in range(int(pool.size) // int(pool.page_size))]


def _page_parts(pool: Any) -> list[Bytes]:
    """K, V and whatever else a pool keeps, each as uint8 with its layout's axes and the element's bytes last."""
    parts = []
    for tensor in buffers(pool):
        raw = tensor.view(torch.uint8).numpy()
        is_pair = type(pool).__name__ == "MHATokenToKVPoolHost"
        parts += [raw[0], raw[1]] if is_pair else [raw]
    return parts


def _canonical(pool: Any, page: int, part: Bytes) -> bytes:
    tokens = int(pool.page_size)
    first = page * tokens
    if pool.layout == "layer_first":  # [L, T, H, D]
        ordered = part[:, first : first + tokens].transpose(1, 0, 2, 3)
    elif pool.layout == "page_first":  # [T, L, H, D]
        ordered = part[first : first + tokens]
    elif pool.layout in ("page_first_direct", "page_first_kv_split"):  # [page, L, P, H, D]
        ordered = part[page].transpose(1, 0, 2, 3)
    elif pool.layout == "page_head":  # [page, H, P, L, D]
        ordered = part[page].transpose(1, 2, 0, 3)
    else:
        raise ValueError(f"layout {pool.layout!r} has no canonical order here")
    return ordered.tobytes()
