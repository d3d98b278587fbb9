#!/usr/bin/env bash
# Set up and run the whole test suite, real SGLang servers included.
#
#   scripts/test.sh            everything
#   scripts/test.sh --fast     lint, types, and the core tests only: no SGLang is installed or run
#
# The virtual environment is .venv in the repository; set SGL_KVTIER_VENV to use another folder. A second run
# reuses it. As root on Debian or Ubuntu missing system packages are installed; elsewhere the script says which.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${SGL_KVTIER_VENV:-.venv}
fast=false
case "${1:-}" in
  "") ;;
  --fast) fast=true ;;
  *) echo "usage: scripts/test.sh [--fast]" >&2; exit 2 ;;
esac

step() { printf '\n== %s (%ss)\n' "$1" "$SECONDS"; }

step "environment"
if $fast; then
  [ -x "$venv/bin/python" ] || python3 -m venv "$venv"
  "$venv/bin/python" -m pip install -q -e '.[dev]'
else
  bash scripts/sglang_cpu/install.sh "$venv"
  "$venv/bin/python" -m pip install -q -r scripts/dev-requirements.txt
fi
python="$venv/bin/python"

step "lint and types"
"$python" -m ruff check .
"$python" -m ruff format --check .
"$python" -m mypy

step "core tests"
core=(tests --ignore=tests/conformance --ignore=tests/hostpool --ignore=tests/radix --ignore=tests/sglang)
if $fast; then
  CI= "$python" -m pytest -q "${core[@]}"
  exit
fi
"$python" -m pytest -q "${core[@]}"

step "kernels as plain Python"
NUMBA_DISABLE_JIT=1 "$python" -m pytest -q tests/kernels

step "SGLang in process"
"$python" -m pytest -q tests/conformance tests/hostpool tests/radix

step "real SGLang servers"
"$python" -m pytest -q tests/sglang

step "wheel beside the package 'kernels'"
bash scripts/check_wheel.sh

printf '\nAll tests passed in %ss.\n' "$SECONDS"
