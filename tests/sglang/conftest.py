"""Real SGLang servers on the CPU, with random tiny models; each start takes some 15 seconds, so tests share them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.sglang.rig import (
    CPU_ARGS,
    HICACHE_ARGS,
    MODELS,
    REPO,
    Seeded,
    Serve,
    SGLangServer,
    cpu_environment,
    prompt,
    wait_for_pages,
)


def _model(name: str, kind: str, *arguments: str) -> Path:
    """A random model, made in a process of its own and kept between runs."""
    folder = REPO / ".cache" / "models" / name
    subprocess.run([sys.executable, str(MODELS), kind, str(folder), *arguments], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def tiny_llama() -> Path:
    """A random Llama."""
    return _model("tiny_llama", "tiny_llama", "0")


@pytest.fixture(scope="session")
def other_llama() -> Path:
    """Another Llama of the same architecture."""
    return _model("other_llama", "tiny_llama", "1")


@pytest.fixture(scope="session")
def tiny_mla() -> Path:
    """A random model with multi-head latent attention."""
    return _model("tiny_mla", "tiny_mla")


@pytest.fixture(scope="session")
def serve(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Start a server: ``serve(store, *more_args, model=…, page=16, extra={…}, env={…}, l3=True)``."""
    logs = tmp_path_factory.mktemp("logs")
    count = 0

    @contextmanager
    def start(
        store: Path | None,
        *args: str,
        model: Path | None = None,
        page: int = 16,
        extra: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        backend: str = "sgl_kvtier",
        bind: str = "0",
    ) -> Iterator[SGLangServer]:
        nonlocal count
        count += 1
        command = [
            *CPU_ARGS,
            *HICACHE_ARGS,
            "--dtype",
            "float32",
            "--page-size",
            str(page),
            "--max-total-tokens",
            "4096",
        ]
        if store is not None:
            settings = {"directory": str(store), "capacity": "256MiB", "min_free": 0, "prefetch_threshold": page}
            command += ["--hicache-storage-backend", backend]
            command += ["--hicache-storage-backend-extra-config", json.dumps(settings | (extra or {}))]
        environment = cpu_environment(bind=bind) | (env or {})
        server = SGLangServer(model or tiny_llama, [*command, *args], logs / f"{count}.log", environment)
        with server:
            yield server

    return start


@pytest.fixture(scope="session")
def seeded(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Seeded:
    """The store of a server that answered three prompts and was then killed with SIGKILL."""
    store = tmp_path_factory.mktemp("seeded") / "store"
    prompts = [prompt(seed) for seed in range(3)]
    with serve(store) as server:
        answers = [server.generate(ids) for ids in prompts]
        wait_for_pages(store, 3 * 25)
        log = server.log.read_text()
        server.kill()
    assert "path=zero-copy" in log
    assert "answered as a miss" not in log
    return Seeded(store, prompts, answers, 25)
