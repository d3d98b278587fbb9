"""A writer folder: the segments of one writing process, its lock, and its change feed."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from sgl_kvtier.errors import DamagedError, StoreError
from sgl_kvtier.store import files
from sgl_kvtier.store.directory import segment_folder, segment_folders, segment_number
from sgl_kvtier.store.feed import WHOLE_SEGMENT, Feed
from sgl_kvtier.store.segment import Segment

logger = logging.getLogger(__name__)

#: Names of segment folders that are not yet, or no longer, segments.
_LEFTOVERS = (".new-", ".dead-")


class Writer:
    """One writer folder as this process sees it: its own after :meth:`try_own`, else read only."""

    def __init__(self, folder: Path, *, durable: bool = False) -> None:
        """Open the folder for reading; a damaged change feed is repaired, unless its owner lives.

        With ``durable``, segments that are created here survive a power loss.

        Raises:
            StoreError: Not a writer folder of this version.
            OSError: It cannot be opened.
        """
        files.check_private_directory(folder)
        self.folder = folder
        self.owned = False
        self._durable = durable
        self._lock = files.FileLock(folder / "lock")
        try:
            self.feed = Feed(folder / "feed.bin", create=False)
        except DamagedError:
            self.feed = self._repaired_feed()
        #: Feed position up to which the process knows the folder.
        self.seen = 0
        self.segments: dict[int, Segment] = {}

    @classmethod
    def create(cls, folder: Path, *, durable: bool = False) -> Writer:
        """Make an empty, just created folder a writer folder, and own it."""
        Feed(folder / "feed.bin", create=True)
        writer = cls(folder, durable=durable)
        if not writer.try_own():
            raise StoreError(f"{folder}: just created, and already owned by another process")
        return writer

    def _repaired_feed(self) -> Feed:
        path = self.folder / "feed.bin"
        # The store's lock is held while a folder is created: with it, the feed is not just half written.
        with files.FileLock(self.folder.parent / "lock"):
            try:
                return Feed(path, create=False)
            except DamagedError:
                if not self._lock.try_acquire():
                    raise
            logger.warning("%s is damaged, and repaired", path)
            Feed.repair(path)
            self._lock.release()
            return Feed(path, create=False)

    def try_own(self) -> bool:
        """Become the one process that writes here; False while another one is. Leftovers of a crash are removed."""
        if self.owned:
            return True
        if not self._lock.try_acquire():
            return False
        self.owned = True
        self.feed.want = False
        self._remove_leftovers()
        # Segments that were opened for reading are opened again, for writing.
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        return True

    def reclaim(self) -> None:
        """Remove what a dead owner left half made: it takes space, and nobody counts it."""
        if not self.owned and self._has_leftovers() and self._lock.try_acquire():
            self._remove_leftovers()
            self._lock.release()

    def _has_leftovers(self) -> bool:
        return any(name.startswith(_LEFTOVERS) for name in os.listdir(self.folder))

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self.folder):
            if name.startswith(_LEFTOVERS):
                files.remove_tree(self.folder / name)
        for folder in segment_folders(self.folder):
            for name in os.listdir(folder):
                if name.startswith("."):
                    with contextlib.suppress(OSError):
                        os.unlink(folder / name)

    def is_live(self) -> bool:
        """Whether some process owns the folder at this moment."""
        if self.owned:
            return True
        if not self._lock.try_acquire():
            return True
        self._lock.release()
        return False

    def open_segments(self) -> list[Segment]:
        """Open the segments that are not open yet; returns those. A damaged one is logged and left out."""
        opened = []
        for folder in segment_folders(self.folder):
            number = segment_number(folder)
            if number not in self.segments and (segment := self.open_segment(number)) is not None:
                opened.append(segment)
        return opened

    def open_segment(self, number: int) -> Segment | None:
        """Open one segment; None when it is gone or unusable. The owner deletes a damaged one: its space is needed."""
        folder = segment_folder(self.folder, number)
        try:
            segment = Segment(folder, owned=self.owned)
        except FileNotFoundError:
            return None
        except DamagedError as error:
            logger.warning("segment %s is %s: %s", folder, "deleted" if self.owned else "left out", error)
            if self.owned:
                files.remove_tree(folder)
            return None
        except (OSError, StoreError) as error:
            logger.warning("segment %s is left out: %s", folder, error)
            return None
        self.segments[number] = segment
        return segment

    def new_segment(self, slot_bytes: int, slot_count: int) -> Segment:
        """Create a segment and tell the readers. The folder must be owned.

        Raises:
            StoreFullError: The file system has no room for it.
            OSError: It cannot be created for another reason.
        """
        taken = [segment_number(folder) for folder in segment_folders(self.folder)]
        number = max(taken, default=-1) + 1
        folder = segment_folder(self.folder, number)
        segment = Segment.create(folder, slot_bytes, slot_count, durable=self._durable)
        self.segments[number] = segment
        self.feed.post(number, [WHOLE_SEGMENT])
        return segment

    def reshape_segment(self, segment: Segment, slot_bytes: int, slot_count: int) -> Segment:
        """Make an owned segment that holds nothing one of other slots, and tell the readers.

        Raises:
            OSError: It failed; the segment is gone from ``segments``.
        """
        number = segment_number(segment.directory)
        self.segments.pop(number, None)
        try:
            reshaped = segment.reshape(slot_bytes, slot_count, durable=self._durable)
            self.segments[number] = reshaped
        finally:
            self.feed.post(number, [WHOLE_SEGMENT])
        return reshaped

    def delete_segment(self, segment: Segment) -> None:
        """Delete a segment and tell the readers. The folder must be owned.

        Raises:
            OSError: It cannot be deleted; it is gone from ``segments`` all the same.
        """
        number = segment_number(segment.directory)
        self.segments.pop(number, None)
        try:
            segment.destroy()
        finally:
            self.feed.post(number, [WHOLE_SEGMENT])

    def announce(self, segment: Segment, slots: Sequence[int]) -> None:
        """Tell the readers that ``slots`` of an owned segment changed."""
        self.feed.post(segment_number(segment.directory), slots)

    def close(self) -> None:
        """Close all files and give up ownership."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._lock.release()
        self.owned = False
