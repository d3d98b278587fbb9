"""The SSD tier: pages in host memory on one side, records in segment files on the other.

Data goes page -> codec -> store and back, without a copy of the raw page in between: kernels split planes out of
host memory, and merge them back into it straight from the segment's map.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

from sgl_kvtier import metrics
from sgl_kvtier.codec import CodecSet
from sgl_kvtier.config import TierConfig
from sgl_kvtier.errors import RecordError, StoreFullError
from sgl_kvtier.identity import index_digests, key_bytes
from sgl_kvtier.page import PageView
from sgl_kvtier.store import ChainPlace, RecordKey, Store

logger = logging.getLogger(__name__)


class NamedPages(NamedTuple):
    """Names of a batch of pages of one namespace, one row each."""

    names: tuple[RecordKey, ...]

    @classmethod
    def of(cls, namespace: bytes, keys: Sequence[str]) -> NamedPages:
        """The pages under ``keys`` in the namespace with digest ``namespace``."""
        raw = [key_bytes(key) for key in keys]
        digests = index_digests(namespace, raw)
        return cls(tuple(RecordKey(namespace, key, digest) for key, digest in zip(raw, digests, strict=True)))


class SsdTier:
    """Pages on local disk, compressed. All methods may be called from several threads at once."""

    name = "ssd"

    def __init__(self, store: Store, config: TierConfig) -> None:
        """A tier over ``store`` that writes with the configured codec."""
        self.store = store
        self.codecs = CodecSet(config.codec, config.zstd_level)
        self._full_was_logged = False

    def leading_run(self, namespace: bytes, keys: Sequence[str]) -> int:
        """How many of ``keys`` are stored before the first that is not."""
        return self.store.leading_run(index_digests(namespace, [key_bytes(key) for key in keys])) if keys else 0

    def present(self, namespace: bytes, keys: Sequence[str]) -> list[bool]:
        """Which of ``keys`` are stored."""
        if not keys:
            return []
        found: list[bool] = self.store.present(index_digests(namespace, [key_bytes(key) for key in keys])).tolist()
        return found

    def put(
        self, namespace: bytes, keys: Sequence[str], pages: Sequence[PageView], prefix: Sequence[str] | None = None
    ) -> list[bool]:
        """Store ``pages`` under ``keys``; one bool each: stored now or before.

        Args:
            namespace: Digest of the namespace.
            keys: Page keys; consecutive ones follow each other in a chain.
            pages: Where the pages lie in host memory.
            prefix: Keys of the chain before ``keys[0]``, when known.
        """
        batch = NamedPages.of(namespace, keys)
        parent = int(NamedPages.of(namespace, prefix[-1:]).names[0].digest[0]) if prefix else 0
        stored = []
        for number, (name, page) in enumerate(zip(batch.names, pages, strict=True)):
            position = len(prefix) + number if prefix is not None else number
            place = ChainPlace(min(position, 0xFFFE), parent) if prefix is not None or number else ChainPlace()
            stored.append(self._put_one(name, page, place))
            parent = int(name.digest[0])
        return stored

    def get(self, namespace: bytes, keys: Sequence[str], pages: Sequence[PageView]) -> list[bool]:
        """Fill ``pages`` in host memory with what is stored under ``keys``; one bool each.

        A page that answers False may have been overwritten with anything: its content is undefined.
        """
        return [
            self._get_one(name, page) for name, page in zip(NamedPages.of(namespace, keys).names, pages, strict=True)
        ]

    def _put_one(self, name: RecordKey, page: PageView, place: ChainPlace) -> bool:
        if self.store.contains(name):
            metrics.PAGES.labels("put", "present").inc()
            return True
        encoded = self.codecs.encode(page)
        try:
            self.store.put(name, encoded, page.nbytes, place)
        except StoreFullError as error:
            metrics.PAGES.labels("put", "full").inc()
            if not self._full_was_logged:
                self._full_was_logged = True
                logger.warning("pages are not stored: %s", error)
            return False
        except OSError as error:
            metrics.PAGES.labels("put", "failed").inc()
            logger.warning("a page could not be written: %s", error)
            return False
        metrics.PAGES.labels("put", "stored").inc()
        metrics.PAGE_BYTES.labels("put").inc(page.nbytes)
        metrics.RECORD_BYTES.labels("put").inc(encoded.nbytes)
        return True

    def _get_one(self, name: RecordKey, page: PageView) -> bool:
        record = None
        try:
            record = self.store.read(name)
            if record is not None:
                self.codecs.decode(record.header, record.payload, page)
        except RecordError as error:
            # A record that was rewritten under the decoder is gone, not damaged.
            if record is None or record.intact():
                self.store.drop(name)
                metrics.PAGES.labels("get", "damaged").inc()
                logger.warning("a stored page is dropped: %s", error)
                return False
        if record is None or not record.intact():
            metrics.PAGES.labels("get", "miss").inc()
            return False
        metrics.PAGES.labels("get", "hit").inc()
        metrics.PAGE_BYTES.labels("get").inc(page.nbytes)
        metrics.RECORD_BYTES.labels("get").inc(record.payload.size)
        return True
