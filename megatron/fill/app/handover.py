"""The start of a rank where the jobs of an earlier training may still go on (``--fill-between``)."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

from megatron.fill.agent.turn import DeviceTurn, take
from megatron.fill.app.placing import world_size
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.launcher import local_rank

logger = logging.getLogger("pipefill")


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
