"""A segment's table of contents: one 64-byte entry per slot, contiguous, the truth about the segment.

File ``toc.bin``, little-endian::

    0                 header, 4096 bytes
    4096              entries, 64 bytes x slot_count
    4096 + 64 n       last use of each slot, u64 microseconds since the epoch x slot_count (advisory)
    4096 + 72 n       until when each slot is promised to a reader, u32 seconds since the epoch x slot_count (advisory)
    4096 + 76 n       what eviction remembers of each slot, u8 x slot_count (advisory)

    header: magic "KVTTOC\\0\\0" (8), version u32, header bytes u32, slot bytes u64, slot count u64,
            segment id (16), XXH3-64 of the bytes before it (8), zeros

Entries are written with ``pwrite``, by the segment's owner alone, and read through a map by every process. The
advisory fields are written through the map by any process: losing them costs a better choice of what to give up. An
entry is valid when its check matches; the check is seeded with the segment id and the slot number, so that an
entry written to the wrong place, or left over from an older segment, is void.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_kvtier.errors import DamagedError, StoreError

VERSION = 2
HEADER_BYTES = 4096
ENTRY_BYTES = 64
LAST_USE_BYTES = 8
LEASE_BYTES = 4
HEAT_BYTES = 1
SLOT_BYTES = ENTRY_BYTES + LAST_USE_BYTES + LEASE_BYTES + HEAT_BYTES

_MAGIC = b"KVTTOC\0\0"
_HEADER = struct.Struct("<8sIIQQ16s")
_ENTRY = struct.Struct("<QQQQQIIQBBHI")
_CHECK_OFFSET = 60

ENTRY_DTYPE = np.dtype(
    [
        ("digest", "<u8", 2),
        ("namespace", "<u8"),
        ("parent", "<u8"),
        ("payload_checksum", "<u8"),
        ("payload_bytes", "<u4"),
        ("page_bytes", "<u4"),
        ("written_us", "<u8"),
        ("codec", "u1"),
        ("flags", "u1"),
        ("position", "<u2"),
        ("check", "<u4"),
    ]
)

VOID_ENTRY = bytes(ENTRY_BYTES)

#: Position of a page whose place in its chain is not known, or lies beyond what the field holds.
UNKNOWN_POSITION = 0xFFFF

_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


#: Files of a segment beside data and table of contents, each smaller than a block.
SMALL_FILES = 4

#: Unit of space on disk.
DISK_BLOCK_BYTES = 4096


def disk_bytes(file_bytes: int) -> int:
    """Disk space that a file takes."""
    return -(-file_bytes // DISK_BLOCK_BYTES) * DISK_BLOCK_BYTES


class TocHeader(NamedTuple):
    """Shape and identity of a segment."""

    slot_bytes: int
    slot_count: int
    segment_id: bytes

    def pack(self) -> bytes:
        """The header's 4096 bytes."""
        body = _HEADER.pack(_MAGIC, VERSION, HEADER_BYTES, self.slot_bytes, self.slot_count, self.segment_id)
        check = xxhash.xxh3_64_intdigest(body).to_bytes(8, "little")
        return (body + check).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def unpack(cls, data: bytes) -> TocHeader:
        """Parse the first bytes of a table of contents.

        Raises:
            DamagedError: Not a table of contents, or damaged.
            StoreError: Of another version.
        """
        if len(data) < HEADER_BYTES:
            raise DamagedError(f"table of contents is cut off after {len(data)} bytes")
        body = data[: _HEADER.size]
        magic, version, header_bytes, slot_bytes, slot_count, segment_id = _HEADER.unpack(body)
        if magic != _MAGIC:
            raise DamagedError(f"not a table of contents: it begins with {magic!r}")
        if version != VERSION:
            raise StoreError(f"table of contents of version {version}; this build reads version {VERSION}")
        check = int.from_bytes(data[_HEADER.size : _HEADER.size + 8], "little")
        if header_bytes != HEADER_BYTES or xxhash.xxh3_64_intdigest(body) != check:
            raise DamagedError("table of contents header fails its checksum")
        return cls(slot_bytes, slot_count, segment_id)

    @property
    def seed(self) -> int:
        """Seed of the entries' checks."""
        return int.from_bytes(self.segment_id[:8], "little")

    @property
    def toc_bytes(self) -> int:
        """Size of the whole file."""
        return HEADER_BYTES + SLOT_BYTES * self.slot_count

    @property
    def data_bytes(self) -> int:
        """Size of the segment's data file."""
        return self.slot_bytes * self.slot_count

    @property
    def disk_bytes(self) -> int:
        """Disk space of the segment in bytes, its small files included."""
        return disk_bytes(self.data_bytes) + disk_bytes(self.toc_bytes) + SMALL_FILES * DISK_BLOCK_BYTES


