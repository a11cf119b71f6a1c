"""A main job taken apart and put together again: records made from a timeline whose costs are known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import Compiled
from megatron.fill.types import RankRecord
from megatron.fill.wings.sim.recorded.busy import RecordedMainJob
from tests.support.recorded_runs import MS, SYNC_NS, noisy, records

SCHEDULES = [
    make_schedule("1f1b", 2, 4),
    make_schedule("gpipe", 2, 3),
    make_schedule("1f1b", 4, 6),
    make_schedule("interleaved", 2, 4, 2),
]


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), schedule=st.sampled_from(SCHEDULES))
def test_what_is_taken_apart_can_be_put_together(seed: int, schedule: Schedule) -> None:
    timelines = noisy(schedule, 4, seed)
    tails = [MS * (rank + 1) for rank in range(schedule.stages)]
    made = records(schedule, timelines, tails)
    job = RecordedMainJob(made, schedule)
    assert [sample.iteration for sample in job.samples] == [2, 3, 4]
    for sample, timeline in zip(job.samples, timelines[1:], strict=True):
        period_ns = timeline.period_ns + 2 * SYNC_NS + max(tails)
        assert sample.period_ns == period_ns
        for rank, record in enumerate(made):
            parts = sample.ranks[rank]
            busy_ns = sum(parts.passes_ns) + parts.reduced_ns + parts.after_ns - 2 * SYNC_NS  # collectives are bubbles
            of_iteration = [bubble for bubble in record.bubbles if bubble.iteration == sample.iteration]
            assert busy_ns + sum(bubble.duration_ns for bubble in of_iteration) == period_ns
            assert parts.passes_ns == tuple(span.end_ns - span.start_ns for span in timeline.spans[rank])


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: f"{schedule.name}-{schedule.stages}")
def test_the_costs_come_back(schedule: Schedule) -> None:
    stages = tuple(StageCost((9 + stage) * MS, (20 - stage) * MS) for stage in range(schedule.virtual_stages))
    ranks = schedule.stages
    costs = PipelineCosts(stages, MS // 4, (2 * MS,) * ranks, tuple((3 + rank) * MS for rank in range(ranks)))
    timeline = Compiled(schedule, rendezvous=True).run(costs)
    made = records(schedule, [timeline] * 3, [MS] * ranks)
    found = RecordedMainJob(made, schedule).costs()
    assert (found.stages, found.p2p_ns) == (costs.stages, costs.p2p_ns)
    # The first collective counts as reduction, and what follows it as the optimizer's: a millisecond each, and the
    # second collective.
    assert found.reduce_ns == tuple(one + SYNC_NS for one in costs.reduce_ns)
    assert found.optimizer_ns == tuple(one + MS + SYNC_NS for one in costs.optimizer_ns)
    again = Compiled(schedule, rendezvous=True).run(found).period_ns
    assert again == timeline.period_ns + 2 * SYNC_NS + MS


def test_iterations_without_all_spans_are_left_out() -> None:
    schedule = SCHEDULES[0]
    made = records(schedule, noisy(schedule, 6, 1), [MS, MS])
    lost = next(span for span in made[1].spans if span.iteration == 4)
    made[1] = replace(made[1], spans=[span for span in made[1].spans if span != lost])
    assert [sample.iteration for sample in RecordedMainJob(made, schedule).samples] == [2, 3, 6]


def test_records_of_something_else_are_refused() -> None:
    schedule = SCHEDULES[0]
    made = records(schedule, noisy(schedule, 3, 1), [MS, MS])
    with pytest.raises(ValueError, match=r"stages \[0\]"):
        RecordedMainJob(made[:1], schedule)
    with pytest.raises(ValueError, match="no iteration has the spans"):
        RecordedMainJob(made, make_schedule("1f1b", 2, 5))
    with pytest.raises(ValueError, match="follows another"):
        RecordedMainJob(records(schedule, noisy(schedule, 1, 1), [MS, MS]), schedule)
    without = [RankRecord(one.info, one.iterations, [], one.spans) for one in made]
    with pytest.raises(ValueError, match="collective"):
        RecordedMainJob(without, schedule)
    with pytest.raises(ValueError, match="there is no iteration"):
        RecordedMainJob(made, schedule).costs([])
