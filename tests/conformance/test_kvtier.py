"""The conformance suite, on this project's backend with each of its codecs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.backend import KVTierStorage
from sgl_kvtier.testing.conformance import BackendConformance
from sgl_kvtier.testing.dialects import V1
from sgl_kvtier.testing.pools import PoolShape, fill_like_kv, page_keys


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

    def test_page_rewritten_under_the_reader_is_a_miss(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its slot is given to another page while it is decoded: what was decoded may be half of each."""
        pool = self.pool(PoolShape(pages=8), seed=1)
        backend, keys = self.open(pool), page_keys(2)
        V1().put(backend, pool, keys[:1], [0])
        codecs = backend._tier.codecs
        decode = codecs.decode

        def decode_late(header: Any, payload: Any, page: Any) -> None:
            monkeypatch.undo()
            backend.clear()
            fill_like_kv(pool, 2)
            assert V1().put(backend, pool, keys[1:], [1]) == [True]
            decode(header, payload, page)

        monkeypatch.setattr(codecs, "decode", decode_late)
        assert V1().get(backend, pool, keys[:1], [2]) == [False]
        assert V1().get(backend, pool, keys[1:], [3]) == [True]


class TestZstd(_KVTier):
    codec = "zstd"


class TestRaw(_KVTier):
    codec = "raw"
