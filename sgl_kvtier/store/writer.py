"""A writer folder: the segments of one writing process, its lock, and its change feed."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

from sgl_kvtier.errors import DamagedError, StoreError
from sgl_kvtier.store import files
from sgl_kvtier.store.directory import segment_folder, segment_folders, segment_number
from sgl_kvtier.store.feed import WHOLE_SEGMENT, Feed
from sgl_kvtier.store.segment import Segment

logger = logging.getLogger(__name__)


class Writer:
    """One writer folder as this process sees it: its own after :meth:`try_own`, else read only."""

    def __init__(self, folder: Path) -> None:
        """Open the folder for reading; a damaged change feed is repaired, unless its owner lives.

        Raises:
            StoreError: Not a writer folder of this version.
            OSError: It cannot be opened.
        """
        files.check_private_directory(folder)
        self.folder = folder
        self.owned = False
        self._lock = files.FileLock(folder / "lock")
        try:
            self.feed = Feed(folder / "feed.bin", create=False)
        except DamagedError:
            self.feed = self._repaired_feed()
        #: Feed position up to which the process knows the folder.
        self.seen = 0
        self.segments: dict[int, Segment] = {}

    @classmethod
    def create(cls, folder: Path) -> Writer:
        """Make an empty, just created folder a writer folder, and own it."""
        Feed(folder / "feed.bin", create=True)
        writer = cls(folder)
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
        for path in self.folder.iterdir():
            if path.name.startswith((".new-", ".dead-")):
                shutil.rmtree(path, ignore_errors=True)
        # Segments that were opened for reading are opened again, for writing.
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        return True

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
                shutil.rmtree(folder, ignore_errors=True)
            return None
        except (OSError, StoreError) as error:
            logger.warning("segment %s is left out: %s", folder, error)
            return None
        self.segments[number] = segment
        return segment

    def new_segment(self, slot_bytes: int, slot_count: int) -> Segment:
        """Create a segment and tell the readers. The folder must be owned."""
        taken = [segment_number(folder) for folder in segment_folders(self.folder)]
        number = max(taken, default=-1) + 1
        segment = Segment.create(segment_folder(self.folder, number), slot_bytes, slot_count)
        self.segments[number] = segment
        self.feed.post(number, WHOLE_SEGMENT)
        return segment

    def delete_segment(self, segment: Segment) -> None:
        """Delete a segment and tell the readers. The folder must be owned."""
        number = segment_number(segment.directory)
        self.segments.pop(number, None)
        segment.destroy()
        self.feed.post(number, WHOLE_SEGMENT)

    def close(self) -> None:
        """Close all files and give up ownership."""
        for segment in self.segments.values():
            segment.close()
        self.segments.clear()
        self._lock.release()
        self.owned = False
