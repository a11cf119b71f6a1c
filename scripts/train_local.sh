#!/usr/bin/env bash
# Trains on this machine with one process per device; every flag goes to pretrain_gpt.py.
#   RANKS=2 scripts/train_local.sh --pipeline-model-parallel-size 2 ... --fill-jobs examples/jobs.yaml
# RANKS: processes to start (default: the CUDA devices, or 2 without one).  SCRIPT: another Megatron script, unchanged.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
"$root/scripts/setup.sh"
python=$root/.venv/bin/python
ranks=${RANKS:-$("$python" -c 'import torch; print(torch.cuda.device_count() or 2)')}
launch=("$python" -m torch.distributed.run --standalone --local-addr 127.0.0.1 --nproc-per-node "$ranks")
# OMP_NUM_THREADS keeps the launcher from warning; on the CPU each rank has one core anyway.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
if [ -n "${SCRIPT:-}" ]; then
    exec "${launch[@]}" --module pipefill_patches "$SCRIPT" "$@"
fi
exec "${launch[@]}" "$root/pretrain_gpt.py" "$@"
