#!/usr/bin/env bash
#SBATCH --job-name=pipefill
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --output=pipefill-%j.out
# Trains on the nodes of a SLURM allocation, one torchrun per node; every flag goes to pretrain_gpt.py.
#   RANKS=8 sbatch --nodes 4 --gpus-per-node 8 scripts/train_slurm.sh --pipeline-model-parallel-size 16 ... --fill-jobs jobs.yaml
# RANKS: processes per node (default: its GPUs, or 2 without one).  PIPEFILL: the checkout (default: where sbatch was called).
# The run folder (--fill-report) must be on a file system that all nodes share.
set -euo pipefail
root=${PIPEFILL:-${SLURM_SUBMIT_DIR:?this script is for sbatch; use train_local.sh elsewhere}}
master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
ranks=${RANKS:-${SLURM_GPUS_ON_NODE:-2}}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec srun --kill-on-bad-exit=1 "$root/.venv/bin/python" -m torch.distributed.run \
    --nnodes "$SLURM_NNODES" --nproc-per-node "$ranks" \
    --rdzv-backend c10d --rdzv-id "$SLURM_JOB_ID" --rdzv-endpoint "$master:${MASTER_PORT:-29400}" \
    "$root/pretrain_gpt.py" "$@"
