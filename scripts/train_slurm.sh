#!/usr/bin/env bash
#SBATCH --job-name=pipefill
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=pipefill-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
# Trains on the nodes of a SLURM allocation, one srun task per rank; every flag goes to pretrain_gpt.py.
#   RANKS=8 sbatch --nodes 4 --gpus-per-node 8 --cpus-per-task 64 --signal USR2@300 scripts/train_slurm.sh \
#       --pipeline-model-parallel-size 16 ... --save ckpt --load ckpt --save-interval 500 \
#       --exit-signal-handler --exit-signal SIGUSR2 --fill-jobs jobs.yaml
# docs/slurm.md tells of time limits, requeues, several nodes and containers.  In the environment:
#   RANKS       ranks per node (default: its GPUs, else its tasks if more than one, else 2)
#   PIPEFILL    the checkout (default: where sbatch was called, or where this script lies)
#   PYTHON      the interpreter (default: .venv/bin/python of the checkout)
#   SCRIPT      another Megatron script, unchanged, instead of pretrain_gpt.py
#   SRUN_FLAGS  more flags for srun, separated by spaces, e.g. --container-image=...
set -euo pipefail

refuse() {
    echo "train_slurm.sh: error: $*" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || refuse "this is no SLURM job; expected sbatch $0 ..., or train_local.sh without SLURM"

submitted_as() { # the path of this script when sbatch read it; SLURM runs a copy
    scontrol show job "$SLURM_JOB_ID" | sed -n 's/^ *Command=\(.*\.sh\)\( .*\)\?$/\1/p' | head -n 1
}

root=${PIPEFILL:-$SLURM_SUBMIT_DIR}
if [ -z "${PIPEFILL:-}" ] && [ ! -e "$root/pretrain_gpt.py" ]; then
    root=$(cd "$(dirname "$(submitted_as)")/.." && pwd)
fi
[ -e "$root/pretrain_gpt.py" ] || refuse "there is no pretrain_gpt.py in $root; expected the checkout in PIPEFILL"
root=$(cd "$root" && pwd)
python=${PYTHON:-$root/.venv/bin/python}
if [ -z "${PYTHON:-}" ]; then
    [ -x "$python" ] || refuse "there is no $python; expected $root/scripts/setup.sh run first, or PYTHON"
fi

tasks=${SLURM_NTASKS_PER_NODE:-1}
tasks=${tasks%%(*}
ranks=${RANKS:-${SLURM_GPUS_ON_NODE:-$((tasks > 1 ? tasks : 2))}}
case $ranks in
    0* | *[!0-9]* | '') refuse "RANKS is '$ranks'; expected the number of ranks per node" ;;
esac

# Without CPUs of their own, ranks wait for each other's: srun binds all of a task to what the task was given.
cpus=0
for of_nodes in ${SLURM_JOB_CPUS_PER_NODE//,/ }; do # 16(x3),8
    of_nodes=${of_nodes%%(*}
    [ "$cpus" -ne 0 ] && [ "$cpus" -le "$of_nodes" ] || cpus=$of_nodes
done
[ "$cpus" -ge "$ranks" ] ||
    refuse "$ranks ranks per node, but SLURM gave $cpus CPUs on a node; expected sbatch --cpus-per-task $ranks" \
        "(for one task per node), --exclusive, or a smaller RANKS"

# Rank 0 runs on the first node.  SLURM's name of it need not be one that others can look up; its address is.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_ADDR=$(scontrol show node "$first" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
# Below the ports that the kernel gives away, and another one for every job on a node.
port=${MASTER_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
while [ -z "${MASTER_PORT:-}" ] && (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; do
    port=$((port + 1)) # somebody listens there
done
export MASTER_ADDR MASTER_PORT=$port
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
read -ra more <<<"${SRUN_FLAGS:-}"
launch=("$python" -m megatron.fill.rank.srun)
if [ -n "${SCRIPT:-}" ]; then
    launch+=(-m pipefill_patches "$SCRIPT")
else
    launch+=("$root/pretrain_gpt.py")
fi

# A rank that ended in order after a signal says so here; a training that ended by itself says nothing.
export PIPEFILL_INTERRUPTED=$SLURM_SUBMIT_DIR/.pipefill-$SLURM_JOB_ID.interrupted
rm -f "$PIPEFILL_INTERRUPTED"
srun --nodes "$SLURM_JOB_NUM_NODES" --ntasks $((ranks * SLURM_JOB_NUM_NODES)) --ntasks-per-node "$ranks" \
    --cpus-per-task $((cpus / ranks)) --kill-on-bad-exit=1 "${more[@]}" "${launch[@]}" "$@" &
step=$!
# SLURM's notices reach the ranks by themselves; one that is sent to this script alone (--signal=B:USR2) is handed on.
trap 'kill -USR1 "$step" 2>/dev/null || true' USR1
trap 'kill -USR2 "$step" 2>/dev/null || true' USR2
trap 'cancelled=1' TERM
status=0
wait "$step" || status=$?
while kill -0 "$step" 2>/dev/null; do # a signal ends a wait
    status=0
    wait "$step" || status=$?
done
if [ "$status" -gt 128 ]; then # the wait may have been ended just before srun was
    wait "$step" && status=0 || { again=$? && [ "$again" -eq 127 ] || status=$again; }
fi

if [ -e "$PIPEFILL_INTERRUPTED" ]; then
    by=$(cat "$PIPEFILL_INTERRUPTED")
    rm -f "$PIPEFILL_INTERRUPTED"
    if [ "$status" -eq 0 ] && [ "$by" != SIGTERM ] && [ -z "${cancelled:-}" ]; then
        echo "train_slurm.sh: $by ended the training before its last iteration; it is queued again"
        # The number of an array's last job is the array's own too, and would queue all of them.
        job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
        scontrol requeue "${job:-$SLURM_JOB_ID}" || echo "train_slurm.sh: it cannot be queued again: submit it once more" >&2
    fi
fi
exit "$status"
