"""HiCache's copies between device and host pools, in torch, for pools that both lie in host memory.

Names and arguments are those of SGLang's compiled ``sgl_kernel.kvcacheio``. Suffixes name the layouts: ``lf``
layer_first, ``pf`` page_first, ``ph`` page_head. Sizes and strides are in bytes, indices in tokens.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import torch

from sgl_kernel import missing

Tensors = list[torch.Tensor]


def _pages(indices: torch.Tensor, page_size: int) -> torch.Tensor:
    return indices.long()[::page_size] // page_size


def _token_pairs(source: torch.Tensor, target: torch.Tensor) -> Iterator[tuple[int, int]]:
    return zip(source.tolist(), target.tolist(), strict=True)


# ------------------------------------------------------------------ io backend "direct"


def transfer_kv_direct(
    src_layers: Tensors, dst_layers: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Copy tokens, buffer by buffer."""
    del page_size
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.long()] = source[src_indices.long()]


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Tensors, dst_ptrs: Tensors, src_indices: torch.Tensor, dst_indices: torch.Tensor, page_size: int
) -> None:
    """Device buffers per layer (K's, then V's) to host buffers ``[page, layer, token, ...]``."""
    layers = len(src_ptrs) // len(dst_ptrs)
    tokens, pages = src_indices.long().view(-1, page_size), _pages(dst_indices, page_size)
    for component, target in enumerate(dst_ptrs):
        for layer in range(layers):
            target[pages, layer] = src_ptrs[component * layers + layer][tokens]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Tensors,
    dst_ptrs: Tensors,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer of host buffers ``[page, layer, token, ...]`` to device buffers of that layer."""
    pages, tokens = _pages(src_indices, page_size), dst_indices.long().view(-1, page_size)
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[tokens] = source[pages, layer_id]


# ------------------------------------------------------------------ io backend "kernel", K and V


def transfer_kv_per_layer(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """Tokens of one layer, between buffers ``[token, ...]``."""
    del item_size
    source, target = src_indices.long(), dst_indices.long()
    dst_k[target] = src_k[source]
    dst_v[target] = src_v[source]


def transfer_kv_all_layer(
    src_k_layers: torch.Tensor,
    dst_k_layers: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Tokens of all layers; the buffers are given as tensors of addresses."""
    del num_layers
    for sources, targets in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for a, b in _token_pairs(src_indices, dst_indices):
                ctypes.memmove(target + b * item_size, source + a * item_size, item_size)


def transfer_kv_per_layer_pf_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer of host buffers ``[token, layer, ...]`` to device buffers of that layer."""
    del item_size, src_layout_dim
    source, target = src_indices.long(), dst_indices.long()
    dst_k[target] = src_k[source, layer_id]
    dst_v[target] = src_v[source, layer_id]


def transfer_kv_all_layer_lf_pf(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Device buffers per layer, given as addresses, to host buffers ``[token, layer, ...]``."""
    del num_layers
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        _layers_to_pages(sources, target.data_ptr(), src_indices, dst_indices, item_size, dst_layout_dim)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: torch.Tensor,
    dst_k: torch.Tensor,
    src_v_layers: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """Device buffers per layer, given as addresses, to host buffers ``[page, head, token, layer, dim]``."""
    row = item_size // head_num
    for sources, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer, source in enumerate(sources.tolist()):
            for a, b in _token_pairs(src_indices, dst_indices):
                page, token = divmod(b, page_size)
                for head in range(head_num):
                    place = ((head * page_size + token) * num_layers + layer) * row
                    address = target.data_ptr() + page * page_size * dst_layout_dim + place
                    ctypes.memmove(address, source + a * item_size + head * row, row)


def transfer_kv_per_layer_ph_lf(
    src_k: torch.Tensor,
    dst_k: torch.Tensor,
    src_v: torch.Tensor,
    dst_v: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **_: Any,
) -> None:
    """One layer of host buffers ``[page, head, token, layer, dim]`` to device buffers of that layer."""
    del item_size, src_layout_dim, head_num
    source, target = src_indices.long(), dst_indices.long()
    page, token = source // page_size, source % page_size
    dst_k[target] = src_k[page, :, token, layer_id]
    dst_v[target] = src_v[page, :, token, layer_id]


# ------------------------------------------------------------------ io backend "kernel", MLA


def transfer_kv_per_layer_mla(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    **_: Any,
) -> None:
    """Tokens of one layer, between buffers ``[token, ...]``."""
    del item_size
    dst[dst_indices.long()] = src[src_indices.long()]


def transfer_kv_all_layer_mla(
    src_layers: torch.Tensor,
    dst_layers: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Tokens of all layers; the buffers are given as tensors of addresses."""
    del num_layers
    for source, target in zip(src_layers.tolist(), dst_layers.tolist(), strict=True):
        for a, b in _token_pairs(src_indices, dst_indices):
            ctypes.memmove(target + b * item_size, source + a * item_size, item_size)


def transfer_kv_per_layer_mla_pf_lf(
    src: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **_: Any,
) -> None:
    """One layer of a host buffer ``[token, layer, ...]`` to the device buffer of that layer."""
    del item_size, src_layout_dim
    dst[dst_indices.long()] = src[src_indices.long(), layer_id]


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: torch.Tensor,
    dst: torch.Tensor,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **_: Any,
) -> None:
    """Device buffers per layer, given as addresses, to a host buffer ``[token, layer, ...]``."""
    del num_layers
    _layers_to_pages(src_layers, dst.data_ptr(), src_indices, dst_indices, item_size, dst_layout_dim)


def _layers_to_pages(
    sources: torch.Tensor,
    target: int,
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    item_size: int,
    token_stride: int,
) -> None:
    for layer, source in enumerate(sources.tolist()):
        for a, b in _token_pairs(src_indices, dst_indices):
            ctypes.memmove(target + layer * item_size + b * token_stride, source + a * item_size, item_size)


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return missing(__name__, name)
