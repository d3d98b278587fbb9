"""SGLang's host pools as pages: which bytes of a pool are a page, in which order.

Three kinds of pool, best first:

* MHA and MLA pools of the known classes and layouts: strided views in canonical order, no copy, any layout reads
  what any other wrote.
* Pools that list their pages' addresses (``get_page_buffer_meta``), such as Mamba states and indexers: the listed
  runs as opaque bytes, no copy, readable by a pool of the same class, layout and sizes.
* Pools that only hand out flat copies (``get_data_page``): the copy as opaque bytes.

A pool class that is not known is never taken apart by guessing at its buffers: a subclass may keep more state
than its parent (scales, side tables), and leaving it out would restore wrong pages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from sgl_kvtier.errors import GeometryError
from sgl_kvtier.page import (
    HostPart,
    PageGeometry,
    PageMap,
    PageView,
    Words,
    flat_page,
    host_part,
    part_geometry,
    runs_page,
    word_type,
)

_MHA_CLASSES = frozenset({"MHATokenToKVPoolHost", "HiSparseMHATokenToKVPoolHost", "AsymmetricMHATokenToKVPoolHost"})
_MLA_CLASSES = frozenset({"MLATokenToKVPoolHost"})

#: Failures by which a pool says that it does not offer an interface or not in its layout.
_UNSUPPORTED = (NotImplementedError, AttributeError, ValueError, AssertionError, TypeError)


class PagedPool(Protocol):
    """Pages of one host pool, by the token index at which they start."""

    geometry: PageGeometry
    #: Empty for canonical order; else a tag of the pool's opaque byte order.
    order: str

    def sources(self, first_tokens: Sequence[int]) -> list[PageView]:
        """The pages to be stored."""

    def targets(self, first_tokens: Sequence[int]) -> list[PageView]:
        """Where loaded pages are to be put; :meth:`commit` completes it."""

    def commit(self, first_tokens: Sequence[int], pages: Sequence[PageView], loaded: Sequence[bool]) -> None:
        """Bring the targets that were ``loaded`` into the pool."""


class StridedPool:
    """A pool whose pages are strided views in canonical order."""

    order = ""

    def __init__(self, parts: Sequence[HostPart], page_tokens: int, pool_tokens: int) -> None:
        """A pool of ``pool_tokens`` tokens in pages of ``page_tokens``."""
        self._pool_tokens = pool_tokens
        self._map = PageMap(parts, pool_tokens)
        self.geometry = PageGeometry(page_tokens, tuple(part.geometry for part in parts))

    def sources(self, first_tokens: Sequence[int]) -> list[PageView]:
        """The pages in place."""
        return [self._map.page(first) for first in first_tokens]

    targets = sources

    def commit(self, first_tokens: Sequence[int], pages: Sequence[PageView], loaded: Sequence[bool]) -> None:
        """Nothing to do: targets are the pool's own memory."""

    def heads(self, first: int, count: int) -> StridedPool:
        """The same pool, seen through ``count`` heads from ``first`` on."""
        parts = [part.heads(first, count) for part in self._map.parts]
        return StridedPool(parts, self.geometry.page_tokens, self._pool_tokens)


class AddressedPool:
    """A pool that lists the addresses and sizes of the runs that make up a page."""

    def __init__(self, pool: Any, page_tokens: int) -> None:
        """Take the shape of a page from the first one.

        Raises:
            GeometryError: The pool does not list addresses.
        """
        self._pool = pool
        self._page_tokens = page_tokens
        self._last_first_token = int(pool.size) - page_tokens
        _check_own_method(pool, "get_page_buffer_meta")
        runs = self._runs(0)
        self.geometry = PageGeometry(
            page_tokens,
            tuple(part_geometry(f"run{i}", 1, 1, 1, run.size, "opaque", 1) for i, run in enumerate(runs)),
        )
        self.order = _order_tag(pool)

    def sources(self, first_tokens: Sequence[int]) -> list[PageView]:
        """The pages in place."""
        pages = []
        for first in first_tokens:
            runs = self._runs(first)
            if [run.size for run in runs] != [part.dim for part in self.geometry.parts]:
                raise GeometryError(f"page at token index {first} has runs of other sizes than the first page")
            pages.append(runs_page(self.geometry.parts, runs))
        return pages

    targets = sources

    def commit(self, first_tokens: Sequence[int], pages: Sequence[PageView], loaded: Sequence[bool]) -> None:
        """Nothing to do: targets are the pool's own memory."""

    def _runs(self, first_token: int) -> list[Words]:
        # Pools compute an address for any index they are given, also of memory that is not theirs.
        _check_start(first_token, self._last_first_token, self._page_tokens)
        indices = torch.arange(first_token, first_token + self._page_tokens, dtype=torch.int64)
        try:
            addresses, sizes = self._pool.get_page_buffer_meta(indices)
        except _UNSUPPORTED as error:
            raise GeometryError(f"{type(self._pool).__name__} lists no page addresses: {error}") from error
        return [
            np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))
            for address, size in zip(addresses, sizes, strict=True)
            if size
        ]


