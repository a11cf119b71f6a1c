#!/usr/bin/env bash
# Makes .venv with PipeFill and everything it needs; does nothing when that is done already.
#   scripts/setup.sh [--extras dev,te]     PYTHON=/path/to/python3.12 chooses the interpreter
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=dev
while [ $# -gt 0 ]; do
    case $1 in
        --extras) extras=${2:?--extras needs a value, such as dev or dev,te}; shift 2 ;;
        -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "setup.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
    esac
done

new_enough() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; }

# The default python3 of a machine may be older than 3.12, and pyenv may hold a newer one that is not on PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3.14 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python3 /usr/local/bin/python3.1[2-9] /opt/*/bin/python3.1[2-9]; do
        if command -v "$candidate" >/dev/null 2>&1 && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup.sh: no Python >= 3.12 (with venv) found on PATH or under pyenv; set PYTHON=/path/to/python3.12" >&2
    exit 1
}

# The stamp says what was installed: a change of the requirements or of the extras installs again.
stamp=$(cat setup.py pyproject.toml | cksum | tr ' ' -)-$extras
if [ -x .venv/bin/python ] && [ "$(cat .venv/pipefill-stamp 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
if [ ! -x .venv/bin/python ] || ! new_enough .venv/bin/python; then
    python=$(find_python)
    echo "Making .venv with $("$python" --version)"
    "$python" -m venv --clear .venv
fi
echo "Installing PipeFill and what it needs (torch, megatron-core, ...); two to five minutes the first time"
# Without pip's import hook, so that type checkers see the package too.
.venv/bin/python -m pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat --editable ".[$extras]"
echo "$stamp" >.venv/pipefill-stamp
