"""The SSD tier: pages in host memory on one side, records in segment files on the other.

Data goes page -> codec -> store and back, without a copy of the raw page in between: kernels split planes out of
host memory, and merge them back into it straight from the segment's map. A batch is worked on by several threads:
each encodes and writes pages of its own, and the pages become visible together, in the order of their chain. A batch
that is read is taken in windows from its first page on; within a window pages are read in the order in which they lie,
from the map those that are in memory, by direct I/O in one piece those that lie together on disk.
"""

from __future__ import annotations

import logging
import mmap
import threading
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sgl_kvtier import metrics
from sgl_kvtier.codec import CodecSet
from sgl_kvtier.codec.base import Bytes
from sgl_kvtier.config import MIB, TierConfig
from sgl_kvtier.errors import RecordError, StoreFullError
from sgl_kvtier.identity import Words, index_digests, key_words
from sgl_kvtier.page import PageView
from sgl_kvtier.parallel import Workers
from sgl_kvtier.store import ChainPlace, PendingRecord, Place, RecordKey, Store
from sgl_kvtier.store.segment import DIRECT_ALIGNMENT
from sgl_kvtier.store.toc import UNKNOWN_POSITION

logger = logging.getLogger(__name__)

#: Most that one direct read brings in: enough for the disk's full rate, little enough to stay in the cache.
_DIRECT_READ_BYTES = 4 * MIB

#: Pages of a batch that each thread is given per window, in bytes; a deadline is kept from window to window.
_WINDOW_BYTES = 8 * MIB

#: Pages that a thread takes at a time are at least this large together: handing out work costs time too.
_TASK_BYTES = 256 << 10


class NamedPages(NamedTuple):
    """Names of a batch of pages of one namespace: their digests uint64[n, 2], and one name each."""

    digests: Words
    names: tuple[RecordKey, ...]

    @classmethod
    def of(cls, namespace: bytes, keys: Sequence[str]) -> NamedPages:
        """The pages under ``keys`` in the namespace with digest ``namespace``."""
        words = key_words(keys)
        digests, raw = index_digests(namespace, words), words.tobytes()
        size = len(raw) // max(1, len(keys))
        return cls(
            digests,
            tuple(RecordKey(namespace, raw[i * size : (i + 1) * size], digest) for i, digest in enumerate(digests)),
        )


class Chain(NamedTuple):
    """Where a batch of consecutive pages stands in its chain.

    Attributes:
        position: Number of pages before the first, or ``UNKNOWN_POSITION``.
        before: Key of the page before the first, when known.
    """

    position: int = UNKNOWN_POSITION
    before: str | None = None

    @classmethod
    def after(cls, prefix: Sequence[str] | None) -> Chain:
        """A batch that follows the pages with keys ``prefix``; None when they are not known."""
        if prefix is None:
            return cls()
        return cls(len(prefix), prefix[-1]) if prefix else cls(0)


