"""Which plans can be trained, and in which order their stages meet."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.graph.runnable import Runnable
from megatron.fill.wings.graph.schedule import in_flight
from megatron.fill.wings.mainjob.hardware import GPUS


def plan(edges: list[tuple[int, int]], stages: int, microbatches: int = 6, sequential: bool = False) -> Plan:
    """A stage for each operator."""
    operators = [
        Operator(name=f"o{at}", inputs=tuple(f"o{a}" for a, b in edges if b == at), forward_s=1.0, output_bytes=1.0)
        for at in range(stages)
    ]
    after = [[b for a, b in edges if a == at] for at in range(stages)]
    flight = in_flight(after, [1] * stages, microbatches)
    cluster = Cluster(devices=stages, gpu=GPUS["v100-16gb"], network=None)
    parts = tuple(Stage((f"o{at}",), (at,), 1, 1, flight[at]) for at in range(stages))
    return Plan(ModelGraph("toy", tuple(operators)), cluster, microbatches, parts, sequential)


def series_parallel(random: Random, most: int) -> tuple[list[tuple[int, int]], int]:
    """Stages in series, where each end goes to each beginning, and side by side."""
    edges: list[tuple[int, int]] = []
    count = 0

    def build(size: int) -> tuple[list[int], list[int]]:
        nonlocal count
        if size == 1:
            count += 1
            return [count - 1], [count - 1]
        first = random.randint(1, size - 1)
        (begins, ends), (begins_2, ends_2) = build(first), build(size - first)
        if random.random() < 0.5:
            return begins + begins_2, ends + ends_2
        edges.extend((a, b) for a in ends for b in begins_2)
        return begins, ends_2

    build(most)
    return edges, count


def test_series_parallel_stages_never_wait_for_each_other():
    random = Random(1)
    for _ in range(400):
        edges, stages = series_parallel(random, random.randint(2, 8))
        Runnable(plan(edges, stages, random.randint(1, 8)), stages)


def test_the_warm_up_is_counted_to_the_farthest_sink():
    run = Runnable(plan([(0, 1), (1, 3), (2, 3)], 4), 4)
    assert run.plan.after == (2, 1, 1, 0)
    assert run.plan.successors == ((1,), (3,), (3,), ())
    assert run.outputs == (("o0",), ("o1",), ("o2",), ())


def test_a_branch_that_skips_stages_is_taken_ahead():
    Runnable(plan([(0, 1), (1, 2), (2, 3), (0, 3)], 4), 4)


def test_what_stages_receive_ahead_is_counted():
    assert Runnable(plan([(0, 2), (1, 2)], 3), 3).received_ahead == 0
    assert Runnable(plan([(0, 1), (1, 2), (0, 2)], 3), 3).received_ahead == 1
    assert Runnable(plan([(0, 1), (1, 2), (2, 3), (0, 3)], 4), 4).received_ahead == 2


def test_stages_that_would_wait_for_each_other_are_named():
    edges = [(0, 1), (1, 2), (2, 3), (0, 2), (0, 3)]  # a stage that all others take from
    with pytest.raises(GraphError, match=r"stages 0, 1, 2, 3 would wait for each other forever.*\ngraph plan of toy"):
        Runnable(plan(edges, 4), 4)


def changed(its: Plan, stage: int, **fields: object) -> Plan:
    stages = list(its.stages)
    stages[stage] = replace(stages[stage], **fields)  # type: ignore[arg-type]
    return replace(its, stages=tuple(stages), cluster=replace(its.cluster, devices=8))


FAN_IN = plan([(0, 2), (1, 2)], 3)


CHAIN = plan([(0, 1), (1, 2)], 3)
FROZEN = replace(
    CHAIN, graph=ModelGraph("toy", (replace(CHAIN.graph.operators[0], frozen=True), *CHAIN.graph.operators[1:]))
)
SHARED = changed(FAN_IN, 1, devices=(1, 5), micro_batch=2, in_flight=6)


@pytest.mark.parametrize(
    ("given", "ranks", "said"),
    [
        (FAN_IN, 4, "the plan has 3 stages and the run has 4 ranks; expected RANKS=3"),
        (FAN_IN, 1, "the plan has 3 stages and the run has 1 rank; expected RANKS=3"),
        (plan([], 1), 1, "the plan has one stage, and so no pipeline; expected two or more"),
        (plan([(0, 1)], 2, sequential=True), 2, "the plan is sequential: .* expected a graph of stages"),
        (FROZEN, 3, "stage 0 sends only what frozen operators return, .* a plan made with --ahead"),
        (SHARED, 3, "stage 1 is on 2 devices: a stage is trained on one; .* --micro-batches 6"),
        (changed(FAN_IN, 1, devices=(5,)), 3, "stage 1 is on device 5; expected 1: rank 1 trains it"),
        (changed(FAN_IN, 1, micro_batch=2, in_flight=4), 3, "stage 1 .* micro-batches of 2; expected 1F1B with 1"),
        (changed(FAN_IN, 1, k=2), 3, "stage 1 has 2F2B with micro-batches of 1; expected 1F1B"),
        (changed(FAN_IN, 1, in_flight=3), 3, "stage 1 has 3 samples in flight; expected 2, as the schedule has"),
    ],
)
def test_a_plan_that_cannot_be_trained_says_why(given, ranks, said):
    with pytest.raises(GraphError, match=said):
        Runnable(given, ranks)
