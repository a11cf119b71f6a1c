"""Frozen operators: what they cost, in a stage and ahead of it; and ahead, when a rank runs them."""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from megatron.fill import cli
from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.files import load_plan, plan_text
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan
from megatron.fill.wings.graph.running.ahead import Ahead, Frozen, turns
from megatron.fill.wings.graph.search import plan_graph
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS

CLUSTER = Cluster(devices=2, gpu=GPUS["v100-16gb"], network=NETWORKS["p3.16xlarge"])
TOWER = Operator(name="tower", forward_flops=1e9, parameters=1000, output_bytes=8.0, kept_bytes=4.0)
FROZEN = replace(TOWER, frozen=True)
HEAD = Operator(name="head", inputs=("tower",), forward_flops=1e9, parameters=500, output_bytes=4.0)
END = Operator(name="end", inputs=("head",), forward_flops=1e9, parameters=500, output_bytes=4.0)
GRAPH = ModelGraph("model", (FROZEN, HEAD, END))


def test_a_frozen_operator_has_no_backward_pass_and_nothing_to_keep():
    trained, frozen = (Costs(ModelGraph("model", (its, HEAD)), CLUSTER, 8) for its in (TOWER, FROZEN))
    assert frozen.passes_s(1, 4) == (trained.passes_s(1, 4)[0], 0.0)
    assert trained.passes_s(1, 4)[1] > 0
    its = CLUSTER.precision
    assert frozen.memory_bytes(1, 8, 1) == 1000 * its.weight_bytes
    assert trained.memory_bytes(1, 8, 1) == CLUSTER.state_bytes(1000) + 8 * 4.0
    assert frozen.sums(3)[:2] == (500, 1000)
    measured = replace(FROZEN, forward_flops=0.0, forward_s=1.0)
    assert CLUSTER.passes_s(measured, 0.0, 2) == (2.0, 0.0)


def test_what_runs_ahead_is_in_no_stage_and_on_every_device():
    ahead = GRAPH.running_ahead()
    assert [its.name for its in ahead.operators] == ["head", "end"]
    assert ahead.ahead == (FROZEN,)
    assert ahead.inputs[0] == 0
    costs, without = Costs(ahead, CLUSTER, 8), Costs(ModelGraph("model", (replace(HEAD, inputs=()), END)), CLUSTER, 8)
    assert costs.passes_s(1, 4) == without.passes_s(1, 4)
    more = costs.memory_bytes(1, 8, 1) - without.memory_bytes(1, 8, 1)
    assert more == 1000 * CLUSTER.precision.weight_bytes + 2 * 8 * 8.0
    assert costs.ahead_s(2) == 4 * CLUSTER.passes_s(FROZEN, 0.0, 2)[0]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            lambda: ModelGraph("m", (TOWER, replace(HEAD, frozen=True))),
            "operator head is frozen and takes tower, which is trained; expected frozen operators before all others",
        ),
        (lambda: ModelGraph("m", (HEAD,), (TOWER,)), "operator tower runs ahead; expected a frozen one"),
        (lambda: ModelGraph("m", (TOWER, HEAD)).running_ahead(), "no operator is frozen; expected some to run ahead"),
        (lambda: ModelGraph("m", (FROZEN,)).running_ahead(), "all operators are frozen; expected some to train"),
        (lambda: ModelGraph("m", (HEAD,), (FROZEN, FROZEN)), "operator tower is there twice"),
        (lambda: ModelGraph("m", (HEAD,), (replace(FROZEN, inputs=("tower",)),)), "has the cycle tower -> tower"),
    ],
)
def test_what_can_not_be_frozen_is_said(make, said):
    with pytest.raises(GraphError, match=said):
        make()


def test_a_plan_with_operators_ahead_is_read_back(tmp_path):
    plan = plan_graph(GRAPH.running_ahead(), CLUSTER, 8, (1,)).plan
    (tmp_path / "plan.json").write_text(plan_text(plan), encoding="utf-8")
    assert load_plan(tmp_path / "plan.json") == plan
    assert str(plan).splitlines()[-1] == "ahead: tower"
    assert Plan.parse(str(plan), GRAPH, CLUSTER) == plan
    with pytest.raises(
        GraphError, match="the last line runs other operators ahead than the frozen ones of model: other"
    ):
        Plan.parse(str(plan) + " other", GRAPH, CLUSTER)


def pipefill(monkeypatch: pytest.MonkeyPatch, line: str) -> int:
    monkeypatch.setattr(sys, "argv", ["pipefill", *line.split()])
    try:
        cli.main()
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


def test_the_command_says_what_runs_ahead(capsys, monkeypatch):
    line = "graph plan examples/graph/frozen_towers.yaml --devices 2 --batch 8 --micro-batches 8 --network none"
    assert pipefill(monkeypatch, f"{line} --ahead") == 0
    assert re.search(r"^ahead: 7 operators, .* of each device's .* of bubbles$", capsys.readouterr().out, re.MULTILINE)
    assert pipefill(monkeypatch, line) == 0
    assert "ahead:" not in capsys.readouterr().out
    assert pipefill(monkeypatch, "graph plan mmt --devices 2 --ahead") == 2
    assert "mmt: no operator is frozen; expected some to run ahead" in capsys.readouterr().err


