"""What one rank of a pipeline waits for if the others keep to the timeline: for a rank that runs without them.

The others are *ghosts*: they are where the timeline has them, however long the one real rank takes.  So a transfer
takes as long from when it was posted as it does in the timeline, and a delay of the real rank makes its iteration
longer by all of it.  In a real pipeline some of that would be hidden by other waits.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Pass, Schedule
from megatron.fill.pipeline.timeline import Compiled, Timeline


@dataclass(frozen=True, slots=True)
class GhostWaits:
    """The waits of one rank in one iteration.

    Attributes:
        transfers: by direction (``send_next``, ``recv_prev``, ``send_prev``, ``recv_next``), for each transfer in the
            order in which the rank posts them, how many ns it takes from then.
        drain_ns: from when the rank is done until all ranks are.
        timeline: that they are from; waits of length 0 are listed.
    """

    transfers: dict[str, tuple[int, ...]]
    drain_ns: int
    timeline: Timeline


def ghost_waits(schedule: Schedule, costs: PipelineCosts, rank: int) -> GhostWaits:
    """Time an iteration of the whole pipeline, for one rank of it.

    Transfers meet as in ``rendezvous``: a sender waits for its receiver too, as with gloo and NCCL's large messages.

    Raises:
        ValueError: there is no such rank, or the costs do not fit the schedule.
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
