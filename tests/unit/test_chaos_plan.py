"""Which faults a chaos run injects: quotas, batches, names, and the tasks that commit them."""

from __future__ import annotations

import inspect

import pytest

from megatron.fill.chaos import plan, tasks
from megatron.fill.chaos.kinds import KINDS, Source, chosen
from megatron.fill.errors import ConfigError

ALL = list(KINDS.values())


def test_all_kinds_unless_some_are_named():
    assert chosen(()) == ALL
    assert [kind.name for kind in chosen(["hang", "sigsegv", "hang"])] == ["hang", "sigsegv"]


def test_an_unknown_kind_is_an_error_that_lists_those_there_are():
    with pytest.raises(ConfigError, match=r"--kinds names gremlins; expected some of raise-create, .*hang"):
        chosen(["hang", "gremlins"])


@pytest.mark.parametrize("faults", [1, 40, 1000])
def test_the_quotas_make_up_the_faults_with_each_kind_among_them(faults):
    quotas = plan.quotas(ALL, faults)
    assert set(quotas) == set(KINDS)
    assert min(quotas.values()) >= 1
    assert sum(quotas.values()) >= faults


def test_what_is_missing_is_planned_by_jobs_and_no_more():
    kinds = chosen(["hang", "sigsegv"])
    elements = plan.missing(kinds, {"hang": 3, "sigsegv": 4}, {"hang": 1})
    assert [kind.name for kind in elements] == ["hang", "hang", "sigsegv", "sigsegv"]  # three faults to a job
    assert plan.missing(kinds, {"hang": 1, "sigsegv": 1}, {"hang": 1, "sigsegv": 2}) == []


def test_batches_hold_every_element_once_in_an_order_of_the_seed():
    elements = plan.missing(ALL, plan.quotas(ALL, 300), {})
    batches = plan.batches(elements, 7)
    assert sorted(kind.name for batch in batches for kind in batch) == sorted(kind.name for kind in elements)
    assert batches == plan.batches(elements, 7)
    assert batches != plan.batches(elements, 8)
    assert all(sum(kind.burst for kind in batch) >= 40 for batch in batches[:-1])


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.source is not Source.DRIVER], ids=lambda kind: kind.name)
def test_every_kind_of_job_has_a_task_that_takes_its_arguments(kind):
    path, args = plan.task_of(kind)
    module, _, name = path.partition(":")
    if kind.source is Source.GPU:
        assert module.endswith(".gpu")
        return
    task = getattr(tasks, name)
    inspect.signature(task.create).bind(None, marks="marks", **args)
    if name == "Raising":
        assert callable(getattr(task, args["where"]))
    if name == "Fault":
        assert callable(getattr(task, "_" + kind.name.replace("-", "_")))
