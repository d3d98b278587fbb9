"""Counters of the tier, as Prometheus metrics and as the figures that SGLang asks a backend for.

Metrics live in prometheus-client's default registry, so they appear beside SGLang's own wherever those are served.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from prometheus_client import Counter

PAGES = Counter("sgl_kvtier_pages", "Pages asked for or offered, by outcome", ["operation", "outcome"])
PAGE_BYTES = Counter("sgl_kvtier_page_bytes", "Bytes of pages as the host pool holds them", ["operation"])
RECORD_BYTES = Counter("sgl_kvtier_record_bytes", "Bytes of pages as the store holds them", ["operation"])
FAULTS = Counter("sgl_kvtier_faults", "Calls that failed inside and were answered as a miss", ["operation", "kind"])

#: Batches that are kept for the next call of :meth:`TransferLog.drain`; older ones are dropped.
_KEPT_BATCHES = 1024


class Transfer(NamedTuple):
    """One batch that was moved: pages and gigabytes (10^9 bytes) of raw page data per second."""

    pages: int
    gb_per_second: float


class TransferLog:
    """Batches moved since the last look, for SGLang's ``get_stats``."""

    def __init__(self) -> None:
        """An empty log."""
        self._lock = threading.Lock()
        self._transfers: list[Transfer] = []

    def add(self, pages: int, nbytes: int, seconds: float) -> None:
        """Record a batch of ``pages`` pages, ``nbytes`` raw bytes, that took ``seconds``."""
        if pages and seconds > 0:
            with self._lock:
                self._transfers.append(Transfer(pages, nbytes / seconds / 1e9))
                del self._transfers[:-_KEPT_BATCHES]

    def drain(self) -> list[Transfer]:
        """The batches since the last call."""
        with self._lock:
            drained, self._transfers = self._transfers, []
        return drained
