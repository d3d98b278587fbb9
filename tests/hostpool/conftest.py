"""Backends of this project over SGLang's host pools, closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

if TYPE_CHECKING:
    from sgl_kvtier.backend import KVTierStorage


class OpenStore(Protocol):
    """Opens a backend on the test's own directory; keyword arguments change the ``HiCacheStorageConfig``."""

    def __call__(self, pool: Any, *, codec: str = "zstd", **config: Any) -> KVTierStorage: ...


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    # Here, since this file is read before the stand-ins for SGLang's GPU-only dependencies are in place.
    from sgl_kvtier.backend import KVTierStorage
    from sgl_kvtier.testing.pools import storage_config

    opened: list[KVTierStorage] = []

    def open_one(pool: Any, *, codec: str = "zstd", **config: Any) -> KVTierStorage:
        extra = {"directory": str(tmp_path / "store"), "codec": codec, "capacity": "128MiB", "segment_size": "1MiB"}
        backend = KVTierStorage(storage_config(extra_config=extra, **config), {"mem_pool_host": pool})
        opened.append(backend)
        return backend

    yield open_one
    for backend in opened:
        backend.close()
