"""A store's folder: its format mark, its lock, its namespaces, and the space all of it takes.

::

    store.json              {"format": 2}
    lock                    taken for moments: choosing a writer folder, allocating a segment
    namespaces/<16 hex>.json  what a namespace digest stands for, and up to when it was cleared
    writer-0000/            one per writing process: lock, feed.bin, and segments seg-00000000/, ...
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from sgl_kvtier.errors import StoreError
from sgl_kvtier.identity import Namespace
from sgl_kvtier.store import files
from sgl_kvtier.store.toc import DISK_BLOCK_BYTES, SMALL_FILES, disk_bytes

FORMAT = 2

logger = logging.getLogger(__name__)

_TEMPORARY_NAME = re.compile(r"\.[^/]+\.json\.\d+")
_WRITER_NAME = re.compile(r"writer-\d{4}")
_SEGMENT_NAME = re.compile(r"seg-\d{8}")


class NamespaceRecord(msgspec.Struct, kw_only=True):
    """Content of a namespace's file: its full digest, what it stands for, and its last clearing."""

    digest: str
    namespace: Namespace
    cleared_us: int = 0


def namespace_prefix(digest: bytes) -> int:
    """The 8 bytes of a namespace digest that table of contents entries carry, as an integer."""
    return int.from_bytes(digest[:8], "little")


