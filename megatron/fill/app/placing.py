"""This process's rank, by ``--fill-rank-order``, and its turn on its device, after an earlier start's jobs.

The order is applied before there are process groups, and changes only the rank.  Device, core and node stay those of
the process: ``LOCAL_RANK``, ``GROUP_RANK`` and their sizes do not change.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from megatron.fill.agent.turn import DeviceTurn, take
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.launcher import local_rank, ranks_here

logger = logging.getLogger("pipefill")

_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"  # torch's: a store is served at MASTER_ADDR, every rank is a client


def world_size() -> int:
    """Return the number of processes that the launcher has started."""
    return int(os.environ.get("WORLD_SIZE") or 1)


def take_rank(order: tuple[int, ...]) -> tuple[int, Any]:
    """Change ``RANK`` to the logical rank of this process, and keep the rendezvous of the ranks working.

    ``order`` has the physical rank of each logical one.  Return the logical rank, and the store that this process
    serves, which has to be kept; None if it serves none.
    """
    physical, ranks = int(os.environ.get("RANK") or 0), len(order)
    # The new rank does not imply these, if the launcher has not set them.
    for name, value in (("LOCAL_RANK", local_rank(physical, ranks)), ("GROUP_RANK", physical // ranks_here(ranks))):
        if not os.environ.get(name):
            os.environ[name] = str(value)
    store = _serve(physical) if ranks > 1 and os.environ.get(_AGENT_STORE) != str(True) else None
    rank = order.index(physical)
    os.environ["RANK"] = str(rank)
    return rank, store


def _serve(physical: int) -> Any:
    """Serve the store in the process at ``MASTER_ADDR``, which may no longer be rank 0."""
    os.environ[_AGENT_STORE] = str(True)
    if physical != 0:
        return None
    from torch.distributed import TCPStore

    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return TCPStore(address, port, is_master=True, wait_for_workers=False)


def jobs_outlive_ranks() -> bool:
    """False where srun has started the rank, and ends all that it leaves."""
    return "SLURM_STEP_ID" not in os.environ or "TORCHELASTIC_RUN_ID" in os.environ


def check_between(settings: FillSettings) -> None:
    """Raise ConfigError for ``--fill-between`` where srun has started the rank, and ends all that it leaves."""
    if settings.between and not jobs_outlive_ranks():
        raise ConfigError(
            "--fill-between: SLURM ends all processes of a step with its ranks, so no job can go on; "
            "expected torchrun, which starts ranks again within a step"
        )


def take_turn(run_dir: Path) -> DeviceTurn | None:
    """Take this rank's device from jobs that go on in this run folder; called before CUDA is initialised.

    The process has to keep the result until its end; it is None if no jobs have ever gone on there.
    """
    rank = int(os.environ.get("RANK") or 0)
    began_s = time.monotonic()
    turn, found = take(run_dir, local_rank(rank, world_size()))
    if found:
        logger.info("rank %d waited %.1f s for the jobs of an earlier start", rank, time.monotonic() - began_s)
    return turn
