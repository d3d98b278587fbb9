"""Identity of stored pages: namespaces, page keys, and the fingerprint of a model's weights.

A record is found only by (namespace, page key). The namespace is a digest over everything that changes the
bytes of a page; SGLang's page keys hash the tokens alone, so model, dtype, geometry and ranks are added here.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from sgl_kvtier.page import PageGeometry
from sgl_kvtier_kernels.keys import KEY_DIGITS, mix_keys, parse_hex_keys

#: Raised when the meaning of stored bytes changes, so that old pages miss instead of being misread.
NAMESPACE_VERSION = 1

KEY_BYTES = 32

_HEX_KEY = re.compile(r"[0-9a-f]{64}")
_SAMPLE_BYTES = 1 << 16
_SALT = struct.Struct("<QQ")

Words = npt.NDArray[np.uint64]


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """Which part of the model's KV a rank holds. Sizes of 1 mean "not sharded that way"."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    cp_rank: int = 0
    cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1


class Namespace(msgspec.Struct, frozen=True, kw_only=True):
    """All that must be equal for two pages under one key to hold the same bytes.

    Attributes:
        model: Served model name, as SGLang gives it.
        weights: Fingerprint of the weights, or the configured ``model_id``.
        pool: SGLang's pool name, ``"kv"`` for the main pool.
        geometry: Shape and dtype of a page, independent of the host layout.
        shard: The rank's share of the model.
        order: Empty for pages in canonical order; else a tag of the opaque byte order of a pool.
        variant: Server settings that change KV bytes under equal weights, such as quantization.
    """

    model: str
    weights: str
    pool: str
    geometry: PageGeometry
    shard: Shard
    order: str = ""
    variant: str = ""
    version: int = NAMESPACE_VERSION

    def digest(self) -> bytes:
        """BLAKE2b-256 over the namespace's deterministic JSON form (32 bytes)."""
        encoded = msgspec.json.encode(self, order="deterministic")
        return hashlib.blake2b(encoded, digest_size=32, person=b"kvtier-namespace").digest()


def key_bytes(key: str) -> bytes:
    """The 32 bytes under which ``key`` is stored.

    SGLang's keys, 64 lower-case hex digits of a SHA-256, are taken as they are. Any other string is hashed
    under its own domain, so that it cannot name the same bytes as a hex key.

    Raises:
        TypeError: ``key`` is not a string.
    """
    if _HEX_KEY.fullmatch(key):
        return bytes.fromhex(key)
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=32, person=b"kvtier-page-key").digest()


def key_words(keys: Sequence[str]) -> Words:
    """The stored bytes of ``keys``, as :func:`key_bytes` gives them: ``uint64[len(keys), 4]``, little-endian.

    Raises:
        TypeError: A key is not a string.
    """
    words = np.empty((len(keys), KEY_BYTES // 8), np.uint64)
    if keys:
        # SGLang's keys are parsed by one kernel for the whole batch; any other key sends the batch the long way.
        text = "\n".join(keys).encode("utf-8", "surrogatepass")
        if len(text) != len(keys) * (KEY_DIGITS + 1) - 1 or not parse_hex_keys(np.frombuffer(text, np.uint8), words):
            return np.frombuffer(b"".join(map(key_bytes, keys)), "<u8").reshape(words.shape)
    return words


def index_digests(namespace: bytes, words: Words) -> Words:
    """128-bit index digests of keys in ``namespace``: ``uint64[n, 4]`` as of :func:`key_words` to ``uint64[n, 2]``.

    Keys and namespaces are uniform hashes, so mixing them keeps 128 bits of one; keys that differ in one half only
    differ too. The full key and namespace are compared on every read.
    """
    low, high = _SALT.unpack_from(namespace)
    digests = np.empty((len(words), 2), np.uint64)
    mix_keys(words, np.uint64(low), np.uint64(high), digests)
    return digests


def weights_fingerprint(model_path: str | os.PathLike[str]) -> str | None:
    """Fingerprint of the model in a local folder or file, or None when there is nothing local to read.

    Covers ``config.json``, the safetensors index, and of every weight file its size, its first bytes (the
    header of a safetensors file) and samples from its middle and end: two fine-tunes of one architecture have
    equal headers. Weights are sampled, not read whole, so that start-up stays fast.
    """
    root = Path(model_path).expanduser()
    if root.is_file():
        files = [root]
    elif root.is_dir():
        files = sorted(
            file
            for file in root.iterdir()
            if file.name in ("config.json", "model.safetensors.index.json")
            or file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        )
    else:
        return None
    if not files:
        return None
    digest = hashlib.blake2b(digest_size=32, person=b"kvtier-weights")
    for file in files:
        with open(file, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            digest.update(f"{file.name}\0{size}\0".encode())
            if file.suffix == ".json":
                digest.update(stream.read())
                continue
            header = min(_header_bytes(stream.read(8), size), size)
            for start, count in (
                (0, header),
                (max(header, size // 2), _SAMPLE_BYTES),
                (max(header, size - _SAMPLE_BYTES), _SAMPLE_BYTES),
            ):
                stream.seek(start)
                digest.update(stream.read(count))
    return digest.hexdigest()


def _header_bytes(first: bytes, size: int) -> int:
    """Length of a safetensors header with its 8-byte prefix; a sample's length for other files."""
    declared = int.from_bytes(first, "little") + 8
    return declared if declared <= min(size, 64 << 20) else _SAMPLE_BYTES
