"""The search for graph pipelines: valid, as good as trying everything, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.baselines import plan_atomic, plan_data_parallel, plan_sequential
from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.graph.plan import Plan
from megatron.fill.wings.graph.search import micro_batches, plan_graph
from megatron.fill.wings.graph.timeline import simulate
from megatron.fill.wings.graph.zoo import MODELS, candle, mmt
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from tests.support.graph_oracle import least_bottleneck_s, random_cluster, random_model

CLUSTER = Cluster(devices=8, gpu=GPUS["v100-32gb"], network=None)


def unit(graph: ModelGraph) -> ModelGraph:
    """The same graph; each operator takes a second forward and two backward."""
    return ModelGraph(
        graph.name, tuple(Operator(name=its.name, inputs=its.inputs, forward_s=1) for its in graph.operators)
    )


def chain(count: int) -> ModelGraph:
    names = [f"op{at}" for at in range(count)]
    return ModelGraph(
        "chain",
        tuple(
            Operator(name=name, inputs=tuple(names[:at][-1:]), forward_s=1 + at % 3, kept_bytes=1e6)
            for at, name in enumerate(names)
        ),
    )


@pytest.mark.parametrize("seed", range(120))
def test_no_plan_of_a_small_model_has_a_shorter_time_per_sample(seed):
    random = Random(seed)
    graph = random_model(random, random.randint(2, 8))
    cluster = random_cluster(random, random.randint(1, 4))
    batch, sizes = random.choice((4, 8)), (1, 2, 4)[: random.randint(1, 3)]
    least_s = least_bottleneck_s(graph, cluster, batch, sizes)
    if least_s is None:
        with pytest.raises(GraphError):
            plan_graph(graph, cluster, batch, sizes)
    else:
        assert plan_graph(graph, cluster, batch, sizes, tolerance=1e-9).bottleneck_s == pytest.approx(least_s)


@pytest.mark.parametrize("seed", range(40))
def test_plans_of_larger_models_are_valid(seed):
    random = Random(seed)
    graph = random_model(random, random.randint(9, 14))
    cluster = replace(random_cluster(random, random.randint(2, 6)), memory_bytes=2**30)
    found = plan_graph(graph, cluster, 8, (1, 2, 4))
    assert Plan.parse(str(found.plan), graph, cluster) == found.plan  # which checks C1 to C4
    assert not found.lined
    assert found.bottleneck_s <= found.plan.bottleneck_s


@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_a_chain_gives_the_sequential_plan(devices):
    graph, cluster = chain(7), replace(CLUSTER, devices=devices)
    found, line = plan_graph(graph, cluster, 8, (1, 2)), plan_sequential(graph, cluster, 8, (1, 2))
    assert found.plan.stages == line.plan.stages
    assert found.timeline.period_ns == line.timeline.period_ns
    assert found.plan.depth == len(found.plan.stages)


def test_branches_run_side_by_side():
    """Eight devices, two towers of four layers, 32 micro-batches: 35 of 39 micro-batch times."""
    graph = unit(mmt(2, 4, joined=False))
    found, line = plan_graph(graph, CLUSTER, 32, (1,)), plan_sequential(graph, CLUSTER, 32, (1,))
    assert (found.plan.depth, line.plan.depth) == (4, 8)
    assert found.timeline.period_ns == 35 * 3e9
    assert line.timeline.period_ns == 39 * 3e9
    assert max(its.in_flight for its in found.plan.stages) == 4
    assert max(its.in_flight for its in line.plan.stages) == 8


def test_fewer_devices_than_branches():
    found = plan_graph(unit(candle(joined=False)), replace(CLUSTER, devices=4), 8, (1,))
    assert found.bottleneck_s == pytest.approx(8 * 3)  # two branches of four layers on each of three, one on the last
    assert found.plan.depth == 1


def test_layers_side_by_side_are_the_atomic_chain():
    found = plan_atomic(unit(mmt(2, 4, joined=False)), replace(CLUSTER, devices=4), 8, (1,))
    assert [stage.operators for stage in found.plan.stages] == [
        (f"modality0.{at}", f"modality1.{at}") for at in range(4)
    ]


def test_memory_makes_micro_batches_small():
    graph = unit(mmt(2, 2, joined=False))
    graph = ModelGraph("m", tuple(replace(its, kept_bytes=1e9) for its in graph.operators))
    cluster = replace(CLUSTER, devices=2, memory_bytes=int(4.5e9))
    found = plan_graph(graph, cluster, 8, (1, 2, 4))
    assert all(its.micro_batch <= 2 for its in found.plan.stages)
    assert all(found.plan.memory_bytes(at) <= 4.5e9 for at in range(len(found.plan.stages)))


def test_too_few_devices():
    with pytest.raises(
        GraphError, match=r"mmt: 2 devices are too few: parameters.* expected at least 7 devices of 1.00"
    ):
        plan_graph(mmt(), replace(CLUSTER, devices=2, memory_bytes=2**30), 32, (1, 2))


def test_an_operator_that_fits_no_device():
    with pytest.raises(GraphError, match=r"dlrm: operator table0 fits no device: needs 1.07 GiB .* they have 1.00 GiB"):
        plan_graph(MODELS["dlrm"](), replace(CLUSTER, memory_bytes=2**30), 32, (1, 2))


def test_micro_batches_that_do_not_fit_anywhere():
    graph = ModelGraph("m", tuple(replace(its, kept_bytes=1e9) for its in unit(mmt(2, 2)).operators))
    with pytest.raises(GraphError, match=r"no plan fits 2 devices of 1.86 GiB with micro-batches of 1; expected more"):
        plan_graph(graph, replace(CLUSTER, devices=2, memory_bytes=2 * 10**9), 8, (1,))


def test_a_model_as_one_data_parallel_stage():
    """Each of eight devices has a sample of three seconds; a model that fits no device has no such stage."""
    found = plan_data_parallel(unit(chain(1)), CLUSTER, 8, (1, 2, 4, 8))
    assert found is not None
    assert (found.period_ns, found.plan.devices, len(found.plan.stages)) == (3_000_000_000, 8, 1)
    large = ModelGraph("large", tuple(Operator(name=name, parameters=10**9, forward_s=1) for name in "abc"))
    assert plan_data_parallel(large, CLUSTER, 8, (8,)) is None


def test_a_model_that_takes_no_time_is_refused():
    free = ModelGraph("free", (Operator(name="a", forward_s=0), *(Operator(name=name) for name in "bcd")))
    with pytest.raises(GraphError, match=r"forward_s 0 of a, forward_flops 0 and output_bytes 0 of b, .* of 1 more"):
        plan_graph(free, CLUSTER, 8, (8,))


def test_sizes_of_micro_batches():
    assert micro_batches(24) == (1, 2, 4, 8)
    assert micro_batches(24, 3) == (8,)
    with pytest.raises(GraphError, match="24 samples in 5 micro-batches; expected a divisor of 24"):
        micro_batches(24, 5)


@pytest.mark.parametrize("name", MODELS)
def test_built_in_models_have_plans(name):
    cluster = Cluster(devices=4, gpu=GPUS["v100-32gb"], network=NETWORKS["p3dn.24xlarge"])
    found = plan_graph(MODELS[name](), cluster, 16, (4,))
    assert found.plan.devices <= 4
    assert found.timeline.period_ns / 1e9 >= 16 * found.bottleneck_s * (1 - 2e-3)
    assert simulate(found.plan) == found.timeline


def test_the_papers_sizes():
    layer = mmt().operators[0]
    assert layer.parameters == 12 * 1024**2 + 4 * 1024
    assert layer.forward_flops == 24 * 256 * 1024**2 + 4 * 256**2 * 1024
    assert len(mmt().operators) == 33
    tables = [its for its in MODELS["dlrm"]().operators if its.lookup]
    assert [its.parameters for its in tables] == [64_000_000] * 7
    assert sum(its.parameters for its in candle(joined=False).operators) == 28 * 4097 * 4096
