"""Numba kernels of ``sgl_kvtier``: plane split and merge, layout reorder, checksums, digest
index, chains of pages. No I/O, no SGLang."""

from __future__ import annotations

import threading

import numpy as np

from sgl_kvtier_kernels import chains, checksum, index, keys, layout, planes

__all__ = ["chains", "checksum", "index", "keys", "layout", "planes", "warm_up"]

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
        data, target = np.zeros(4096, np.uint8), np.zeros(4096, np.uint8)
        for source in (data, _read_only(data)):
            checksum.hash_bytes(source)
            checksum.hash_parts([source, source])
            checksum.copy_parts(source, [target[:9], target[9:]])
        digests, locations = np.ones((1, 2), np.uint64), np.ones(1, np.uint64)
        table = index.DigestIndex()
        table.put_many(digests, locations)
        table.get(digests)
        table.get_low(locations)
        table.remove_many(digests, locations)
        index.promise(np.zeros(1, np.uint64), True, locations, locations, np.uint32(0))
        text, words = np.frombuffer(b"0" * keys.KEY_DIGITS, np.uint8), np.zeros((1, 4), np.uint64)
        keys.parse_hex_keys(text, words)
        for given in (words, _read_only(words)):
            keys.mix_keys(given, np.uint64(0), np.uint64(0), digests)
        rows = chains.parent_rows(locations, locations)
        order = chains.leaves_first(rows)
        chains.raise_to_followers(rows, order, np.zeros(1))
        chains.lost_rows(rows, order)
        _warm.set()


def _read_only(array: layout.Words) -> layout.Words:
    view = array.view()
    view.flags.writeable = False
    return view
