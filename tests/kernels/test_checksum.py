"""Checksums against the xxhash package, and copies byte for byte."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from sgl_kvtier_kernels import checksum
from tests.kernels.strategies import examples

_JIT = os.environ.get("NUMBA_DISABLE_JIT") != "1"
_GUARD = 64

#: Lengths about the ends of stripes, of blocks, and of XXH3's own branches.
_EDGES = [0, 1, 3, 4, 8, 9, 16, 17, 63, 64, 65, 128, 129, 240, 241, 256, 1023, 1024, 1025, 1088, 2047, 2048, 2049, 3072]
_sizes = st.lists(st.one_of(st.sampled_from(_EDGES), st.integers(0, 3000)), max_size=6)


def _random(size: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


def _aligned(size: int) -> np.ndarray:
    """uint8[size] that begins at a multiple of 64 bytes."""
    room = np.zeros(size + 64, np.uint8)
    return room[-room.ctypes.data % 64 :][:size]


def _digest(data: np.ndarray) -> int:
    return xxhash.xxh3_64_intdigest(data.tobytes())


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view


def _copy_is_exact(source: np.ndarray, room: np.ndarray, offset: int, reread: bool) -> None:
    """Copy to ``room[offset:]``: the digest is right, the bytes too, and none beside them changes."""
    room[:] = 0xA5
    target = room[offset : offset + source.size]
    assert checksum.hash_copy(source, target, reread=reread) == _digest(source)
    assert np.array_equal(target, source)
    assert (room[:offset] == 0xA5).all()
    assert (room[offset + source.size :] == 0xA5).all()


def test_every_length() -> None:
    data, room = _random(2100), _aligned(2100 + 2 * _GUARD)
    for size in range(data.size + 1):
        expected = _digest(data[:size])
        assert checksum.hash_bytes(data[:size]) == expected, size
        assert checksum.hash_parts([data[: size // 3], data[size // 3 : size]]) == expected, size
        _copy_is_exact(data[:size], room, _GUARD, reread=False)


@pytest.mark.parametrize("size", [241, 1024, 3333, checksum.STREAM_BYTES - 1, checksum.STREAM_BYTES + 777])
def test_every_alignment(size: int) -> None:
    data, room = _aligned(size + 64), _aligned(size + 64 + 2 * _GUARD)
    data[:] = _random(data.size)
    for offset in range(64):
        source = data[offset : offset + size]
        assert checksum.hash_bytes(source) == _digest(source), offset
        _copy_is_exact(source, room, _GUARD + offset, reread=False)
        _copy_is_exact(source, room, _GUARD + 37 * offset % 64, reread=True)


@pytest.mark.parametrize("reread", [False, True])
def test_large_lengths(reread: bool) -> None:
    most = (5 << 20) if _JIT else (1 << 18)
    rng = np.random.default_rng(3)
    data, room = _random(most), _aligned(most + 2 * _GUARD)
    for size in [most, *rng.integers(checksum.STREAM_BYTES, most, 12).tolist()]:
        assert checksum.hash_bytes(data[:size]) == _digest(data[:size])
        _copy_is_exact(data[:size], room, _GUARD, reread)


@examples
@given(_sizes, st.integers(0, 63), st.integers(0, 2**32))
@example([], 0, 0)
@example([0, 0], 0, 0)
@example([1024, 1024, 1], 0, 0)
@example([240, 1], 0, 0)
def test_parts_equal_the_whole(sizes: list[int], offset: int, seed: int) -> None:
    data = _random(offset + sum(sizes), seed)[offset:]
    parts = np.split(data, np.cumsum(sizes)[:-1]) if sizes else []
    # Parts that lie apart, each at an alignment of its own.
    apart = [np.concatenate((np.zeros(i + 1, np.uint8), part))[i + 1 :] for i, part in enumerate(parts)]
    assert checksum.hash_parts(apart) == _digest(data)


@examples
@given(_sizes, st.integers(0, 63), st.booleans(), st.booleans(), st.integers(0, 2**32))
@example([], 0, False, False, 0)
@example([1024, 0, 1024, 1], 0, False, True, 0)
def test_a_copy_to_parts_fills_each_exactly(
    sizes: list[int], offset: int, reread: bool, large: bool, seed: int
) -> None:
    if large:
        sizes = [*sizes, checksum.STREAM_BYTES, 1, checksum.STREAM_BYTES + offset]
    source = _random(sum(sizes), seed)
    room = np.full(sum(sizes) + _GUARD * (len(sizes) + 2), 0xA5, np.uint8)
    targets, expected, at, done = [], room.copy(), offset, 0
    for size in sizes:
        targets.append(room[at : at + size])
        expected[at : at + size] = source[done : done + size]
        at, done = at + size + _GUARD, done + size
    assert checksum.copy_parts(_read_only(source), targets, reread=reread) == _digest(source)
    assert np.array_equal(room, expected)


def test_the_halves_of_a_page() -> None:
    source, k, v = _random(1 << 18, 7), _aligned(1 << 17), _aligned(1 << 17)
    assert checksum.copy_parts(source, [k, v]) == _digest(source)
    assert np.array_equal(np.concatenate((k, v)), source)
    assert checksum.hash_parts([k, v]) == _digest(source)


@pytest.mark.parametrize("size", [100, 5000, checksum.STREAM_BYTES])
def test_read_only_buffers(size: int) -> None:
    source = np.frombuffer(_random(size).tobytes(), np.uint8)
    assert not source.flags.writeable
    target = np.zeros(size, np.uint8)
    assert checksum.hash_bytes(source) == checksum.hash_parts([source]) == _digest(source)
    assert checksum.hash_copy(source, target) == _digest(source)
    assert np.array_equal(target, source)
    for fails in (lambda: checksum.hash_copy(source, source), lambda: checksum.copy_parts(source, [source])):
        with pytest.raises(ValueError, match="read-only"):
            fails()


@pytest.mark.parametrize(
    "data", [np.zeros(9, np.uint16), np.zeros((3, 300), np.uint8), np.zeros(600, np.uint8)[::2], np.zeros(9, np.int8)]
)
def test_other_arrays_are_refused(data: np.ndarray) -> None:
    good = np.zeros(data.size, np.uint8)
    for fails in (
        lambda: checksum.hash_bytes(data),
        lambda: checksum.hash_parts([good, data]),
        lambda: checksum.hash_copy(data, good),
        lambda: checksum.hash_copy(good, data),
        lambda: checksum.copy_parts(data, [good]),
        lambda: checksum.copy_parts(good, [data]),
    ):
        with pytest.raises(ValueError, match="contiguous uint8"):
            fails()


def test_other_lengths_are_refused() -> None:
    source, target = np.zeros(500, np.uint8), np.zeros(499, np.uint8)
    with pytest.raises(ValueError, match="500 bytes to a target of 499"):
        checksum.hash_copy(source, target)
    with pytest.raises(ValueError, match="500 bytes to targets of 499"):
        checksum.copy_parts(source, [target[:100], target[100:]])


@pytest.mark.parametrize("reread", [False, True])
def test_what_is_hashed_is_what_is_copied(reread: bool) -> None:
    """A writer that changes the source meanwhile never makes the digest differ from the target's."""
    size = 1 << 20 if _JIT else 1 << 14
    source, target = _random(size + 100), _aligned(size + 100)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            np.add(source, 1, out=source)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200 if _JIT else 5):
            assert checksum.hash_copy(source, target, reread=reread) == _digest(target)
            middle = source.size // 2 + 5
            digest = checksum.copy_parts(source, [target[:middle], target[middle:]], reread=reread)
            assert digest == _digest(target)
    finally:
        stop.set()
        writer.join()
