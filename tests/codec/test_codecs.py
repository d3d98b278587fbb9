"""Every codec gives back every page bit for bit, in every layout, or says that it cannot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from sgl_kvtier.codec import CodecSet, RecordHeader
from sgl_kvtier.codec.base import HEADER_BYTES, payload_checksum
from sgl_kvtier.errors import ConfigError, RecordError
from tests.support import ITEM_BYTES, HostPool, content

LAYOUTS = ("page_first", "layer_first", "page_first_direct", "page_head")


def _encoded(codecs: CodecSet, pool: HostPool, number: int) -> tuple[RecordHeader, np.ndarray]:
    encoded = codecs.encode(pool.page(number))
    payload = np.frombuffer(b"".join(bytes(buffer) for buffer in encoded.buffers), np.uint8)
    checksum = payload_checksum(encoded.buffers)
    assert checksum == payload_checksum([payload])
    header = RecordHeader(
        encoded.codec, pool.geometry.nbytes, payload.size, encoded.coded_bytes, checksum, bytes(32), bytes(32), 1
    )
    return header, payload


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["zstd", "raw"]),
    st.sampled_from(sorted(ITEM_BYTES)),
    st.sampled_from(LAYOUTS),
    st.sampled_from(LAYOUTS),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3), st.sampled_from([1, 8, 33, 130])),
    st.binary(min_size=1, max_size=40),
)
def test_a_page_comes_back_in_any_layout(
    codec: str, dtype: str, written: str, read: str, shape: tuple[int, int, int, int], pattern: bytes
) -> None:
    source, target = HostPool(3, written, dtype, shape), HostPool(3, read, dtype, shape)
    page = (pattern * (source.geometry.nbytes // len(pattern) + 1))[: source.geometry.nbytes]
    source.fill(1, page)
    codecs = CodecSet(codec)
    header, payload = _encoded(codecs, source, 1)
    codecs.decode(header, payload, target.page(1))
    assert target.canonical(1) == page
    assert not any(target.canonical(0))
    assert not any(target.canonical(2))


def test_payload_equals_the_format_as_documented() -> None:
    pool = HostPool(1, "layer_first")
    page = content("x", pool.geometry)
    pool.fill(0, page)
    words = np.frombuffer(page, np.uint16)
    header, payload = _encoded(CodecSet("zstd"), pool, 0)
    exponents = np.frombuffer(
        zstandard.ZstdDecompressor().decompress(payload[: header.coded_bytes].tobytes()), np.uint8
    )
    assert header.codec == 1
    assert np.array_equal(exponents, (words >> 7 & 0xFF).astype(np.uint8))
    assert np.array_equal(payload[header.coded_bytes :], (words >> 8 & 0x80 | words & 0x7F).astype(np.uint8))
    header, payload = _encoded(CodecSet("raw"), pool, 0)
    assert (header.codec, header.coded_bytes) == (0, 0)
    assert payload.tobytes() == page


def test_gaussian_bf16_pages_shrink_by_more_than_a_quarter() -> None:
    pool = HostPool(1, shape=(64, 4, 4, 64))
    pool.fill(0, content("x", pool.geometry))
    _, payload = _encoded(CodecSet("zstd"), pool, 0)
    assert payload.size < 0.75 * pool.geometry.nbytes


def test_pages_that_do_not_shrink_are_stored_raw() -> None:
    pool = HostPool(1, dtype="uint8")
    pool.fill(0, content("x", pool.geometry, compressible=False))
    header, payload = _encoded(CodecSet("zstd"), pool, 0)
    assert header.codec == 0
    assert payload.size == pool.geometry.nbytes


def test_header_survives_and_every_damaged_bit_is_noticed() -> None:
    header = RecordHeader(1, 2**40, 70_000, 300, 2**63 + 1, bytes(range(32)), bytes(range(32, 64)), 2**50)
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert RecordHeader.unpack(packed) == header
    for bit in range(8 * len(packed)):
        damaged = bytearray(packed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordError):
            RecordHeader.unpack(bytes(damaged))
    with pytest.raises(RecordError):
        RecordHeader.unpack(packed[:-1])


@pytest.mark.parametrize(
    "change",
    [
        {"codec": 77},
        {"page_bytes": 1},
        {"coded_bytes": 0},
        {"coded_bytes": 10},
        {"payload": b""},
        {"payload": b"\x28\xb5\x2f\xfd" + bytes(200)},
    ],
)
def test_payloads_that_do_not_fit_their_header_are_refused(change: dict[str, Any]) -> None:
    pool = HostPool(1)
    pool.fill(0, content("x", pool.geometry))
    codecs = CodecSet("zstd")
    header, payload = _encoded(codecs, pool, 0)
    given_payload = np.frombuffer(change.pop("payload", payload.tobytes()), np.uint8)
    with pytest.raises(RecordError):
        codecs.decode(header._replace(**change), given_payload, pool.page(0))


def test_forged_zstd_frames_are_refused() -> None:
    pool = HostPool(1)
    codecs = CodecSet("zstd")
    coded, plane = pool.page(0).coded_bytes, pool.page(0).plane_bytes
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    sizeless = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(coded))
    good = zstandard.ZstdCompressor().compress(bytes(coded))
    for frame in (bomb, sizeless, good[:-1], good[:-1] + b"\xff", b"noise"):
        payload = np.frombuffer(frame + bytes(plane), np.uint8)
        header = RecordHeader(1, pool.geometry.nbytes, payload.size, len(frame), 0, bytes(32), bytes(32), 1)
        with pytest.raises(RecordError):
            codecs.decode(header, payload, pool.page(0))


def test_random_payloads_never_raise_anything_else() -> None:
    pool = HostPool(1)
    codecs = CodecSet("zstd")
    rng = np.random.default_rng(0)
    header, payload = _encoded(codecs, pool, 0)
    for _ in range(300):
        damaged = payload.copy()
        for position in rng.integers(0, header.coded_bytes, 3):
            damaged[position] ^= rng.integers(1, 256)
        try:
            codecs.decode(header, damaged, pool.page(0))
        except RecordError:
            continue


def test_an_unknown_codec_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="raw, zstd"):
        CodecSet("lz4")
