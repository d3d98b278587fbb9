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
[ -x "$venv/bin/python" ] || { say "creating $venv"; python3 -m venv "$venv"; }
# Messages about the resolver name SGLang's GPU dependencies, which are left out on purpose.
pip() { "$venv/bin/python" -m pip --disable-pip-version-check install -q "$@"; }
say "installing torch and SGLang's dependencies"
pip -r "$here/requirements.txt" 2> >(grep -v -e 'Location .* is ignored' >&2)
say "installing SGLang"
pip --no-deps -r "$here/no-deps.txt" 2> >(grep -v -e 'Location .* is ignored' >&2)
say "installing sgl_kvtier"
pip setuptools wheel 2> >(grep -v -e 'Location .* is ignored' >&2)
pip --no-deps --no-build-isolation -e "$repo" 2> >(grep -v -e 'Location .* is ignored' >&2)
echo "$stamp $repo" > "$venv/.sgl_kvtier_stamp"
