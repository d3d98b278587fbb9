"""Reading a store from outside: figures over all writers and namespaces, on a live or a closed store."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from sgl_kvtier.codec.base import HEADER_BYTES
from sgl_kvtier.store.directory import StoreDirectory
from sgl_kvtier.store.writer import Writer


class NamespaceUsage(msgspec.Struct, kw_only=True):
    """What a store holds of one namespace; sizes in bytes.

    Attributes:
        digest: First 16 hex digits of the namespace digest.
        model, pool, page: The namespace in words.
        pages: Number of stored pages.
        raw_bytes: Size of those pages in a host pool.
        record_bytes: Size of their records, headers included.
        slot_bytes: Size of the slots that hold them.
    """

    digest: str
    model: str
    pool: str
    page: str
    pages: int = 0
    raw_bytes: int = 0
    record_bytes: int = 0
    slot_bytes: int = 0


class StoreUsage(msgspec.Struct, kw_only=True):
    """What a store holds; sizes in bytes.

    Attributes:
        directory: Path of the store.
        pages, raw_bytes, record_bytes: Sums over the namespaces.
        stored_bytes: Space that the pages take on disk: their slots, records and slack together.
        saved_fraction: 1 - stored_bytes / raw_bytes; 0 for an empty store.
        segments, segment_bytes: Number and size of the segments, void slots and tables of contents included.
        codecs: Pages by codec code.
        namespaces: One row each.
    """

    directory: str
    pages: int = 0
    raw_bytes: int = 0
    record_bytes: int = 0
    stored_bytes: int = 0
    saved_fraction: float = 0.0
    segments: int = 0
    segment_bytes: int = 0
    codecs: dict[str, int]
    namespaces: list[NamespaceUsage]


def store_usage(directory: str | Path) -> StoreUsage:
    """Read the tables of contents of the store in ``directory``.

    Raises:
        StoreError: There is no store, or not one that this version reads.
    """
    opened = StoreDirectory(Path(directory), create=False)
    known = opened.namespaces()
    rows: dict[int, NamespaceUsage] = {}
    codecs: dict[str, int] = {}
    usage = StoreUsage(directory=str(opened.root), codecs=codecs, namespaces=[])
    for folder in opened.writer_folders():
        writer = Writer(folder)
        try:
            for segment in writer.open_segments():
                usage.segments += 1
                usage.segment_bytes += segment.disk_bytes
                _slots, entries = segment.live_entries()
                for code, count in zip(*np.unique(entries["codec"], return_counts=True), strict=True):
                    codecs[str(code)] = codecs.get(str(code), 0) + int(count)
                for prefix in np.unique(entries["namespace"]).tolist():
                    record = known.get(prefix)
                    chosen = entries[entries["namespace"] == prefix]
                    if record is not None:
                        chosen = chosen[chosen["written_us"] > record.cleared_us]
                    row = rows.get(prefix)
                    if row is None:
                        row = rows[prefix] = NamespaceUsage(
                            digest=prefix.to_bytes(8, "little").hex(),
                            model=record.namespace.model if record else "?",
                            pool=record.namespace.pool if record else "?",
                            page=str(record.namespace.geometry) if record else "?",
                        )
                    row.pages += len(chosen)
                    row.raw_bytes += int(chosen["page_bytes"].sum(dtype=np.uint64))
                    row.record_bytes += int(chosen["payload_bytes"].sum(dtype=np.uint64)) + HEADER_BYTES * len(chosen)
                    row.slot_bytes += segment.header.slot_bytes * len(chosen)
        finally:
            writer.close()
    usage.namespaces = sorted(rows.values(), key=lambda row: -row.slot_bytes)
    usage.pages = sum(row.pages for row in usage.namespaces)
    usage.raw_bytes = sum(row.raw_bytes for row in usage.namespaces)
    usage.record_bytes = sum(row.record_bytes for row in usage.namespaces)
    usage.stored_bytes = sum(row.slot_bytes for row in usage.namespaces)
    usage.saved_fraction = 1 - usage.stored_bytes / usage.raw_bytes if usage.raw_bytes else 0.0
    return usage
