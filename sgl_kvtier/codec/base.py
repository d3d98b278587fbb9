"""The codec contract, the registry, and the record frame that every stored page begins with.

A record is a 128-byte header and a payload. All integers are little-endian::

    offset size
         0    8  magic "KVTREC\\0\\0"
         8    2  version (1)
        10    1  codec code
        11    1  flags (0)
        12    4  header size (128)
        16    8  page bytes: size of the decoded page
        24    8  payload bytes
        32    8  coded bytes: stored size of the entropy-coded plane, the first part of the payload
        40    8  XXH3-64 of the payload
        48   32  namespace digest
        80   32  page key
       112    8  write time, microseconds since the epoch
       120    8  XXH3-64 of bytes 0..119
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from sgl_kvtier.errors import RecordError
from sgl_kvtier.page import PageView
from sgl_kvtier_kernels.checksum import hash_parts

Bytes = npt.NDArray[np.uint8]

HEADER_BYTES = 128
RECORD_VERSION = 1
_MAGIC = b"KVTREC\0\0"
_HEADER = struct.Struct("<8sHBBIQQQQ32s32sQ")
_CHECK = struct.Struct("<Q")


class Encoded(NamedTuple):
    """A page's payload: ``buffers`` one after the other, the first ``coded_bytes`` of them entropy-coded."""

    codec: int
    buffers: Sequence[Bytes | bytes]
    coded_bytes: int

    @property
    def nbytes(self) -> int:
        """Size of the payload in bytes."""
        return sum(len(buffer) for buffer in self.buffers)


class RecordHeader(NamedTuple):
    """The header of a stored page; see the module's docstring for the fields."""

    codec: int
    page_bytes: int
    payload_bytes: int
    coded_bytes: int
    payload_checksum: int
    namespace: bytes
    key: bytes
    written_us: int

    def pack(self) -> bytes:
        """The header's 128 bytes."""
        body = _HEADER.pack(
            _MAGIC,
            RECORD_VERSION,
            self.codec,
            0,
            HEADER_BYTES,
            self.page_bytes,
            self.payload_bytes,
            self.coded_bytes,
            self.payload_checksum,
            self.namespace,
            self.key,
            self.written_us,
        )
        return body + _CHECK.pack(xxhash.xxh3_64_intdigest(body))

    @classmethod
    def unpack(cls, data: bytes) -> RecordHeader:
        """Parse 128 bytes.

        Raises:
            RecordError: Not a record, damaged, or of another version.
        """
        if len(data) < HEADER_BYTES:
            raise RecordError(f"record header of {len(data)} bytes; it has {HEADER_BYTES}")
        body = data[: _HEADER.size]
        (check,) = _CHECK.unpack_from(data, _HEADER.size)
        if xxhash.xxh3_64_intdigest(body) != check:
            raise RecordError("record header fails its checksum")
        magic, version, codec, _flags, size, page, payload, coded, checksum, namespace, key, written = _HEADER.unpack(
            body
        )
        if magic != _MAGIC or version != RECORD_VERSION or size != HEADER_BYTES:
            raise RecordError(
                f"record of version {version}, magic {magic!r}; this build reads version {RECORD_VERSION}"
            )
        if coded > payload:
            raise RecordError(f"record header claims {coded} coded bytes in a payload of {payload}")
        return cls(codec, page, payload, coded, checksum, namespace, key, written)


class Codec(Protocol):
    """Lossless transform between a page in host memory and a payload. Stateless towards callers; thread-safe."""

    name: str
    code: int

    def encode(self, page: PageView, scratch: Scratch) -> Encoded | None:
        """The page's payload, or None when it would not be smaller than the page.

        The buffers may lie in ``scratch`` or in host memory: they hold until the thread's next encode.
        """

    def decode(self, header: RecordHeader, payload: Bytes, page: PageView, scratch: Scratch) -> None:
        """Fill ``page`` in host memory from ``payload``, and check the payload against its checksum.

        Raises:
            RecordError: The payload is damaged, or not one of this codec for a page of this shape; the page's content
                is undefined then.
        """


class Scratch(threading.local):
    """Per-thread byte buffers that are reused from page to page, by name."""

    def __init__(self) -> None:
        """An empty set; each thread gets its own."""
        self._buffers: dict[str, Bytes] = {}

    def take(self, name: str, nbytes: int) -> Bytes:
        """A buffer uint8[nbytes] with undefined content, valid until the thread takes ``name`` again."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = np.empty(nbytes, np.uint8)
        return buffer[:nbytes]


def payload_checksum(buffers: Sequence[Bytes | bytes]) -> int:
    """XXH3-64 over the buffers one after the other."""
    return hash_parts([np.frombuffer(buffer, np.uint8) for buffer in buffers])


def check_payload(header: RecordHeader, payload: Bytes) -> None:
    """Compare a payload with its checksum.

    Raises:
        RecordError: They differ.
    """
    if payload_checksum([payload]) != header.payload_checksum:
        raise RecordError("payload fails its checksum")
