"""One segment: a directory that holds a valid mmap-ninja NumPy memory map of slots, and its table of contents.

``data.ninja`` is ``uint8[slot_count, slot_bytes]``; ``mmap_ninja.numpy.open_existing(directory)`` opens it. Data is
written with ``pwritev`` into preallocated space, never through a map (a full disk under a map is SIGBUS, under a
write it is ENOSPC), and read through the map.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mmap_ninja.numpy
import numpy as np
import numpy.typing as npt

from sgl_kvtier.codec.base import HEADER_BYTES
from sgl_kvtier.errors import DamagedError, StoreError, StoreFullError
from sgl_kvtier.store import files, toc
from sgl_kvtier.store.toc import TocEntry, TocHeader

#: Slots are placed on multiples of this, so that direct I/O can read them.
SLOT_ALIGNMENT = 512

#: Direct reads begin and end on multiples of this: no disk has larger blocks.
DIRECT_ALIGNMENT = 4096

_libc = ctypes.CDLL(None)
_mincore = _libc.mincore
_mincore.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
_mincore.restype = ctypes.c_int


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
        #: Whether anything was written since the last :meth:`sync_data` and :meth:`sync_toc`.
        self.data_dirty = self.toc_dirty = False
        self._data_fd = self._toc_fd = -1
        files.check_private_directory(directory)
        self._toc_fd = files.open_private(directory / "toc.bin", os.O_RDWR)
        try:
            self.header = TocHeader.unpack(os.pread(self._toc_fd, toc.HEADER_BYTES, 0))
            count = self.header.slot_count
            table = files.map_shared(self._toc_fd, np.uint8, self.header.toc_bytes, 0, writable=True)
            parts, start = [], toc.HEADER_BYTES
            for item_bytes in (toc.ENTRY_BYTES, toc.LAST_USE_BYTES, toc.LEASE_BYTES, toc.HEAT_BYTES):
                parts.append(table[start : start + item_bytes * count])
                start += item_bytes * count
            self._entry_bytes = parts[0].reshape(count, toc.ENTRY_BYTES)
            self._entry_bytes.flags.writeable = False
            self.entries = self._entry_bytes.reshape(-1).view(toc.ENTRY_DTYPE)
            #: Of each slot: its last use in microseconds since the epoch, until when it is promised to a reader in
            #: seconds since the epoch, and what eviction remembers. Any process may write them, none relies on them.
            self.last_use_us = parts[1].view("<u8")
            self.lease_s = parts[2].view("<u4")
            self.heat = parts[3]
            #: Which slots hold a record, for the owner, who alone fills and voids them. Kept by the store.
            self.used = np.zeros(count, bool)
            self._data_fd = files.open_private(directory / "data.ninja", os.O_RDWR if owned else os.O_RDONLY)
            self.file_bytes = os.fstat(self._data_fd).st_size
            if self.file_bytes < self.header.data_bytes:
                raise DamagedError(f"{directory}: data.ninja is cut off")
            for name, content in _ninja_files(self.header).items():
                if _read_small(directory / name) != content:
                    raise DamagedError(f"{directory}: {name} and the table of contents disagree")
            self.data: npt.NDArray[np.uint8] = files.guarded(mmap_ninja.numpy.open_existing(directory, mode="r"))
            self._data_address = self.data.ctypes.data
            self._payload_bytes = self.entries["payload_bytes"]
            if not owned:
                self.close()  # the maps are all that a reader needs
        except (OSError, StoreError):
            self.close()
            raise

    @classmethod
    def create(cls, directory: Path, slot_bytes: int, slot_count: int, *, durable: bool = False) -> Segment:
        """Create a segment with all its space allocated, then make it visible under ``directory``.

        Raises:
            StoreFullError: The file system has no room for it.
            OSError: It cannot be created for another reason.
        """
        header = TocHeader(slot_bytes, slot_count, os.urandom(16))
        temporary = directory.with_name(f".new-{directory.name}")
        try:
            files.remove_tree(temporary)
            files.make_private_directory(temporary)
            _allocate(temporary / "data.ninja", header.data_bytes, durable=durable)
            _allocate(temporary / "toc.bin", header.toc_bytes, header.pack(), durable=durable)
            for name, content in _ninja_files(header).items():
                files.replace_file(temporary / name, content, durable=durable)
            os.rename(temporary, directory)
            if durable:
                files.sync_directory(directory.parent)
        except OSError as error:
            files.remove_tree(temporary)
            _raise_full(error, header, directory)
            raise
        return cls(directory, owned=True)

    def reshape(self, slot_bytes: int, slot_count: int, *, durable: bool = False) -> Segment:
        """Make the segment, whose entries must all be void, one of other slots; returns it, opened anew.

        The data file stays as it is: its blocks are allocated, written and in memory, which new ones would not be.

        Raises:
            OSError: It failed; the segment is closed, and as it was or damaged.
        """
        header = TocHeader(slot_bytes, slot_count, os.urandom(16))
        self.close()
        temporary = self.directory / ".toc.bin.new"
        try:
            _allocate(temporary, header.toc_bytes, header.pack(), durable=durable)
            # Between the two renames the files disagree: whoever opens the segment then takes it for damaged.
            os.replace(temporary, self.directory / "toc.bin")
            files.replace_file(self.directory / "shape.ninja", _ninja_files(header)["shape.ninja"], durable=durable)
        except OSError as error:
            _raise_full(error, header, self.directory)
            raise
        return Segment(self.directory, owned=True)

    @property
    def disk_bytes(self) -> int:
        """Disk space of the segment in bytes."""
        return self.header.disk_bytes - toc.disk_bytes(self.header.data_bytes) + toc.disk_bytes(self.file_bytes)

    def live_entries(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[Any]]:
        """Slots that hold a record, in rising order, and their entries ``ENTRY_DTYPE[n]`` as of one moment."""
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
        self.data_dirty = True
        files.write_whole(self._data_fd, buffers, slot * self.header.slot_bytes)

    def publish(self, slots: Sequence[int], entries: Sequence[TocEntry]) -> None:
        """Make the records in ``slots`` visible."""
        self._write_entries(
            slots, [entry.pack(self.header.seed, slot) for slot, entry in zip(slots, entries, strict=True)]
        )

    def void(self, slots: Sequence[int]) -> None:
        """Make ``slots`` hold nothing; their space may be rewritten from now on."""
        self._write_entries(slots, [toc.VOID_ENTRY] * len(slots))

    def _write_entries(self, slots: Sequence[int], packed: Sequence[bytes]) -> None:
        """Write entries, those of neighbouring slots with one call."""
        self.toc_dirty = True
        start = 0
        for end in range(1, len(slots) + 1):
            if end == len(slots) or slots[end] != slots[end - 1] + 1:
                files.write_whole(self._toc_fd, packed[start:end], toc.HEADER_BYTES + toc.ENTRY_BYTES * slots[start])
                start = end

    def sync_data(self) -> None:
        """Make the records written so far durable."""
        if self.data_dirty:
            self.data_dirty = False
            try:
                os.fdatasync(self._data_fd)
            except OSError:
                self.data_dirty = True
                raise

    def sync_toc(self) -> None:
        """Make the entries written so far durable."""
        if self.toc_dirty:
            self.toc_dirty = False
            try:
                os.fdatasync(self._toc_fd)
            except OSError:
                self.toc_dirty = True
                raise

    def is_resident(self, slot: int) -> bool:
        """Whether the record in ``slot`` is in memory, so that the map reads it without the disk."""
        # The rest of the slot was never written, or is what a longer record left.
        nbytes = min(HEADER_BYTES + int(self._payload_bytes[slot]), self.header.slot_bytes)
        start = self._data_address + slot * self.header.slot_bytes
        first = start & -mmap.PAGESIZE
        pages = -(-(start + nbytes - first) // mmap.PAGESIZE)
        found = np.empty(pages, np.uint8)
        if _mincore(first, pages * mmap.PAGESIZE, found.ctypes.data) != 0:
            return True  # it cannot be said: the map gives the right bytes in any case
        return bool((found & 1).all())

    def read_direct(self, first_slot: int, slot_count: int, buffer: memoryview) -> npt.NDArray[np.uint8] | None:
        """Read neighbouring slots past the page cache.

        Args:
            first_slot, slot_count: The slots.
            buffer: Memory on a :data:`DIRECT_ALIGNMENT` boundary, at least 2 x :data:`DIRECT_ALIGNMENT` larger
                than the slots.

        Returns:
            ``uint8[slot_count, slot_bytes]`` in ``buffer``, or None where the file system has no direct I/O for it, or
            the file is gone: the map still reads it.

        Raises:
            OSError: The disk cannot be read.
        """
        slot_bytes = self.header.slot_bytes
        start, nbytes = first_slot * slot_bytes, slot_count * slot_bytes
        first = start & -DIRECT_ALIGNMENT
        wanted = start + nbytes - first
        try:
            with files.closing_fd(files.open_private(self.directory / "data.ninja", os.O_RDONLY | os.O_DIRECT)) as fd:
                read = 0
                while read < wanted:
                    rest = -(-(wanted - read) // DIRECT_ALIGNMENT) * DIRECT_ALIGNMENT
                    count = os.preadv(fd, [buffer[read : read + rest]], first + read)
                    read += count
                    if read < wanted and (count == 0 or count % DIRECT_ALIGNMENT):
                        return None
        except (FileNotFoundError, StoreError):
            return None
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return None
            raise
        return np.frombuffer(buffer, np.uint8, nbytes, start - first).reshape(slot_count, slot_bytes)

    def is_cut_off(self) -> bool:
        """Whether the files are shorter than they were, or gone: what the maps show then is not what was written."""
        try:
            data, table = (os.stat(self.directory / name).st_size for name in ("data.ninja", "toc.bin"))
        except FileNotFoundError:
            return not self.owned  # a reader's segment was deleted; nobody deletes the owner's
        return data < self.header.data_bytes or table < self.header.toc_bytes

    def close(self) -> None:
        """Close the files. Maps live on while arrays over them do."""
        for fd in (self._data_fd, self._toc_fd):
            if fd >= 0:
                os.close(fd)
        self._data_fd = self._toc_fd = -1

    def destroy(self) -> None:
        """Close the segment and delete it; first its name goes, so that no process opens half of it.

        Raises:
            OSError: Its name cannot be removed; the segment is closed, and still there.
        """
        self.close()
        dead = self.directory.with_name(f".dead-{self.directory.name}")
        files.remove_tree(dead)
        os.rename(self.directory, dead)
        files.remove_tree(dead)


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


def _allocate(path: Path, nbytes: int, head: bytes = b"", *, durable: bool) -> None:
    with files.closing_fd(files.open_private(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)) as fd:
        os.posix_fallocate(fd, 0, nbytes)
        files.write_whole(fd, [head], 0)
        if durable:
            os.fsync(fd)


def _raise_full(error: OSError, header: TocHeader, directory: Path) -> None:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        raise StoreFullError(f"no room for a segment of {header.data_bytes} bytes in {directory.parent}") from error
