#!/usr/bin/env bash
# A conversation's KV survives a server crash: one command on a fresh machine.
#
#   scripts/demo.sh                               on the CPU, with SmolLM2-135M; sets everything up in .venv
#   scripts/demo.sh --backend file                the same with SGLang's own file backend
#   scripts/demo.sh --python PYTHON --model MODEL on a GPU machine: the interpreter that has SGLang and sgl_kvtier,
#                                                 and a model of yours
#
# All options: scripts/demo.sh --help. A second run reuses the set-up. SGL_KVTIER_VENV names another folder than .venv.
set -euo pipefail
repo=$(cd "$(dirname "$0")/.." && pwd)

python=
for ((i = 1; i <= $#; i++)); do
  case "${!i}" in
    --python) next=$((i + 1)); python=${!next:?--python needs an interpreter} ;;
    --python=*) python=${!i#--python=} ;;
  esac
done
if [ -z "$python" ]; then
  venv=${SGL_KVTIER_VENV:-$repo/.venv}
  bash "$repo/scripts/sglang_cpu/install.sh" "$venv"
  python=$venv/bin/python
fi
exec "$python" "$repo/scripts/demo.py" "$@"
