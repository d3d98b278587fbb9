"""One segment: a directory that holds a valid mmap-ninja NumPy memory map of slots, and its table of contents.

``data.ninja`` is ``uint8[slot_count, slot_bytes]``; ``mmap_ninja.numpy.open_existing(directory)`` opens it. Data is
written with ``pwritev`` into preallocated space, never through a map (a full disk under a map is SIGBUS, under a
write it is ENOSPC), and read through the map.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmap_ninja.numpy
import numpy as np
import numpy.typing as npt

from sgl_kvtier.errors import DamagedError, StoreError, StoreFullError
from sgl_kvtier.store import files, toc
from sgl_kvtier.store.toc import TocEntry, TocHeader

#: Slots are placed on multiples of this, so that direct I/O can read them.
SLOT_ALIGNMENT = 512


def slot_class(record_bytes: int) -> int:
    """Slot size for a record: rounded up to 1/64 of its own size or less, so that little of a slot is wasted.

    Pages of one namespace compress to nearly equal sizes; steps of 1/128 to 1/64 of the size keep the slack under
    1.6 % while few classes are in use. Records below 64 KiB step by :data:`SLOT_ALIGNMENT`.
    """
    step = max(SLOT_ALIGNMENT, 1 << max(0, record_bytes.bit_length() - 7))
    return -(-record_bytes // step) * step


class Segment:
    """An open segment. Only its owner calls the methods that write."""

    def __init__(self, directory: Path, *, owned: bool) -> None:
        """Open the segment in ``directory``.

        Raises:
            DamagedError: Not a segment, damaged, or cut off.
            StoreError: Of another version, or not private.
            OSError: The files cannot be opened.
        """
        self.directory = directory
        self.owned = owned
        #: Number under which the process knows the segment; set by the store.
        self.handle = 0
        #: Writes in flight; while there are any, the segment is not closed. Kept by the store.
        self.pending_writes = 0
        self._data_fd = self._toc_fd = -1
        files.check_private_directory(directory)
        self._toc_fd = files.open_private(directory / "toc.bin", os.O_RDWR)
        try:
            self.header = TocHeader.unpack(os.pread(self._toc_fd, toc.HEADER_BYTES, 0))
            count = self.header.slot_count
            self.entries = files.map_shared(self._toc_fd, toc.ENTRY_DTYPE, count, toc.HEADER_BYTES, writable=False)
            #: Last use of each slot in microseconds since the epoch; any process may write it, none relies on it.
            self.last_use_us = files.map_shared(
                self._toc_fd, "<u8", count, toc.HEADER_BYTES + toc.ENTRY_BYTES * count, writable=True
            )
            #: Which slots hold a record, for the owner, who alone fills and voids them. Kept by the store.
            self.used = np.zeros(count, bool)
            self._entry_bytes = self.entries.view(np.uint8).reshape(count, toc.ENTRY_BYTES)
            self._data_fd = files.open_private(directory / "data.ninja", os.O_RDWR if owned else os.O_RDONLY)
            if os.fstat(self._data_fd).st_size < self.header.data_bytes:
                raise DamagedError(f"{directory}: data.ninja is cut off")
            for name, content in _ninja_files(self.header).items():
                if _read_small(directory / name) != content:
                    raise DamagedError(f"{directory}: {name} and the table of contents disagree")
            mapped = mmap_ninja.numpy.open_existing(directory, mode="r")
            self.data: npt.NDArray[np.uint8] = mapped.view(np.ndarray)
        except (OSError, StoreError):
            self.close()
            raise

    @classmethod
    def create(cls, directory: Path, slot_bytes: int, slot_count: int) -> Segment:
        """Create a segment with all its space allocated, then make it visible under ``directory``.

        Raises:
            StoreFullError: The file system has no room for it.
            OSError: It cannot be created for another reason.
        """
        header = TocHeader(slot_bytes, slot_count, os.urandom(16))
        temporary = directory.with_name(f".new-{directory.name}")
        shutil.rmtree(temporary, ignore_errors=True)
        files.make_private_directory(temporary)
        try:
            _allocate(temporary / "data.ninja", header.data_bytes)
            _allocate(temporary / "toc.bin", header.toc_bytes, header.pack())
            for name, content in _ninja_files(header).items():
                files.replace_file(temporary / name, content)
            os.rename(temporary, directory)
        except OSError as error:
            shutil.rmtree(temporary, ignore_errors=True)
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise StoreFullError(
                    f"no room for a segment of {header.data_bytes} bytes in {directory.parent}"
                ) from error
            raise
        return cls(directory, owned=True)

    @property
    def nbytes(self) -> int:
        """Disk space of the segment in bytes."""
        return self.header.nbytes

    def live_entries(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
        """Slot numbers and entries of all valid slots, as copies."""
        entries = np.array(self.entries)
        slots = np.flatnonzero(toc.valid_entries(entries, self.header.seed))
        return slots, entries[slots]

    def raw_entry(self, slot: int) -> bytes:
        """The 64 bytes of the slot's entry as they are now; compare two readings to see whether it was rewritten."""
        raw: bytes = self._entry_bytes[slot].tobytes()
        return raw

    def entry(self, slot: int, raw: bytes | None = None) -> TocEntry | None:
        """The slot's entry, or None when the slot is void."""
        return TocEntry.unpack(self.raw_entry(slot) if raw is None else raw, self.header.seed, slot)

    def write(self, slot: int, buffers: Sequence[Any]) -> None:
        """Write a record into ``slot``, whose entry must be void."""
        files.write_whole(self._data_fd, buffers, slot * self.header.slot_bytes)

    def publish(self, slot: int, entry: TocEntry) -> None:
        """Make the record in ``slot`` visible."""
        files.write_whole(self._toc_fd, [entry.pack(self.header.seed, slot)], toc.HEADER_BYTES + toc.ENTRY_BYTES * slot)

    def void(self, slot: int) -> None:
        """Make ``slot`` hold nothing; its space may be rewritten from now on."""
        files.write_whole(self._toc_fd, [toc.VOID_ENTRY], toc.HEADER_BYTES + toc.ENTRY_BYTES * slot)

    def close(self) -> None:
        """Close the files. Maps live on while arrays over them do."""
        for fd in (self._data_fd, self._toc_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._toc_fd = -1

    def destroy(self) -> None:
        """Close the segment and delete it; first its name goes, so that no process opens half of it."""
        self.close()
        dead = self.directory.with_name(f".dead-{self.directory.name}")
        os.rename(self.directory, dead)
        shutil.rmtree(dead, ignore_errors=True)


def _ninja_files(header: TocHeader) -> dict[str, bytes]:
    """mmap-ninja's description of the data file; the shape is two u64, little-endian."""
    shape = header.slot_count.to_bytes(8, "little") + header.slot_bytes.to_bytes(8, "little")
    return {"type.ninja": b"numpy", "dtype.ninja": b"uint8", "order.ninja": b"C", "shape.ninja": shape}


def _read_small(path: Path) -> bytes | None:
    """The first bytes of one of mmap-ninja's files; None when it is gone."""
    try:
        with files.closing_fd(files.open_private(path, os.O_RDONLY)) as fd:
            return os.pread(fd, 64, 0)
    except FileNotFoundError:
        return None


def _allocate(path: Path, nbytes: int, head: bytes = b"") -> None:
    with files.closing_fd(files.open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)) as fd:
        os.posix_fallocate(fd, 0, nbytes)
        files.write_whole(fd, [head], 0)
