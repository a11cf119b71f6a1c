#!/usr/bin/env bash
# Collects, as wheels, what a GPU machine without network lacks to run PipeFill beside its torch, numpy and
# transformers: PipeFill itself and what it needs, for Python 3.12 on x86-64, in the versions that are installed here.
#   scripts/gpu_wheels.sh DIR [--extras tasks] [--has FREEZE.txt] [--most MIB]
# --has names what `pip list --format=freeze` prints there: what fits is left out.  It fails if they take more than
# --most MiB (64).  DIR holds nothing but wheels; those that are in it already are removed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$root/.venv/bin/python
fail() { echo "gpu_wheels.sh: $1" >&2; exit 2; }

folder='' most=64
asked=()
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --extras | --has) asked+=("$1" "${2:?gpu_wheels.sh: $1 needs a value}"); shift 2 ;;
        --most) most=${2:?gpu_wheels.sh: --most needs a number of MiB}; shift 2 ;;
        -*) fail "unknown argument $1 (see --help)" ;;
        *) [ -z "$folder" ] || fail "one folder at a time, not $folder and $1"; folder=$1; shift ;;
    esac
done
[ -n "$folder" ] || fail "no folder given; expected scripts/gpu_wheels.sh DIR"
[[ $most =~ ^[1-9][0-9]*$ ]] || fail "--most is '$most'; expected a whole number of MiB"
[ -x "$python" ] || fail "there is no $python; expected scripts/setup.sh to have run"
lines=$("$python" "$root/scripts/benchmarks/carried.py" "${asked[@]}") || exit 2
mapfile -t packages <<<"$lines"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
others=$(find "$folder" -mindepth 1 -maxdepth 1 ! -name '*.whl' -printf '%f ')
[ -z "$others" ] || fail "$folder holds more than wheels ($others); expected a folder for them alone"
rm -f "$folder"/*.whl

# From a copy: what an earlier build left in the checkout would be packed too.
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
(cd "$root" && cp -r megatron pipefill_patches setup.py pyproject.toml README.md LICENSE NOTICE "$copy")
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation -w "$folder" "$copy"

# pip takes a wheel for an older C library only if that one is named.
platforms=(--platform linux_x86_64 --platform manylinux1_x86_64 --platform manylinux2010_x86_64 --platform manylinux2014_x86_64)
for minor in $(seq 5 28); do
    platforms+=(--platform "manylinux_2_${minor}_x86_64")
done
"$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --implementation cp --python-version 3.12 "${platforms[@]}" -d "$folder" "${packages[@]}"

bytes=0
for wheel in "$folder"/*.whl; do
    size=$(stat -c %s "$wheel")
    bytes=$((bytes + size))
    printf '%7d KiB  %s\n' $((size / 1024)) "$(basename "$wheel")"
done
printf '%7d KiB  in %d wheels\n' $((bytes / 1024)) "$(find "$folder" -name '*.whl' | wc -l)"
cat <<EOF
There, in the folder with the wheels (all in one command, since the folder megatron is in two of them):
  python3 -m pip install --no-index --no-deps --no-compile --target /tmp/site *.whl && export PYTHONPATH=/tmp/site
EOF
if [ "$bytes" -gt $((most * 1024 * 1024)) ]; then
    echo "gpu_wheels.sh: they take more than $most MiB; leave out with --has what is there, or allow more with --most" >&2
    exit 1
fi
