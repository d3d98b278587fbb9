"""The segment store: mmap-backed segment files, their tables of contents, and the index over them."""

from __future__ import annotations

from sgl_kvtier.store.catalog import Place
from sgl_kvtier.store.record import ChainPlace, PendingRecord, RecordKey, StoredRecord
from sgl_kvtier.store.store import Store, StoreStats

__all__ = ["ChainPlace", "PendingRecord", "Place", "RecordKey", "Store", "StoreStats", "StoredRecord"]
