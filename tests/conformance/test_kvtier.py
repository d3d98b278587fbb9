"""The conformance suite, on this project's backend with each of its codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sgl_kvtier.backend import KVTierStorage
from sgl_kvtier.testing.conformance import BackendConformance


class _KVTier(BackendConformance):
    codec = ""

    def make_backend(self, directory: Path, storage_config: Any, host_pool: Any) -> KVTierStorage:
        storage_config.extra_config = {
            "directory": str(directory),
            "codec": self.codec,
            "capacity": "256MiB",
            "segment_size": "1MiB",
            **storage_config.extra_config,
        }
        return KVTierStorage(storage_config, {"mem_pool_host": host_pool} if host_pool is not None else {})


class TestZstd(_KVTier):
    codec = "zstd"


class TestRaw(_KVTier):
    codec = "raw"
