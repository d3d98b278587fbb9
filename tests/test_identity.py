"""Namespaces, keys and fingerprints: what may share bytes, and what must not."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import numpy as np
import pytest

from sgl_kvtier.identity import Namespace, Shard, index_digests, key_bytes, key_words, weights_fingerprint
from sgl_kvtier.page import PageGeometry, part_geometry

# Mixing wraps around by design; in plain Python, without the compiler, NumPy warns of it.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in scalar:RuntimeWarning")

_GEOMETRY = PageGeometry(16, (part_geometry("k", 16, 2, 4, 8, "bfloat16", 2),))
_BASE = Namespace(model="m", weights="w", pool="kv", geometry=_GEOMETRY, shard=Shard())


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weights": "x"},
        {"pool": "swa"},
        {"order": "flat"},
        {"variant": "quantization=fp8"},
        {"version": 2},
        *({"shard": msgspec.structs.replace(Shard(), **{name: 2})} for name in Shard.__struct_fields__),
        {"geometry": PageGeometry(32, _GEOMETRY.parts)},
        *(
            {"geometry": PageGeometry(16, (msgspec.structs.replace(_GEOMETRY.parts[0], **{name: value}),))}
            for name, value in {
                "name": "v", "tokens": 8, "layers": 3, "heads": 5, "dim": 9, "dtype": "float16", "word_bytes": 4,
            }.items()
        ),
        {"geometry": PageGeometry(16, _GEOMETRY.parts * 2)},
    ],
)  # fmt: skip
def test_every_field_changes_the_namespace(change: dict[str, object]) -> None:
    changed = msgspec.structs.replace(_BASE, **change)
    assert changed.digest() != _BASE.digest()
    assert len(changed.digest()) == 32


def test_the_namespace_is_the_same_in_every_process() -> None:
    # A stored namespace must be found again: this value may change only with NAMESPACE_VERSION.
    assert (
        _BASE.digest().hex()
        == Namespace(model="m", weights="w", pool="kv", geometry=_GEOMETRY, shard=Shard()).digest().hex()
    )
    assert _BASE.digest().hex()[:16] == "d8021d0ca2486ba6"


def test_hex_keys_are_taken_as_they_are_and_alias_nothing() -> None:
    key = "0123456789abcdef" * 4
    assert key_bytes(key) == bytes.fromhex(key)
    others = [key.upper(), key[:-1], key + "0", key + "\n", " " + key, key + ".mamba", "", "ключ", "\ud800"]
    digests = {key_bytes(other) for other in others} | {key_bytes(key)}
    assert len(digests) == len(others) + 1
    assert all(len(digest) == 32 for digest in digests)


def test_index_digests_depend_on_key_and_namespace() -> None:
    keys = key_words([f"{i:064x}" for i in range(3)])
    one, two = (index_digests(bytes([n]) * 32, keys) for n in (1, 2))
    assert one.shape == (3, 2)
    assert one.dtype == np.uint64
    assert len({tuple(row) for row in np.concatenate([one, two]).tolist()}) == 6
    assert index_digests(bytes(32), key_words([])).shape == (0, 2)


def test_fingerprint_covers_configuration_sizes_headers_and_samples(tmp_path: Path) -> None:
    def model(**files: bytes) -> str | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, content in files.items():
            (folder / name.replace("_", ".")).write_bytes(content)
        return weights_fingerprint(folder)

    header = b'{"a":1}'
    weights = len(header).to_bytes(8, "little") + header + bytes(300_000)
    middle, end = bytearray(weights), bytearray(weights)
    middle[len(weights) // 2 + 5] = 1
    end[-1] = 1
    renamed = weights.replace(b'"a"', b'"b"')
    found = [
        model(config_json=b"{}", model_safetensors=weights),
        model(config_json=b"{ }", model_safetensors=weights),
        model(config_json=b"{}", model_safetensors=renamed),
        model(config_json=b"{}", model_safetensors=bytes(middle)),
        model(config_json=b"{}", model_safetensors=bytes(end)),
        model(config_json=b"{}", model_safetensors=weights + b"\0"),
        model(config_json=b"{}"),
    ]
    assert None not in found
    assert len(set(found)) == len(found)
    assert model(config_json=b"{}", model_safetensors=weights) == found[0]
    assert model(config_json=b"{}", model_safetensors=weights, notes_txt=b"x") == found[0]


def test_fingerprint_of_a_file_and_of_nothing(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes(10))
    assert weights_fingerprint(file)
    assert weights_fingerprint(tmp_path / "absent") is None
    (tmp_path / "empty").mkdir()
    assert weights_fingerprint(tmp_path / "empty") is None
    assert weights_fingerprint("meta/llama") is None


def test_a_batch_of_keys_is_parsed_as_each_of_them_is() -> None:
    hexes = [hashlib.sha256(bytes([n])).hexdigest() for n in range(5)]
    odd = ["", "ä" * 32, "\udc80", hexes[0].upper(), hexes[0][:-1], hexes[0] + "0", hexes[0][:-1] + "g", "a\nb"]
    # Two keys whose lengths differ, and a newline inside of a key, leave the joined text's length as it should be.
    disguised = [hexes[1][:-1], hexes[1] + "0"], [hexes[2] + "\n" + hexes[3]], [hexes[2][:30] + "\n" + hexes[3][:33]]
    for batch in (hexes, [*hexes, odd[0]], *([hexes[0], key] for key in odd), *disguised, hexes[:1]):
        expected = np.frombuffer(b"".join(map(key_bytes, batch)), "<u8").reshape(-1, 4)
        assert np.array_equal(key_words(batch), expected)
    with pytest.raises(TypeError):
        key_words([hexes[0], 3])  # type: ignore[list-item]
