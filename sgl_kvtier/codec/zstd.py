"""zstd on the exponent plane; the sign+mantissa plane, which has no redundancy to find, is stored as it is.

The parameters make zstd an order-0 Huffman coder in effect: in KV, matches are accidental, and looking for them
costs time and ratio. A tiny hash table with long minimum matches finds next to none.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import zstandard

from sgl_kvtier.codec.base import Bytes, Encoded, RecordHeader, Scratch, check_payload
from sgl_kvtier.errors import RecordError
from sgl_kvtier.page import PageView

#: Parts smaller than this share a block with their neighbour: a block of its own costs a Huffman table.
_SMALLEST_BLOCK_BYTES = 8 << 10


class ZstdCodec:
    """Plane split, then zstd on the coded plane. Payload: zstd frame, then the raw plane."""

    name = "zstd"
    code = 1

    def __init__(self, level: int = 1) -> None:
        """A codec that compresses at zstd ``level`` (1 to 19)."""
        self._parameters = zstandard.ZstdCompressionParameters.from_level(
            level,
            strategy=zstandard.STRATEGY_FAST,
            hash_log=6,
            min_match=7,
            window_log=17,
            write_content_size=True,
            write_checksum=False,
        )
        # zstd contexts are not thread-safe; each thread keeps its own.
        self._local = threading.local()

    def encode(self, page: PageView, scratch: Scratch) -> Encoded | None:
        """Compress the page, or None when the record would not be smaller than the page itself."""
        coded = scratch.take("coded", page.coded_bytes)
        raw = scratch.take("raw", page.plane_bytes)
        page.split(coded, raw)
        compressor = getattr(self._local, "compressor", None)
        if compressor is None:
            compressor = zstandard.ZstdCompressor(compression_params=self._parameters)
            self._local.compressor = compressor
        frame = _compress(compressor, memoryview(coded), page.coded_parts)
        if len(frame) >= page.coded_bytes:
            return None
        return Encoded(self.code, (frame, raw) if page.plane_bytes else (frame,), len(frame))

    def decode(self, header: RecordHeader, payload: Bytes, page: PageView, scratch: Scratch) -> None:
        """Decompress the coded plane and merge both planes straight into host memory."""
        del scratch
        if payload.size - header.coded_bytes != page.plane_bytes:
            raise RecordError(
                f"zstd payload of {header.coded_bytes} + {payload.size - header.coded_bytes} bytes "
                f"for a page with a raw plane of {page.plane_bytes}"
            )
        check_payload(header, payload)
        decompressor = getattr(self._local, "decompressor", None)
        if decompressor is None:
            decompressor = self._local.decompressor = zstandard.ZstdDecompressor()
        frame = memoryview(payload[: header.coded_bytes])
        try:
            # The size in the frame is checked first: a forged one must not make the decoder allocate it.
            if zstandard.frame_content_size(frame) != page.coded_bytes:
                raise RecordError(f"zstd frame is not one of {page.coded_bytes} bytes")
            coded = np.frombuffer(decompressor.decompress(frame), np.uint8)
        except zstandard.ZstdError as error:
            raise RecordError(f"zstd frame cannot be decoded: {error}") from error
        if coded.size != page.coded_bytes:
            raise RecordError(f"zstd frame decodes to {coded.size} bytes, not {page.coded_bytes}")
        page.merge(coded, payload[header.coded_bytes :])


def _compress(compressor: zstandard.ZstdCompressor, coded: memoryview, parts: Sequence[int]) -> bytes:
    """One frame of ``coded`` whose blocks end where parts end: K and V have exponents of their own, and so tables.

    Measured on 16-token pages of SmolLM2-135M: 32.0 % saved instead of 31.7 %.
    """
    ends: list[int] = []
    end = 0
    for nbytes in parts:
        end += nbytes
        if end - (ends[-1] if ends else 0) >= _SMALLEST_BLOCK_BYTES:
            ends.append(end)
    stream = compressor.compressobj(size=len(coded))
    pieces, start = [], 0
    for end in ends[:-1]:
        pieces += [stream.compress(coded[start:end]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
        start = end
    pieces += [stream.compress(coded[start:]), stream.flush()]
    return b"".join(pieces)