class TocEntry(NamedTuple):
    """What a slot holds.

    Attributes:
        digest_lo, digest_hi: Index digest of (namespace, key).
        namespace: First 8 bytes of the namespace digest.
        parent: ``digest_lo`` of the page before this one in its chain; 0 when not known.
        payload_checksum: XXH3-64 of the payload.
        payload_bytes, page_bytes: Sizes of the payload as stored and of the page it decodes to.
        written_us: Write time, microseconds since the epoch, unique and rising within a writer.
        codec: Codec code.
        flags: 0.
        position: Number of pages before this one in its chain, or :data:`UNKNOWN_POSITION`.
    """

    digest_lo: int
    digest_hi: int
    namespace: int
    parent: int
    payload_checksum: int
    payload_bytes: int
    page_bytes: int
    written_us: int
    codec: int
    flags: int
    position: int

    def pack(self, seed: int, slot: int) -> bytes:
        """The entry's 64 bytes for ``slot`` of the segment with ``seed``."""
        raw = _ENTRY.pack(*self, 0)
        check = _entry_check(raw, seed, slot)
        return raw[:_CHECK_OFFSET] + check.to_bytes(4, "little")

    @classmethod
    def unpack(cls, raw: bytes, seed: int, slot: int) -> TocEntry | None:
        """The entry in ``raw``, or None when the slot is void or its entry damaged."""
        *fields, check = _ENTRY.unpack(raw)
        entry = cls(*fields)
        if entry.written_us == 0 or check != _entry_check(raw, seed, slot):
            return None
        return entry


def valid_entries(entries: npt.NDArray[Any], seed: int) -> npt.NDArray[np.bool_]:
    """Which of a segment's entries, ``ENTRY_DTYPE[slot_count]``, are valid."""
    words = np.ascontiguousarray(entries).view("<u8").reshape(len(entries), ENTRY_BYTES // 8)
    multiplier, shift = np.uint64(_MULTIPLIER), np.uint64(32)
    with np.errstate(over="ignore"):
        mixed = np.uint64(seed) ^ (np.arange(len(entries), dtype=np.uint64) * multiplier)
        for column in range(7):
            mixed = (mixed ^ words[:, column]) * multiplier
            mixed ^= mixed >> shift
        mixed = (mixed ^ (words[:, 7] & np.uint64(0xFFFFFFFF))) * multiplier
        mixed ^= mixed >> shift
    valid: npt.NDArray[np.bool_] = (entries["check"] == (mixed & np.uint64(0xFFFFFFFF))) & (entries["written_us"] != 0)
    return valid


def _entry_check(raw: bytes, seed: int, slot: int) -> int:
    """32-bit check over the first 60 bytes: a multiply-xorshift fold, the scalar form of :func:`valid_entries`."""
    mixed = seed ^ ((slot * _MULTIPLIER) & _MASK)
    for word in struct.unpack_from("<7QI", raw):
        mixed = ((mixed ^ word) * _MULTIPLIER) & _MASK
        mixed ^= mixed >> 32
    return mixed & 0xFFFFFFFF
