"""A Hypothesis state machine: a backend against a dictionary, over random sequences of calls and restarts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from sgl_kvtier.testing.dialects import Dialect
from sgl_kvtier.testing.pools import fill_with_any_bits, page_bytes, page_keys

_KEYS = page_keys(24, salt="machine")
_numbers = st.lists(st.sampled_from(range(len(_KEYS))), min_size=1, max_size=6)


def check_backend(
    open_backend: Callable[[Path], Any],
    close_backend: Callable[[Any], None],
    new_directory: Callable[[], Path],
    pool: Any,
    dialect: Dialect,
    *,
    may_forget: bool = False,
    examples: int = 12,
    steps: int = 25,
) -> None:
    """Run the machine; raises ``AssertionError`` with the shortest failing sequence of calls.

    Args:
        open_backend: Opens the backend in a directory, with ``pool`` registered.
        close_backend: Closes it.
        new_directory: A directory that does not exist yet, for each sequence.
        pool: Host pool of at least 6 pages through which pages go in and out.
        dialect: How pages are moved.
        may_forget: Whether a stored page may miss. A page that is found must be right in any case.
        examples: Number of sequences.
        steps: Calls in a sequence at most.
    """

    class BackendMachine(RuleBasedStateMachine):
        """Calls on one backend, beside a dictionary from key number to canonical bytes."""

        @initialize()
        def start(self) -> None:
            """A new store."""
            self.directory = new_directory()
            self.backend = open_backend(self.directory)
            self.stored: dict[int, bytes] = {}
            self.generation = 0

        @rule(numbers=_numbers)
        def put(self, numbers: list[int]) -> None:
            """Store a batch, keys stored before and twice in the batch among them."""
            for page, number in enumerate(numbers):
                _write_page(pool, page, number, self.generation)
            pages = [page_bytes(pool, page) for page in range(len(numbers))]
            answers = dialect.put(self.backend, pool, [_KEYS[number] for number in numbers], range(len(numbers)))
            assert may_forget or answers == [True] * len(numbers)
            for number, content, stored in zip(numbers, pages, answers, strict=True):
                if stored:
                    self.stored[number] = content

        @rule(numbers=_numbers)
        def get(self, numbers: list[int]) -> None:
            """Load a batch, present keys and absent ones mixed."""
            fill_with_any_bits(pool, 0)
            answers = dialect.get(self.backend, pool, [_KEYS[number] for number in numbers], range(len(numbers)))
            for page, (number, found) in enumerate(zip(numbers, answers, strict=True)):
                assert found or may_forget or number not in self.stored
                if found:
                    assert page_bytes(pool, page) == self.stored[number]

        @rule()
        def clear(self) -> None:
            """Forget everything; from now on the keys name other pages, so that an old one would be noticed."""
            self.backend.clear()
            self.stored.clear()
            self.generation += 1

        @rule()
        def restart(self) -> None:
            """Close and open again."""
            close_backend(self.backend)
            self.backend = open_backend(self.directory)

        def teardown(self) -> None:
            """Close the backend of this sequence."""
            if hasattr(self, "backend"):
                close_backend(self.backend)

    run_state_machine_as_test(
        BackendMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


def _write_page(pool: Any, page: int, number: int, generation: int) -> None:
    """Content of a page as a function of its key, as in SGLang; ``generation`` tells old pages from new ones.

    Every second key's page compresses, the others hold random bits.
    """
    flat = pool.get_dummy_flat_data_page()
    raw = flat.view(torch.uint8).numpy()
    bound = 4 if number % 2 else 256
    raw[:] = np.random.default_rng((number, generation)).integers(0, bound, raw.size, np.uint8)
    pool.set_from_flat_data_page(page * int(pool.page_size), flat)
