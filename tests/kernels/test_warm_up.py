"""Compilation ahead of the first request."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import sgl_kvtier_kernels


def test_warm_up_can_be_repeated() -> None:
    sgl_kvtier_kernels.warm_up()
    sgl_kvtier_kernels.warm_up()


def test_a_cache_folder_that_cannot_be_made_only_costs_time(tmp_path: Path) -> None:
    file = tmp_path / "a_file"
    file.touch()
    code = (
        "import sgl_kvtier_kernels.layout as l, numpy as n; p = l.PagePlan(n.arange(4, dtype='u2'), "
        "[l.HostPart(0, 1, (1, 1, 1, 4), (4, 4, 4))], 0); o = n.zeros(4, 'u2'); p.gather(0, o); print(o.tolist())"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(file / "below"), "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.stdout.strip() == "[0, 1, 2, 3]", result.stderr
