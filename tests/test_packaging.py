"""What the wheel holds, and what the core imports."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

_REPO = Path(__file__).resolve().parents[1]


def test_the_wheel_holds_both_packages_and_no_top_level_kernels(tmp_path: Path) -> None:
    # A copy, so that building leaves nothing in the source tree.
    source = tmp_path / "source"
    files = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=_REPO, capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    for name in files:
        if (_REPO / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((_REPO / name).read_bytes())
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        ".",
    ]
    subprocess.run(command, cwd=source, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for expected in (
        "sgl_kvtier/backend.py",
        "sgl_kvtier/py.typed",
        "sgl_kvtier/store/store.py",
        "sgl_kvtier_kernels/planes.py",
        "sgl_kvtier_kernels/py.typed",
    ):
        assert expected in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"sgl_kvtier", "sgl_kvtier_kernels"}
    entry_points = zipfile.ZipFile(wheel).read(next(n for n in names if n.endswith("entry_points.txt"))).decode()
    assert "[sglang.srt.plugins]\nsgl_kvtier = sgl_kvtier.plugin:load" in entry_points
    assert "sgl-kvtier = sgl_kvtier.cli:app" in entry_points


def test_the_core_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sgl_kvtier.cli, sgl_kvtier.tier.ssd, sgl_kvtier.store.inspect, sgl_kvtier.bench.page_kernels\n"
        "print([name for name in ('torch', 'sglang', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=_REPO, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
