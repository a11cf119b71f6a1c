"""The launcher's environment variables: torchrun's, or else SLURM's.  An empty variable counts as unset."""

from __future__ import annotations

import os


def ranks_here(otherwise: int) -> int:
    """Return the number of ranks on this node; ``otherwise`` if it is unknown."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or otherwise)


def local_rank(rank: int = 0, ranks: int = 1) -> int:
    """Return the number of this rank on its node, from 0; computed from ``rank`` if the launcher does not say."""
    return int(os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or rank % ranks_here(ranks))


def cores_by_srun() -> int:
    """Return the number of cores that srun allotted to this rank; 0 without srun, or if it is unknown."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS")
    return int(os.environ.get("SLURM_CPUS_PER_TASK") or 0) if tasks and tasks == os.environ.get("WORLD_SIZE") else 0
