"""The three dialects in which SGLang moves pages to and from a backend, behind one form.

Each moves numbered pages of a host pool and answers one bool per key, as SGLang's own callers would take it:

* ``v1``: keys and indices into the host pool.
* ``generic``: keys and flat tensors, which the host pool hands out and takes in.
* ``v2``: descriptors of transfers, one for each pool; here one side pool.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

from sgl_kvtier.testing.pools import page_indices

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each accelerator that it does not find
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer


class Dialect(Protocol):
    """Moves pages between a host pool and a backend."""

    def put(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Store the pool's ``pages`` under ``keys``."""

    def get(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """Load what is stored under ``keys`` into the pool's ``pages``."""


class V1:
    """``batch_set_v1`` and ``batch_get_v1``."""

    def put(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        stored: list[bool] = backend.batch_set_v1(list(keys), page_indices(pool, pages))
        return stored

    def get(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        loaded: list[bool] = backend.batch_get_v1(list(keys), page_indices(pool, pages))
        return loaded


class Generic:
    """``batch_set`` and ``batch_get``. The former answers for the whole batch, so here for each page of it."""

    def put(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        values = [pool.get_data_page(page * pool.page_size, flat=True) for page in pages]
        return [bool(backend.batch_set(list(keys), values))] * len(keys)

    def get(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        found = backend.batch_get(list(keys), [pool.get_dummy_flat_data_page() for _ in pages])
        for page, flat in zip(pages, found, strict=True):
            if flat is not None:
                pool.set_from_flat_data_page(page * pool.page_size, flat)
        return [flat is not None for flat in found]


class V2:
    """``batch_set_v2`` and ``batch_get_v2`` with one transfer of the pool named ``name``."""

    def __init__(self, name: PoolName = PoolName.DRAFT) -> None:
        """A dialect for the side pool ``name``, which must be registered with the backend."""
        self.name = name

    def put(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        stored: list[bool] = backend.batch_set_v2([self._transfer(pool, keys, pages)])[self.name]
        return stored

    def get(self, backend: Any, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See :class:`Dialect`."""
        loaded: list[bool] = backend.batch_get_v2([self._transfer(pool, keys, pages)])[self.name]
        return loaded

    def _transfer(self, pool: Any, keys: Sequence[str], pages: Sequence[int]) -> Any:
        return PoolTransfer(name=self.name, keys=list(keys), host_indices=page_indices(pool, pages))


DIALECTS: dict[str, Dialect] = {"v1": V1(), "generic": Generic(), "v2": V2()}
