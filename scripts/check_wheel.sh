#!/usr/bin/env bash
# Install the wheel into a clean environment that holds the PyPI package "kernels", which SGLang depends on, and
# check that ours leaves it untouched and works from there.
set -euo pipefail
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

python3 -m venv "$work/venv"
python="$work/venv/bin/python"
"$python" -m pip install -q --no-deps kernels
before=$(cd "$work" && "$python" -c 'import importlib.metadata as m; print(*sorted(f"{f} {f.hash.value}" for f in m.files("kernels") if f.hash), sep="\n")')
"$python" -m pip wheel -q --no-deps -w "$work" .
"$python" -m pip install -q "$work"/sgl_kvtier-*.whl
(
  cd "$work"
  KERNELS_BEFORE="$before" "$python" - <<'PY'
import base64, hashlib, importlib.metadata as metadata, os, pathlib

for line in os.environ["KERNELS_BEFORE"].splitlines():
    name, expected = line.rsplit(" ", 1)
    file = pathlib.Path(metadata.distribution("kernels").locate_file(name))
    actual = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    assert actual == expected, f"{name} of the package kernels was changed"
import sgl_kvtier_kernels, sgl_kvtier.cli, sgl_kvtier.tier.ssd

plugins = {e.name: e.value for e in metadata.entry_points(group="sglang.srt.plugins")}
assert plugins["sgl_kvtier"] == "sgl_kvtier.plugin:load", plugins
print("wheel installed beside kernels", metadata.version("kernels"), "- untouched")
PY
  "$work/venv/bin/sgl-kvtier" --version
)
