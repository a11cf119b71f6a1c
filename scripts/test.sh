#!/usr/bin/env bash
# Sets up if needed, then runs the whole test suite; arguments go to pytest.
#   scripts/test.sh [tests/unit -k gate ...]
#   scripts/test.sh --megatron VERSION [...]    the tests that touch Megatron (tests/patches, tests/e2e), with that
#                                               version of megatron-core, in an environment of its own
#   scripts/test.sh --megatron PATH [...]       the same with the source of a checkout of Megatron-LM, before it is released
#   scripts/test.sh tests/slurm                 real trainings under a real SLURM too, which take some minutes more
# The job store is tested with PostgreSQL, and train_slurm.sh with SLURM: Debian's packages are installed if there are
# none and we are root.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
suites=(--ignore tests/e2e --ignore tests/slurm/test_training.py)

# Lets Pythons import the source of a folder `megatron` in the place of pip's, and says which it is.  What they import is
# links to its files: so nothing is written there, and the dataset helper, which a source lacks, is that of pip's wheel.
in_front() {
    local links=$PWD/$venv/megatron-checkout helper
    rm -rf "$links"
    mkdir "$links"
    cp -rs "$1" "$links"
    for helper in "$PWD/$venv"/lib/python3*/site-packages/megatron/core/datasets/helpers_cpp*.so; do
        [ -e "$links/megatron/core/datasets/${helper##*/}" ] || ln -s "$helper" "$links/megatron/core/datasets"
    done
    export PYTHONPATH=$links${PYTHONPATH:+:$PYTHONPATH}
    "$venv/bin/python" -W ignore -m pipefill_patches --check || true  # the tests say it, too
}

case ${1:-} in
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    --megatron)
        version=${2:?--megatron needs a version, such as 0.18.2, or the path of a checkout of Megatron-LM}
        shift 2
        suites=(tests/patches)
        if checkout=$(cd "$OLDPWD" && realpath -e "$version/megatron/core/package_info.py" 2>/dev/null); then
            scripts/setup.sh
            in_front "${checkout%/core/package_info.py}"
        elif [[ $version = */* ]]; then
            echo "test.sh: --megatron $version: expected a version, such as 0.18.2, or a checkout with megatron/core in it" >&2
            exit 2
        else
            scripts/setup.sh --megatron "$version"
            venv=.venv-megatron-$version
        fi ;;
    *) scripts/setup.sh ;;
esac

install() { # what it is called, its Debian packages
    local name=$1 log
    shift
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "test.sh: $name is not installed, and only root can do that: its tests will be skipped" >&2
        return
    fi
    log=$(mktemp)
    {
        export DEBIAN_FRONTEND=noninteractive
        apt-get update -qq &&
            apt-get install -qq -y --no-install-recommends -o Dpkg::Options::=--force-confold "$@"
    } >"$log" 2>&1 || echo "test.sh: $name could not be installed (see $log): its tests will be skipped" >&2
}

if ! ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 && ! command -v initdb >/dev/null; then
    if [ "$(id -u)" = 0 ] && [ ! -e /etc/postgresql-common/createcluster.conf ]; then
        # No cluster of its own: the tests start a private one.
        mkdir -p /etc/postgresql-common
        echo 'create_main_cluster = false' >/etc/postgresql-common/createcluster.conf
    fi
    install PostgreSQL postgresql pgbouncer
fi
if ! command -v slurmctld >/dev/null && [ ! -e /usr/sbin/slurmctld ]; then
    install SLURM slurm-wlm munge
fi
if [ $# -gt 0 ]; then
    exec "$venv/bin/python" -m pytest "$@"
fi
# Of end-to-end tests, which train on two cores, no more than two are run at a time.  They often wait for something, and
# so do the others: three of those beside them keep both cores busy, and the end-to-end tests' output comes last.  They
# come first, a ninth of the weight for the others: a training that waits for its jobs goes on for nothing.
# Both fork what needs torch, or Megatron too, from processes that have imported it.
status=0
export OMP_NUM_THREADS=1  # else the libraries' threads of two processes spin for two cores
unset PYTHONDONTWRITEBYTECODE  # else each of them compiles all tests
folder=$(mktemp -d)
export PIPEFILL_TEST_FRESH=$folder/fresh PIPEFILL_TEST_WARM=$folder/megatron
set -m  # without job control, bash has a command in the background ignore Ctrl-C
"$venv/bin/python" tests/e2e/warm.py --two "$PIPEFILL_TEST_FRESH" "$PIPEFILL_TEST_WARM" </dev/null >/dev/null 2>&1 &
warm=$!
"$venv/bin/python" -m pytest --numprocesses 2 tests/e2e >"$folder/log" 2>&1 &
e2e=$!
set +m
trap 'kill -INT "$e2e" 2>/dev/null || :; rm -rf "$folder"; kill "$warm"; wait "$warm" || :' EXIT
PIPEFILL_TEST_NICE=10 "$venv/bin/python" -m pytest --numprocesses 3 "${suites[@]}" || status=$?
wait "$e2e" || status=$?
cat "$folder/log"
exit "$status"
