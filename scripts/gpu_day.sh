#!/usr/bin/env bash
# The measurements for a GPU that is there only for a while, in parts of less than ten minutes:
#   scripts/gpu_day.sh look|smoke|figures1|figures2|stages [OUT] [--device cpu|cuda] [--seconds N] [--only STEP,...] [--list]
#     look      what is there, one job behind all walls, the tests that need a GPU, what the GPU does to bubbles
#     smoke     short trainings with ghost stages: does everything work
#     figures1  slowdown, harvest, delays and overruns of one stage with ghosts, time-sliced and under MPS
#     figures2  another schedule; whether weights are the same with jobs and without
#     stages    real stages: whether losses are the same; --fill-free-waits
# OUT (default: $OUT, else runs/gpu-day) gets PART.json, which is written after every step, PART.log, and PART.tgz with the
# logs, records and reports of all steps.  Each step has its own time limit, and one that fails does not stop the others;
# --seconds bounds them all (580).  On a machine without an NVIDIA driver it is a rehearsal on the CPU, in which every
# step runs small and has eight times as long.
# --only leaves all other steps alone; --list only prints them.
set -uo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "gpu_day.sh: $1" >&2; exit 2; }

part='' out='' device='' most='' stretch=1 only='' list='' work=WORK
while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) sed -n '2,13s/^# \{0,1\}//p' "$0"; exit 0 ;;
        --device) device=${2:-}; shift; [[ $device =~ ^(cpu|cuda)$ ]] || fail "--device is '$device'; expected cpu or cuda" ;;
        --seconds) most=${2:-}; shift; [[ $most =~ ^[1-9][0-9]{0,4}$ ]] || fail "--seconds is '$most'; expected a whole number above 0" ;;
        --only) only=${2:-}; shift; [[ $only =~ ^[a-z0-9,-]+$ ]] || fail "--only is '$only'; expected names of steps, with commas between" ;;
        --list) list=1 ;;
        -*) fail "unknown argument $1 (see --help)" ;;
        *) if [ -z "$part" ]; then part=$1; elif [ -z "$out" ]; then out=$1; else fail "unexpected argument $1 (see --help)"; fi ;;
    esac
    shift
done
[[ $part =~ ^(look|smoke|figures1|figures2|stages)$ ]] || fail "the part is '$part'; expected look, smoke, figures1, figures2 or stages"
python=${PYTHON:-$root/.venv/bin/python}
[ -x "$python" ] || python=$(command -v python3) || fail "there is no python3"
out=${out:-${OUT:-$root/runs/gpu-day}}
cd "$root" || exit 2
PATH=$PATH:/usr/local/nvidia/bin:/usr/local/cuda/bin
export PYTHONUNBUFFERED=1 GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo} PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}

if [ -z "$list" ]; then
    mkdir -p "$out" || exit 2
    out=$(cd "$out" && pwd)
    device=${device:-$("$python" scripts/benchmarks/gpu_day.py device)} || fail "$python cannot run PipeFill; see above"
    work=$(mktemp -d)
    chmod 755 "$work" # jobs run as another user
    json=$out/$part.json log=$out/$part.log
    keeper=''
    trap '"$python" scripts/benchmarks/gpu_day.py logs "$work" "$out/$part.tgz"; kill $keeper 2>/dev/null; rm -rf "$work"' EXIT
    "$python" scripts/benchmarks/gpu_day.py begin "$json" --part "$part" --device "$device" || exit 2
    : >"$log"
    # While somebody has the driver open, it need not be set up anew for each process that uses the GPU.
    if [ "$device" = cuda ]; then
        "$python" -c "import pynvml, time; pynvml.nvmlInit(); time.sleep(3600)" >/dev/null 2>&1 &
        keeper=$!
    fi
fi
failed=0

# step NAME LIMIT CMD...: run it, and keep what it says.  @ in its arguments stands for the JSON file that it writes.
step() {
    local name=$1 limit=$(($2 * stretch)) found code begun left
    shift 2
    [ -z "$only" ] || [[ ,$only, = *,$name,* ]] || return
    if [ -n "$list" ]; then
        printf '%4d s  %s: %s\n' "$limit" "$name" "$*"
        return
    fi
    found=$work/$name.json left=$((most - SECONDS))
    local note=("$python" scripts/benchmarks/gpu_day.py note "$json" --step "$name" --command "$*" --log "$work/$name.log" --found "$found")
    : >"$work/$name.log"
    if [ "$left" -lt 5 ]; then
        "${note[@]}" --limit "$limit"
        failed=1
        return
    fi
    limit=$((limit < left ? limit : left)) begun=$SECONDS
    echo "== $name (at most $limit s): $*"
    local word words=()
    for word in "$@"; do
        [ "$word" = @ ] && word=$found
        words+=("$word")
    done
    timeout -k 5 "$limit" "${words[@]}" >"$work/$name.log" 2>&1 </dev/null
    code=$?
    [ "$code" = 0 ] || failed=1
    { echo "== $name: $*"; cat "$work/$name.log"; } >>"$log"
    "${note[@]}" --limit "$limit" --code "$code" --seconds $((SECONDS - begun))
}

