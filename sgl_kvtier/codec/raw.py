"""The codec that stores canonical bytes as they are: for pages that do not shrink, and for the fastest disks."""

from __future__ import annotations

from sgl_kvtier.codec.base import Bytes, Encoded, RecordHeader, Scratch, check_payload
from sgl_kvtier.errors import RecordError
from sgl_kvtier.page import PageView
from sgl_kvtier_kernels.checksum import copy_parts


class RawCodec:
    """Canonical page bytes, uncompressed."""

    name = "raw"
    code = 0

    def encode(self, page: PageView, scratch: Scratch) -> Encoded:
        """The page's canonical bytes: host memory itself where its order is canonical, else gathered."""
        parts = page.contiguous_parts()
        if parts is None:
            gathered = scratch.take("canonical", page.nbytes)
            page.gather(gathered)
            parts = [gathered]
        return Encoded(self.code, parts, 0)

    def decode(self, header: RecordHeader, payload: Bytes, page: PageView, scratch: Scratch) -> None:
        """Scatter the payload into host memory; hash and copy go in one pass where the page lies in one piece."""
        del scratch
        if payload.size != page.nbytes or header.coded_bytes != 0:
            raise RecordError(f"raw payload of {payload.size} bytes for a page of {page.nbytes}")
        parts = page.contiguous_parts()
        if parts is None:
            check_payload(header, payload)
            page.scatter(payload)
        elif copy_parts(payload, parts) != header.payload_checksum:
            raise RecordError("payload fails its checksum")
