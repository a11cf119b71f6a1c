"""Measuring the jobs without the training, after its last iteration, as the baseline of the fill efficiency."""

from __future__ import annotations

import time

from megatron.fill.app.session import Session
from megatron.fill.config import FillSettings
from megatron.fill.types import RankInfo


def rounds(settings: FillSettings, info: RankInfo) -> int:
    """Return the number of rounds in which the ranks measure their jobs alone; 0 if that was not requested.

    On the CPU, whose cores share caches and memory bandwidth, the ranks of a node follow one another.  GPUs have
    memory of their own, and all measure at once.
    """
    if not settings.baseline_seconds:
        return 0
    return info.local_world_size if info.device == "cpu" else 1


def measure_alone(session: Session | None, of: int, seconds: float) -> None:
    """Measure the jobs without the training, and without jobs of the node's other ranks, in rounds.

    Every rank reaches every barrier at about the same time, also one whose session failed.

    Args:
        of: number of rounds, the same on all ranks.
        seconds: duration of a round.
    """
    import torch.distributed as dist

    for number in range(of):
        dist.barrier()
        if session is not None and session.info.local_rank % of == number:
            session.measure_alone(seconds)
        else:
            time.sleep(seconds)
    if of:
        dist.barrier()  # so that no rank stops its jobs while others measure
