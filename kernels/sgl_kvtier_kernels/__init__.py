"""Numba kernels of ``sgl_kvtier``: plane split and merge, layout reorder, digest index. No I/O, no SGLang."""

from __future__ import annotations

import threading

import numpy as np

from sgl_kvtier_kernels import index, layout, planes

__all__ = ["index", "layout", "planes", "warm_up"]

_warm_up_lock = threading.Lock()
_warm = threading.Event()


def warm_up() -> None:
    """Compile what the store uses, so that the first request does not wait for it. Idempotent and thread-safe.

    Takes seconds the first time on a machine; compiled kernels are then kept on disk.
    """
    with _warm_up_lock:
        if _warm.is_set():
            return
        part = layout.HostPart(0, 1, (2, 1, 1, 8), (8, 8, 8))
        for kind, word_type in planes.WORD_TYPES.items():
            plan = layout.PagePlan(np.zeros(16, word_type), [part], 0)
            coded, raw = np.zeros(16, np.uint8), np.zeros(16 * planes.RAW_BYTES[kind], np.uint8)
            canonical = np.zeros(16, word_type)
            planes.split(kind, plan, 0, coded, raw)
            plan.gather(0, canonical)
            # As the store reads: the coded plane out of a decoder, everything else out of a read-only map.
            plan.scatter(0, _read_only(canonical))
            planes.merge(kind, plan, 0, _read_only(coded), _read_only(raw))
        digests = np.ones((1, 2), np.uint64)
        table = index.DigestIndex()
        table.put_many(digests, np.ones(1, np.uint64))
        table.get(digests)
        table.leading_run(digests)
        table.remove(digests[0])
        _warm.set()


def _read_only(array: layout.Words) -> layout.Words:
    view = array.view()
    view.flags.writeable = False
    return view