# bench NAME LIMIT ARGUMENTS...: a call of bench_gpu.py.  It ends by itself before it is ended, and keeps its profiles.
bench() {
    local name=$1 limit=$2
    shift 2
    step "$name" "$limit" "$python" scripts/benchmarks/bench_gpu.py --json @ --keep "$work/keep" --budget-seconds $((limit * stretch - 15)) \
        "${small[@]}" "$@"
}

look() {
    step machine 20 "$python" scripts/benchmarks/gpu_look.py --json @
    step imports 40 "$python" -c "import megatron.training, megatron.fill.app, pretrain_gpt; print('imported')"
    # shellcheck disable=SC2016  # they are of that shell
    step try 50 bash -c '"$0" -c "from megatron.fill.cli import main; main()" try "$@"' "$python" \
        scripts/benchmarks/gpu_task.py:Products "size=$size" --memory 4GiB --device "$where" --seconds 3 --keep "$work/keep/try"
    # shellcheck disable=SC2016
    step doctor 30 bash -c '"$0" -c "from megatron.fill.cli import main; main()" doctor --json >"$1"' "$python" @
    step tests 90 "$python" -m pytest -q --timeout 60 tests/gpu/test_bubbles.py tests/gpu/test_cuda.py tests/gpu/test_device.py
    step micro 135 "$python" scripts/benchmarks/gpu_micro.py --json @ --keep "$work/keep/micro" --seconds 1
}

smoke() {
    local model=(--model "$smaller" --waits "$waits")
    bench profile 115 --parts profile --model "$smaller" --waits "$waits"
    bench bubbles 80 --parts bubbles "${model[@]}"
    bench filled 115 --parts filled "${model[@]}" "${few[@]}"
    bench filled-mps 115 --parts filled "${model[@]}" --sharing "$mps" "${few[@]}"
}

figures1() {
    local model=(--model "$larger" --waits "$waits")
    bench profile 108 --parts profile --model "$larger" --waits "$waits"
    bench filled 125 --parts filled "${model[@]}" "${some[@]}"
    bench filled-mps 125 --parts filled "${model[@]}" --sharing "$mps" "${some[@]}"
    bench no-gate 111 --parts no-gate "${model[@]}" "${few[@]}"
    bench no-gate-mps 111 --parts no-gate "${model[@]}" --sharing "$mps" "${few[@]}"
}

figures2() {
    bench profile 115 --parts profile --model "$smaller" --waits "$waits"
    bench filled-interleaved 155 --parts filled --model "$smaller" --waits "$waits" --schedule interleaved "${few[@]}"
    bench identity 180 --parts identity --model "$smaller" --waits "$waits"
}

stages() {
    step losses 185 "$python" scripts/benchmarks/gpu_identity.py --json @ --keep "$work/keep/losses" --device "$device" --iterations 20 --most-seconds $((45 * stretch))
    step free-waits 140 "$python" scripts/benchmarks/gpu_free_waits.py --json @ --keep "$work/keep/free-waits" --pairs 1 --budget-seconds $((127 * stretch))
}

if [ "$device" = cpu ]; then
    # Jobs run when nothing else does (SCHED_IDLE): beside four busy processes, importing torch took more than 40 s, not 2.
    stretch=8 small=(--device cpu --block 2 --pairs 2 --warmup 6 --startup-seconds 10 --baseline-seconds 1)
    few=() some=() smaller=tiny larger=tiny waits=host mps=timeslice size=192 where=cpu
else
    small=(--block 4 --warmup 15 --startup-seconds 22 --baseline-seconds 5) few=(--pairs 3) some=(--pairs 5)
    smaller=350m larger=1.3b waits=stream mps=mps size=4096 where=cuda:0
fi
most=${most:-$((580 * stretch))}
case $part in
    look) look ;;
    smoke) smoke ;;
    figures1) figures1 ;;
    figures2) figures2 ;;
    stages) stages ;;
esac
[ -z "$list" ] || exit 0
"$python" scripts/benchmarks/gpu_day.py table "$json"
exit "$failed"
