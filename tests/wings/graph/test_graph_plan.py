"""Graphs, stages, plans, their schedules and timelines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.errors import GraphError
from megatron.fill.types import BubbleKind
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan, Stage
from megatron.fill.wings.graph.schedule import group, in_flight, passes
from megatron.fill.wings.graph.timeline import simulate
from megatron.fill.wings.graph.tree import decompose
from megatron.fill.wings.mainjob.hardware import GPUS, Network

CLUSTER = Cluster(devices=4, gpu=GPUS["v100-16gb"], network=None)


def model(*edges: str, **fields: Any) -> ModelGraph:
    """``a``, ``a>b`` or ``a,b>c``: an operator after those it takes; a second per sample forward, two backward."""
    operators = []
    for edge in edges:
        inputs, _, name = edge.rpartition(">")
        operators.append(Operator(name=name, inputs=tuple(filter(None, inputs.split(","))), forward_s=1.0, **fields))
    return ModelGraph("toy", tuple(operators))


def stages(*rows: tuple[str, int, int, int], k: int = 1) -> tuple[Stage, ...]:
    """Rows of operators, device, micro-batch and samples in flight."""
    return tuple(Stage(tuple(names.split()), (device,), size, k, flying) for names, device, size, flying in rows)


TOWERS = model("a", "b", "a,b>c")


class TestModel:
    def test_a_cycle_is_named(self):
        with pytest.raises(GraphError, match=r"has the cycle (b -> c -> b|c -> b -> c); expected none"):
            model("a", "a,c>b", "b>c", "c>d")

    def test_an_unknown_input_is_named(self):
        with pytest.raises(GraphError, match="operator b takes x, which is not an operator"):
            model("a", "x>b")

    def test_a_name_is_there_once(self):
        with pytest.raises(GraphError, match="operator a is there twice"):
            model("a", "a")

    @pytest.mark.parametrize("field", ["forward_flops", "kept_bytes", "parameters"])
    def test_costs_are_not_negative(self, field: Any):
        with pytest.raises(GraphError, match=f"operator a: {field} is -1; expected"):
            model("a", **{field: -1})

    @pytest.mark.parametrize("field", ["forward_flops", "backward_flops"])
    def test_seconds_and_operations_are_not_given_together(self, field: Any):
        with pytest.raises(GraphError, match="operator a: has seconds and operations; expected"):
            model("a", **{field: 1e9})

    def test_each_branch_is_in_one_piece_of_the_order(self):
        graph = model("a1", "b1", "a1>a2", "b1>b2", "a2,b2>c")
        assert graph.names(graph.everything) == ("a1", "a2", "b1", "b2", "c")


class TestTree:
    def test_fork_and_join(self):
        graph = model("a", "a>b", "a>c", "c>d", "b,d>e")
        assert decompose(graph) == ((1, ((2,), (4, 8)), 16), ())

    def test_an_edge_that_skips_is_in_series(self):
        assert decompose(model("a", "a>b", "a,b>c"))[0] == (1, 2, 4)

    def test_several_ends_are_side_by_side(self):
        assert decompose(model("a", "b", "a>c"))[0] == (((1, 4), (2,)),)

    def test_what_is_not_series_parallel_is_put_into_a_line_and_told(self):
        graph = model("a", "b", "a>c", "a,b>d", "c,d>e")
        chain, lined = decompose(graph)
        assert sorted(chain) == [1, 2, 4, 8, 16]
        assert chain[-1] == 16
        assert [graph.names(mask) for mask in lined] == [("a", "c", "b", "d")]


class TestSchedule:
    def test_the_papers_known_answers(self):
        chain = [[1], [2], []]  # from the model's beginning to its end
        assert in_flight(chain, [1, 2, 4], 64) == (10, 8, 4)
        assert in_flight(chain, [4, 4, 4], 64) == (12, 8, 4)

    def test_the_deepest_successor_counts(self):
        assert in_flight([[1, 2], [3], [3], []], [1, 4, 1, 1], 64) == (12, 8, 2, 1)

    def test_samples_are_whole_micro_batches_and_at_most_the_batch(self):
        assert in_flight([[1], []], [8, 4], 64) == (16, 4)
        assert in_flight([[1], []], [8, 4], 8) == (8, 4)

    def test_k_makes_up_one_micro_batch_of_the_smallest_successor(self):
        assert group(1, [4]) == 4
        assert group(1, [4, 2]) == 2
        assert group(4, [1]) == 1
        assert group(4, []) == 1

    def test_the_order_of_passes(self):
        assert " ".join(map(str, passes(8, 2, 4, 1))) == "F0 F1 B0 F2 B1 F3 B2 B3"
        assert " ".join(map(str, passes(6, 1, 4, 2))) == "F0 F1 F2 F3 B0 B1 F4 F5 B2 B3 B4 B5"


VALID = stages(("a", 0, 2, 4), ("b", 1, 2, 4), ("c", 2, 2, 2))


class TestConditions:
    def refused(self, given: tuple[Stage, ...], reason: str, graph: ModelGraph = TOWERS, cluster: Cluster = CLUSTER):
        with pytest.raises(GraphError) as error:
            Plan(graph, cluster, 8, given)
        assert reason in str(error.value)
        assert "the plan is\ngraph plan of toy: 8 samples" in str(error.value)

    def test_a_valid_plan(self):
        plan = Plan(TOWERS, CLUSTER, 8, VALID)
        assert list(plan.edges) == [(0, 2), (1, 2)]
        assert (plan.depth, plan.devices, plan.predecessors(2)) == (2, 3, [0, 1])

    def test_c1_partition(self):
        self.refused((), "C1: there are no stages")
        self.refused(VALID[:2], "C1: c is in no stage")
        self.refused(
            (*VALID, replace(VALID[0], devices=(3,))), "C1: operator a is in stages 0 and 3; expected it in one"
        )
        self.refused((replace(VALID[0], operators=("x",)),), "C1: stage 0 has x, which is not an operator of toy")
        self.refused((replace(VALID[0], operators=()), *VALID), "C1: stage 0 has no operators")

    def test_c1_convex(self):
        graph = model("a", "a>b", "b>c")
        given = stages(("a c", 0, 2, 2), ("b", 1, 2, 2))
        self.refused(given, "C1: stage 0 is not convex: the path a -> b -> c leaves it and comes back", graph)

    def test_c2_order_and_cycles(self):
        given = (VALID[2], *VALID[:2])
        self.refused(given, "C2: c of stage 0 takes a of stage 1, which is not before it")
        graph = model("a", "a>b", "c", "c>d")
        given = stages(("a d", 0, 2, 2), ("b c", 1, 2, 2))
        self.refused(given, "C2: d of stage 0 takes c of stage 1, which is not before it", graph)

    def test_c3_devices_and_memory(self):
        self.refused((replace(VALID[0], devices=(4,)), *VALID[1:]), "C3: stage 0 is on device 4; expected 0 to 3")
        self.refused((replace(VALID[0], devices=(1,)), *VALID[1:]), "C3: device 1 has stages 0 and 1; expected one")
        self.refused((replace(VALID[0], devices=()), *VALID[1:]), "C3: stage 0 has no devices")
        graph = model("a", "b", "a,b>c", kept_bytes=3e9)
        small = replace(CLUSTER, memory_bytes=8 * 2**30)
        self.refused(VALID, "C3: stage 0 needs 11.18 GiB on a device of 8.00 GiB", graph, small)

    def test_c4_micro_batches(self):
        self.refused(
            (replace(VALID[0], micro_batch=3), *VALID[1:]), "C4: stage 0 has micro-batches of 3; expected a divisor"
        )
        several = replace(VALID[0], devices=(0, 3), micro_batch=1)
        self.refused((several, *VALID[1:]), "C4: stage 0 has micro-batches of 1; expected a multiple of its 2 devices")
        self.refused((replace(VALID[0], k=0), *VALID[1:]), "C4: stage 0 has k 0")
        self.refused(
            (replace(VALID[0], in_flight=3), *VALID[1:]), "C4: stage 0 has 3 samples in flight; expected a multiple"
        )

    def test_c4_number_of_passes(self, monkeypatch):
        monkeypatch.setattr("megatron.fill.wings.graph.plan._MOST_PASSES", 23)
        self.refused(VALID, "C4: an iteration has 24 passes; expected at most 23, by larger micro-batches")

    def test_c4_stages_that_wait_for_each_other(self):
        given = stages(
            ("a", 0, 1, 2), ("b", 1, 2, 4), ("c", 2, 4, 4)
        )  # a stops two samples short of a micro-batch of c
        self.refused(given, "C4: stages wait for each other forever: stage 0 at B0")


class TestText:
    def test_it_is_read_back(self):
        plan = Plan(TOWERS, CLUSTER, 8, VALID)
        assert str(plan).splitlines()[1] == "0: devices 0, micro-batch 2, 1F1B, in flight 4: a"
        assert Plan.parse(str(plan), TOWERS, CLUSTER) == plan
        line = replace(plan, sequential=True)
        assert Plan.parse(str(line), TOWERS, CLUSTER) == line

    def test_devices_are_ranges(self):
        cluster = replace(CLUSTER, devices=8)
        wide = Plan(TOWERS, cluster, 8, (replace(VALID[0], devices=(0, 4, 5, 6), micro_batch=4), *VALID[1:]))
        assert "devices 0,4-6," in str(wide)
        assert Plan.parse(str(wide), TOWERS, cluster) == wide

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", "line 1 is ''; expected such as"),
            ("a plan", "line 1 is 'a plan'; expected such as 'graph plan of"),
            ("graph plan of toy: 8 samples, 1 stage:\n0: a b", "line 2 is '0: a b'; expected such as '0: devices"),
            ("graph plan of mmt: 8 samples, 1 stage:", "line 1 is a plan of mmt; expected one of toy"),
            ("graph plan of toy: 8 samples, 2 stages:", "line 1 says 2 stages, and there are 0"),
            (
                "graph plan of toy: 8 samples, 1 stage:\n0: devices 1-x, micro-batch 1, 1F1B, in flight 1: a",
                "line 2: devices are '1-x'; expected such as 0-2,5",
            ),
            (
                "graph plan of toy: 8 samples, 1 stage:\n0: devices 1, micro-batch 1, 1F2B, in flight 1: a",
                "line 2 is",
            ),
        ],
    )
    def test_what_is_wrong_is_named_by_line(self, text, reason):
        with pytest.raises(GraphError) as error:
            Plan.parse(text, TOWERS, CLUSTER)
        assert reason in str(error.value)


class TestTimeline:
    def test_side_by_side_and_one_after_another(self):
        """Two stages deep, m micro-batches of 3 s: 3 (m + 1); as a chain 3 (m + 2)."""
        given = stages(("a", 0, 1, 2), ("b", 1, 1, 2), ("c", 2, 1, 1))
        plan = Plan(TOWERS, CLUSTER, 8, given)
        assert simulate(plan).period_ns == 27e9
        deeper = stages(("a", 0, 1, 3), ("b", 1, 1, 2), ("c", 2, 1, 1))
        assert simulate(Plan(TOWERS, CLUSTER, 8, deeper, sequential=True)).period_ns == 30e9

    def test_time_is_passes_and_bubbles(self):
        timeline = simulate(Plan(TOWERS, CLUSTER, 8, stages(("a", 0, 2, 4), ("b", 1, 1, 4), ("c", 2, 2, 2), k=1)))
        for row, spans in enumerate(timeline.spans):
            busy_ns = sum(end - start for _, start, end in spans)
            assert busy_ns == 24e9
            assert busy_ns + sum(wait.duration_ns for wait in timeline.waits[row]) == timeline.period_ns
            assert timeline.bubble_share(row) == pytest.approx(1 - busy_ns / timeline.period_ns)

    def test_bubbles_have_their_kinds(self):
        timeline = simulate(Plan(TOWERS, CLUSTER, 4, stages(("a", 0, 1, 2), ("b", 1, 1, 2), ("c", 2, 1, 1))))
        kinds = [[wait.kind for wait in waits] for waits in timeline.waits]
        assert kinds[2] == [BubbleKind.FILL, BubbleKind.DRAIN]
        assert kinds[0][0] is BubbleKind.FWD_BWD
        assert set(kinds[0][1:]) == {BubbleKind.INTERIOR}

    def test_transfers_and_reductions_take_time(self):
        network = Network("slow", 1e9, 1e9, gpus_per_node=8, latency_s=0.0)
        cluster = replace(CLUSTER, network=network, memory_bytes=32 * 2**30)
        graph = model("a", "a>b", output_bytes=5e8, kept_bytes=1.0, parameters=500_000_000)
        plan = Plan(graph, cluster, 1, stages(("a", 0, 1, 1), ("b", 1, 1, 1)))
        assert simulate(plan).period_ns == 7e9  # half a second there, and half a second back
        wide = Plan(graph, cluster, 2, (Stage(("a", "b"), (0, 1), 2, 1, 2),))
        assert simulate(wide).period_ns == (6 + 4) * 1e9  # 4 GB of gradients over a ring of two
        assert wide.bottleneck_s == 5.0
        assert simulate(wide).reduce_ns == (4 * 10**9,)
