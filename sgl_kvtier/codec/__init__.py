"""Lossless codecs for pages: one file each, registered by name and by the code that records carry."""

from __future__ import annotations

from sgl_kvtier.codec.base import Bytes, Codec, Encoded, RecordHeader, Scratch
from sgl_kvtier.codec.raw import RawCodec
from sgl_kvtier.codec.zstd import ZstdCodec
from sgl_kvtier.errors import ConfigError, RecordError
from sgl_kvtier.page import PageView

__all__ = ["Codec", "CodecSet", "Encoded", "RecordHeader", "Scratch"]


class CodecSet:
    """All codecs of a store: one writes, each reads the records that carry its code."""

    def __init__(self, write: str = "zstd", zstd_level: int = 1) -> None:
        """Codecs that write with the codec named ``write``.

        Raises:
            ConfigError: No codec has that name.
        """
        self._raw = RawCodec()
        codecs: tuple[Codec, ...] = (self._raw, ZstdCodec(zstd_level))
        self._by_code = {codec.code: codec for codec in codecs}
        by_name = {codec.name: codec for codec in codecs}
        if write not in by_name:
            raise ConfigError(f"codec: {write!r} is not known; accepted: {', '.join(sorted(by_name))}")
        self._writer = by_name[write]
        self._scratch = Scratch()

    @property
    def write_name(self) -> str:
        """Name of the codec that new pages are written with."""
        return self._writer.name

    def names(self) -> dict[int, str]:
        """Codec names by the code that records carry."""
        return {code: codec.name for code, codec in self._by_code.items()}

    def encode(self, page: PageView) -> Encoded:
        """The page's payload, raw when the chosen codec does not shrink it; valid until this thread's next call."""
        encoded = self._writer.encode(page, self._scratch)
        return self._raw.encode(page, self._scratch) if encoded is None else encoded

    def decode(self, header: RecordHeader, payload: Bytes, page: PageView) -> None:
        """Fill ``page`` from a payload, which is checked against its checksum.

        Raises:
            RecordError: Unknown codec, wrong page size, a damaged payload, or one that does not decode.
        """
        codec = self._by_code.get(header.codec)
        if codec is None:
            raise RecordError(f"record is written with codec {header.codec}, which this build does not have")
        if header.page_bytes != page.nbytes:
            raise RecordError(f"record holds a page of {header.page_bytes} bytes, not {page.nbytes}")
        codec.decode(header, payload, page, self._scratch)
