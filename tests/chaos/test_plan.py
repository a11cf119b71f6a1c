"""The plan of a chaos run: quotas, batches, names, and the tasks that commit the faults."""

from __future__ import annotations

import inspect

import pytest

from megatron.fill.errors import ConfigError
from tests.chaos import holder, plan, tasks
from tests.chaos.attacks import brought, outside
from tests.chaos.attacks.table import ATTACKS, FAMILIES
from tests.chaos.attacks.task import Attacker
from tests.chaos.checkout import ROOT
from tests.chaos.kind import Source
from tests.chaos.kinds import KINDS, chosen

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
    assert [kind.name for kind in elements] == ["hang", "hang", "sigsegv", "sigsegv", "sigsegv", "sigsegv"]
    assert plan.missing(kinds, {"hang": 1, "sigsegv": 1}, {"hang": 1, "sigsegv": 2}) == []


def test_batches_hold_every_element_once_in_an_order_of_the_seed():
    elements = plan.missing(ALL, plan.quotas(ALL, 300), {})
    batches = plan.batches(elements, 7)
    assert sorted(kind.name for batch in batches for kind in batch) == sorted(kind.name for kind in elements)
    assert batches == plan.batches(elements, 7)
    assert batches != plan.batches(elements, 8)
    assert {len(batch) for batch in batches[:-1]} == {30}


@pytest.mark.parametrize("kind", [kind for kind in ALL if kind.source is not Source.DRIVER], ids=lambda kind: kind.name)
def test_every_kind_of_job_has_a_task_that_takes_its_arguments(kind):
    path, args = plan.task_of(kind)
    module, _, name = path.partition(":")
    if kind.source is Source.GPU:
        assert module.endswith(".gpu")
        return
    if kind.source is Source.ATTACK:
        assert args["attack"] in ATTACKS
        inspect.signature(Attacker.create).bind(None, marks="marks", folder="run", machine_network=1, **args)
        return
    task = getattr(tasks, name)
    inspect.signature(task.create).bind(None, marks="marks", **args)
    if name == "Raising":
        assert callable(getattr(task, str(args["where"])))
    if name == "Fault":
        assert callable(getattr(task, "_" + kind.name.replace("-", "_")))


def test_a_family_stands_for_all_its_attacks():
    assert [kind.name for kind in chosen(["words"])] == [attack.kind.name for attack in FAMILIES["words"]]
    assert chosen(["outside", "brought"]) == [*outside.KINDS, *brought.KINDS]


def test_there_are_more_than_a_hundred_attacks_and_every_name_is_one_kinds():
    assert len(ATTACKS) == sum(map(len, FAMILIES.values()))
    assert len(ATTACKS) + len(brought.KINDS) + len(outside.KINDS) > 100
    assert all(KINDS[name] is attack.kind for name, attack in ATTACKS.items())


def test_the_documentation_names_every_kind_with_what_is_expected():
    text = (ROOT / "docs" / "chaos.md").read_text(encoding="utf-8")
    attacks = [*(attack.kind for attack in ATTACKS.values()), *brought.KINDS, *outside.KINDS]
    assert [kind.name for kind in attacks if f"| `{kind.name}` | {kind.what} | {kind.expected} |" not in text] == []


def test_the_tasks_that_hold_memory_take_an_honest_jobs_arguments():
    for task in (holder.MemoryHolder, holder.Shrinking):
        inspect.signature(task.create).bind(None, marks="marks", steps=1)


@pytest.mark.parametrize("kind", brought.KINDS, ids=lambda kind: kind.name)
def test_what_a_job_brings_is_its_environment_or_its_command(kind, tmp_path):
    found = brought.bring(kind, tmp_path / "brought", tmp_path / "marks")
    assert set(found) <= {"env", "command"}
    assert found
