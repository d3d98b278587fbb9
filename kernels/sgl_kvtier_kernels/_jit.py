"""How kernels are compiled: without the GIL, lazily, cached on disk.

``NUMBA_CACHE_DIR`` defaults to a folder of the user's, set before Numba is imported: cache files beside installed
modules would outlive an uninstall and hide a later installation. A folder that cannot be written only costs the
compilation at each start.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable[..., object])


def _default_cache_dir() -> str:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(root, "sgl_kvtier", "numba")


def _use_cache_dir() -> bool:
    """Whether compiled kernels can be kept; points Numba to the place unless the user did."""
    folder = os.environ.setdefault("NUMBA_CACHE_DIR", _default_cache_dir())
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


_CACHE = _use_cache_dir()

import numba  # noqa: E402 - reads NUMBA_CACHE_DIR when it is imported


def kernel(function: _Function) -> _Function:
    """Compile ``function`` on its first call, for the array types of that call.

    The compiled function holds no GIL. Read-only arrays, as maps give them, get a specialisation of their own.
    """
    compiled: _Function = numba.njit(nogil=True, cache=_CACHE, error_model="numpy")(function)
    return compiled
