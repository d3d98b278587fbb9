"""Compressed KV cache storage tier for SGLang's hierarchical cache (HiCache), in pure Python and Numba."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("sgl_kvtier")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
