"""A real SGLang server as a context manager: started, watched, asked, killed, and never left behind."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import requests

SHIM = Path(__file__).parent / "shim"

_START_DEADLINE_S = 300
_STOP_DEADLINE_S = 20

#: Arguments that make SGLang 0.5.23 run on a CPU.
CPU_ARGS = (
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
    "--grammar-backend", "none", "--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle",
    "--mem-fraction-static", "0.5", "--max-running-requests", "8", "--random-seed", "1",
)  # fmt: skip

#: Arguments that switch the hierarchical cache on, with storage written at once and waited for.
HICACHE_ARGS = (
    "--enable-hierarchical-cache", "--hicache-ratio", "2", "--hicache-write-policy", "write_through",
    "--hicache-storage-prefetch-policy", "wait_complete",
)  # fmt: skip


def cpu_environment(threads: int = 1, bind: str = "0") -> dict[str, str]:
    """The environment in which SGLang runs on a CPU; ``bind`` lists cores for each TP rank, ``"0|1"``."""
    paths = [str(SHIM), *filter(None, [os.environ.get("PYTHONPATH")])]
    # SGLang compiles its page-hash extension on the first request. torch keeps such builds in one folder for all
    # environments, so two of them would take turns at building it anew.
    builds = Path.home() / ".cache" / "torch_extensions" / hashlib.sha256(sys.prefix.encode()).hexdigest()[:12]
    return {
        "TORCH_EXTENSIONS_DIR": str(builds),
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_CPU_OMP_THREADS_BIND": bind,
        "OMP_NUM_THREADS": str(threads),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def free_port() -> int:
    """A TCP port that is free on loopback at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """What a request brought.

    Attributes:
        output_ids: Generated tokens.
        prompt_tokens: Length of the prompt.
        cached_tokens: Prompt tokens that were not computed, by where they came from: device, host, storage.
        ttft_s: Seconds until the first token.
    """

    output_ids: list[int]
    prompt_tokens: int
    cached_tokens: dict[str, int]
    ttft_s: float


@dataclass
class SGLangServer:
    """A server process; use it in a ``with`` block.

    Attributes:
        model: Folder of the model.
        args: Further command line arguments.
        log: File for its output.
        env: Its environment; the process's own when None.
        python: Interpreter that has SGLang.
        port: Port on loopback.
    """

    model: Path
    args: Sequence[str]
    log: Path
    env: Mapping[str, str] | None = None
    python: str = sys.executable
    port: int = field(default_factory=free_port)
    _process: subprocess.Popen[bytes] | None = None
    _guard: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> SGLangServer:
        """Start the server and wait until it answers."""
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server."""
        self.stop()

    def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            RuntimeError: It ended or did not answer in time; the message has the end of its log.
        """
        command = [
            self.python, "-m", "sglang.launch_server", "--model-path", str(self.model), "--host", "127.0.0.1",
            "--port", str(self.port), "--enable-cache-report", *self.args,
        ]  # fmt: skip
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as output:
            # A session of its own: SIGKILL to the group takes the schedulers along, as a crash of the host would.
            self._process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=self.env, start_new_session=True
            )
        # When this process dies without cleaning up, the pipe closes, and the guard ends the server in its place.
        self._guard = subprocess.Popen(
            ["sh", "-c", f"read _; kill -s KILL -- -{self._process.pid}"],
            stdin=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        atexit.register(self.kill)
        deadline = time.monotonic() + _START_DEADLINE_S
        while True:
            if (code := self._process.poll()) is not None:
                self.kill()
                raise RuntimeError(f"the server ended with {code}; the end of {self.log}:\n{self.log_tail()}")
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"no answer after {_START_DEADLINE_S} s; the end of {self.log}:\n{self.log_tail()}")
            time.sleep(0.25)

    @property
    def url(self) -> str:
        """Base URL of the server."""
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        """SIGKILL to all of the server's processes at once, as in a crash."""
        self._signal_group(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
            self._process = None
        if self._guard is not None:
            self._guard.communicate()
            self._guard = None
        atexit.unregister(self.kill)

    def stop(self) -> None:
        """Ask the server to end, and make sure that it does."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_DEADLINE_S)
        self.kill()

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)

    def log_tail(self, lines: int = 40) -> str:
        """The last lines of the server's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def generate(self, prompt: str | Sequence[int], max_new_tokens: int = 8, **request: Any) -> Answer:
        """Generate greedily from a text or from token ids, streamed, so that the first token's time is known."""
        body: dict[str, Any] = {
            ("text" if isinstance(prompt, str) else "input_ids"): prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": {"max_new_tokens": max_new_tokens, "temperature": 0, "ignore_eos": True},
            "stream": True,
            **request,
        }
        started, first, last = time.perf_counter(), 0.0, {}
        with requests.post(f"{self.url}/generate", json=body, stream=True, timeout=600) as response:
            response.raise_for_status()
            ids: list[int] = []
            for line in response.iter_lines():
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                first = first or time.perf_counter()
                last = json.loads(line[len(b"data: ") :])
                if "error" in last:
                    raise RuntimeError(f"the server answered: {last['error']}")
                ids = _joined(ids, last["output_ids"], int(last["meta_info"]["completion_tokens"]))
        meta = last["meta_info"]
        details = meta.get("cached_tokens_details") or {"device": meta["cached_tokens"]}
        cached = {source: int(details.get(source) or 0) for source in ("device", "host", "storage")}
        return Answer(ids, int(meta["prompt_tokens"]), cached, first - started)

    def call(self, method: str, path: str, body: Any = None, api_key: str | None = None) -> requests.Response:
        """One call of the server's HTTP API."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return requests.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=120)

    def flush(self, api_key: str | None = None) -> None:
        """Empty the caches in device and host memory; the storage keeps what it has."""
        self.call("POST", "/flush_cache?timeout=30", api_key=api_key).raise_for_status()


def _joined(before: list[int], chunk: list[int], total: int) -> list[int]:
    """Tokens so far: chunks are cumulative or increments, depending on the server's settings."""
    return list(chunk) if len(chunk) == total else before + list(chunk)
