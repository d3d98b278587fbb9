"""File system primitives of the store: private files, whole writes, allocation, locks.

Directories are created 0700 and files 0600; symbolic links are refused. Every function raises ``OSError`` as the
system gives it unless its docstring says otherwise.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from sgl_kvtier.errors import DamagedError, StoreError
from sgl_kvtier_kernels import bus_errors

logger = logging.getLogger(__name__)

#: Buffers in one ``pwritev`` call: the kernel's limit.
_IOV_MAX = 1024

_PRIVATE_DIRECTORY = 0o700
_PRIVATE_FILE = 0o600


def make_private_directory(path: Path) -> None:
    """Create ``path`` with mode 0700; an existing one is left as it is."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, _PRIVATE_DIRECTORY)


def check_private_directory(path: Path) -> None:
    """Check that ``path`` is a directory of ours that nobody else can enter.

    Raises:
        StoreError: It is a symbolic link, no directory, someone else's, or open to others.
    """
    info = os.lstat(path)
    if not stat.S_ISDIR(info.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(info.st_mode) else "not a directory"
        raise StoreError(f"{path}: is {kind}; the store wants a directory of its own")
    if info.st_uid != os.geteuid():
        raise StoreError(f"{path}: belongs to user {info.st_uid}, but this process runs as user {os.geteuid()}")
    if info.st_mode & 0o077:
        raise StoreError(f"{path}: others may enter it (mode {stat.S_IMODE(info.st_mode):04o}); run chmod 700 {path}")


def open_private(path: Path, flags: int) -> int:
    """Open a file of the store, creating it 0600 where ``flags`` say so.

    Raises:
        StoreError: It is a symbolic link, or no regular file of ours.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, _PRIVATE_FILE)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise StoreError(f"{path}: is a symbolic link; the store does not follow links") from error
        raise
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
        os.close(fd)
        raise StoreError(f"{path}: is not a regular file of user {os.geteuid()}")
    return fd


def write_whole(fd: int, buffers: Sequence[Any], offset: int) -> None:
    """Write all of ``buffers`` one after the other at ``offset``, however many calls it takes."""
    pending = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
    while pending:
        written = os.pwritev(fd, pending[:_IOV_MAX], offset)
        if written == 0:
            raise OSError(errno.EIO, "write of 0 bytes")
        offset += written
        while pending and written >= len(pending[0]):
            written -= len(pending.pop(0))
        if written:
            pending[0] = pending[0][written:]


def replace_file(path: Path, data: bytes, *, durable: bool = False) -> None:
    """Write a small file so that a reader sees either the old or the new content; after a power loss too, if durable.

    A crash leaves a temporary file behind, whose name begins with a dot and the file's own name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with closing_fd(open_private(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)) as fd:
            write_whole(fd, [data], 0)
            if durable:
                os.fdatasync(fd)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in the folder ``path`` durable."""
    with closing_fd(os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        os.fsync(fd)


def remove_tree(path: Path) -> None:
    """Delete a folder of files as far as it can be deleted; what is left is logged, and costs space only."""
    try:
        for name in os.listdir(path):
            os.unlink(path / name)
        os.rmdir(path)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", path, error)


def map_shared(fd: int, dtype: npt.DTypeLike, count: int, offset: int, *, writable: bool) -> npt.NDArray[Any]:
    """A plain array over ``count`` items of the open file, shared with all who map it; outlives ``fd``.

    Should the file be cut off while it is mapped, what is missing reads as zeros.

    Raises:
        DamagedError: The file is shorter than that: a map past its end would fault on access.
    """
    needed = offset + count * np.dtype(dtype).itemsize
    if os.fstat(fd).st_size < needed:
        raise DamagedError(f"file of {os.fstat(fd).st_size} bytes; its header promises at least {needed}")
    with os.fdopen(os.dup(fd), "r+b" if writable else "rb") as stream:
        mapped = np.memmap(stream, dtype, "r+" if writable else "r", offset, (count,))
    return guarded(mapped)


def guarded(mapped: np.memmap[Any, Any]) -> npt.NDArray[Any]:
    """The same memory as a plain array, watched for bus errors for as long as it is mapped."""
    bus_errors.watch(mapped._mmap, mapped.ctypes.data, mapped.nbytes)  # type: ignore[attr-defined]
    return mapped.view(np.ndarray)


class FileLock:
    """An exclusive ``flock`` on a file, held until :meth:`release` or the end of the process.

    A forked child would keep the lock alive after its parent's death, so children close theirs at once.
    """

    _held: ClassVar[weakref.WeakSet[FileLock]] = weakref.WeakSet()

    def __init__(self, path: Path) -> None:
        """A lock on ``path``, not yet taken."""
        self._path = path
        self._fd = -1

    def try_acquire(self) -> bool:
        """Take the lock if nobody holds it."""
        return self._acquire(fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _acquire(self, operation: int) -> bool:
        fd = open_private(self._path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(fd, operation)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        FileLock._held.add(self)
        return True

    def release(self) -> None:
        """Give the lock back; does nothing when it is not held."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        FileLock._held.discard(self)

    def __enter__(self) -> FileLock:
        """Wait for the lock."""
        self._acquire(fcntl.LOCK_EX)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.release()

    @classmethod
    def _release_in_child(cls) -> None:
        for lock in list(cls._held):
            lock.release()


os.register_at_fork(after_in_child=FileLock._release_in_child)


@contextlib.contextmanager
def closing_fd(fd: int) -> Iterator[int]:
    """Close ``fd`` when the block ends."""
    try:
        yield fd
    finally:
        os.close(fd)
