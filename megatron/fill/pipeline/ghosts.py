"""The waits of a pipeline's rank that runs without the other ranks, as if these kept to the timeline.

The other ranks are *ghosts*: they follow the timeline, however long the real rank takes.  So a transfer takes as long
after it was posted as in the timeline, and a delay of the real rank lengthens its iteration by the full delay.  In a
real pipeline, other waits would absorb a part of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline


@dataclass(frozen=True, slots=True)
class GhostWaits:
    """The waits of a rank in an iteration."""

    # Durations in ns of the transfers from their posting, by direction (``send_next``, ``recv_prev``, ``send_prev``,
    # ``recv_next``), in the order in which the rank posts them.
    transfers: dict[str, tuple[int, ...]]
    drain_ns: int  # time from the rank's end until all ranks are done
    timeline: Timeline  # timeline that they are from, which includes waits of length 0


def ghost_waits(schedule: Schedule, costs: PipelineCosts, rank: int) -> GhostWaits:
    """Compute the timeline of the whole pipeline, and the waits of one rank in it; ValueError if these do not fit.

    Transfers are as in ``rendezvous``: a sender waits for its receiver too, as with gloo and NCCL's large messages.
    """
    if not 0 <= rank < schedule.stages:
        raise ValueError(f"rank is {rank}; expected 0 to {schedule.stages - 1}")
    compiled = Compiled(schedule, rendezvous=True)
    timeline = compiled.run(costs, empty=True)
    transfers: dict[str, list[int]] = {name: [] for name in ("send_next", "recv_prev", "send_prev", "recv_next")}
    for transfer in compiled.transfers(costs, rank):
        if transfer.op.kind is Pass.FORWARD:
            name = "send_next" if transfer.sends else "recv_prev"
        else:
            name = "send_prev" if transfer.sends else "recv_next"
        transfers[name].append(transfer.over_ns - transfer.posted_ns)
    drain_ns = timeline.waits[rank][-1].duration_ns
    return GhostWaits({name: tuple(row) for name, row in transfers.items()}, drain_ns, timeline)
