"""What the server tests share: prompts, a look into the store, and the types of the fixtures."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPO / "scripts" / "sglang_cpu"))

from server import CPU_ARGS, HICACHE_ARGS, Answer, SGLangServer, cpu_environment  # noqa: E402 - not installed

from sgl_kvtier.errors import StoreError  # noqa: E402
from sgl_kvtier.store.inspect import StoreUsage, store_usage  # noqa: E402

__all__ = [
    "CPU_ARGS",
    "HICACHE_ARGS",
    "MODELS",
    "REPO",
    "SGLangServer",
    "Seeded",
    "Serve",
    "cpu_environment",
    "prompt",
    "wait_for_pages",
]

#: The script that makes models.
MODELS = REPO / "scripts" / "sglang_cpu" / "models.py"

_WRITE_DEADLINE_S = 60

Serve = Callable[..., AbstractContextManager[SGLangServer]]


@dataclass(frozen=True)
class Seeded:
    """A store that a killed server left, and what that server answered.

    Attributes:
        store: Its folder.
        prompts: The prompts that were sent.
        answers: The server's answers to them.
        pages: Number of full pages of each prompt.
    """

    store: Path
    prompts: Sequence[list[int]]
    answers: Sequence[Answer]
    pages: int


def prompt(seed: int, tokens: int = 400) -> list[int]:
    """A prompt of ``tokens`` token ids, the same for the same seed."""
    return [(seed * 7919 + i * 104729) % 40000 + 100 for i in range(tokens)]


def usage(store: Path) -> StoreUsage | None:
    """What the store holds; None before it is made."""
    try:
        return store_usage(store)
    except StoreError:
        return None


def wait_for_pages(store: Path, pages: int) -> StoreUsage:
    """Wait until the store holds at least ``pages`` pages: servers write in the background."""
    deadline = time.monotonic() + _WRITE_DEADLINE_S
    while time.monotonic() < deadline:
        found = usage(store)
        if found is not None and found.pages >= pages:
            return found
        time.sleep(0.1)
    raise AssertionError(f"{usage(store)} after {_WRITE_DEADLINE_S} s, {pages} pages expected")