class SsdTier:
    """Pages on local disk, compressed. All methods may be called from several threads at once."""

    name = "ssd"

    def __init__(self, store: Store, config: TierConfig) -> None:
        """A tier over ``store`` that writes with the configured codec."""
        self.store = store
        self.codecs = CodecSet(config.codec, config.zstd_level)
        self._deadline_s = config.deadline_s
        self._threads = config.threads
        self._workers = Workers(config.threads)
        self._buffers = _DirectBuffers()
        self._full_was_logged = False

    def close(self) -> None:
        """Close the store. Calls after it find nothing and store nothing."""
        self.store.close()
        self._workers.close()

    def leading_run(self, namespace: bytes, keys: Sequence[str]) -> int:
        """How many of ``keys`` are stored before the first that is not; those are leased, which eviction respects."""
        return self.store.leading_run(index_digests(namespace, key_words(keys))) if keys else 0

    def present(self, namespace: bytes, keys: Sequence[str]) -> list[bool]:
        """Which of ``keys`` are stored; those are leased."""
        if not keys:
            return []
        found: list[bool] = self.store.present(index_digests(namespace, key_words(keys))).tolist()
        return found

    # ------------------------------------------------------------------ put

    def put(
        self,
        namespace: bytes,
        keys: Sequence[str],
        pages: Sequence[PageView],
        chain: Chain | None = None,
    ) -> list[bool]:
        """Store ``pages`` under ``keys``; one bool each: stored now or before.

        Args:
            namespace: Digest of the namespace.
            keys: Page keys.
            pages: Where the pages lie in host memory.
            chain: Where the pages stand, if each of them follows the one before it; None if they have no such order.
                A page is then not stored where the one before it could not be: nobody would find it.
        """
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        if not keys:
            return []
        batch = NamedPages.of(namespace, keys)
        places = _chain_places(namespace, batch, chain)
        stored = self.store.contains(batch.digests).tolist()
        if any(stored):  # storing a page again is a use of it
            self.store.note_use([place for place in self.store.find(batch.digests[stored]) if place is not None])
            metrics.PAGES.labels("put", "present").inc(sum(stored))
        identities = [digest.tobytes() for digest in batch.digests]
        first_of: dict[bytes, int] = {}
        todo = [n for n, there in enumerate(stored) if first_of.setdefault(identities[n], n) == n and not there]
        # Records become visible a window at a time: a large batch need not be written whole before its first page is.
        broken = len(keys)
        for window in _split(todo, pages, _WINDOW_BYTES * self._threads):
            numbers = [number for number in window if number < broken]
            written = self._write(numbers, batch, places, pages)
            if chain is not None:
                broken = min([broken, *(number for number in numbers if number not in written)])
            self.store.abandon([record for number, record in written.items() if number >= broken])
            kept = [number for number in numbers if number in written and number < broken]
            if self._publish([written[number] for number in kept]):
                for number in kept:
                    stored[number] = True
                metrics.PAGE_BYTES.labels("put").inc(sum(pages[number].nbytes for number in kept))
            elif chain is not None:
                broken = min([broken, *kept])
        return [stored[first_of[identity]] for identity in identities]

    def _write(
        self, numbers: Sequence[int], batch: NamedPages, places: Sequence[ChainPlace], pages: Sequence[PageView]
    ) -> dict[int, PendingRecord]:
        """Encode and write the pages with ``numbers``; those that could be written, in no particular order."""
        written: dict[int, PendingRecord] = {}

        def work(task: Sequence[int]) -> None:
            for number in task:
                page = pages[number]
                encoded = self.codecs.encode(page)
                try:
                    written[number] = self.store.write(batch.names[number], encoded, page.nbytes, places[number])
                except StoreFullError as error:
                    metrics.PAGES.labels("put", "full").inc()
                    if not self._full_was_logged:
                        self._full_was_logged = True
                        logger.warning("pages are not stored: %s", error)
                except OSError as error:
                    metrics.PAGES.labels("put", "failed").inc()
                    logger.warning("a page could not be written: %s", error)
                else:
                    metrics.RECORD_BYTES.labels("put").inc(encoded.nbytes)

        try:
            self._workers.run(work, list(_split(numbers, pages, _TASK_BYTES)))
        except BaseException:
            self.store.abandon(list(written.values()))
            raise
        return written

    def _publish(self, records: Sequence[PendingRecord]) -> bool:
        if not records:
            return True
        try:
            self.store.publish(records)
        except OSError as error:
            metrics.PAGES.labels("put", "failed").inc(len(records))
            logger.warning("%d pages could not be stored: %s", len(records), error)
            return False
        metrics.PAGES.labels("put", "stored").inc(len(records))
        return True

    # ------------------------------------------------------------------ get

    def get(self, namespace: bytes, keys: Sequence[str], pages: Sequence[PageView]) -> list[bool]:
        """Fill ``pages`` in host memory with what is stored under ``keys``; one bool each.

        A page that answers False may have been overwritten with anything: its content is undefined. When the
        configured deadline has passed, the pages up to the first that is not loaded yet are all that are answered.
        """
        if len(keys) != len(pages):
            raise ValueError(f"{len(keys)} keys for {len(pages)} pages")
        if not keys:
            return []
        end = time.monotonic() + self._deadline_s if self._deadline_s else float("inf")
        batch = NamedPages.of(namespace, keys)
        places = self.store.find(batch.digests)
        loaded = [False] * len(keys)
        late = len(keys)
        found = [number for number, place in enumerate(places) if place is not None]
        for window in _split(found, pages, _WINDOW_BYTES * self._threads):
            reader = _WindowReader(self, batch, places, pages, end)
            self._workers.run(reader.load, reader.plan(window))
            for number in reader.loaded:
                loaded[number] = True
            if reader.late:
                late = min(reader.late)
                break
        loaded[late:] = [False] * (len(keys) - late)
        used = [place for place, now in zip(places, loaded, strict=True) if now and place is not None]
        self.store.note_use(used)
        metrics.PAGES.labels("get", "hit").inc(len(used))
        metrics.PAGES.labels("get", "late" if late < len(keys) else "miss").inc(len(keys) - len(used))
        metrics.PAGE_BYTES.labels("get").inc(sum(p.nbytes for p, now in zip(pages, loaded, strict=True) if now))
        return loaded

    def load(
        self, name: RecordKey, place: Place, page: PageView, raw: bytes | None = None, content: Bytes | None = None
    ) -> bool:
        """Fill ``page`` from the record in ``place``; see :meth:`Store.record` for the rest."""
        record = None
        try:
            record = self.store.record(name, place, raw, content)
            if record is not None:
                self.codecs.decode(record.header, record.payload, page)
        except RecordError as error:
            # A record that was rewritten under the decoder is gone, not damaged.
            if record is None or record.intact():
                self.store.drop(name, place)
                metrics.PAGES.labels("get", "damaged").inc()
                logger.warning("a stored page is dropped: %s", error)
            return False
        if record is None or not record.intact():
            return False
        metrics.RECORD_BYTES.labels("get").inc(record.payload.size)
        return True

    def direct_buffer(self) -> memoryview:
        """Memory of this thread for direct reads."""
        return self._buffers.take()