class CopiedPool:
    """A pool that hands out and takes in pages as flat tensors only."""

    def __init__(self, pool: Any, page_tokens: int) -> None:
        """Take the shape of a page from the first one.

        Raises:
            GeometryError: The pool does not hand out flat pages.
        """
        self._pool = pool
        self._page_tokens = page_tokens
        self._last_first_token = int(pool.size) - page_tokens
        _check_own_method(pool, "get_data_page")
        try:
            page = pool.get_data_page(0, flat=True)
        except _UNSUPPORTED as error:
            raise GeometryError(f"{type(pool).__name__} hands out no flat pages: {error}") from error
        self._dtype = dtype_name(page.dtype)
        self._numel = page.numel()
        self.geometry = PageGeometry(
            page_tokens, (part_geometry("flat", 1, 1, 1, page.numel(), self._dtype, page.element_size()),)
        )
        self.order = _order_tag(pool)

    def sources(self, first_tokens: Sequence[int]) -> list[PageView]:
        """Copies of the pages."""
        self._check(first_tokens)
        return [
            flat_page(tensor_words(self._pool.get_data_page(first, flat=True).contiguous()), self._dtype)
            for first in first_tokens
        ]

    def targets(self, first_tokens: Sequence[int]) -> list[PageView]:
        """Buffers of a page's size."""
        self._check(first_tokens)
        return [flat_page(tensor_words(self._pool.get_dummy_flat_data_page()), self._dtype) for _ in first_tokens]

    def commit(self, first_tokens: Sequence[int], pages: Sequence[PageView], loaded: Sequence[bool]) -> None:
        """Copy the loaded buffers into the pool."""
        for first, page, ok in zip(first_tokens, pages, loaded, strict=True):
            if ok:
                flat = np.empty(page.nbytes, np.uint8)
                page.gather(flat)
                self._pool.set_from_flat_data_page(first, torch.from_numpy(flat).view(getattr(torch, self._dtype)))

    def _check(self, first_tokens: Sequence[int]) -> None:
        for first in first_tokens:
            _check_start(first, self._last_first_token, self._page_tokens)


def adapt(pool: Any) -> PagedPool:
    """The pages of one of SGLang's host pools.

    Raises:
        GeometryError: The pool offers no way to take pages from it that keeps all of a page.
    """
    page_tokens = int(pool.page_size)
    parts = _known_parts(pool)
    if parts:
        return StridedPool(parts, page_tokens, int(pool.size))
    reasons = []
    for kind in (AddressedPool, CopiedPool):
        try:
            return kind(pool, page_tokens)
        except GeometryError as error:
            reasons.append(str(error))
    raise GeometryError(
        f"host pool {type(pool).__name__} in layout {getattr(pool, 'layout', None)!r} cannot be stored: "
        + "; ".join(reasons)
    )


def _check_start(first_token: int, last: int, page_tokens: int) -> None:
    if not 0 <= first_token <= last or first_token % page_tokens:
        raise GeometryError(
            f"no page starts at token index {first_token} of the host pool; its pages of {page_tokens} tokens start at "
            f"the multiples up to {last}"
        )


def _check_own_method(pool: Any, name: str) -> None:
    """Refuse a subclass of a KV pool that inherits how its pages are listed: the parent omits what it adds."""
    owner = next((cls for cls in type(pool).__mro__ if name in vars(cls)), None)
    if owner is not None and owner is not type(pool) and owner.__name__ in _MHA_CLASSES | _MLA_CLASSES:
        raise GeometryError(
            f"{type(pool).__name__} inherits {name} from {owner.__name__}, which cannot know what state it adds"
        )