class Scale(torch.nn.Module):
    """Multiplies what it takes, and counts how often."""

    def __init__(self, by: float) -> None:
        super().__init__()
        self.by = by
        self.calls = 0

    def forward(self, inputs: list[torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.calls += 1
        return (inputs[0] if inputs else batch["data"]) * self.by


KNOWN = 8  # waits, after which one is known
LONG_NS = 50_000_000


class Clock(threading.local):
    """Each thread's own time."""

    now = 0


class Alone:
    """An ``Ahead`` of one rank, which takes what it computes."""

    def __init__(self, total: int = 100, microbatches: int = 2, slack: int = 0) -> None:
        self.first, self.second = Scale(2.0), Scale(3.0)
        operators = [Frozen("first", self.first, (), (1, 1, 1)), Frozen("second", self.second, ("first",), (1, 1, 1))]
        self.ahead = Ahead(
            operators, [("second",)], (0,), 0, None, microbatches, lambda: total, lambda: self.clock.now, slack
        )
        self.data = self.batches()
        self.waits, self.total = 0, total
        self.clock = Clock()
        self.microbatches = microbatches

    @staticmethod
    def batches() -> Iterator[dict[str, torch.Tensor]]:
        number = 0
        while True:
            yield {"data": torch.full((1, 1, 1), float(number))}
            number += 1

    def forward(self) -> float:
        batch = self.ahead.next_batch(self.data, True)
        return float(self.ahead.outputs(batch, True)["second"])

    def iterate(self, then: Callable[[], None] = lambda: None) -> list[float]:
        """An iteration with one wait at its end; if that is known to be long, until all is done that may begin.

        Passes themselves take no time.
        """
        self.ahead.on_schedule()
        found = [self.forward() for _ in range(self.microbatches)]
        self.waits += 1
        wanted = self.may_be_done() if self.waits > KNOWN else 0

        def wait() -> None:
            for _ in range(10_000):
                if self.second.calls >= wanted:
                    break
                time.sleep(1e-3)
            self.clock.now = start + LONG_NS  # in the thread that waits, and not in the one that computes
            then()

        start = self.clock.now
        self.ahead.on_wait(wait)()
        self.clock.now = start + LONG_NS
        return found

    def may_be_done(self) -> int:
        """Micro-batches: those of the forward passes up to now, and of two iterations more."""
        return min(self.microbatches * (self.waits + 2), self.total)

    def iterate_without_waiting(self) -> list[float]:
        self.ahead.on_schedule()
        found = [self.forward() for _ in range(self.microbatches)]
        self.ahead.on_wait(lambda: None)()
        return found


@pytest.mark.parametrize(
    ("bubbles", "counts"),
    [((1, 1), (16, 16)), ((3, 1), (24, 8)), ((0, 5), (0, 32)), ((0, 0), (16, 16)), ((1, 2, 1), (8, 16, 8))],
)
def test_ranks_have_turns_by_their_bubbles(bubbles, counts):
    found = turns(bubbles)
    assert tuple(found.count(rank) for rank in range(len(bubbles))) == counts
    for begin in range(0, 32, 8):  # evenly spread
        for rank, count in enumerate(counts):
            assert found[begin : begin + 8].count(rank) == count / 4


def test_passes_run_while_a_rank_waits_and_are_taken_from_there():
    run = Alone()
    found = [value for _ in range(KNOWN + 4) for value in run.iterate()]
    assert found == [6.0 * number for number in range(2 * (KNOWN + 4))]  # each micro-batch's own, in order
    assert run.ahead.in_bubbles >= 4 * 2 * 2
    assert run.first.calls == run.second.calls == run.may_be_done()


def test_nothing_but_what_is_needed_next_begins_in_a_wait_that_may_be_short():
    run = Alone()
    for iteration in range(12):
        run.iterate_without_waiting()
        assert run.second.calls <= 2 * (iteration + 1) + 1
    assert run.ahead.in_bubbles == 0
    assert run.ahead.late + run.ahead.in_passes <= 2 * 25


def test_a_rank_is_at_most_two_iterations_ahead_and_never_beyond_the_run():
    run = Alone(total=2 * (KNOWN + 4))
    for iteration in range(KNOWN + 4):
        run.iterate()
        if iteration >= KNOWN:
            assert run.second.calls == min(2 * (iteration + 3), 2 * (KNOWN + 4))


@pytest.mark.parametrize("slack", [0, 1, 2])
def test_what_another_stage_may_wait_for_already_is_late(slack):
    run = Alone(slack=slack)
    run.ahead.on_schedule()
    for _ in range(2):
        run.forward()
    done = threading.Event()
    wanted = 2 + slack + 1  # the first iteration's, and all that may be needed before the next forward pass ends

    def wait() -> None:
        for _ in range(10_000):
            if run.second.calls >= wanted:
                done.set()
                return
            time.sleep(1e-3)

    run.ahead.on_wait(wait)()
    assert done.is_set()
    assert run.second.calls == wanted
    assert run.ahead.late == 2 * (slack + 1)


def test_an_output_of_another_shape_than_the_script_says_is_refused():
    operator = Frozen("first", Scale(2.0), (), (1, 2, 1))
    ahead = Ahead([operator], [(), ("first",)], (0,), 0, None, 1, lambda: 9)
    source = Alone.batches()
    for _ in range(2):
        ahead.next_batch(source, True)
    with pytest.raises(GraphError, match=r"first returns \(1, 1, 1\) in torch.float32; expected \(1, 2, 1\)"):
        ahead.on_wait(lambda: time.sleep(0.5))()


def test_an_evaluation_computes_its_own():
    run = Alone()
    run.iterate_without_waiting()
    other = iter([{"data": torch.full((1, 1, 1), 7.0)}])
    batch = run.ahead.next_batch(other, False)
    assert float(run.ahead.outputs(batch, False)["second"]) == 42.0
    assert run.iterate_without_waiting() == [12.0, 18.0]


def test_a_wait_that_fails_fails():
    def fails() -> None:
        raise ConnectionError("the peer is gone")

    run = Alone()
    for _ in range(KNOWN):
        run.iterate()
    with pytest.raises(ConnectionError, match="the peer is gone"):
        run.iterate(then=fails)
