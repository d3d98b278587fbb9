"""The demo: coding-agent conversations on a real SGLang server, SIGKILL, restart, and the conversations go on.

Run it through ``scripts/demo.sh``, which sets up what it needs. Three servers, one after the other:

1. with an L3 backend: every session's turns, from nothing; then SIGKILL to all of the server's processes
2. with the same L3 directory: every session's next turn, whose context comes back from storage
3. without any cache: the same turns, for the time without L3 and for the outputs that must be equal
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "scripts" / "sglang_cpu"))

from models import smollm2  # noqa: E402 - beside this file, not installed
from server import CPU_ARGS, HICACHE_ARGS, Answer, SGLangServer, cpu_environment  # noqa: E402

#: Source files of the standard library that the sessions talk about.
_FILES = (
    "heapq.py", "textwrap.py", "bisect.py", "queue.py", "shlex.py", "fnmatch.py", "sched.py", "colorsys.py",
    "contextlib.py", "functools.py", "copy.py", "csv.py",
)  # fmt: skip
_QUESTIONS = (
    "What does this module do? Answer in one sentence.",
    "Name its most important function and say what it returns.",
    "Which inputs would make it fail?",
    "Write a short test for it.",
    "How would you make it faster?",
    "What would you change in its interface?",
)

#: Token ids of a prompt that has nothing in common with the conversations.
_WARM_UP = list(range(1000, 1040))

_QUIET_S = 2.0
_WRITE_DEADLINE_S = 120.0

console = Console()


@dataclass
class Session:
    """One conversation: its tokens so far, and what was measured of it."""

    file: str
    tokens: list[int]
    #: Tokens of the conversation before the last question: what a restored cache can save.
    repeated: int = 0
    first: Answer | None = None
    restored: Answer | None = None
    without: Answer | None = None


@dataclass
class Result:
    """The demo's figures; bytes are totals of the L3 directory, times are medians over the sessions."""

    backend: str
    kv_dtype: str
    sessions: int
    storage_token_fraction: float
    ttft_first_s: float
    ttft_restored_s: float
    ttft_without_l3_s: float
    ttft_speedup: float
    outputs_identical: bool
    raw_bytes: int
    stored_bytes: int
    saved_fraction: float
    rows: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Setting:
    """What the servers run with."""

    model: Path
    python: str
    backend: str
    store: Path
    logs: Path
    page_tokens: int
    cpu: bool
    port: int | None

    @property
    def kv_dtype(self) -> str:
        """Element type of the KV cache."""
        return "bfloat16" if self.cpu else "auto"

    def server(self, name: str, *, l3: bool) -> SGLangServer:
        """A server with the L3 backend, or one without any cache."""
        env = cpu_environment() if self.cpu else dict(os.environ)
        args = list(CPU_ARGS) if self.cpu else []
        if self.cpu:
            # bf16 prefill is several times slower on CPUs without AVX-512; the KV cache is bf16 as on GPU servers.
            args += ["--dtype", "float32", "--kv-cache-dtype", "bfloat16", "--max-total-tokens", "16384"]
        if l3:
            args += [*HICACHE_ARGS, "--page-size", str(self.page_tokens), "--hicache-storage-backend", self.backend]
            extra: dict[str, Any] = {"prefetch_threshold": self.page_tokens}
            if self.backend == "file":
                env["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(self.store)
            else:
                extra |= {"directory": str(self.store), "capacity": "4GiB", "min_free": "256MiB"}
            args += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        else:
            args += ["--disable-radix-cache", "--page-size", str(self.page_tokens)]
        server = SGLangServer(self.model, args, self.logs / f"{name}.log", env, self.python)
        if self.port is not None:
            server.port = self.port
        return server

    def stored(self) -> tuple[int, int]:
        """Raw and stored bytes in the L3 directory."""
        if self.backend == "file":
            total = sum(f.stat().st_size for f in self.store.rglob("*") if f.is_file()) if self.store.exists() else 0
            return total, total
        from sgl_kvtier.errors import StoreError
        from sgl_kvtier.store.inspect import store_usage

        try:
            usage = store_usage(self.store)
        except StoreError:  # not made yet
            return 0, 0
        return usage.raw_bytes, usage.stored_bytes


def main(
    backend: Annotated[str, typer.Option(help="L3 backend: sgl_kvtier or file.")] = "sgl_kvtier",
    sessions: Annotated[int, typer.Option(help="Conversations.", min=1, max=len(_FILES))] = 3,
    turns: Annotated[int, typer.Option(help="Turns before the crash.", min=1, max=len(_QUESTIONS) - 1)] = 3,
    context: Annotated[int, typer.Option(help="Tokens of source code in a conversation.", min=64)] = 600,
    answer: Annotated[int, typer.Option(help="Tokens of an answer.", min=1)] = 24,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the L3 directory and the logs here.")] = None,
    model: Annotated[str | None, typer.Option(help="Model to serve; SmolLM2-135M by default, on the CPU.")] = None,
    python: Annotated[str | None, typer.Option(help="Interpreter that has SGLang, on a GPU machine.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the servers; a free one by default.")] = None,
) -> None:
    """Show that conversations survive a crash of the server, and what the L3 backend saves."""
    if backend not in ("sgl_kvtier", "file"):
        raise typer.BadParameter(f"{backend!r}; accepted: sgl_kvtier, file", param_hint="--backend")
    if python is not None and model is None:
        raise typer.BadParameter("--python needs --model: the model to serve on that machine", param_hint="--model")
    with _workplace(keep) as work:
        started = time.monotonic()
        setting = Setting(
            model=Path(model) if model is not None else _step("model", lambda: smollm2(REPO / ".cache/models/smollm2")),
            python=python or sys.executable,
            backend=backend,
            store=work / "store",
            logs=work / "logs",
            page_tokens=16 if python is None else 64,
            cpu=python is None,
            port=port,
        )
        talks = _conversations(setting, sessions, context)
        result = _run(setting, talks, turns, answer)
        _report(result, time.monotonic() - started)
        if json_file is not None:
            json_file.write_text(json.dumps(asdict(result), indent=2) + "\n")
        if keep is not None:
            console.print(f"L3 directory and logs are in {work}")
    if not result.outputs_identical:
        raise typer.Exit(1)


@contextmanager
def _workplace(keep: Path | None) -> Iterator[Path]:
    """A folder for the L3 directory and the logs; temporary unless it is to be kept."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        if (keep / "store").exists():
            raise typer.BadParameter(
                f"{keep} has a store from an earlier run; name another folder", param_hint="--keep"
            )
        yield keep.resolve()
        return
    work = Path(tempfile.mkdtemp(prefix="sgl-kvtier-demo-"))
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _step(title: str, action: Any) -> Any:
    """Run ``action`` under a spinner and say how long it took."""
    started = time.monotonic()
    with console.status(f"{title} ..."):
        value = action()
    console.print(f"  {title} [dim]{time.monotonic() - started:.1f} s[/dim]")
    return value


def _tokenizer(setting: Setting) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(setting.model))


def _conversations(setting: Setting, count: int, context: int) -> list[Session]:
    """Conversations that begin with the source of a module of the standard library."""
    tokenizer = _tokenizer(setting)
    library = Path(sysconfig.get_paths()["stdlib"])
    talks = []
    for name in _FILES[:count]:
        source = tokenizer.encode((library / name).read_text(), add_special_tokens=False)[:context]
        head = tokenizer.encode(f"You are a coding agent. The file {name} follows.\n\n", add_special_tokens=False)
        talks.append(Session(name, head + source))
    return talks


def _run(setting: Setting, talks: list[Session], turns: int, answer: int) -> Result:
    tokenizer = _tokenizer(setting)

    def ask(server: SGLangServer, talk: Session, turn: int) -> Answer:
        return server.generate(talk.tokens + question(turn), answer)

    def question(turn: int) -> list[int]:
        ids: list[int] = tokenizer.encode(f"\n\nUser: {_QUESTIONS[turn]}\nAgent:", add_special_tokens=False)
        return ids

    console.print(f"[bold]server 1[/bold]: L3 backend {setting.backend}, empty")
    server = setting.server("1-with-l3", l3=True)
    try:
        _step("start", lambda: _start(server))
        for turn in range(turns):
            for talk in talks:
                reply = _step(f"turn {turn + 1}: {talk.file}", lambda t=talk, n=turn: ask(server, t, n))
                talk.first = talk.first or reply
                talk.tokens += question(turn) + reply.output_ids
        _step("write to L3", lambda: _wait_until_written(setting))
        raw_bytes, stored_bytes = setting.stored()
        _step("SIGKILL", server.kill)
    finally:
        server.kill()
    for talk in talks:
        talk.repeated = len(talk.tokens)

    console.print("[bold]server 2[/bold]: restarted on the same L3 directory")
    server = setting.server("2-restarted", l3=True)
    try:
        _step("start", lambda: _start(server))
        for talk in talks:
            talk.restored = _step(f"turn {turns + 1}: {talk.file}", lambda t=talk: ask(server, t, turns))
    finally:
        server.stop()

    console.print("[bold]server 3[/bold]: no cache at all")
    server = setting.server("3-without-cache", l3=False)
    try:
        _step("start", lambda: _start(server))
        for talk in talks:
            talk.without = _step(f"turn {turns + 1}: {talk.file}", lambda t=talk: ask(server, t, turns))
    finally:
        server.stop()
    return _result(setting, talks, raw_bytes, stored_bytes)


def _start(server: SGLangServer) -> None:
    """Start the server and ask it something else, so that no session's first token pays for one-time costs."""
    server.start()
    server.generate(_WARM_UP, 2)


def _wait_until_written(setting: Setting) -> None:
    """Wait until the L3 directory stops growing: the server writes in the background."""
    deadline = time.monotonic() + _WRITE_DEADLINE_S
    seen, since = (-1, -1), time.monotonic()
    while time.monotonic() < deadline:
        now = setting.stored()
        if now != seen:
            seen, since = now, time.monotonic()
        elif now[0] > 0 and time.monotonic() - since > _QUIET_S:
            return
        time.sleep(0.2)
    raise RuntimeError(f"nothing was written to {setting.store} within {_WRITE_DEADLINE_S:.0f} s; see {setting.logs}")


def _result(setting: Setting, talks: list[Session], raw_bytes: int, stored_bytes: int) -> Result:
    rows = []
    for talk in talks:
        first, restored, without = talk.first, talk.restored, talk.without
        assert first is not None
        assert restored is not None
        assert without is not None
        rows.append(
            {
                "file": talk.file,
                "prompt_tokens": restored.prompt_tokens,
                "repeated_tokens": talk.repeated,
                "storage_tokens": restored.cached_tokens["storage"],
                "computed_tokens": restored.prompt_tokens - sum(restored.cached_tokens.values()),
                "ttft_first_s": first.ttft_s,
                "ttft_restored_s": restored.ttft_s,
                "ttft_without_l3_s": without.ttft_s,
                "output_identical": restored.output_ids == without.output_ids,
            }
        )

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    return Result(
        backend=setting.backend,
        kv_dtype=setting.kv_dtype,
        sessions=len(rows),
        storage_token_fraction=sum(r["storage_tokens"] for r in rows) / sum(r["repeated_tokens"] for r in rows),
        ttft_first_s=median("ttft_first_s"),
        ttft_restored_s=median("ttft_restored_s"),
        ttft_without_l3_s=median("ttft_without_l3_s"),
        ttft_speedup=median("ttft_without_l3_s") / median("ttft_restored_s"),
        outputs_identical=all(row["output_identical"] for row in rows),
        raw_bytes=raw_bytes,
        stored_bytes=stored_bytes,
        saved_fraction=1 - stored_bytes / raw_bytes if raw_bytes else 0.0,
        rows=rows,
    )


def _report(result: Result, seconds: float) -> None:
    table = Table(title=f"L3 backend {result.backend}, KV cache {result.kv_dtype}: tokens, and time to first token")
    for title in ("session", "prompt", "loaded", "computed", "first", "restored", "no L3", "same"):
        table.add_column(title, justify="left" if title == "session" else "right", no_wrap=True)
    for row in result.rows:
        table.add_row(
            row["file"],
            str(row["prompt_tokens"]),
            str(row["storage_tokens"]),
            str(row["computed_tokens"]),
            f"{row['ttft_first_s']:.2f} s",
            f"{row['ttft_restored_s']:.2f} s",
            f"{row['ttft_without_l3_s']:.2f} s",
            "yes" if row["output_identical"] else "NO",
        )
    console.print(table)
    console.print(
        f"{result.storage_token_fraction:.1%} of the repeated prompt tokens came from storage after SIGKILL + restart\n"
        f"TTFT {result.ttft_restored_s:.2f} s instead of {result.ttft_without_l3_s:.2f} s: {result.ttft_speedup:.1f} x "
        f"lower (medians; first turn {result.ttft_first_s:.2f} s)\n"
        f"{result.raw_bytes / 1e6:.1f} MB of KV stored in {result.stored_bytes / 1e6:.1f} MB: "
        f"{result.saved_fraction:.1%} saved\n"
        f"outputs equal those of a server without cache: {'yes' if result.outputs_identical else 'NO'}\n"
        f"[dim]{seconds:.0f} s in all[/dim]"
    )


if __name__ == "__main__":
    # Ended from outside, the demo still stops its server and removes its files.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        typer.run(main)
    except (RuntimeError, subprocess.SubprocessError) as error:
        console.print(f"[red]{error}[/red]")
        sys.exit(1)
