"""Sweeps: every combination of values, at the right places."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.wings.sim.sweep import parse_sweep, run_all, variants

DATA: dict[str, Any] = {
    "duration": 10,
    "main_jobs": [{"parallel": {"dp": 1}}, {"report": "x"}],
    "fill": {"generate": {"jobs": 3}},
}


def square(number: int) -> int:
    if number < 0:
        raise ConfigError(f"{number}")
    return number * number


def test_a_sweep_is_a_field_and_values():
    assert parse_sweep("dp=8,16") == ("dp", (8, 16))
    assert parse_sweep("schedule=gpipe,1f1b") == ("schedule", ("gpipe", "1f1b"))
    assert parse_sweep("runtime.harvest=0.5") == ("runtime.harvest", (0.5,))


@pytest.mark.parametrize("text", ["dp", "dp=", "=3", "dp=[1", "dp={a: 1}"])
def test_what_is_no_sweep_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="--sweep is"):
        parse_sweep(text)


def test_every_combination_and_the_original_stays():
    found = list(variants(DATA, [("dp", (8, 16)), ("fill.generate.jobs", (5, 6))]))
    assert [what for what, _ in found] == [{"dp": dp, "fill.generate.jobs": jobs} for dp in (8, 16) for jobs in (5, 6)]
    assert found[3][1]["main_jobs"][0]["parallel"]["dp"] == 16
    assert found[3][1]["fill"]["generate"]["jobs"] == 6
    assert DATA["main_jobs"][0]["parallel"]["dp"] == 1
    assert list(variants(DATA, [])) == [({}, DATA)]


def test_a_path_may_lead_into_a_list_and_to_a_field_that_is_not_there_yet():
    (_, changed), _ = variants(DATA, [("main_jobs.1.gpus", (4, 8))])
    assert changed["main_jobs"][1]["gpus"] == 4
    (_, changed), _ = variants(DATA, [("duration", (1, 2))])
    assert changed["duration"] == 1


@pytest.mark.parametrize("field", ["fill.x.y", "main_jobs.7.gpu", "main_jobs.7", "main_jobs.x.gpu", "duration.x"])
def test_a_place_that_is_not_there_is_refused_by_name(field):
    with pytest.raises(ConfigError, match=field.replace(".", r"\.")):
        list(variants(DATA, [(field, (1,))]))


def test_a_name_alone_needs_a_main_job_with_parallel():
    with pytest.raises(ConfigError, match="no main job"):
        list(variants({"main_jobs": [{"report": "x"}]}, [("dp", (1,))]))


def test_a_name_alone_changes_the_schedule_of_recorded_jobs():
    data = {"main_jobs": [{"report": "x"}, {"parallel": {"dp": 2}}]}
    (_, changed), _ = variants(data, [("microbatches", (8, 16))])
    assert changed["main_jobs"] == [
        {"report": "x", "reschedule": {"microbatches": 8}},
        {"parallel": {"dp": 2, "microbatches": 8}},
    ]


def test_a_field_twice_is_refused():
    with pytest.raises(ConfigError, match="twice"):
        list(variants(DATA, [("dp", (1,)), ("dp", (2,))]))


@pytest.mark.parametrize("processes", [1, 2])
def test_work_is_done_in_order_and_errors_come_through(processes):
    assert run_all(square, [3, 1, 2], processes) == [9, 1, 4]
    with pytest.raises(ConfigError, match="-1"):
        run_all(square, [1, -1, 2], processes)