class StoreDirectory:
    """The folder of a store, opened and checked."""

    def __init__(self, root: Path, *, create: bool = True, durable: bool = False) -> None:
        """Open the store in ``root``, making a new one of an absent or empty folder where ``create`` says so.

        With ``durable``, what is written here survives a power loss once the call returns.

        Raises:
            StoreError: No store and not empty, a newer format, someone else's, open to others, or not writable.
        """
        self.root = root
        self._durable = durable
        self._namespaces = root / "namespaces"
        try:
            self._open(create)
        except PermissionError as error:
            raise StoreError(f"directory: cannot write to {root}: permission denied") from error
        except OSError as error:
            raise StoreError(f"directory: cannot use {root}: {error.strerror or error}") from error

    def _open(self, create: bool) -> None:
        mark = self.root / "store.json"
        if create and not os.path.lexists(self.root):
            self.root.parent.mkdir(parents=True, exist_ok=True)
            files.make_private_directory(self.root)
        if not os.path.lexists(mark):
            if not self.root.is_dir() or not create:
                raise StoreError(f"directory: {self.root} holds no store")
            if any(self.root.iterdir()) and not (self.root / "lock").exists():
                raise StoreError(f"directory: {self.root} is not empty and holds no store; name a new or empty folder")
            if os.lstat(self.root).st_uid == os.geteuid():
                os.chmod(self.root, 0o700)
        files.check_private_directory(self.root)
        if not os.access(self.root, os.W_OK | os.X_OK):
            raise StoreError(f"directory: cannot write to {self.root}: permission denied")
        with self.lock():
            if not os.path.lexists(mark):
                files.replace_file(mark, json.dumps({"format": FORMAT}).encode(), durable=self._durable)
            self._check_format(mark)
            files.make_private_directory(self._namespaces)
            files.check_private_directory(self._namespaces)
            if self._durable:
                files.sync_directory(self.root)
                files.sync_directory(self.root.parent)
            self._remove_temporaries()

    def _remove_temporaries(self) -> None:
        """Remove small files that a crash left half written; all are written under the lock, which is held."""
        for folder in (self.root, self._namespaces):
            for name in os.listdir(folder):
                if _TEMPORARY_NAME.fullmatch(name):
                    try:
                        os.unlink(folder / name)
                    except OSError as error:
                        logger.warning("%s cannot be deleted: %s", folder / name, error)

    @staticmethod
    def _check_format(mark: Path) -> None:
        with files.closing_fd(files.open_private(mark, os.O_RDONLY)) as fd:
            text = os.pread(fd, 4096, 0)
        try:
            found = json.loads(text)["format"]
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"directory: {mark} is not a store's format mark: {text[:80]!r}") from error
        if found != FORMAT:
            raise StoreError(
                f"directory: {mark.parent} is a store of format {found}, left untouched; this version of sgl_kvtier "
                f"reads format {FORMAT}: use a matching version, or another folder"
            )

    def lock(self) -> files.FileLock:
        """The lock over the folder as a whole, to be used as a context manager."""
        return files.FileLock(self.root / "lock")

    def changed_ns(self) -> int:
        """A number that changes when a writer folder comes or goes."""
        return os.stat(self.root).st_mtime_ns

    def cleared_ns(self) -> int:
        """A number that changes when a namespace is registered or cleared."""
        return os.stat(self._namespaces).st_mtime_ns

    def writer_folders(self) -> list[Path]:
        """All writer folders, in order of their names."""
        return sorted(path for path in self.root.iterdir() if _WRITER_NAME.fullmatch(path.name))

    def new_writer_folder(self) -> Path:
        """Create the writer folder with the lowest free number. Call under :meth:`lock`."""
        taken = {path.name for path in self.writer_folders()}
        name = next(name for number in range(10_000) if (name := f"writer-{number:04d}") not in taken)
        files.make_private_directory(self.root / name)
        if self._durable:
            files.sync_directory(self.root)
        return self.root / name

    def used_bytes(self) -> int:
        """Disk space of all files of the store, in bytes."""
        total = DISK_BLOCK_BYTES * (1 + len(os.listdir(self._namespaces)))
        for writer in self.writer_folders():
            total += _disk_bytes(writer / "feed.bin")
            for folder in segment_folders(writer):
                total += _disk_bytes(folder / "data.ninja") + _disk_bytes(folder / "toc.bin")
                total += SMALL_FILES * DISK_BLOCK_BYTES
        return total

    def free_bytes(self) -> int:
        """Space on the file system that this user may still write, in bytes."""
        info = os.statvfs(self.root)
        return info.f_bavail * info.f_frsize

    def register(self, namespace: Namespace) -> bytes:
        """Record what ``namespace``'s digest stands for; returns the digest.

        Raises:
            StoreError: Another namespace has the same first 8 digest bytes; entries could not tell them apart.
        """
        digest = namespace.digest()
        path = self._namespace_path(digest)
        with self.lock():
            known = self._read_namespace(path)
            if known is None:
                record = NamespaceRecord(digest=digest.hex(), namespace=namespace)
                files.replace_file(path, msgspec.json.encode(record), durable=self._durable)
            elif known.digest != digest.hex():
                raise StoreError(f"{path}: two namespaces share their first 8 digest bytes; clear one of them")
        return digest

    def mark_cleared(self, digest: bytes, cleared_us: int) -> None:
        """Record that all pages of the namespace written up to ``cleared_us`` are forgotten."""
        path = self._namespace_path(digest)
        with self.lock():
            known = self._read_namespace(path)
            if known is not None:
                known.cleared_us = cleared_us
                files.replace_file(path, msgspec.json.encode(known), durable=self._durable)

    def namespaces(self) -> dict[int, NamespaceRecord]:
        """All namespaces, by the 8-byte prefix of their digests."""
        found = {}
        for path in sorted(self._namespaces.glob("*.json")):
            record = self._read_namespace(path)
            if record is not None:
                found[namespace_prefix(bytes.fromhex(record.digest))] = record
        return found

    def _namespace_path(self, digest: bytes) -> Path:
        return self._namespaces / f"{digest[:8].hex()}.json"

    @staticmethod
    def _read_namespace(path: Path) -> NamespaceRecord | None:
        """The record in ``path``; None when there is none or it is not one, in which case it is written anew."""
        try:
            with files.closing_fd(files.open_private(path, os.O_RDONLY)) as fd:
                return msgspec.json.decode(os.pread(fd, 1 << 20, 0), type=NamespaceRecord)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, ValueError):
            return None


def _disk_bytes(path: Path) -> int:
    try:
        return disk_bytes(os.lstat(path).st_size)
    except FileNotFoundError:  # deleted by its owner meanwhile
        return 0


def segment_folders(writer: Path) -> Iterator[Path]:
    """The segments of a writer folder, in order of their numbers."""
    try:
        names = sorted(os.listdir(writer))
    except FileNotFoundError:
        return
    yield from (writer / name for name in names if _SEGMENT_NAME.fullmatch(name))


def segment_folder(writer: Path, number: int) -> Path:
    """Where segment ``number`` of a writer lies."""
    return writer / f"seg-{number:08d}"


def segment_number(folder: Path) -> int:
    """Inverse of :func:`segment_folder`."""
    return int(folder.name.removeprefix("seg-"))
