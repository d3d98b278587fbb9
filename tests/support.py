"""Pools, pages and stores for tests of the core: no SGLang, no torch."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier.config import TierConfig, load_config
from sgl_kvtier.identity import Namespace, Shard
from sgl_kvtier.page import PageGeometry, PageMap, PageView, host_part, part_geometry, word_type
from sgl_kvtier.store import Store
from sgl_kvtier.tier.ssd import SsdTier

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


class HostPool:
    """K and V of ``pages`` pages in one buffer, as SGLang's MHA pools keep them."""

    def __init__(
        self,
        pages: int,
        layout: str = "page_first",
        dtype: str = "bfloat16",
        shape: tuple[int, int, int, int] = (16, 2, 2, 32),
    ) -> None:
        """A pool of zeros; ``shape`` is (tokens, layers, heads, dim) of a page."""
        tokens, layers, heads, dim = shape
        parts = [part_geometry(name, tokens, layers, heads, dim, dtype, ITEM_BYTES[dtype]) for name in ("k", "v")]
        half = parts[0].words * pages
        self.words: npt.NDArray[Any] = np.zeros(2 * half, word_type(parts[0]))
        self.page_tokens = tokens
        self.pages = pages
        self.geometry = PageGeometry(tokens, tuple(parts))
        self._map = PageMap(
            [host_part(layout, g, self.words, i * half, tokens * pages) for i, g in enumerate(parts)], tokens * pages
        )

    def page(self, number: int) -> PageView:
        """Page ``number`` of the pool."""
        return self._map.page(number * self.page_tokens)

    def views(self, numbers: Sequence[int] | None = None) -> list[PageView]:
        """All pages, or those with the given numbers."""
        return [self.page(n) for n in (range(self.pages) if numbers is None else numbers)]

    def canonical(self, number: int) -> bytes:
        """The canonical bytes of a page."""
        out = np.empty(self.geometry.nbytes, np.uint8)
        self.page(number).gather(out)
        return out.tobytes()

    def fill(self, number: int, content: bytes) -> None:
        """Set the canonical bytes of a page."""
        self.page(number).scatter(np.frombuffer(content, np.uint8))


def key(name: object) -> str:
    """A page key as SGLang makes them."""
    return hashlib.sha256(str(name).encode()).hexdigest()


def content(name: object, geometry: PageGeometry, *, compressible: bool = True) -> bytes:
    """Page content that follows from its name: normally distributed values, or noise."""
    seed = int.from_bytes(hashlib.sha256(str(name).encode()).digest()[:8], "little")
    rng = np.random.default_rng(seed)
    if not compressible:
        return rng.bytes(geometry.nbytes)
    floats = rng.standard_normal(geometry.nbytes // 2).astype(np.float32)
    return (floats.view(np.uint32) >> 16).astype(np.uint16).tobytes()


def config(directory: Path, **extra: Any) -> TierConfig:
    """A configuration for a small store in ``directory``."""
    return load_config({"directory": str(directory), "capacity": "64MiB", "min_free": 0, **extra}, {})


def tier(directory: Path, **extra: Any) -> SsdTier:
    """A tier over the store in ``directory``."""
    settings = config(directory, **extra)
    return SsdTier(Store(settings), settings)


def namespace(opened: SsdTier, geometry: PageGeometry, model: str = "model") -> bytes:
    """Register a namespace of pages with ``geometry``."""
    described = Namespace(model=model, weights="weights", pool="kv", geometry=geometry, shard=Shard())
    return opened.store.register(described)
