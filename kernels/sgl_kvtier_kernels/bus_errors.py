"""Surviving SIGBUS: a mapped file that was cut off, or that the disk cannot read, must cost a miss, not the process.

A fault inside of a watched map puts a private page of zeros where the missing page of the file was, and the read goes
on; zeros fail the checksum. The handler runs in whatever thread faulted, inside of kernels without the GIL too, so it
is machine code that touches no Python object: a Numba callback that calls ``mmap``. A fault elsewhere gets the handler
that was there before.

With ``NUMBA_DISABLE_JIT`` there is no handler, and :func:`install` does nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import threading
import weakref
from typing import Any

import numba
import numpy as np
from numba.core import types

from sgl_kvtier_kernels._memory import load_u64, store_u64

#: Maps that can be watched at a time; further ones are not.
MAX_WATCHED = 1 << 14

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10
# siginfo_t.si_addr, on 64-bit Linux.
_FAULT_ADDRESS_OFFSET = 16
# struct sigaction on 64-bit Linux (glibc and musl): handler, mask of 128 bytes, flags, restorer.
_MASK_BYTES = 128
_SA_SIGINFO, _SA_NODEFER, _SA_ONSTACK = 4, 0x40000000, 0x08000000

#: Entries in use, faults so far, then (start, end) of each watched map; its address is part of the handler.
_watched = np.zeros(2 + 2 * MAX_WATCHED, np.uint64)
_lock = threading.Lock()
_handler: Any = None


class _SigAction(ctypes.Structure):
    _fields_ = (
        ("handler", ctypes.c_void_p),
        ("mask", ctypes.c_uint8 * _MASK_BYTES),
        ("flags", ctypes.c_int),
        ("restorer", ctypes.c_void_p),
    )


_previous = _SigAction()
_libc = ctypes.CDLL(None)
_sigaction = _libc.sigaction
_sigaction.argtypes = [ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t]
_sigaction.restype = ctypes.c_int
_mmap = _libc.mmap
_mmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_size_t]
_mmap.restype = ctypes.c_size_t


def install() -> bool:
    """Catch SIGBUS in this process, now or again if another library replaced the handler; False where it cannot be."""
    global _handler  # noqa: PLW0603 - compiled once, on first use
    if numba.config.DISABLE_JIT:
        return False
    with _lock:
        if _handler is None:
            _handler = _compile()
        current = _SigAction()
        _sigaction(signal.SIGBUS, 0, ctypes.addressof(current))
        if current.handler == _handler.address:
            return True
        ctypes.memmove(ctypes.addressof(_previous), ctypes.addressof(current), ctypes.sizeof(current))
        ours = _SigAction(handler=_handler.address, flags=_SA_SIGINFO | _SA_NODEFER | _SA_ONSTACK)
        return bool(_sigaction(signal.SIGBUS, ctypes.addressof(ours), 0) == 0)


def watch(owner: Any, address: int, nbytes: int) -> None:
    """Guard the map of ``nbytes`` bytes at ``address`` until ``owner`` is collected."""
    with _lock:
        count = int(_watched[0])
        entries = _watched[2 : 2 + 2 * count].reshape(-1, 2)
        free = np.flatnonzero(entries[:, 1] == 0)
        entry = int(free[0]) if free.size else count
        if entry == MAX_WATCHED:
            return
        start = 2 + 2 * entry
        _watched[start], _watched[start + 1] = address, address + nbytes
        _watched[0] = max(count, entry + 1)
    # Runs before the memory is unmapped, and so before anything else can be mapped there.
    weakref.finalize(owner, _forget, start).atexit = False


def faults() -> int:
    """How many faults were caught so far."""
    return int(_watched[1])


def _forget(start: int) -> None:
    # No lock: it may run inside of watch, when a collection starts there. The end goes first, so that the pair is
    # never taken for a map it is not.
    _watched[start + 1] = 0
    _watched[start] = 0


def _compile() -> Any:
    watched, previous = _watched.ctypes.data, ctypes.addressof(_previous)
    page_mask, page = ~np.uint64(_PAGE - 1), _PAGE
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
    bus, none = int(signal.SIGBUS), np.uint64(0)
    map_memory, set_action = _mmap, _sigaction

    def handler(_number: Any, info: Any, _context: Any) -> None:
        address = load_u64(np.uint64(info + np.uint64(_FAULT_ADDRESS_OFFSET)))
        table = np.uint64(watched)
        for entry in range(load_u64(table)):
            at = np.uint64(table + np.uint64(16) + np.uint64(16) * np.uint64(entry))
            if load_u64(at) <= address < load_u64(np.uint64(at + np.uint64(8))):
                map_memory(address & page_mask, page, protection, flags, -1, none)
                store_u64(np.uint64(table + np.uint64(8)), np.uint64(load_u64(np.uint64(table + np.uint64(8))) + 1))
                return
        # Not ours: the instruction runs again, and faults again, under the handler that was there before.
        set_action(bus, np.uint64(previous), none)

    signature = types.void(types.int32, types.uint64, types.uint64)
    return numba.cfunc(signature, nopython=True)(handler)
