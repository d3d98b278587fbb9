"""The ``sgl-kvtier`` command, as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from sgl_kvtier import __version__
from sgl_kvtier.cli import app
from tests.support import HostPool, content, key, namespace, tier

_run = CliRunner().invoke


def test_version_and_help() -> None:
    assert _run(app, ["--version"]).output.strip() == __version__
    assert "stat" in _run(app, ["--help"]).output


def test_stat_of_a_live_store(tmp_path: Path) -> None:
    pool = HostPool(3)
    opened = tier(tmp_path / "s")
    space = namespace(opened, pool.geometry, "org/a-model")
    for number in range(3):
        pool.fill(number, content(number, pool.geometry))
    opened.put(space, [key(n) for n in range(3)], pool.views())
    result = _run(app, ["stat", str(tmp_path / "s"), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.output)
    assert found["pages"] == 3
    assert found["raw_bytes"] == 3 * pool.geometry.nbytes
    assert found["raw_bytes"] > found["stored_bytes"] >= found["record_bytes"]
    assert found["saved_fraction"] == 1 - found["stored_bytes"] / found["raw_bytes"]
    assert found["codecs"] == {"1": 3}
    assert found["segment_bytes"] >= found["stored_bytes"]
    assert [row["model"] for row in found["namespaces"]] == ["org/a-model"]
    assert found["namespaces"][0]["digest"] == space[:8].hex()
    table = _run(app, ["stat", str(tmp_path / "s")])
    assert "3 pages" in table.output
    opened.store.clear([space])
    assert json.loads(_run(app, ["stat", str(tmp_path / "s"), "--json"]).output)["pages"] == 0
    opened.store.close()


def test_stat_of_what_is_no_store(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        result = _run(app, ["stat", str(folder)])
        assert result.exit_code == 2
        assert str(folder) in result.stderr
    assert not (tmp_path / "absent").exists()


def test_bench_kernels(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    arguments = ["bench", "kernels", "--page-sizes", "256KiB", "--layouts", "page_first,page_head", "--dtypes", "bf16"]
    result = _run(app, [*arguments, "--seconds", "0", "--json", str(file)])
    assert result.exit_code == 0, result.output
    rows = json.loads(file.read_text())["rows"]
    assert len(rows) == 2 * 2 * 4
    assert {row["op"] for row in rows} == {"split", "merge", "gather", "scatter"}
    assert all(row["over_memcpy"] == row["gb_s"] / row["memcpy_gb_s"] > 0 for row in rows)
    assert "lowest over memcpy" in result.output


def test_bench_kernels_says_what_is_wrong() -> None:
    for arguments, reason in (
        (["--page-sizes", "big"], "big"),
        (["--page-sizes", "1KiB"], "1024"),
        (["--dtypes", "fp4"], "fp4"),
        (["--layouts", "sideways"], "sideways"),
    ):
        result = _run(app, ["bench", "kernels", "--seconds", "0", *arguments])
        assert result.exit_code == 2
        assert reason in result.stderr
