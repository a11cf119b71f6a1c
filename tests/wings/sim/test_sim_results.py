"""From outcomes to answers, and their picture."""

from __future__ import annotations

import json
from typing import Any

import pytest

from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.types import BubbleKind, JobState
from megatron.fill.wings.sim.draw import _label, _title, draw_results
from megatron.fill.wings.sim.results import SimResult, short_names, summarise
from megatron.fill.wings.sim.values import (
    DeviceGroup,
    FillKind,
    GroupOutcome,
    JobOutcome,
    MainJobRun,
    Scenario,
    SimJob,
    SimOutcome,
)

MS = 1_000_000
CYCLE = BubbleCycle(100 * MS, (BubbleSlot(BubbleKind.FILL, 50 * MS, 1000),))
KIND = FillKind("k", "samples", (JobProfile(Configuration(1), (NodeProfile("n", 10 * MS, 10),), 2.0),), alone_rate=200)


def result(**changes: object) -> SimResult:
    """Four devices for 100 s: 300 device seconds of main job, half of them bubbles, and 20,000 samples done."""
    jobs = (
        SimJob(0, "a", "k", 0.0, 12_000, deadline_s=30.0),
        SimJob(1, "b", "k", 10.0, 8_000, deadline_s=20.0),
        SimJob(2, "c", "k", 50.0, 5_000),
    )
    main = MainJobRun("m", (DeviceGroup("m/0", 4, CYCLE),))
    scenario = Scenario((main,), (KIND,), jobs, 100.0, "fifo")
    outcome = SimOutcome(
        (
            JobOutcome(0, JobState.SUCCEEDED, 0.0, 20.0, 12_000, 20.0, 1),
            JobOutcome(1, JobState.SUCCEEDED, 10.0, 40.0, 8_000, 30.0, 1),
            JobOutcome(2, JobState.QUEUED, None, None, 0.0, 0.0, 0),
        ),
        (GroupOutcome("m/0", 4, 300.0, 150.0, 20.0, 120.0, 10.0, 100.0),),
        100.0,
        events=7,
        failures=1,
        wall_s=0.1,
    )
    options: dict[str, Any] = {"price_per_gpu_hour": 2.0, **changes}
    return summarise(scenario, outcome, **options)


def test_where_the_time_goes():
    total = result().total
    assert total.devices == 4
    assert (total.main, total.fill, total.down, total.idle) == pytest.approx((0.375, 0.25, 0.05, 0.2))
    assert total.bubble == 0.5
    assert total.gpus_worth == 1.0  # 100 device seconds alone, in 100 s
    assert total.gain == pytest.approx(0.25 / 0.375)


def test_jobs_deadlines_and_money():
    found = result()
    assert found.jobs == {"QUEUED": 1, "RUNNING": 0, "SUCCEEDED": 2, "FAILED": 0}
    assert found.deadlines == (2, 1)  # the second was done 20 s late
    assert found.completion is not None
    assert (found.completion.count, found.completion.mean_s, found.completion.median_s) == (2, 25.0, 25.0)
    assert found.truncated == 1
    assert found.saved_per_day == 48.0  # one GPU, 24 hours, 2 each
    assert result(price_per_gpu_hour=None).saved_per_day is None
    (kind,) = found.kinds
    assert (kind.jobs, kind.succeeded, kind.work_done, kind.gpus_worth) == (3, 2, 20_000, 1.0)


def test_the_groups_kinds_and_total_agree():
    found = result()
    assert sum(group.gpus_worth for group in found.groups) == pytest.approx(found.total.gpus_worth)
    assert sum(kind.gpus_worth for kind in found.kinds) == pytest.approx(found.total.gpus_worth)


def test_the_json_form_has_no_nan_and_all_fields():
    data = json.loads(json.dumps(result().to_dict(), allow_nan=False))
    assert data["total"]["gain"] == pytest.approx(2 / 3)
    assert data["groups"][0]["name"] == "m/0"


@pytest.mark.parametrize("count", [1, 3])
def test_a_picture_of_one_or_of_several(tmp_path, count):
    path = tmp_path / "deep" / "picture.png"
    draw_results(path, [result(what={"dp": number}) for number in range(count)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [entry.name for entry in path.parent.iterdir()] == ["picture.png"]


def test_swept_fields_go_by_their_last_name_where_that_is_enough():
    assert short_names(["dp", "fill.generate.jobs"]) == {"dp": "dp", "fill.generate.jobs": "jobs"}
    assert short_names(["a.jobs", "b.jobs"]) == {"a.jobs": "a.jobs", "b.jobs": "b.jobs"}


def test_nothing_to_draw_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="at least one"):
        draw_results(tmp_path / "x.png", [])


def test_a_picture_says_once_what_is_the_same_and_with_each_result_what_is_not():
    results = [result(what={"parallel.dp": number, "fill.jobs": 5}) for number in (8, 16)]
    assert [_label(one, results) for one in results] == ["dp=8", "dp=16"]
    assert _title(results).endswith(f" hours, jobs=5, policy {results[0].policy}")
