"""Tables of contents: the bytes as documented, and every damage noticed."""

from __future__ import annotations

import struct

import numpy as np
import pytest

from sgl_kvtier.errors import DamagedError, StoreError
from sgl_kvtier.store import toc
from sgl_kvtier.store.toc import TocEntry, TocHeader

_ENTRY = TocEntry(1, 2, 3, 4, 5, 6, 7, 8, 1, 0, 9)
_SEED = 0x1122334455667788


def _check(raw: bytes, seed: int, slot: int) -> int:
    """The check as docs/format.md describes it."""
    constant, mask = 0x9E3779B97F4A7C15, (1 << 64) - 1
    mixed = seed ^ slot * constant & mask
    for word in (*struct.unpack_from("<7Q", raw), struct.unpack_from("<I", raw, 56)[0]):
        mixed = (mixed ^ word) * constant & mask
        mixed ^= mixed >> 32
    return mixed & 0xFFFFFFFF


def test_an_entry_has_the_documented_bytes() -> None:
    raw = _ENTRY.pack(_SEED, 17)
    body = struct.pack("<5Q2IQ2BH", 1, 2, 3, 4, 5, 6, 7, 8, 1, 0, 9)
    assert raw == body + struct.pack("<I", _check(body + bytes(4), _SEED, 17))
    assert TocEntry.unpack(raw, _SEED, 17) == _ENTRY
    table = np.frombuffer(raw, toc.ENTRY_DTYPE)
    assert table["digest"].tolist() == [[1, 2]]
    assert (table["payload_bytes"], table["page_bytes"], table["position"]) == (6, 7, 9)


def test_an_entry_is_void_elsewhere_and_with_any_bit_flipped() -> None:
    raw = _ENTRY.pack(_SEED, 17)
    assert TocEntry.unpack(raw, _SEED, 18) is None
    assert TocEntry.unpack(raw, _SEED + 1, 17) is None
    assert TocEntry.unpack(toc.VOID_ENTRY, _SEED, 17) is None
    for bit in range(8 * len(raw)):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        assert TocEntry.unpack(bytes(damaged), _SEED, 17) is None


def test_whole_tables_are_judged_like_single_entries() -> None:
    rng = np.random.default_rng(0)
    entries = [_ENTRY._replace(digest_lo=int(rng.integers(1 << 63)), written_us=i) for i in range(64)]
    raws = [entry.pack(_SEED, slot) for slot, entry in enumerate(entries)]
    for slot in range(0, 64, 3):
        raws[slot] = bytes([raws[slot][0] ^ 1]) + raws[slot][1:]
    table = np.frombuffer(b"".join(raws), toc.ENTRY_DTYPE)
    expected = [TocEntry.unpack(raw, _SEED, slot) is not None for slot, raw in enumerate(raws)]
    assert toc.valid_entries(table, _SEED).tolist() == expected
    assert sum(expected) == 42  # every third is damaged; entry 0, written at time 0, is among them


def test_header() -> None:
    header = TocHeader(4096, 10, bytes(range(16)))
    packed = header.pack()
    assert TocHeader.unpack(packed) == header
    assert header.data_bytes == 40960
    assert header.toc_bytes == 4096 + 10 * 77
    for bit in range(8 * 56):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(StoreError):
            TocHeader.unpack(bytes(damaged))
    with pytest.raises(DamagedError, match="cut off"):
        TocHeader.unpack(packed[:100])


def test_another_version_is_not_called_damage() -> None:
    packed = bytearray(TocHeader(4096, 10, bytes(16)).pack())
    packed[8] = 3
    with pytest.raises(StoreError, match="version 3") as caught:
        TocHeader.unpack(bytes(packed))
    assert not isinstance(caught.value, DamagedError)
