"""What the launcher says of this process: torchrun's variables, or else SLURM's.  One that is empty counts as unset."""

from __future__ import annotations

import os


def ranks_here(otherwise: int) -> int:
    """How many ranks were started on this node; ``otherwise`` if nobody says."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or otherwise)


def local_rank(otherwise: int) -> int:
    """Which of them this one is."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or otherwise)


def cores_by_srun() -> int:
    """How many cores srun gave this rank for itself; 0 if srun did not start it, or did not say."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    return int(os.environ.get("SLURM_CPUS_PER_TASK") or 0) if tasks and tasks == os.environ.get("WORLD_SIZE") else 0
