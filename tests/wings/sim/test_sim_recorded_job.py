"""Main jobs that a run recorded: replicated, and in another schedule."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.bubbles import bubble_cycle
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import Compiled, simulate
from megatron.fill.pipeline.torch_csv import dump_csv
from megatron.fill.report.schema import Cycles, RankCycle
from megatron.fill.types import BubbleKind, CycleKey, RankRecord
from megatron.fill.wings.sim.recorded.groups import Reschedule, recorded_groups, rescheduled_groups
from tests.support.recorded_runs import MS, SYNC_NS, cycle_bubble, records
from tests.support.segments import write_segment

SCHEDULE = make_schedule("1f1b", 2, 4)
STAGES = (StageCost(9 * MS, 20 * MS), StageCost(10 * MS, 18 * MS))
COSTS = PipelineCosts(STAGES, MS // 4, (2 * MS, 2 * MS), (3 * MS, 4 * MS))


def recorded(iteration_ms: float | None = 100.0) -> list[RankCycle]:
    bubbles = [
        cycle_bubble(BubbleKind.FILL, 1000, mean_ms=2.5),
        cycle_bubble(BubbleKind.DRAIN, 0, index=1, mean_ms=4.0),
    ]
    return [
        RankCycle(rank=rank, stage=rank, iteration_ms=iteration_ms, training=bubbles, evaluation=[]) for rank in (0, 1)
    ]


@pytest.mark.parametrize("kind", ["report", "cycles"])
def test_a_recorded_job_is_replicated(tmp_path, kind):
    path = tmp_path / "recorded.json"
    cycles = Cycles(ranks=recorded())
    if kind == "report":
        data = {"version": 1, "ranks": [{"rank": 0}], "cycle": [item.model_dump(mode="json") for item in cycles.ranks]}
        path.write_text(json.dumps(data))
    else:
        path.write_text(cycles.model_dump_json())
    groups = recorded_groups(path, 1024)
    assert [(group.name, group.count) for group in groups] == [("rank 0", 512), ("rank 1", 512)]
    cycle = groups[1].cycle
    assert cycle.period_ns == 100_000_000
    assert [(slot.kind, slot.duration_ns) for slot in cycle.slots] == [
        (BubbleKind.FILL, 2_500_000),
        (BubbleKind.DRAIN, 4_000_000),
    ]
    assert cycle.slots[0].free_bytes == 1000
    assert cycle.slots[1].free_bytes > 2**60  # 0 is "not measured"
    assert [group.count for group in recorded_groups(path)] == [1, 1]


@pytest.mark.parametrize(
    ("text", "gpus", "expected"),
    [
        (None, None, "cannot be read: No such file"),
        ("nonsense", None, "is not JSON.*expected a report.json"),
        ("{}", None, "ranks is missing"),
        ('{"cycle": []}', None, "cycle is empty; expected at least one rank"),
        ('{"cycle": [{"rank": 0}]}', None, "cycle.0.stage"),
        (Cycles(ranks=recorded()).model_dump_json(), 1023, "gpus is 1023; expected a multiple of the 2 recorded ranks"),
        (Cycles(ranks=recorded()).model_dump_json(), 0, "gpus is 0"),
        (Cycles(ranks=recorded(None)).model_dump_json(), 2, "rank 0: iteration_ms is None; expected the time"),
    ],
)
def test_a_recorded_job_that_is_none_names_file_and_field(tmp_path, text, gpus, expected):
    path = tmp_path / "recorded.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=f"recorded.json: .*{expected}"):
        recorded_groups(path, gpus)


# In another schedule


def run_folder(folder: Path, made: Sequence[RankRecord] | None = None, replicas: int = 1) -> Path:
    """What a run leaves behind that is needed here; its report's path."""
    if made is None:
        timeline = Compiled(SCHEDULE, rendezvous=True).run(COSTS)
        made = records(SCHEDULE, [timeline] * 4, [MS, MS])
    every = []
    for replica in range(replicas):
        for record in made:
            rank = replica * len(made) + record.info.rank
            info = replace(record.info, rank=rank, data_parallel_rank=replica)
            every.append(replace(record, info=info))
    write_segment(folder, every)
    cycles = [item.model_copy(update={"rank": at}) for at, item in enumerate(recorded() * replicas)]
    path = folder / "report.json"
    path.write_text(json.dumps({"cycle": [item.model_dump(mode="json") for item in cycles]}))
    return path


def expected(weight_share: float = 0.5) -> PipelineCosts:
    """``COSTS`` as they are found again.

    The first collective counts as reduction, the second and what is before it as the optimizer's.
    """
    stages = tuple(replace(one, weight_ns=round(one.backward_ns * weight_share)) for one in COSTS.stages)
    return replace(
        COSTS,
        stages=stages,
        reduce_ns=tuple(one + SYNC_NS for one in COSTS.reduce_ns),
        optimizer_ns=tuple(one + MS + SYNC_NS for one in COSTS.optimizer_ns),
    )


