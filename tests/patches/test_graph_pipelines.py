"""Megatron's multi-module pipelines as graphs, each over several processes and against one."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from megatron.fill.pipeline.schedule import Pass
from megatron.fill.pipeline.schedules import make_schedule
from pipefill_patches.multimodule import FanIn, stages_after
from tests.patches.fresh import python
from tests.patches.graph_topologies import MICROBATCHES, TOPOLOGIES

pytest.importorskip("megatron.core.pipeline_parallel.multimodule_communicator")


@cache
def trained(*arguments: str) -> dict[str, dict[str, Any]]:
    """By topology; all of them in one go, since starting takes longest."""
    done = python("-m", "tests.patches.graph_runs", *arguments, megatron=True, PIPEFILL_CPU_BACKEND="1")
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["topology"]: line for line in lines}


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_a_graph_has_the_gradients_of_one_process(name):
    found = trained()[name]
    assert "hangs" not in found
    assert found["gradient_error"] <= 1e-6


@pytest.mark.parametrize("name", ["chain", "chain of modules"])
def test_a_chain_has_the_order_of_1f1b(name):
    letters = {Pass.FORWARD: "F", Pass.BACKWARD: "B"}
    expected = [
        " ".join(f"{letters[op.kind]}{op.microbatch}" for op in row)
        for row in make_schedule("1f1b", 4, MICROBATCHES).order
    ]
    assert trained()[name]["order"] == expected


def test_waits_at_bridges_are_bubbles_of_their_kinds():
    found = trained()["fan-out"]["bubbles"]
    assert found[0] == ["interior", "interior", "fwd-bwd", *["interior"] * 4]  # sends, then gradients of both
    assert found[1] == found[2]
    assert found[1][:4] == ["fill", "interior", "interior", "fwd-bwd"]
    assert found[1][-1] == "drain"
    # one bubble for both inputs
    assert found[3] == ["fill", *["interior"] * (MICROBATCHES - 1), "drain"]


def test_without_the_patch_a_fan_out_loses_gradients():
    found = trained("fan-in", "fan-out", "two sinks", "--upstream")
    assert found["fan-in"]["gradient_error"] <= 1e-6
    assert found["fan-out"]["gradient_error"] > 0.01
    assert found["two sinks"]["gradient_error"] > 0.01


def test_stages_are_counted_to_the_farthest_sink():
    topology = {"a": ["c"], "b": ["c", "d"], "c": ["d"], "d": []}
    depths = {"a": 1, "b": 2, "c": 3, "d": 1}
    assert {name: stages_after(topology, depths, name) for name in topology} == {"a": 4, "b": 4, "c": 1, "d": 0}


class Recorded:
    """A bridge that says what was called of it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.src_module_name = name
        self._calls = calls
        self._received = 0

    def recv_forward(self) -> str:
        self._calls.append(f"{self.src_module_name} in")
        self._received += 1
        return f"{self.src_module_name}{self._received - 1}"

    def send_backward(self, gradient: str) -> None:
        self._calls.append(f"{self.src_module_name} out")

    def send_backward_recv_forward(self, gradient: str) -> str:
        self._calls.append(f"{self.src_module_name} both")
        self._received += 1
        return f"{self.src_module_name}{self._received - 1}"


def test_inputs_are_taken_ahead_in_turns_and_given_in_order():
    calls: list[str] = []
    fan = FanIn([(Recorded("near", calls), 0), (Recorded("far", calls), 2)])
    fan.begin(4)
    near, far = fan.inlets
    given = [near.recv_forward(), far.recv_forward()]
    assert calls == ["near in", "far in", "far in", "far in"]
    del calls[:]
    for _ in range(3):
        given += [near.send_backward_recv_forward("g"), far.send_backward_recv_forward("g")]
    near.send_backward("g")
    far.send_backward("g")
    assert calls == ["near both", "far both", "near both", "far out", "near both", "far out", "near out", "far out"]
    assert given == [f"{name}{number}" for number in range(4) for name in ("near", "far")]
