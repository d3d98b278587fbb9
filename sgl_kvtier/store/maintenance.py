"""The store's own thread: evicts ahead of need, syncs, scrubs, and notices what others did to the folder."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from sgl_kvtier.errors import KVTierError
from sgl_kvtier.store.scrub import Scrubber
from sgl_kvtier_kernels import bus_errors

if TYPE_CHECKING:
    from sgl_kvtier.store.store import Store

logger = logging.getLogger(__name__)

#: How often it looks around when nobody wakes it, in seconds.
_PERIOD_S = 1.0


class Maintenance:
    """A thread that starts with the first record written, and ends with the store."""

    def __init__(self, store: Store) -> None:
        """For ``store``; nothing runs yet."""
        self._store = store
        self._wake = threading.Event()
        self._stopping = False
        self._start_lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def wake_if_needed(self) -> None:
        """Start the thread if it has not been, and wake it when free slots run short."""
        if self._thread is None:
            self._start()
        if not self._wake.is_set() and self._store.needs_room():
            self._wake.set()

    def _start(self) -> None:
        with self._start_lock:
            if self._thread is None and not self._stopping:
                self._thread = threading.Thread(target=self._run, name="sgl-kvtier-store", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """End the thread, and wait for it."""
        with self._start_lock:
            self._stopping = True
            self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def after_fork(self) -> None:
        """In a forked child: the thread stayed with the parent."""
        self._stopping = True
        self._thread = None

    def _run(self) -> None:
        store, faults = self._store, bus_errors.faults()
        scrubber = Scrubber(store, np.random.default_rng())
        last_look = last_sync = time.monotonic()
        while not self._stopping:
            self._wake.wait(_PERIOD_S)
            self._wake.clear()
            try:
                store.reclaim()
                store.prepare_victims()
                now = time.monotonic()
                if store.config.durability == "interval" and now - last_sync >= store.config.durability_interval_s:
                    last_sync = now
                    store.sync()
                if now - last_look >= _PERIOD_S:
                    store.follow_clears()
                    store.keep_disk_free()
                    if bus_errors.faults() != faults:
                        faults = bus_errors.faults()
                        store.check_files()
                    scrubber.run(store.config.scrub_bytes_s * (now - last_look), lambda: self._stopping)
                    last_look = now
            except (OSError, KVTierError) as error:
                # Nothing here is needed for a right answer, and it is tried again.
                if not self._stopping:
                    logger.warning("maintenance of %s: %s", store.directory.root, error)
