#!/usr/bin/env bash
# install.sh VENV: SGLang for the CPU, the demo's model package, and this project, in a virtual environment.
#
# About 1.7 GB and three minutes the first time; a second run finds everything in place. Missing Debian packages are
# installed where that is possible (root on Debian or Ubuntu), else named.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
repo=$(cd "$here/../.." && pwd)
venv=${1:?usage: install.sh VENV}

say() { printf '%s\n' "$*" >&2; }

command -v python3 >/dev/null || { say "python3 is missing; Python 3.11, 3.12 or 3.13 is needed"; exit 1; }
python3 -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' \
  || { say "python3 is $(python3 -V); Python 3.11, 3.12 or 3.13 is needed"; exit 1; }

# SGLang compiles its page-hash extension when HiCache starts; it has no fallback.
missing=()
command -v g++ >/dev/null || missing+=(g++)
command -v ninja >/dev/null || missing+=(ninja-build)
[ -e /usr/include/openssl/sha.h ] || missing+=(libssl-dev)
python3 -c 'import sysconfig, os; raise SystemExit(not os.path.exists(sysconfig.get_paths()["include"] + "/Python.h"))' \
  || missing+=(python3-dev)
python3 -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
if [ ${#missing[@]} -gt 0 ]; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "${missing[@]}" >/dev/null
  else
    say "these packages are missing: ${missing[*]}; install them (as root: apt-get install ${missing[*]}) and run again"
    exit 1
  fi
fi

stamp=$(cat "$here"/requirements.txt "$here"/no-deps.txt "$repo"/pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$venv/.sgl_kvtier_stamp" 2>/dev/null)" = "$stamp $repo" ]; then
  exit 0
fi
# An interrupted creation leaves an interpreter without pip.
"$venv/bin/python" -m pip --version >/dev/null 2>&1 || { say "creating $venv"; python3 -m venv "$venv"; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -qq "$@"; }
say "installing torch and SGLang's dependencies (1.5 GB, the longest step)"
pip -r "$here/requirements.txt"
say "installing SGLang"
pip --no-deps -r "$here/no-deps.txt"
say "installing sgl_kvtier"
pip setuptools wheel
pip --no-deps --no-build-isolation -e "$repo"
echo "$stamp $repo" > "$venv/.sgl_kvtier_stamp"
