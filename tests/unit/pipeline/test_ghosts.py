"""What a rank waits for when the others are ghosts is what it waits for in the whole pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.ghosts import ghost_waits
from megatron.fill.pipeline.program import rendezvous
from megatron.fill.pipeline.schedule import Pass
from megatron.fill.pipeline.schedules import interleaved, one_forward_one_backward
from megatron.fill.pipeline.timeline import Compiled

MS = 1_000_000


def replayed(schedule, costs, rank):
    """The rank's waits if it runs alone, each transfer over as long after its posting as its ghost says."""
    waits = ghost_waits(schedule, costs, rank)
    durations = {name: iter(row) for name, row in waits.transfers.items()}
    program = rendezvous(schedule)[rank]
    over: dict[object, int] = {}
    now, found = costs.optimizer_ns[rank], []
    for at, step in enumerate(program.steps):
        if step.transfers:
            ends = max(now, *(over[key] for key in step.transfers))
            found.append((now, ends))
            now = ends
        if step.op is not None:
            stage = costs.stages[schedule.virtual_stage(rank, step.op)]
            now += stage.forward_ns if step.op.kind is Pass.FORWARD else stage.backward_ns
        for posts, forward, backward in (
            (program.sent, "send_next", "send_prev"),
            (program.received, "recv_prev", "recv_next"),
        ):
            for key, posted in posts.items():
                if posted == at:
                    over[key] = now + next(durations[forward if key[1].kind is Pass.FORWARD else backward])
    assert all(next(row, None) is None for row in durations.values())
    now += costs.reduce_ns[rank]
    return [*found, (now, now + waits.drain_ns)]


@given(st.data())
def test_alone_with_ghosts_the_bubbles_are_those_of_the_whole_pipeline(data):
    stages = data.draw(st.integers(2, 5), "stages")
    chunks = data.draw(st.integers(1, 3), "chunks")
    times = st.integers(0, 20)
    if chunks == 1:
        schedule = one_forward_one_backward(stages, data.draw(st.integers(1, 9), "microbatches"))
    else:
        schedule = interleaved(stages, stages * data.draw(st.integers(1, 3), "groups"), chunks)
    virtual = tuple(StageCost(data.draw(times), data.draw(times)) for _ in range(stages * chunks))
    ranks = [tuple(data.draw(times) for _ in range(stages)) for _ in range(2)]
    costs = PipelineCosts(virtual, data.draw(times, "p2p"), *ranks)
    timeline = Compiled(schedule, rendezvous=True).run(costs, empty=True)
    for rank in range(stages):
        expected = [(wait.start_ns, wait.end_ns) for wait in timeline.waits[rank]]
        assert replayed(schedule, costs, rank) == expected


def test_the_first_of_four_waits_for_the_others_forwards_and_backwards():
    costs = PipelineCosts.uniform(4, forward_ns=10 * MS, backward_ns=20 * MS)
    waits = ghost_waits(one_forward_one_backward(4, 8), costs, 0)
    assert len(waits.transfers["send_next"]) == len(waits.transfers["recv_next"]) == 8
    assert waits.transfers["recv_prev"] == waits.transfers["send_prev"] == ()
    assert waits.drain_ns == 0
    assert sum(wait.duration_ns for wait in waits.timeline.waits[0]) == 3 * 30 * MS  # (p - 1)(F + B)


def test_a_stage_that_is_not_there_is_refused():
    costs = PipelineCosts.uniform(2, 1, 1)
    with pytest.raises(ValueError, match="rank is 2; expected 0 to 1"):
        ghost_waits(one_forward_one_backward(2, 2), costs, 2)