@pytest.mark.parametrize(
    ("change", "name", "microbatches"),
    [
        (Reschedule(), "1f1b", 4),
        (Reschedule(microbatches=16), "1f1b", 16),
        (Reschedule("gpipe"), "gpipe", 4),
        (Reschedule("zb-h1", 8, weight_share=0.4), "zb-h1", 8),
    ],
)
def test_the_recorded_passes_are_timed_by_another_schedule(tmp_path, change, name, microbatches):
    path = run_folder(tmp_path, replicas=2)
    timeline = simulate(make_schedule(name, 2, microbatches), expected(change.weight_share), True)
    groups = rescheduled_groups(path, 32, change)
    assert [(group.name, group.count) for group in groups] == [("stage 0", 16), ("stage 1", 16)]
    for stage, group in enumerate(groups):
        assert group.cycle == bubble_cycle(timeline, stage, 1000)  # the least that is known


def test_iterations_without_filling_count_if_there_are_any(tmp_path):
    slow = replace(COSTS, stages=tuple(StageCost(2 * one.forward_ns, 2 * one.backward_ns) for one in STAGES))
    fast, slower = (Compiled(SCHEDULE, rendezvous=True).run(costs) for costs in (COSTS, slow))
    # Every second iteration of these records was filled.
    path = run_folder(tmp_path, records(SCHEDULE, [fast, slower, fast, slower, fast], [MS, MS]))
    period_ns = simulate(SCHEDULE, expected(), True).period_ns
    assert rescheduled_groups(path, None, Reschedule())[0].cycle.period_ns == period_ns


def test_the_recorded_size_of_groups_of_microbatches_is_kept(tmp_path):
    schedule = make_schedule("interleaved", 2, 8, 2, 4)
    costs = replace(COSTS, stages=STAGES * 2)
    timeline = Compiled(schedule, rendezvous=True).run(costs)
    made = records(schedule, [timeline] * 4, [MS, MS])
    keyed = [replace(one, schedule=replace(one.schedule, group_size=4)) for one in made if one.schedule]
    (again, _) = rescheduled_groups(run_folder(tmp_path, keyed), None, Reschedule())
    assert again.cycle.period_ns == timeline.period_ns + 2 * SYNC_NS + MS


def test_more_activations_than_were_recorded_are_warned_of(tmp_path, caplog):
    path = run_folder(tmp_path)
    rescheduled_groups(path, None, Reschedule("gpipe", 4))
    assert "gpipe keeps more activations than were recorded" in caplog.text
    caplog.clear()
    rescheduled_groups(path, None, Reschedule("1f1b", 16))
    assert not caplog.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (Reschedule("interleaved"), "schedule is interleaved; expected one with 1 chunks per rank, as recorded"),
        (Reschedule("2f2b"), "2f2b"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(tmp_path, change, said):
    with pytest.raises(ConfigError, match=rf"report\.json: reschedule: .*{said}"):
        rescheduled_groups(run_folder(tmp_path), None, change)


@pytest.mark.parametrize("values", [{"weight_share": 1.0}, {"weight_share": float("nan")}, {"microbatches": 0}])
def test_values_that_cannot_be_are_refused(values):
    with pytest.raises(ValueError, match=f"{next(iter(values))} is .*; expected"):
        Reschedule(**values)


def test_records_that_cannot_be_timed_again_are_refused(tmp_path):
    timeline = Compiled(SCHEDULE, rendezvous=True).run(COSTS)
    made = records(SCHEDULE, [timeline] * 4, [MS, MS])
    elsewhere = replace(made[1], info=replace(made[1].info, node=1))
    cases = {
        "several machines": [made[0], elsewhere],
        "records of 1 stages; expected all 2": made[:1],
        "no training iteration": [replace(one, schedule=None) for one in made],
        "its schedule is graph; expected one of gpipe, 1f1b": [
            replace(one, schedule=CycleKey("graph", 4)) for one in made
        ],
        "no iteration has the spans": [replace(one, spans=[]) for one in made],
    }
    for number, (said, given) in enumerate(cases.items()):
        folder = tmp_path / str(number)
        with pytest.raises(ConfigError, match=said):
            rescheduled_groups(run_folder(folder, given), None, Reschedule())
    (tmp_path / "report.json").write_text(Cycles(ranks=recorded()).model_dump_json())
    with pytest.raises(ConfigError, match="holds no records of a training; expected a run folder"):
        rescheduled_groups(tmp_path / "report.json", None, Reschedule())


def test_a_file_whose_order_deadlocks_with_gloo_is_named(tmp_path):
    (tmp_path / "own.csv").write_text("0F1,0F0,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    said = "own.csv: it deadlocks where a sender waits for its receiver, as with gloo: ranks 0, 1 wait for each other's"
    with pytest.raises(ConfigError, match=f"{said} transfers forever$"):
        rescheduled_groups(run_folder(tmp_path), None, Reschedule(str(tmp_path / "own.csv"), 2))


def test_another_schedule_from_a_file_is_the_same_as_by_its_name(tmp_path):
    path = run_folder(tmp_path)
    stages = len(rescheduled_groups(path, None, Reschedule()))
    dump_csv(tmp_path / "interleaved.csv", make_schedule("gpipe", stages, 4))
    by_file = rescheduled_groups(path, None, Reschedule(str(tmp_path / "interleaved.csv")))
    assert by_file == rescheduled_groups(path, None, Reschedule("gpipe"))
    with pytest.raises(ConfigError, match="it has 4 microbatches: expected 8"):
        rescheduled_groups(path, None, Reschedule(str(tmp_path / "interleaved.csv"), 8))
