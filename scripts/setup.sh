#!/usr/bin/env bash
# Makes .venv with PipeFill and everything it needs; does nothing when that is done already.
#   scripts/setup.sh [--extras dev,te]     PYTHON=/path/to/python3.12 chooses the interpreter
#   scripts/setup.sh --megatron VERSION    makes .venv-megatron-VERSION, with that version of megatron-core, instead
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=dev
venv=.venv
# The newest version that was tested, and not the newest there is.
megatron=$(sed -n 's/^TESTED = "\(.*\)"$/\1/p' pipefill_patches/versions.py)
while [ $# -gt 0 ]; do
    case $1 in
        --extras) extras=${2:?--extras needs a value, such as dev or dev,te}; shift 2 ;;
        --megatron) megatron="==${2:?--megatron needs a version, such as 0.18.2}" venv=.venv-megatron-$2; shift 2 ;;
        -h | --help) sed -n '2,4s/^# \{0,1\}//p' "$0"; exit 0 ;;
        *) echo "setup.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
    esac
done

# megatron-core has wheels for these alone.
fits() { "$1" -c 'import sys, venv, ensurepip; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }

# The default python3 of a machine may be another one, and pyenv may hold one of these that is not on PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3.12 python3.13 python3 \
        "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[23]*/bin/python3 /usr/local/bin/python3.1[23] /opt/*/bin/python3.1[23]; do
        if command -v "$candidate" >/dev/null 2>&1 && fits "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    echo "setup.sh: no Python 3.12 or 3.13 (with venv) found on PATH or under pyenv: megatron-core has wheels for no" \
        "other; set PYTHON=/path/to/python3.12" >&2
    exit 1
}

# What pip does at the moment, every 15 seconds: it says nothing for minutes while it unpacks torch.
sign_of_life() {
    local never last done
    exec {never}<> <(:) # to wait for: a sleep would outlive this function, and hold a pipe open behind it
    while ! read -rt 15 -u "$never"; do
        last=$(grep -E '^ *(Collecting|Downloading|Using cached|Building|Installing) ' "$log" | tail -n 1 || true)
        if [[ $last = "Installing collected packages: "* ]]; then
            done=("$venv"/lib/python3*/site-packages/*.dist-info)
            last="Installing: ${#done[@]} of $(($(wc -w <<<"$last") - 2)) packages"
        fi
        printf '  %d:%02d  %.100s\n' $((SECONDS / 60)) $((SECONDS % 60)) "${last#"${last%%[! ]*}"}"
    done
}

# The stamp says what was installed: a change of the requirements or of the extras installs again.
stamp=$(cat setup.py pyproject.toml pipefill_patches/versions.py | cksum | tr ' ' -)-$extras
if [ -x "$venv/bin/python" ] && [ "$(cat "$venv/pipefill-stamp" 2>/dev/null)" = "$stamp" ]; then
    exit 0
fi
if [ ! -x "$venv/bin/python" ] || ! fits "$venv/bin/python"; then
    python=$(find_python)
    echo "Making $venv with $("$python" --version)"
    "$python" -m venv --clear "$venv"
fi
log=$venv/setup.log
echo "Installing PipeFill and what it needs into $venv (torch and CUDA's libraries, megatron-core, about 140 packages," \
    "7 GB); two to five minutes the first time. pip's log: $log"
: >"$log"
sign_of_life &
trap 'kill $! 2>/dev/null || true' EXIT
# Without pip's import hook, so that type checkers see the package too.
if ! "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off \
    --config-settings editable_mode=compat --editable ".[$extras]" "megatron-core$megatron" >"$log" 2>&1; then
    tail -n 30 "$log" >&2
    echo "setup.sh: pip could not install it; all it said is in $log" >&2
    exit 1
fi
grep '^ERROR' "$log" >&2 || true # such as conflicts with what was in the environment before
echo "$stamp" >"$venv/pipefill-stamp"
echo "Installed after $((SECONDS / 60)):$(printf %02d $((SECONDS % 60)))"
