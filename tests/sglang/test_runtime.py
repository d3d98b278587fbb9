"""Attaching and detaching at run time, bad configurations, injected faults, and tenants on one server."""

from __future__ import annotations

import json
from pathlib import Path

from tests.sglang.rig import Serve, prompt, wait_for_pages

_KEY = "secret"


def test_attach_detach_and_attach_again_over_http(serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ids = prompt(1)
    file = tmp_path / "a_file"
    file.touch()
    with serve(None, "--admin-api-key", _KEY) as server:

        def attach(**extra: object) -> tuple[int, str]:
            settings = {"directory": str(store), "capacity": "256MiB", "min_free": 0, "prefetch_threshold": 16}
            body = {
                "hicache_storage_backend": "sgl_kvtier",
                "hicache_storage_backend_extra_config_json": json.dumps(settings | extra),
                "hicache_storage_prefetch_policy": "wait_complete",
                "hicache_write_policy": "write_through",
            }
            response = server.call("PUT", "/hicache/storage-backend", body, _KEY)
            return response.status_code, response.text

        before = server.generate(ids)
        server.flush(_KEY)
        for extra, parts in (
            ({"capasity": "1GiB"}, ("capasity", "accepted keys", "capacity")),
            ({"codec": "lz4"}, ("codec", "lz4")),
            ({"capacity": "a lot"}, ("capacity", "a lot")),
            ({"segment_size": 17}, ("segment_size", "17")),
            ({"zstd_level": "high"}, ("zstd_level",)),
            ({"directory": str(file)}, ("directory", str(file))),
            ({"min_free": "900TiB"}, ("no room", str(store))),
        ):
            status, text = attach(**extra)
            assert status == 400, text
            assert all(part in text for part in parts), text
        assert server.generate(ids).output_ids == before.output_ids
        server.flush(_KEY)

        status, text = attach()
        assert status == 200, text
        assert server.generate(ids).cached_tokens["storage"] == 0
        wait_for_pages(store, 25)
        assert server.call("DELETE", "/hicache/storage-backend", api_key=_KEY).status_code == 200
        server.flush(_KEY)
        assert server.generate(ids).cached_tokens["storage"] == 0
        server.flush(_KEY)
        status, text = attach()
        assert status == 200, text
        answer = server.generate(ids)
        assert answer.cached_tokens["storage"] == 384
        assert answer.output_ids == before.output_ids
        assert server.call("POST", "/hicache/storage-backend/clear", api_key=_KEY).status_code == 200
        server.flush(_KEY)
        assert server.generate(ids).cached_tokens["storage"] == 0


def test_right_answers_under_injected_failures_and_delays(serve: Serve, tmp_path: Path) -> None:
    prompts = [prompt(seed, 200) for seed in range(6)]
    faults = {"SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3", "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05"}
    with serve(tmp_path / "store", "--enable-metrics", env=faults) as server:
        before = [server.generate(ids).output_ids for ids in prompts]
        loaded = 0
        for _ in range(3):
            server.flush()
            answers = [server.generate(ids) for ids in prompts]
            assert [answer.output_ids for answer in answers] == before
            loaded += sum(answer.cached_tokens["storage"] for answer in answers)
        assert loaded > 0
        assert "answered as a miss" not in server.log.read_text()


def test_tenants_with_different_salts_share_nothing(serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ids = prompt(1)
    with serve(store) as server:
        server.generate(ids, cache_salt="tenant a")
        wait_for_pages(store, 25)
        server.flush()
        for other in ({"cache_salt": "tenant b"}, {"extra_key": "tenant a"}, {}):
            assert server.generate(ids, **other).cached_tokens["storage"] == 0
            server.flush()
        assert server.generate(ids, cache_salt="tenant a").cached_tokens["storage"] == 384
