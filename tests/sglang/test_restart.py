"""A conversation's KV survives the end of the server that computed it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.sglang.rig import Seeded, Serve, prompt, wait_for_pages


def _copy(seeded: Seeded, to: Path) -> Path:
    """A copy of the seeded store, for a test that writes."""
    shutil.copytree(seeded.store, to)
    return to


def test_a_restarted_server_loads_what_a_killed_one_stored(serve: Serve, seeded: Seeded, tmp_path: Path) -> None:
    with serve(_copy(seeded, tmp_path / "store"), "--enable-metrics") as server:
        for ids, before in zip(seeded.prompts, seeded.answers, strict=True):
            answer = server.generate(ids)
            assert answer.cached_tokens["storage"] == 16 * (len(ids) // 16 - (len(ids) % 16 == 0))
            assert answer.output_ids == before.output_ids
        # A longer prompt with the same beginning shares those pages; another beginning shares none.
        longer = server.generate([*seeded.prompts[0], *prompt(9, 50)])
        assert longer.cached_tokens["device"] >= 16 * (seeded.pages - 1)
        other = server.generate(prompt(8))
        assert other.cached_tokens == {"device": 0, "host": 0, "storage": 0}
        metrics = server.call("GET", "/metrics").text
        assert "sglang:prefetched_tokens_total" in metrics


def test_another_layout_and_the_dynamic_backend_read_the_same_pages(
    serve: Serve, seeded: Seeded, tmp_path: Path
) -> None:
    by_name = {
        "backend_name": "kvtier",
        "module_path": "sgl_kvtier.backend",
        "class_name": "KVTierStorage",
        "interface_v1": 1,
    }
    store = _copy(seeded, tmp_path / "store")
    layout = ("--hicache-mem-layout", "layer_first", "--hicache-io-backend", "direct")
    with serve(store, *layout, backend="dynamic", extra=by_name) as server:
        answer = server.generate(seeded.prompts[1])
        assert answer.cached_tokens["storage"] >= 16 * (seeded.pages - 1)
        assert answer.output_ids == seeded.answers[1].output_ids
        assert "layout=layer_first path=zero-copy" in server.log.read_text()


def test_the_generic_interface_reads_and_writes_the_same_pages(serve: Serve, seeded: Seeded, tmp_path: Path) -> None:
    by_name = {"backend_name": "kvtier", "module_path": "sgl_kvtier.backend", "class_name": "KVTierStorage"}
    store = _copy(seeded, tmp_path / "store")
    with serve(store, backend="dynamic", extra=by_name) as server:
        answer = server.generate(seeded.prompts[2])
        assert answer.cached_tokens["storage"] >= 16 * (seeded.pages - 1)
        assert answer.output_ids == seeded.answers[2].output_ids
        server.generate(prompt(7))
        wait_for_pages(store, 4 * seeded.pages)
        assert "path=generic" in server.log.read_text()


def test_two_tensor_parallel_ranks(serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ids = prompt(1)
    with serve(store, "--tp", "2", bind="0|1") as server:
        before = server.generate(ids)
        assert len(wait_for_pages(store, 2 * 25).namespaces) == 2
        server.kill()
    with serve(store, "--tp", "2", bind="0|1") as server:
        answer = server.generate(ids)
    assert answer.cached_tokens["storage"] == 384
    assert answer.output_ids == before.output_ids


def test_host_memory_as_a_mere_buffer(serve: Serve, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ids = prompt(1)
    mode = ("--hicache-host-memory-mode", "buffer_only")
    with serve(store, *mode) as server:
        before = server.generate(ids)
        wait_for_pages(store, 25)
        server.kill()
    with serve(store, *mode) as server:
        answer = server.generate(ids)
    assert answer.cached_tokens["storage"] == 384
    assert answer.output_ids == before.output_ids


def test_latents_are_stored_once_for_all_tensor_parallel_ranks(serve: Serve, tiny_mla: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    ids = prompt(1)
    with serve(store, "--tp", "2", model=tiny_mla, bind="0|1") as server:
        before = server.generate(ids)
        found = wait_for_pages(store, 25)
        server.kill()
    assert (found.pages, len(found.namespaces)) == (25, 1)
    with serve(store, "--tp", "2", model=tiny_mla, bind="0|1") as server:
        answer = server.generate(ids)
    assert answer.cached_tokens["storage"] == 384
    assert answer.output_ids == before.output_ids


@pytest.mark.parametrize(
    "change", ["kv_dtype", "page_size", "model"], ids=["another KV dtype", "another page size", "another model"]
)
def test_a_server_that_differs_finds_nothing(
    serve: Serve, seeded: Seeded, tmp_path: Path, tiny_llama: Path, other_llama: Path, change: str
) -> None:
    args: tuple[str, ...] = ()
    options = {}
    if change == "kv_dtype":
        args = ("--kv-cache-dtype", "bfloat16")
    elif change == "page_size":
        options = {"page": 32}
    else:
        # The same architecture under the same name: only the weights tell them apart.
        options = {"model": other_llama}
        args = ("--served-model-name", str(tiny_llama))
    store = _copy(seeded, tmp_path / "store")
    with serve(store, *args, **options) as server:
        answer = server.generate(seeded.prompts[0])
    assert answer.cached_tokens == {"device": 0, "host": 0, "storage": 0}
