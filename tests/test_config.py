"""One configuration from three places, and what is said of bad values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sgl_kvtier.config import accepted_keys, load_config, parse_size
from sgl_kvtier.errors import ConfigError


def test_extra_config_beats_environment_beats_file_beats_defaults(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.json"
    file.write_text(json.dumps({"capacity": "1GiB", "segment_size": "2MiB", "min_free": "3MiB"}))
    environ = {"SGL_KVTIER_CONFIG": str(file), "SGL_KVTIER_SEGMENT_SIZE": "4MiB", "SGL_KVTIER_MIN_FREE": "5MiB"}
    config = load_config({"min_free": 6, "directory": str(tmp_path / "store")}, environ)
    assert config.capacity_bytes == 1 << 30
    assert config.segment_bytes == 4 << 20
    assert config.min_free_bytes == 6
    assert config.directory == str(tmp_path / "store")
    assert (config.codec, config.zstd_level, config.model_id) == ("zstd", 1, None)


def test_a_toml_file_named_in_the_extra_config(tmp_path: Path) -> None:
    file = tmp_path / "kvtier.toml"
    file.write_text('codec = "raw"\nzstd_level = 3\n')
    config = load_config({"config_file": str(file)}, {})
    assert (config.codec, config.zstd_level) == ("raw", 3)


def test_defaults_without_anything() -> None:
    config = load_config(None, {})
    assert config.capacity_bytes is None
    assert config.segment_bytes == 256 << 20
    assert config.min_free_bytes == 1 << 30
    assert Path(config.directory).is_absolute()


def test_keys_of_sglang_itself_are_not_ours_to_judge() -> None:
    load_config({"backend_name": "x", "module_path": "y", "class_name": "z", "interface_v1": 1, "tp_lcm_size": 4}, {})


@pytest.mark.parametrize(
    ("extra", "parts"),
    [
        ({"capasity": 1}, ["extra config", "'capasity'", *accepted_keys()]),
        ({"capacity": []}, ["capacity", "[]"]),
        ({"capacity": "much"}, ["capacity", "'much'", "64GiB"]),
        ({"capacity": -5}, ["capacity", "-5"]),
        ({"capacity": "1MiB"}, ["capacity", "4MiB"]),
        ({"codec": "gzip"}, ["codec", "gzip"]),
        ({"zstd_level": 0}, ["zstd_level", "0"]),
        ({"zstd_level": "1"}, ["zstd_level", "'1'"]),
        ({"segment_size": "1KiB"}, ["segment_size", "1MiB"]),
        ({"segment_size": "17TiB"}, ["segment_size", "16GiB"]),
        ({"directory": ""}, ["directory", "empty"]),
        ({"directory": 7}, ["directory", "7"]),
        ({"model_id": ""}, ["model_id", "empty"]),
        ({"config_file": "/no/such/file"}, ["config_file", "/no/such/file"]),
        ({"config_file": 3}, ["config_file", "3"]),
    ],
)
def test_bad_values_are_named_with_what_is_accepted(extra: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(extra, {})
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_bad_values_in_the_environment_and_in_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="SGL_KVTIER_ZSTD_LEVEL"):
        load_config(None, {"SGL_KVTIER_ZSTD_LEVEL": "high"})
    with pytest.raises(ConfigError, match="environment: codec"):
        load_config(None, {"SGL_KVTIER_CODEC": "gzip"})
    file = tmp_path / "kvtier.json"
    for text, reason in (("{", "neither JSON"), ("[1]", "table of keys"), ('{"colour": 1}', "'colour'")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=reason) as caught:
            load_config({"config_file": str(file)}, {})
        assert str(file) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("0", 0), ("4096", 4096), ("1.5KiB", 1536), ("2 MB", 2_000_000), ("3g", 3 << 30), ("1TiB", 1 << 40), (17, 17)],
)
def test_sizes(text: str | int, nbytes: int) -> None:
    assert parse_size("capacity", text) == nbytes