def flat_parts(pool: Any, flat: torch.Tensor) -> list[HostPart]:
    """Parts of a flat tensor from ``pool.get_data_page``, which has the pool's layout; none when the pool is opaque."""
    return _known_parts(pool, flat=flat)


def _known_parts(pool: Any, flat: torch.Tensor | None = None) -> list[HostPart]:
    """Strided parts of a pool of a known class, or of ``flat``, one page of it in the pool's layout; else none."""
    name = type(pool).__name__
    if name in _MHA_CLASSES:
        dims = [("k", pool.head_num, pool.head_dim), ("v", pool.head_num, getattr(pool, "v_head_dim", pool.head_dim))]
    elif name in _MLA_CLASSES:
        if pool.layout == "page_first_kv_split":
            return _split_parts(pool) if flat is None else []
        dims = [("kv", 1, pool.kv_cache_dim)]
    else:
        return []
    if pool.layout not in ("layer_first", "page_first", "page_first_direct", "page_head"):
        return []
    buffer = pool.kv_buffer if flat is None else flat
    buffers = list(buffer) if isinstance(buffer, (tuple, list)) else [buffer]
    tokens = int(pool.size if flat is None else pool.page_size)
    geometries = [_geometry(part, pool, heads, dim, buffers[0].dtype) for part, heads, dim in dims]
    if not all(tensor.is_contiguous() for tensor in buffers):
        return []
    words = [tensor_words(tensor) for tensor in buffers]
    if sum(w.size for w in words) != sum(g.words // g.tokens for g in geometries) * tokens:
        raise GeometryError(
            f"{name} holds {sum(w.size for w in words)} words, which is not {tokens} tokens of "
            + ", ".join(f"{g.name} {g.layers} x {g.heads} x {g.dim}" for g in geometries)
        )
    if len(words) == len(geometries):
        placed = [(w, 0) for w in words]
    else:  # K and V in one buffer, one after the other
        sizes = [g.words // g.tokens * tokens for g in geometries]
        placed = [(words[0], sum(sizes[:i])) for i in range(len(geometries))]
    return [host_part(pool.layout, g, w, base, tokens) for g, (w, base) in zip(geometries, placed, strict=True)]


def _split_parts(pool: Any) -> list[HostPart]:
    """Parts of an MLA pool that keeps latent, rope, and possibly indexer keys and scales in separate buffers."""
    named = [("k", pool.k_buffer)]
    # With packed fp8 rows the rope buffer is never filled; it holds no data to keep.
    if not getattr(pool, "dsa_kv_cache_store_fp8", False):
        named.append(("v", pool.v_buffer))
    for part in ("index_k", "index_k_scale"):
        tensor = getattr(pool, f"{part}_buffer", None)
        if tensor is not None:
            named.append((part, tensor))
    parts = []
    for part, tensor in named:
        _pages, layers, page_tokens, heads, dim = tensor.shape
        if not tensor.is_contiguous():
            return []
        geometry = part_geometry(part, page_tokens, layers, heads, dim, dtype_name(tensor.dtype), tensor.element_size())
        parts.append(host_part(pool.layout, geometry, tensor_words(tensor), 0, int(pool.size)))
    return parts


def _geometry(part: str, pool: Any, heads: int, dim: int, dtype: torch.dtype) -> Any:
    return part_geometry(part, int(pool.page_size), int(pool.layer_num), heads, dim, dtype_name(dtype), dtype.itemsize)


def dtype_name(dtype: torch.dtype) -> str:
    """A torch dtype's name: ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def tensor_words(tensor: torch.Tensor) -> Words:
    """A contiguous CPU tensor as a flat array of the words its type is handled in; shares memory."""
    geometry = part_geometry("tensor", 1, 1, 1, 1, dtype_name(tensor.dtype), tensor.element_size())
    flat: Words = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return flat.view(word_type(geometry))


def _order_tag(pool: Any) -> str:
    return f"{type(pool).__name__}/{getattr(pool, 'layout', '')}"
