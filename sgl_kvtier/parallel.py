"""A small pool of threads for the pages of one batch; the calling thread works too."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import ClassVar, TypeVar

_Task = TypeVar("_Task")


class Workers:
    """Up to ``threads`` threads on one batch; several batches at a time share the helpers."""

    _all: ClassVar[weakref.WeakSet[Workers]] = weakref.WeakSet()

    def __init__(self, threads: int) -> None:
        """No thread is started before it is needed.

        Args:
            threads: Threads that work on a batch, the caller included.
        """
        self._helpers = threads - 1
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        Workers._all.add(self)

    def run(self, work: Callable[[_Task], None], tasks: Sequence[_Task]) -> None:
        """Call ``work`` on each of ``tasks``, begun in their order; returns when all are done.

        The first exception is raised, once the tasks that were begun have ended; the others are left out.
        """
        helpers = min(self._helpers, len(tasks) - 1)
        if helpers <= 0:
            for task in tasks:
                work(task)
            return
        rest = iter(tasks)  # next() on it is one step under the GIL: the threads need no lock
        failed = threading.Event()

        def drain(pending: Iterable[_Task] = rest) -> None:
            for task in pending:
                if failed.is_set():
                    return
                try:
                    work(task)
                except BaseException:
                    failed.set()
                    raise

        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._helpers, "sgl-kvtier-batch")
            pool = self._pool
        futures = [pool.submit(drain) for _ in range(helpers)]
        try:
            drain()
        finally:
            # A helper that never came to it, as another batch keeps it, must not be waited for.
            wait([future for future in futures if not future.cancel()])
        for future in futures:
            if not future.cancelled():
                future.result()

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    @classmethod
    def _forget_in_child(cls) -> None:
        for workers in list(cls._all):
            workers._lock = threading.Lock()
            workers._pool = None


os.register_at_fork(after_in_child=Workers._forget_in_child)
