"""The change feed of one writer: how other processes learn which slots it filled or voided, without disk I/O.

File ``feed.bin``, mapped by all processes, little-endian::

    0      magic "KVTFEED\\0" (8), version u32, number of events kept u32
    16     head: number of events ever posted, u64
    24     want: nonzero while the writer has found no space to write to, u64
    4096   events, u64 x 65536, a ring: segment number << 32 | slot

An event says "read this slot's entry again", no more; the tables of contents stay the truth. A reader that fell
behind by more than the ring reads them whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sgl_kvtier.errors import DamagedError
from sgl_kvtier.store import files

VERSION = 1
HEADER_BYTES = 4096
EVENTS = 1 << 16

#: Events that the writer posts at a time, before it moves the head.
_BATCH = 1 << 10

#: Slot number that stands for the whole segment: created, deleted or recovered.
WHOLE_SEGMENT = 0xFFFFFFFF

_HEADER = b"KVTFEED\0" + VERSION.to_bytes(4, "little") + EVENTS.to_bytes(4, "little")


class Feed:
    """The writer's side and the readers' side of one feed file."""

    def __init__(self, path: Path, *, create: bool) -> None:
        """Open the feed, creating it first where ``create`` says so.

        Raises:
            DamagedError: Not a feed of this version, or cut off.
            OSError: It cannot be opened.
        """
        fd = files.open_private(path, os.O_RDWR | (os.O_CREAT if create else 0))
        with files.closing_fd(fd):
            if create and os.fstat(fd).st_size == 0:
                os.posix_fallocate(fd, 0, HEADER_BYTES + 8 * EVENTS)
                files.write_whole(fd, [_HEADER], 0)
            head = os.pread(fd, 16, 0)
            if head != _HEADER:
                raise DamagedError(f"{path}: not a change feed of version {VERSION}")
            self._counters: npt.NDArray[Any] = files.map_shared(fd, "<u8", 2, 16, writable=True)
            self._events: npt.NDArray[Any] = files.map_shared(fd, "<u8", EVENTS, HEADER_BYTES, writable=True)

    @staticmethod
    def repair(path: Path) -> None:
        """Make a damaged feed one again. Call as the owner of the folder.

        It is done in place, since readers may have the file mapped; a head below theirs makes them read everything.
        """
        with files.closing_fd(files.open_private(path, os.O_RDWR)) as fd:
            os.posix_fallocate(fd, 0, HEADER_BYTES + 8 * EVENTS)
            files.write_whole(fd, [_HEADER, bytes(16)], 0)

    @property
    def head(self) -> int:
        """Number of events ever posted."""
        return int(self._counters[0])

    def post(self, segment: int, slots: Sequence[int]) -> None:
        """Tell readers that ``slots`` of ``segment`` changed. The writer alone calls it, one call at a time."""
        for start in range(0, len(slots), _BATCH):
            batch = np.array(slots[start : start + _BATCH], np.uint64) | np.uint64(segment << 32)
            head = int(self._counters[0])
            self._events[np.arange(head, head + len(batch)) % EVENTS] = batch
            self._counters[0] = (head + len(batch)) & 0xFFFFFFFFFFFFFFFF

    def since(self, seen: int) -> tuple[int, list[tuple[int, int]] | None]:
        """The new head, and the (segment, slot) events after ``seen``; None when some of them are gone."""
        head = self.head
        if head == seen:
            return head, []
        if head < seen or head - seen >= EVENTS - _BATCH:
            return head, None
        picked = self._events[np.arange(seen, head) % EVENTS].tolist()
        # The writer may have lapped us while we copied; it posts a batch before it moves the head, so keep clear of it.
        if self.head - seen >= EVENTS - _BATCH:
            return head, None
        return head, [(event >> 32, event & 0xFFFFFFFF) for event in picked]

    @property
    def want(self) -> bool:
        """Whether the writer waits for the others to give space back."""
        return bool(self._counters[1])

    @want.setter
    def want(self, value: bool) -> None:
        self._counters[1] = int(value)