class _DirectBuffers(threading.local):
    """One buffer per thread, aligned as direct I/O wants it."""

    def __init__(self) -> None:
        self._buffer: memoryview | None = None

    def take(self) -> memoryview:
        if self._buffer is None:
            self._buffer = memoryview(mmap.mmap(-1, _DIRECT_READ_BYTES + 2 * DIRECT_ALIGNMENT))
        return self._buffer


class _WindowReader:
    """Reads some pages of a batch, in tasks for several threads."""

    def __init__(
        self,
        tier: SsdTier,
        batch: NamedPages,
        places: Sequence[Place | None],
        pages: Sequence[PageView],
        end: float,
    ) -> None:
        self._tier = tier
        self._batch = batch
        self._places = places
        self._pages = pages
        self._end = end
        #: Numbers of the pages that were loaded, and of those that there was no time for.
        self.loaded: list[int] = []
        self.late: list[int] = []

    def plan(self, window: Sequence[int]) -> list[_ReadTask]:
        """Tasks for the pages with the numbers in ``window``, in the order in which they lie."""
        places = self._places
        ordered = sorted(window, key=lambda number: (places[number].segment.handle, places[number].slot))  # type: ignore[union-attr]
        tasks: list[_ReadTask] = []
        held = 0
        for number in ordered:
            place = places[number]
            assert place is not None  # plan is given pages that were found
            slot_bytes = place.segment.header.slot_bytes
            direct = not place.segment.is_resident(place.slot)
            last = tasks[-1] if tasks else None
            joins = last is not None and last.direct == direct
            if joins and direct:
                before = places[last.numbers[-1]]  # type: ignore[union-attr]
                joins = (
                    before is not None
                    and before.segment is place.segment
                    and before.slot + 1 == place.slot
                    and held + slot_bytes <= _DIRECT_READ_BYTES
                )
            elif joins:
                joins = held + slot_bytes <= _TASK_BYTES
            if joins and last is not None:
                last.numbers.append(number)
                held += slot_bytes
            else:
                tasks.append(_ReadTask(direct and slot_bytes <= _DIRECT_READ_BYTES, [number]))
                held = slot_bytes
        return tasks

    def load(self, task: _ReadTask) -> None:
        """Read the pages of one task."""
        if time.monotonic() > self._end:
            self.late.extend(task.numbers)
        elif task.direct:
            self._load_direct(task.numbers)
        else:
            self._load_mapped(task.numbers)

    def _load_mapped(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            place = self._places[number]
            if place is not None and self._tier.load(self._batch.names[number], place, self._pages[number]):
                self.loaded.append(number)

    def _load_direct(self, numbers: Sequence[int]) -> None:
        places = [place for number in numbers if (place := self._places[number]) is not None]
        segment, first = places[0]
        # The entries first: an entry that is the same afterwards vouches for what was read in between.
        raws = [segment.raw_entry(place.slot) for place in places]
        try:
            contents = segment.read_direct(first, len(places), self._tier.direct_buffer())
        except OSError as error:
            logger.warning("%d pages cannot be read: %s", len(places), error)
            return
        if contents is None:
            self._load_mapped(numbers)
            return
        for number, place, raw, content in zip(numbers, places, raws, contents, strict=True):
            if self._tier.load(self._batch.names[number], place, self._pages[number], raw, content):
                self.loaded.append(number)


class _ReadTask(NamedTuple):
    """Pages that one thread reads: neighbours on disk by direct I/O, or any through the map."""

    direct: bool
    numbers: list[int]


def _chain_places(namespace: bytes, batch: NamedPages, chain: Chain | None) -> list[ChainPlace]:
    if chain is None:
        return [ChainPlace()] * len(batch.names)
    before = int(NamedPages.of(namespace, [chain.before]).digests[0, 0]) if chain.before is not None else 0
    parents = [before, *batch.digests[:-1, 0].tolist()]
    # Without a known beginning, positions still tell the order within the batch.
    first = 0 if chain.position == UNKNOWN_POSITION else chain.position
    places = [ChainPlace(first + number, parent) for number, parent in enumerate(parents)]
    if chain.position == UNKNOWN_POSITION and chain.before is None:
        places[0] = ChainPlace()
    return places


def _split(numbers: Sequence[int], pages: Sequence[PageView], nbytes: int) -> Iterator[list[int]]:
    """Cut ``numbers`` into lists of pages of about ``nbytes`` together, at least one in each."""
    part: list[int] = []
    held = 0
    for number in numbers:
        part.append(number)
        held += pages[number].nbytes
        if held >= nbytes:
            yield part
            part, held = [], 0
    if part:
        yield part
