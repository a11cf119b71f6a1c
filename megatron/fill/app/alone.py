"""The jobs without the training, after its last iteration: what the fill efficiency compares with."""

from __future__ import annotations

import time

from megatron.fill.app.session import Session
from megatron.fill.config import FillSettings
from megatron.fill.types import RankInfo


def turns(settings: FillSettings, info: RankInfo) -> int:
    """How many turns the ranks take to measure their jobs alone; none if that was not asked for.

    On the CPU, whose cores share caches and the way to memory, the ranks of a node follow one another.  GPUs have
    memory of their own, and measure all at once.
    """
    if not settings.baseline_seconds:
        return 0
    return info.local_world_size if info.device == "cpu" else 1


def measure_alone(session: Session | None, of: int, seconds: float) -> None:
    """Take turns to measure the jobs without the training and without those of the node's other ranks.

    Every rank comes to every barrier, also one whose session failed, and at the same time: none waits for long.

    Args:
        of: the number of turns, on all ranks the same.
        seconds: how long a turn takes.
    """
    import torch.distributed as dist

    for turn in range(of):
        dist.barrier()
        if session is not None and session.info.local_rank % of == turn:
            session.measure_alone(seconds)
        else:
            time.sleep(seconds)
    if of:
        dist.barrier()  # no jobs are stopped while others are measured
