"""The configurator: links, the latency model, memory, the search, rank orders, and the value of bubbles."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.wings.configure import latency, overlap
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.dedicate import MOVES, anneal
from megatron.fill.wings.configure.details import detailed
from megatron.fill.wings.configure.energy import Energy
from megatron.fill.wings.configure.flags import check_whole, layout_flags, read_flags
from megatron.fill.wings.configure.latency import bound_ns, iteration, timeline
from megatron.fill.wings.configure.layout import lay_out
from megatron.fill.wings.configure.links import Links, Route, all_reduce_s
from megatron.fill.wings.configure.many import ManyOrders
from megatron.fill.wings.configure.overlap import connections, startable
from megatron.fill.wings.configure.passes import Both, Passes, Profile
from megatron.fill.wings.configure.room import least_bytes, least_known, margins, memory
from megatron.fill.wings.configure.rows import layout_of
from megatron.fill.wings.configure.search import Evaluator, search
from megatron.fill.wings.configure.space import _balanced, _last_layers, layouts, padded
from megatron.fill.wings.configure.value import fill_kinds, valued
from megatron.fill.wings.mainjob.analytic import boundary_bytes, stage_cost
from megatron.fill.wings.mainjob.hardware import GPUS, NETWORKS
from megatron.fill.wings.mainjob.hardware import Network as NodeNetwork
from megatron.fill.wings.mainjob.kernels import Kernels, Overlaps
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.mainjob.roofline import LAUNCH_S, STEP_LAUNCHES, Part
from megatron.fill.wings.sim.mainjob import MainJob
from tests.support.configuring import event_times, random_iteration, random_links

A100 = GPUS["a100-80gb"]
SMALL = ModelSpec(layers=12, hidden=512, heads=8, sequence=256, vocabulary=1024)
BY_HAND = "--pipeline-model-parallel-layout"
SHARED = "--moe-shared-expert-intermediate-size"
FLAGS = (
    "--num-layers 12 --hidden-size 512 --num-attention-heads 8 --seq-length 256 --vocab-size 1024 "
    "--global-batch-size 16 --bf16"
)


def cluster(nodes: int = 1, gpus: int = 4, **changes) -> Cluster:
    return Cluster.model_validate(
        {"nodes": nodes, "gpus_per_node": gpus, "gpu": "a100-80gb", "network": "dgx-a100"} | changes
    )


def links(its: Cluster) -> Links:
    return its.links(Path())


# Links


def test_ranks_that_leave_a_node_at_once_share_its_way_out():
    two = Links.uniform(NodeNetwork("n", 100.0, 40.0, 2, 0.0), 2)
    assert two.route([(0, 1)]).time_s(200) == 2
    assert two.route([(0, 2)]).time_s(200) == 5
    assert two.route([(0, 2), (1, 3)]).time_s(200) == 10
    assert replace(two, nics=2).route([(0, 2), (1, 3)]).time_s(200) == 5
    assert all_reduce_s(two.ring([[0, 1]]), 2, 100) == 1
    assert all_reduce_s(two.ring([[0], [1]]), 1, 100) == 0


@pytest.fixture
def computed_as_there(monkeypatch):
    """Passes as short as the simulator's, so that what ranks exchange weighs even where layers are small."""
    monkeypatch.setattr(latency, "stage_cost", stage_cost)
    monkeypatch.setattr(latency, "STEP_LAUNCHES", 0)
    for name, value in (("_BEGIN_S", 0.0), ("_GATHERED", 0.7)):
        monkeypatch.setattr(overlap, name, value)


@pytest.mark.parametrize(
    "changes", [{}, {"tp": 2, "sequence_parallel": True}, {"dp": 4}, {"distributed_optimizer": True, "dp": 2}]
)
def test_on_a_network_of_a_data_sheet_all_but_computation_is_as_in_the_simulator(changes, computed_as_there):
    its = Parallel(**{"pp": 4, "microbatch": 1, "global_batch": 16} | changes)
    network = replace(NETWORKS["dgx-a100"], gpus_per_node=its.gpus)
    there = Links.uniform(network, 1)
    found = timeline(iteration(SMALL, A100, 0.45, its, lay_out(there, its, range(its.gpus))))
    main = MainJob("main", SMALL, A100, network, its)
    expected = simulate(main.schedule, main.costs(), rendezvous=True)
    assert found.period_ns == pytest.approx(expected.period_ns, rel=1e-5)


@pytest.mark.parametrize("seed", range(30))
def test_where_the_network_repeats_itself_looking_once_is_enough(seed):
    source = random.Random(seed)
    node = source.choice((2, 4, 8))
    there = Links.uniform(NodeNetwork("n", 100.0, 40.0, node, 0.1), 24 // node)
    shapes = [
        its
        for its in itertools.product((1, 2, 4), (1, 2, 3), (1, 2, 3, 6, 12), (1, 2))
        if 24 % (its[0] * its[1] * its[2]) == 0 and 24 // (its[0] * its[2]) % its[3] == 0
    ]
    for tp, cp, pp, ep in shapes:
        its = Parallel(tp=tp, cp=cp, pp=pp, ep=ep, dp=24 // (tp * cp * pp), global_batch=24)
        assert lay_out(there, its) == lay_out(there, its, range(24))


def test_experts_of_fewer_tensor_ranks_number_the_ranks_anew():
    """By hand: two nodes of four ranks; eight experts are exchanged between nodes, four inside of them."""
    there = Links.uniform(NodeNetwork("n", 100.0, 40.0, 4, 0.0), 2)
    its = Parallel(tp=4, pp=1, dp=2, ep=4, expert_tp=1, global_batch=4, sequence_parallel=True)
    inside, outside = Route([(100.0, 0.0)]), Route([(10.0, 0.0)])  # four share the way out
    (found,) = lay_out(there, its).stages
    assert (found.experts, found.expert_replicas) == ((inside,) * 3, outside)
    (found,) = lay_out(there, replace(its, ep=2, expert_tp=2)).stages
    assert (found.experts, found.expert_replicas) == ((inside,), outside)
    (found,) = lay_out(there, replace(its, ep=8)).stages
    assert (found.experts[3], found.expert_replicas) == (Route([(10.0, 0.0)]), Route())
    (found,) = lay_out(there, replace(its, ep=1)).stages
    assert (found.experts, found.expert_replicas) == ((), Route([(40.0, 0.0), (100.0, 0.0)]))


def test_a_last_stage_with_a_large_output_gets_fewer_layers():
    assert _balanced(80, 8, 1, 2.4) == [(10, 10, 10, 10, 10, 11, 11, 8)]
    assert _balanced(80, 8, 1, 2.1) == [(10, 10, 10, 10, 10, 10, 11, 9)]  # as NVIDIA's recipe divides Llama 3's
    assert _balanced(14, 2, 3, 2.5) == [(2, 3, 3, 3, 3, 0), (2, 2, 3, 2, 3, 2)]
    recipe, even = _balanced(61, 4, 4, 3.5)
    assert recipe == (4,) * 15 + (1,)  # as NVIDIA's recipe divides DeepSeek-V3's
    assert even == (4, 4, 4, 4, 4, 4, 4, 3, 4, 4, 4, 3, 4, 4, 4, 3)
    assert _balanced(48, 8, 3, 0.5) == []  # another rank would have a layer more
    before_last, first = _balanced(61, 16, 1, 5.9, True)
    assert (before_last, first) == ((*(4,) * 14, 5, 0), (5, *(4,) * 14, 0))
    assert _balanced(34, 4, 3, 4.2, True)[-1] == (4, 3, 3, 2, 3, 3, 3, 2, 3, 3, 3, 2)  # in its first chunk
    plain, small = (_last_layers(replace(SMALL, kernels=Kernels(fp8=fp8))) for fp8 in (False, True))
    assert small == 2 * plain == 2 * SMALL.output_flops(1) / SMALL.layer_flops(1)
    assert _last_layers(replace(SMALL, kernels=Kernels(fp8=True, fp8_output=True))) == plain
    later = _last_layers(replace(SMALL, predicted=1))
    assert later == pytest.approx(1 + 2 * plain)


def test_more_expert_parallel_ranks_than_replicas_are_searched_and_timed():
    """Eight ranks with an expert each take the time of their exchange, and reduce no experts' gradients."""
    flags = (
        "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 256 --vocab-size 1000 --bf16 --swiglu "
        "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --global-batch-size 8 "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 1 --expert-tensor-parallel-size 1"
    )
    plain = cluster(nodes=2)
    found = search(Evaluator(read_flags([*flags.split(), "--expert-model-parallel-size", "8"]), plain, links(plain)), 1)
    assert {(one.parallel.ep, one.parallel.expert_replicas) for one in found.proposals} == {(8, 1)}
    assert {its.ep for its in layouts(read_flags(flags.split()), 8, 4, Counter())} == {1, 2, 4, 8}


HIDDEN = (
    "--disable-bias-linear --num-experts 8 --moe-router-topk 2 --moe-token-dispatcher-type alltoall --moe-grouped-gemm "
    "--overlap-moe-expert-parallel-comm"
)


def test_layouts_in_which_megatron_does_not_hide_what_experts_exchange_are_left_out():
    """As ``TransformerConfig`` has it; and what is proposed computes no whole layers again."""
    excluded: Counter[str] = Counter()
    training, its = read_flags(f"{FLAGS} {HIDDEN}".split()), cluster(2, 4)
    found = list(layouts(training, 8, 4, excluded))
    assert {(one.ep > 1, one.pp == 1 or one.chunks > 1) for one in found} == {(True, True)}
    assert sum("--overlap-moe-expert-parallel-comm" in reason for reason in excluded) == 2
    assert Evaluator(training, its, links(its)).kinds == (Recompute.NONE, Recompute.SELECTIVE)
    inner = read_flags(f"{FLAGS} {HIDDEN} --recompute-modules moe".split())
    assert Evaluator(inner, its, links(its)).kinds == (Recompute.NONE,)
    assert Evaluator(read_flags(FLAGS.split()), its, links(its)).kinds == tuple(Recompute)


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ("--recompute-granularity full --recompute-method uniform", "neither whole layers nor moe are recomputed"),
        ("--recompute-granularity selective --recompute-modules moe", "neither whole layers nor moe are recomputed"),
        ("--expert-model-parallel-size 1", "--expert-model-parallel-size is above 1"),
        ("--mtp-num-layers 2 --position-embedding-type rope", "--mtp-num-layers is at most 1"),
        ("--num-virtual-stages-per-pipeline-rank 1 --pipeline-model-parallel-size 2", "have virtual stages"),
    ],
)
def test_flags_with_which_experts_exchange_is_never_hidden_are_named(more, expected):
    training, its = read_flags(f"{FLAGS} {HIDDEN} {more}".split()), cluster(2, 4)
    with pytest.raises(ConfigError, match=expected):
        search(Evaluator(training, its, links(its)))


def test_8_bit_weights_are_held_once_where_products_read_them_in_either_order():
    """By hand: on B200 a byte less for each weight of the layers, if it has one scale."""
    flags = f"{FLAGS} --fp8-format hybrid --fp8-param-gather --pipeline-model-parallel-size 1 --fp8-recipe"
    one = Parallel(pp=1, dp=4, global_batch=4, distributed_optimizer=True)

    def least(gpu, recipe):
        its = cluster(nodes=1, gpu=gpu)
        return Evaluator(read_flags([*flags.split(), recipe]), its, links(its)).least_bytes(one)

    model = read_flags(FLAGS.split()).model
    layers = model.layers * (model.matrix_parameters + model.norm_parameters) + model.final_norm_parameters
    assert least("h100-80gb", "tensorwise") - least("b200", "tensorwise") == pytest.approx(layers, rel=1e-3)
    assert least("h100-80gb", "mxfp8") == least("b200", "mxfp8") == least("h100-80gb", "delayed")


def test_8_bit_weights_come_with_the_distributed_optimizer():
    flags = f"{FLAGS} --fp8-format hybrid --fp8-param-gather --pipeline-model-parallel-size 4"
    assert all(one.distributed_optimizer for one in layouts(read_flags(flags.split()), 4, 4, Counter()))


def test_flags_are_left_out_where_a_layout_exchanges_nothing_that_they_overlap():
    at_step = "--overlap-param-gather-with-optimizer-step"
    flags = ["--bf16", "--tp-comm-overlap", "--overlap-grad-reduce", "--overlap-param-gather", at_step]
    one = Parallel(pp=2, global_batch=2)
    assert startable(flags, one) == ["--bf16", "--overlap-grad-reduce"]
    assert startable(flags, replace(one, tp=2, sequence_parallel=True)) == flags[:3]
    assert startable(flags, replace(one, dp=2, distributed_optimizer=True)) == [flags[0], *flags[2:4]]
    every = replace(one, tp=2, dp=2, chunks=2, sequence_parallel=True, distributed_optimizer=True)
    assert startable(flags, every) == flags


def test_the_queues_of_a_gpu_are_one_but_where_only_experts_exchange_is_hidden():
    """Megatron wants 1 for tensor and context parallelism up to Hopper, and takes 32 beside them too."""
    hidden, one = ["--overlap-moe-expert-parallel-comm"], Parallel(pp=1, dp=2, ep=2, global_batch=2)
    wide = replace(one, tp=2, sequence_parallel=True)
    assert [connections(flags, one)[-1][-4:] for flags in ([], hidden)] == [":-1}", "-32}"]
    for its in (wide, replace(one, cp=2)):
        note, line = connections(hidden, its)
        assert note.startswith("# ")
        assert line.endswith(":-1}")
        assert connections([], its) == [line]


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        ("--tp-comm-overlap", "tensor"),
        ("--overlap-grad-reduce", "gradients"),
        ("--overlap-param-gather", "weights"),
        ("--overlap-moe-expert-parallel-comm", "experts"),
    ],
)
def test_flags_say_which_exchanges_overlap(flag, name):
    assert detailed(SMALL, [flag]).kernels.overlaps == Overlaps(**{name: True})
    local = detailed(SMALL, [flag, "--transformer-impl", "local"]).kernels.overlaps
    assert local == Overlaps(**{name: name != "tensor"})  # which Transformer Engine alone hides
    assert [detailed(SMALL, flags).kernels.grouped for flags in ([flag], ["--moe-grouped-gemm"])] == [False, True]


@pytest.mark.parametrize(
    ("flags", "dispatcher"),
    [
        ("", ""),
        ("--moe-token-dispatcher-type alltoall --moe-flex-dispatcher-backend hybridep", ""),
        ("--moe-token-dispatcher-type flex", "deepep"),
        ("--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend=hybridep", "hybridep"),
    ],
)
def test_flags_say_what_sends_tokens(flags, dispatcher):
    assert detailed(SMALL, flags.split()).kernels.dispatcher == dispatcher


@pytest.mark.parametrize(
    ("flags", "graphs"),
    [
        ("--cuda-graph-impl none --cuda-graph-modules attn", ()),
        ("--cuda-graph-impl full_iteration", ("iteration",)),
        ("--cuda-graph-impl local --cuda-graph-scope full_iteration", ("iteration",)),
        ("--cuda-graph-impl local", ("layer",)),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules full", ("layer",)),
        ("--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router --bf16", ("attn", "moe_router")),
    ],
)
def test_flags_say_what_graphs_launch(flags, graphs):
    assert detailed(SMALL, flags.split()).kernels.graphs == graphs


def test_an_all_gather_of_tokens_is_not_weighed():
    flags = f"{FLAGS} --disable-bias-linear --num-experts 8 --moe-token-dispatcher-type"
    assert [read_flags([*flags.split(), kind]).ignored for kind in ("alltoall", "flex")] == [(), ()]
    assert read_flags([*flags.split(), "allgather"]).ignored == ("--moe-token-dispatcher-type",)


def test_deepep_wants_several_ranks_for_the_experts():
    training = read_flags(f"{FLAGS} --disable-bias-linear --num-experts 8 --moe-token-dispatcher-type flex".split())
    found = list(layouts(training, 8, 4, Counter()))
    assert {one.ep * one.tp > 1 for one in found} == {True}
    hybrid = read_flags(
        [*f"{FLAGS} --disable-bias-linear --num-experts 8 --moe-token-dispatcher-type flex".split(), *HYBRID]
    )
    assert {one.ep * one.tp > 1 for one in layouts(hybrid, 8, 4, Counter())} == {True, False}


HYBRID = ("--moe-flex-dispatcher-backend", "hybridep")


# Latency


@pytest.mark.parametrize(("ranks", "each"), [(8, 50e9), (4, 100e9), (1, 100e9)])
def test_ranks_that_leave_a_node_at_once_share_all_of_its_way_out(ranks, each):
    network = replace(NETWORKS["dgx-h100"], intra_node_bytes_s=100e9, inter_node_bytes_s=400e9)
    route = Links.uniform(network, 2).route((rank, rank + 8) for rank in range(ranks))
    assert [speed for speed, _ in route] == pytest.approx([each])


def test_tokens_are_sent_once_to_each_node_and_from_there_to_each_rank():
    """By hand: 2 of 8 experts on 4 ranks of 2 nodes; 11 of 14 pairs are on both, or either, of the halves."""
    model = replace(SMALL, experts=8, experts_per_token=2)
    once = replace(model, kernels=Kernels(dispatcher="hybridep"))
    assert (once.chosen_share(1 / 2), once.chosen_share(1 / 4)) == pytest.approx((11 / 14, 13 / 28))
    its = Parallel(pp=1, dp=4, ep=4, global_batch=4)
    network = replace(NETWORKS["dgx-a100"], gpus_per_node=2, latency_s=0.0)
    size = boundary_bytes(model, its)
    slow = lay_out(Links.uniform(replace(network, inter_node_bytes_s=2e9), 2), its).stages[0]  # shared by two
    assert overlap.dispatch_s(once, its, slow) == pytest.approx(size * 11 / 14 / 1e9)
    assert overlap.dispatch_s(model, its, slow) == pytest.approx(size / 1e9)
    inner = lay_out(Links.uniform(replace(network, intra_node_bytes_s=1e9, gpus_per_node=4), 1), its).stages[0]
    assert overlap.dispatch_s(once, its, inner) == pytest.approx(3 * size * 13 / 28 / 1e9)
    one = lay_out(Links.uniform(network, 2), replace(its, ep=1))
    assert overlap.dispatch_s(once, replace(its, ep=1), one.stages[0]) == 0


def test_what_experts_exchange_is_hidden_only_where_megatron_does_not_refuse_it():
    wide = replace(SMALL, hidden=4096, heads=32, sequence=2048, experts=8, swiglu=True)
    model = replace(wide, kernels=Kernels(overlaps=Overlaps(experts=True)))
    its = Parallel(pp=1, dp=4, ep=4, global_batch=16)
    layout = lay_out(Links.uniform(NETWORKS["dgx-a100"], 1), its, range(4))
    full = replace(its, recompute=Recompute.FULL)
    inner = replace(its, recompute=Recompute.SELECTIVE, recompute_modules=("moe",))
    some = replace(inner, recompute_modules=("core_attn",))
    for one, hides in ((its, True), (some, True), (full, False), (inner, False)):
        ns = [iteration(each, A100, 0.45, one, layout).costs.stages[0].forward_ns for each in (model, wide)]
        assert (ns[0] < ns[1]) is hides
        assert hides or ns[0] == ns[1]


def test_a_network_of_ones_own_may_be_taken_as_it_is():
    given, own = (links(cluster(**changes)).bytes_per_s[0][1] for changes in ({}, {"intra_node_share": 1}))
    assert given == pytest.approx(0.7 * own) == pytest.approx(0.7 * NETWORKS["dgx-a100"].intra_node_bytes_s)
    assert links(cluster(2, 4)).nodes == (0,) * 4 + (1,) * 4  # whatever the network's own nodes have


def test_what_flags_let_overlap_is_hidden_but_for_a_part():
    """By hand: all that tensor-parallel ranks exchange but an eighth, forward, and all but a bucket of gradients."""
    large = replace(SMALL, hidden=8192, heads=64, sequence=2048)
    model = replace(large, kernels=Kernels(overlaps=Overlaps(tensor=True, gradients=True, weights=True)))
    its = Parallel(tp=2, dp=2, pp=1, microbatch=1, global_batch=8, sequence_parallel=True, distributed_optimizer=True)
    there = Links.uniform(NETWORKS["dgx-a100"], 1)
    layout = lay_out(there, its, range(4))
    hidden, plain = (iteration(each, A100, 0.45, its, layout) for each in (model, large))
    all_reduced_ns = 1e9 * overlap.tensor_exchange_s(large, its, layout.stages[0].tensor) * large.layers
    shorter = plain.costs.stages[0].forward_ns - hidden.costs.stages[0].forward_ns
    assert shorter == pytest.approx((1 - overlap.HELD) * all_reduced_ns * 7 / 8)  # what is hidden holds processors
    shorter = plain.costs.stages[0].backward_ns - hidden.costs.stages[0].backward_ns
    assert shorter == pytest.approx((1 - overlap.HELD) * all_reduced_ns)
    assert hidden.reduce_ns[0] < plain.reduce_ns[0]
    assert hidden.costs.optimizer_ns[0] < plain.costs.optimizer_ns[0]
    its = replace(its, tp=1, pp=2, chunks=2, schedule="interleaved", sequence_parallel=False)
    layout = lay_out(there, its, range(4))
    hidden, plain = (
        iteration(replace(each, tied_embeddings=False), A100, 0.45, its, layout) for each in (model, large)
    )
    half = (1 + overlap.HELD) / 2  # one of two virtual stages is a bucket that nothing hides
    assert hidden.reduce_ns == pytest.approx([half * ns for ns in plain.reduce_ns])


def test_context_parallel_ranks_pass_keys_round_while_they_attend():
    its = Parallel(tp=1, cp=2, pp=1, microbatch=1, global_batch=1)
    routes = lay_out(Links.uniform(NETWORKS["dgx-a100"], 1), its, range(2)).stages[0]
    parts = {"core_attn": Part(1.0, 1.0)}
    keys_s = overlap.layer_exchange_s(SMALL, its, routes, None)[0]
    held = overlap.HELD
    assert overlap.layer_exchange_s(SMALL, its, routes, parts) == pytest.approx((held * keys_s, held * 2 * keys_s))
    parts = {"core_attn": Part(keys_s, keys_s)}
    expected = (1 + held) * keys_s / 2, (3 + held) * keys_s / 2
    assert overlap.layer_exchange_s(SMALL, its, routes, parts) == pytest.approx(expected)


def test_transfers_beside_passes_of_virtual_stages_hold_processors():
    its = Parallel(pp=2, chunks=2, schedule="interleaved", global_batch=2)
    found = iteration(SMALL, A100, 0.45, its, lay_out(Links.uniform(NETWORKS["dgx-a100"], 1), its, range(2)))
    plain = latency.stage_times(SMALL, A100, 0.45, its, [(0.0, 0.0)] * 2, None)
    ((there, back), _), *others = found.transfers_ns
    assert (there == back, others) == (True, [])
    held = [round(overlap.HELD * count * there) for count in (1, 2, 2, 1)]
    for name in ("forward_ns", "backward_ns"):
        passes = ([getattr(one, name) for one in stages] for stages in (found.costs.stages, plain))
        assert [one - alone for one, alone in zip(*passes, strict=True)] == held


def test_collectives_of_tensor_parallelism_copy_and_begin():
    """By hand: two for each layer; the shares are those of a link of which others reach 0.7."""
    size, route = boundary_bytes(SMALL, Parallel(pp=1, global_batch=1)), Route([(7e8, 0.0)])
    for tp, moved in ((2, 1.56), (8, 2.31)):
        its = Parallel(tp=tp, pp=1, global_batch=1)
        assert overlap.tensor_exchange_s(SMALL, its, route) == pytest.approx(2 * (22e-6 + moved * size / 1e9))
        its = replace(its, sequence_parallel=True)
        expected = 2 * (2 * 22e-6 + 2 * (tp - 1) / tp * size / 0.673e9)
        assert overlap.tensor_exchange_s(SMALL, its, route) == pytest.approx(expected)
    assert overlap.tensor_exchange_s(SMALL, replace(its, tp=1), Route()) == 0.0


def test_an_all_to_all_reaches_less_of_the_links_of_a_node():
    experts = replace(SMALL, experts=8, experts_per_token=2)
    its = Parallel(tp=1, pp=1, dp=2, ep=2, global_batch=2)
    inside, between = (
        overlap.dispatch_s(
            experts, its, lay_out(Links.uniform(NodeNetwork("n", 1e9, 1e9, gpus, 0.0), 2), its).stages[0]
        )
        for gpus in (2, 1)
    )
    assert inside == pytest.approx(between * 0.7 / 0.597)


def test_ranks_exchange_half_as_much_around_experts_that_they_do_not_divide():
    route = Route([(1e9, 0.0)])
    experts = replace(SMALL, experts=8, experts_per_token=2)
    shared = replace(experts, shared_width=SMALL.hidden)
    its = Parallel(tp=2, pp=1, ep=2, expert_tp=1, global_batch=1, sequence_parallel=True)
    half, *whole = (
        overlap.tensor_exchange_s(model, one, route)
        for model, one in ((experts, its), (shared, its), (experts, replace(its, ep=1, expert_tp=2)), (SMALL, its))
    )
    assert whole == pytest.approx([2 * half] * 3)


def test_what_is_sent_to_experts_is_beside_the_passes_of_two_microbatches(monkeypatch):
    """By hand: one way takes 3 s; the attention of a forward pass hides 1 s of it, that of a backward pass all."""
    monkeypatch.setattr(overlap, "dispatch_s", lambda *_: 3.0)
    experts = replace(SMALL, experts=8, experts_per_token=2, kernels=Kernels(overlaps=Overlaps(experts=True)))
    its = Parallel(pp=1, dp=2, ep=2, global_batch=2000)
    routes = lay_out(Links.uniform(NETWORKS["dgx-a100"], 1), its, range(2)).stages[0]
    parts = {"core_attn": Part(1.0, 3.0), "moe": Part(2.0, 3.0), "moe_act": Part(9.0, 9.0)}
    left = 2.0 + 1.0 + 0.003  # and of the last, that of one microbatch of 1,000
    both = left + overlap.HELD * (12.0 - left)
    assert overlap.layer_exchange_s(experts, its, routes, parts) == pytest.approx((both / 2,) * 2)


def test_what_8_bit_products_gather_is_half_as_large_with_sequence_parallelism(monkeypatch):
    monkeypatch.setattr(overlap, "_BEGIN_S", 0.0)
    small = replace(SMALL, kernels=Kernels(transformer_engine=True, fp8=True))
    its = Parallel(tp=2, pp=1, global_batch=1)
    routes = replace(lay_out(Links.uniform(NETWORKS["dgx-a100"], 1), its, range(2)).stages[0], tensor=Route([(1e9, 0)]))
    parts = {"core_attn": Part()}
    for sequence_parallel, share in ((True, 0.75), (False, 1.0)):
        one = replace(its, sequence_parallel=sequence_parallel)
        plain, gathered = (overlap.layer_exchange_s(model, one, routes, parts)[0] for model in (SMALL, small))
        assert gathered == pytest.approx(share * plain)


@pytest.mark.parametrize("seed", range(150))
def test_the_timeline_is_that_of_discrete_events_and_no_bound_exceeds_it(seed):
    its = random_iteration(random.Random(seed))
    found = timeline(its)
    assert found.period_ns == event_times(its)
    assert bound_ns(its) <= found.period_ns


def test_the_bound_is_exact_where_stages_are_alike_and_transfers_are_free():
    its = Parallel(pp=4, microbatch=1, global_batch=32)
    there = Links.uniform(NodeNetwork("n", 1e30, 1e30, 4, 0.0), 1)
    model = replace(SMALL, vocabulary=0)
    times = iteration(model, A100, 0.45, its, lay_out(there, its, range(4)))
    assert bound_ns(times) == timeline(times).period_ns


# Memory


@pytest.mark.parametrize(
    "changes",
    [{}, {"chunks": 3}, {"recompute": "full"}, {"pp": 1}, {"pp": 2, "chunks": 2, "cp": 2}, {"microbatch": 4}],
)
def test_the_bound_on_memory_holds_and_is_exact_without_chunks(changes):
    its = Parallel(**{"pp": 4, "microbatch": 1, "global_batch": 16} | changes)
    peak = max(one.total_bytes for one in memory(SMALL, its))
    least = least_bytes(SMALL, its)
    assert least <= peak
    assert its.chunks > 1 or least == peak


def test_context_and_expert_ranks_divide_what_they_should():
    plain = Parallel(pp=2, dp=2, global_batch=16)
    many = replace(SMALL, experts=4, experts_per_token=2)
    whole, part = memory(many, plain)[0], memory(many, replace(plain, ep=2))[0]
    assert whole.weights_bytes - part.weights_bytes == 6 * many.expert_parameters // 2 * 2
    longer = replace(plain, dp=1, cp=2)
    half = memory(SMALL, plain)[0].activations_bytes / 2  # but for the gradient of the embedding's weights
    assert half < memory(SMALL, longer)[0].activations_bytes < 1.05 * half
    assert memory(SMALL, longer)[0].weights_bytes == memory(SMALL, plain)[0].weights_bytes


# The search


def brute_force(training, its: Cluster, top: int) -> list[int]:
    """The shortest iterations of layouts, of everything that fits, each timed."""
    evaluator = Evaluator(training, its, links(its))
    times = defaultdict(list)
    for one in layouts(training, its.gpus, its.gpus_per_node, Counter()):
        for kind in Recompute:
            proposal = evaluator.proposal(evaluator.iteration(replace(one, recompute=kind)))
            if proposal is not None:
                times[layout_of(one)].append(proposal.timeline.period_ns)
                break
    return sorted(map(min, times.values()))[:top]


@pytest.mark.parametrize(
    ("nodes", "gpus", "memory"), [(1, 4, "80GiB"), (2, 4, "2700MB"), (2, 2, "2850MB"), (1, 8, "3GB")]
)
def test_the_search_finds_what_timing_everything_finds(nodes, gpus, memory):
    training, its = read_flags(FLAGS.split()), cluster(nodes, gpus, memory=memory)
    found = search(Evaluator(training, its, links(its)), 5)
    assert [one.timeline.period_ns for one in found.proposals] == brute_force(training, its, 5)
    assert all(one.peak_bytes <= its.room_bytes for one in found.proposals)
    assert found.timed < found.configurations


def test_what_the_flags_fix_stays():
    training = read_flags([*FLAGS.split(), "--pipeline-model-parallel-size", "2", "--micro-batch-size=2"])
    its = cluster()
    for one in search(Evaluator(training, its, links(its))).proposals:
        assert (one.parallel.pp, one.parallel.microbatch) == (2, 2)


_HIDDEN_REDUCE = "--num-experts 8 --disable-bias-linear --overlap-grad-reduce"


@pytest.mark.parametrize("more", ["", f"{_HIDDEN_REDUCE} --overlap-param-gather"])
def test_sequence_parallelism_and_the_distributed_optimizer_cost_nothing(more):
    """What the space says of the choices that it does not search."""
    training, its = read_flags([*FLAGS.split(), *more.split()]), cluster(2, 4)
    evaluator = Evaluator(training, its, links(its))
    for one in layouts(training, 8, 4, Counter()):
        own = timeline(evaluator.iteration(one)).period_ns
        for name in ("sequence_parallel", "distributed_optimizer"):
            if getattr(one, name):
                off: dict[str, Any] = {name: False}
                other = replace(one, **off)
                assert own <= timeline(evaluator.iteration(other)).period_ns + 8  # ns, of rounding
                assert evaluator.least_bytes(one) <= evaluator.least_bytes(other)


def test_the_distributed_optimizer_may_cost_time_where_gradients_are_hidden_and_weights_are_not():
    training, its = read_flags([*FLAGS.replace("--bf16", "").split(), *_HIDDEN_REDUCE.split()]), cluster(2, 4)
    evaluator = Evaluator(training, its, links(its))
    times = [
        [timeline(evaluator.iteration(kind)).period_ns for kind in (one, replace(one, distributed_optimizer=False))]
        for one in layouts(training, 8, 4, Counter())
    ]
    assert 1.0 < max(with_it / without for with_it, without in times) < 1.08  # within what ties


def test_layouts_can_be_read_back_from_their_flags():
    training = read_flags([*FLAGS.split(), "--disable-bias-linear", "--num-experts", "4"])
    for one in itertools.islice(layouts(training, 8, 8, Counter()), 200):
        fixed = read_flags([*training.others, *(its for its in layout_flags(one) if "decoder" not in its)]).fixed
        assert all(getattr(one, name) == value for name, value in fixed.items())


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        *[("[1]*12", 0), ("([1]*12)", 0), ("[0,0,1]+[1]*9", 2), ("([0]*3+[1]*9)", 3), ("[0]+[1]*11", 1)],
        *[("([0]*3)+([1]*9)", 3), ("[0]*2+([1]*2+[1]*3)*2", 2), ("[0]+11*[1]", 1)],
    ],
)
def test_layers_without_experts_are_read_from_any_list(pattern, dense):
    read = read_flags([*FLAGS.split(), "--disable-bias-linear", "--num-experts", "8", "--moe-layer-freq", pattern])
    assert read.model.dense_layers == dense


def test_no_experts_and_no_predicted_tokens_are_as_if_their_flags_were_not_given():
    none = f"{FLAGS} --num-experts 0 --mtp-num-layers 0".split()
    assert read_flags(none) == read_flags(FLAGS.split())
    check_whole(read_flags(none), none)


def test_when_nothing_fits_it_says_what_excludes_all():
    with pytest.raises(
        ConfigError, match=r"the smallest needs [\d.]+ GiB of a GPU, at most [\d.]+ GiB; expected at most 0.0\d GiB"
    ):
        search(Evaluator(read_flags(FLAGS.split()), cluster(memory="2100MiB"), links(cluster())))
    odd = read_flags([*FLAGS.split(), "--tensor-model-parallel-size", "3"])
    with pytest.raises(ConfigError, match="--tensor-model-parallel-size stays inside a node and divides the GPUs"):
        search(Evaluator(odd, cluster(), links(cluster())))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (FLAGS.replace("--hidden-size 512 ", ""), "--hidden-size is missing"),
        (FLAGS + " --micro-batch-size x", "--micro-batch-size is 'x': expected a whole number above 0"),
        (FLAGS + " --multi-latent-attention --v-head-dim x", "--v-head-dim is 'x': expected a whole number above 0"),
        (
            FLAGS + " --disable-bias-linear --num-experts 2 --moe-layer-freq [1]*1+[0]*1",
            "expected 1, or layers without experts before all",
        ),
        (
            FLAGS + " --disable-bias-linear --num-experts 2 --moe-layer-freq ([0]+[1])*11",
            "expected 1, or layers without experts before all",
        ),
        (
            FLAGS + " --disable-bias-linear --num-experts 2 --moe-layer-freq ([0]+[1]*11",
            "expected 1, or layers without experts before all",
        ),
        (
            FLAGS + " --disable-bias-linear --num-experts 2 --moe-layer-freq [1]*9**9**9",
            "expected 1, or layers without experts before all",
        ),
        (
            FLAGS + " --group-query-attention --num-query-groups 3",
            "--num-query-groups is 3; expected a divisor of --num-attention-heads, 8",
        ),
        ("12 " + FLAGS, "'12' belongs to no flag"),
        (FLAGS + " --moe-router-topk 4", "--moe-router-topk is 4; expected 1 without experts"),
        (FLAGS + " --recompute-granularity some", "expected selective or full"),
        (FLAGS + " --misspelt-flag 3", "--misspelt-flag is no flag of Megatron"),
        (FLAGS + " --num-layer 3", "--num-layer is no flag of Megatron; expected --num-layers"),
        (f"{FLAGS} {BY_HAND} Emt|tL", "m in one of them, after all t"),
        (f"{FLAGS} {BY_HAND} Et*6|t*6mL --pipeline-model-parallel-size 2", "has 1 m: expected --mtp-num-layers, 0"),
        (f"{FLAGS} {BY_HAND} t|EtL", "expected E first, L last"),
        (f"{FLAGS} {BY_HAND} E((t*999)*999)*999L", "expected E first, L last"),
        (f"{FLAGS} {BY_HAND} E((t)*2|)*3ttL", "expected E first, L last"),
        (f"{FLAGS} {BY_HAND} Et|tL", "has 2 stages: expected --pipeline-model-parallel-size with it"),
        (f"{FLAGS} {BY_HAND} Et|tL --pipeline-model-parallel-size 2", "has 2 layers: expected --num-layers, "),
        (FLAGS + " --num-experts 2 --moe-shared-expert-intermediate-size 64", "without --disable-bias-linear"),
        (FLAGS + " --disable-bias-linear --moe-shared-expert-intermediate-size 64", "64 without experts; expected 0"),
        (FLAGS + " --recompute-method other", "'other': expected uniform or block"),
        (FLAGS + " --recompute-method block", "without --recompute-num-layers; expected both"),
        (FLAGS + " --recompute-method block --recompute-num-layers 1", "without --recompute-granularity full"),
        (FLAGS + " --optimizer sgd", "'sgd': expected adam"),
        (FLAGS + " --recompute-activations --recompute-method uniform", "with selective recomputation: expected"),
        (FLAGS + " --overlap-param-gather", "--overlap-param-gather without --overlap-grad-reduce; expected both"),
        (FLAGS + " --num-query-groups 2", "--num-query-groups without --group-query-attention; expected both"),
        (FLAGS + " --attention-backend unfusd", "'unfusd': expected one of flash, fused, unfused, local, auto"),
        (FLAGS + " --normalization foo", "--normalization is 'foo': expected one of LayerNorm, RMSNorm"),
        (FLAGS + " --fp8-format", "--fp8-format has no value: expected one of e4m3, hybrid"),
        (FLAGS + " --fp8-format e4m3 hybrid", "--fp8-format is 'e4m3 hybrid': expected one of e4m3, hybrid"),
        (FLAGS + " --moe-router-load-balancing-type foo none", "'foo none': expected one of .*, none, or several"),
        (FLAGS + " --hidden-dropout abc", "--hidden-dropout is 'abc': expected a number"),
        (FLAGS + " --hidden-dropout nan", "--hidden-dropout is 'nan': expected a number"),
        (FLAGS + " --seed 1.5", "--seed is '1.5': expected a whole number"),
        (FLAGS + " --bf16 true", "--bf16 is 'true': expected no value"),
        (FLAGS + " --swiglu=1", "--swiglu is '1': expected no value"),
        (FLAGS + " --sequence-parallel 1", "--sequence-parallel is '1': expected no value"),
        (FLAGS + " --vocab-size 50257 --padded-vocab-size 10", "is 10: expected at least --vocab-size, 50257"),
        (FLAGS + " --max-position-embeddings 8", "--max-position-embeddings is 8: expected at least --seq-length"),
        *(
            (f"{FLAGS} {flag}", f"{flag.split()[0]}: .* is not weighed")
            for flag in (
                "--hybrid-layer-pattern MM",
                "--fp4-format e2m1",
                "--optimizer-cpu-offload",
                "--fine-grained-activation-offloading",
                "--decoder-num-layers 4",
                "--step-batch-size-schedule 0:16",
                "--perform-rl-step",
            )
        ),
    ],
)
def test_wrong_flags_are_named(flags, expected):
    with pytest.raises(ConfigError, match=expected):
        read_flags(flags.split())


def test_widths_that_follow_from_others_are_taken_and_experts_have_their_own():
    plain = read_flags(FLAGS.split()).model
    assert read_flags([*FLAGS.split(), "--kv-channels", "64"]).model == plain
    experts = [
        *FLAGS.split(),
        "--disable-bias-linear",
        "--num-experts",
        "8",
        "--ffn-hidden-size",
        "512",
        "--moe-ffn-hidden-size",
        "96",
    ]
    assert read_flags(experts).model.ffn == 96
    wide = read_flags([*FLAGS.split(), "--kv-channels", "128"]).model
    assert (wide.query_width, wide.attention_parameters) == (2 * plain.hidden, 2 * plain.attention_parameters)
    assert read_flags([*FLAGS.split(), "--swiglu"]).model.ffn == 1344  # two thirds, a multiple of 64
    gated = read_flags([*FLAGS.split(), "--quick-geglu", "--disable-bias-linear"]).model
    assert (gated.ffn, gated.mlp_parameters) == (plain.ffn, plain.mlp_parameters * 3 // 2)
    assert read_flags([*FLAGS.split(), "--group-query-attention"]).model.groups == 1  # Megatron's default
    assert read_flags([*FLAGS.split(), "--num-query-groups", "2"], ran=True).model == plain


def test_flags_are_neutral_or_named_as_not_weighed():
    neutral = "--lr 1e-3 --load x --data-path a b --attention-backend flash --tensorboard-dir t --fill-jobs jobs.yaml"
    assert read_flags([*FLAGS.split(), *neutral.split()]).ignored == ()
    counted = "--no-gradient-accumulation-fusion --moe-grouped-gemm --attention-softmax-in-fp32"
    assert read_flags([*FLAGS.split(), *counted.split()]).ignored == ()
    given = "--expert-tensor-parallel-size 1 --use-nccl-ub"
    found = read_flags([*FLAGS.split(), *given.split(), "--use-nccl-ub"])
    assert found.ignored == ("--expert-tensor-parallel-size", "--use-nccl-ub")
    assert found.fixed["expert_tp"] == 1
    assert "--use-nccl-ub" in found.others


@pytest.mark.parametrize(
    ("flags", "state", "gradients"),
    [
        ("--bf16", None, 4),
        ("--bf16 --use-precision-aware-optimizer", 2 + 4 + 4, 4),  # bf16 weights have the other 16 bits
        ("--bf16 --use-precision-aware-optimizer --fp8-format e4m3 --fp8-recipe mxfp8", 4 + 4 + 4, 4),
        ("--bf16 --use-precision-aware-optimizer --main-grads-dtype bf16 --exp-avg-dtype fp8", 2 + 1 + 4, 2),
        ("--bf16 --use-precision-aware-optimizer --main-params-dtype fp16 --exp-avg-sq-dtype bf16", 2 + 4 + 2, 4),
        ("--fp16 --use-precision-aware-optimizer", 4 + 4 + 4, 2),
        ("--use-precision-aware-optimizer --exp-avg-dtype fp16", 2 + 4, 4),
    ],
)
def test_an_optimizer_may_keep_its_state_in_other_precisions(flags, state, gradients):
    training = read_flags([*FLAGS.replace(" --bf16", "").split(), "--use-distributed-optimizer", *flags.split()])
    assert (training.fixed.get("optimizer_bytes"), training.precision.gradient_bytes) == (state, gradients)
    if state is None:
        return
    its = next(its for its in layouts(training, 2, 2, Counter()) if its.dp == 2)
    usual = replace(its, optimizer_bytes=None)
    parameters = memory(training.model, usual)[0].gradients_bytes / gradients
    saved = min(12, usual.precision.optimizer_bytes) - state
    found = memory(training.model, usual)[0].optimizer_bytes - memory(training.model, its)[0].optimizer_bytes
    assert found == pytest.approx(saved * parameters / its.dp, rel=1e-6)


def test_an_output_layer_in_fp8_has_8_bit_copies_of_its_weights():
    flags = "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather --untie-embeddings-and-output-weights"
    model, other = (
        padded(read_flags([*FLAGS.split(), *flags.split(), *more]), 1) for more in ([], ["--fp8-output-proj"])
    )
    assert (model.kernels.fp8_output, other.kernels.fp8_output) == (False, True)
    its = Parallel(pp=2, global_batch=2)
    (first, last), (first_too, with_copies) = (memory(one, its) for one in (model, other))
    assert first_too == first
    assert with_copies.total_bytes - last.total_bytes == 2 * model.embedding_parameters


def test_gradients_in_half_precision_and_weights_in_fp8_take_less():
    its = Parallel(pp=1, global_batch=1)
    plain = read_flags([*FLAGS.split(), "--grad-reduce-in-bf16"])
    assert plain.precision is Precision.BF16_GRADIENTS
    halved = replace(its, precision=plain.precision)
    model = padded(plain, 1)
    assert memory(model, halved)[0].gradients_bytes == memory(model, its)[0].gradients_bytes / 2
    eight, weights = (
        padded(read_flags([*FLAGS.split(), "--fp8-format", "hybrid", *more]), 1)
        for more in ([], ["--fp8-param-gather"])
    )
    copies = memory(eight, its)[0].activations_bytes - memory(weights, its)[0].activations_bytes
    assert copies == pytest.approx(memory(model, its)[0].weights_bytes)
    assert memory(weights, its)[0].activations_bytes < memory(model, its)[0].activations_bytes


def test_shared_experts_are_computed_and_held_beside_those_that_are_chosen():
    flags = f"{FLAGS} --num-experts 4 --swiglu --disable-bias-linear --moe-ffn-hidden-size 512".split()
    without, model = (read_flags([*flags, *more]).model for more in ([], [SHARED, "1024"]))
    assert model.shared_width == 1024
    assert model.layer_parameters - without.layer_parameters == 3 * model.hidden * 1024
    assert model.matrix_flops(1) - without.matrix_flops(1) == 2 * model.sequence * 3 * model.hidden * 1024
    its = Parallel(pp=1, global_batch=1)
    assert memory(model, its)[0].total_bytes > memory(without, its)[0].total_bytes


def test_a_layout_in_letters_decides_the_layers_of_every_stage():
    count = read_flags(FLAGS.split()).model.layers
    text = f"E|t,t|(t|)*{count - 4}t*2|L"
    given = [*FLAGS.split(), BY_HAND, text, "--pipeline-model-parallel-size", "2"]
    counts = (0, 2, *[1] * (count - 4), 2, 0)
    training = read_flags(given)
    assert (training.fixed["stage_layers"], training.fixed["chunks"]) == (counts, len(counts) // 2)
    best = search(Evaluator(training, cluster(), links(cluster())), 1).proposals[0].parallel
    assert (best.stage_layers, best.layers(training.model)) == (counts, counts)
    there = read_flags([*training.others, *layout_flags(best)])
    assert there.fixed["stage_layers"] == counts
    with pytest.raises(ConfigError, match="--num-virtual-stages-per-pipeline-rank, which divides the layers"):
        read_flags([*given, "--num-virtual-stages-per-pipeline-rank", "2"])


def test_stages_by_hand_are_those_of_the_model_and_the_layout():
    model = ModelSpec(layers=4, hidden=64, heads=4, sequence=64, vocabulary=128)
    with pytest.raises(ValueError, match="expected 2 numbers, as pp"):
        Parallel(pp=2, global_batch=1, stage_layers=(3, 2)).layers(model)
    with pytest.raises(ValueError, match="expected no other field that divides the layers"):
        Parallel(pp=2, global_batch=1, stage_layers=(3, 1), first_layers=3).layers(model)


def test_a_tokenizer_of_berts_says_that_the_model_has_its_heads():
    def heads(more):
        its = padded(read_flags([*FLAGS.split(), *more.split()]), 1)
        return its.word_head, its.pair_head

    assert heads("") == (False, False)
    assert heads("--tokenizer-type BertWordPieceCase") == (True, True)
    assert heads("--tokenizer-type BertWordPieceLowerCase --bert-no-binary-head") == (True, False)


def test_a_run_may_have_flags_of_its_own_script():
    assert read_flags([*FLAGS.split(), "--its-own", "3"], ran=True).ignored == ("--its-own",)


@pytest.mark.parametrize(
    ("flags", "tp", "expected"),
    [
        ("--tokenizer-type GPT2BPETokenizer", 2, 50432),
        ("--tokenizer-type Llama2Tokenizer", 2, 32000),
        ("--padded-vocab-size 50304", 1, 50304),
        ("--vocab-size 1000 --tokenizer-type GPT2BPETokenizer --make-vocab-size-divisible-by 8", 1, 1000),
    ],
)
def test_the_vocabulary_is_what_the_flags_say(flags, tp, expected):
    model = re.sub("--vocab-size [0-9]+ ?", "", FLAGS)
    assert read_flags([*model.split(), *flags.split()]).padded(tp) == expected


def test_selective_recomputation_has_an_older_name():
    assert read_flags([*FLAGS.split(), "--recompute-activations"]).fixed["recompute"] is Recompute.SELECTIVE


# Rank orders


@pytest.mark.parametrize("move", MOVES, ids=lambda move: move.__name__)
def test_a_move_keeps_all_units(move):
    for one, other in itertools.permutations(range(7), 2):
        units = np.arange(7)
        move(units, one, other)
        assert sorted(units) == list(range(7))
        assert list(units) != list(range(7))


@pytest.mark.parametrize("seed", range(6))
def test_annealing_is_never_worse_than_the_identity_and_finds_the_best_of_small_clusters(seed, computed_as_there):
    there = random_links(random.Random(seed), 6, 1)
    shape: dict[str, Any] = {"pp": 3, "dp": 2} if seed % 2 else {"pp": 6}
    its = Parallel(**shape, microbatch=1, global_batch=12)
    energy = Energy(SMALL, A100, 0.45, its, there)
    found = anneal(energy, its, 1, seed, 1500)
    assert found.least_ns <= found.energy_ns <= found.identity_ns == energy(range(6))
    assert found.energy_ns == energy(found.orders[0])
    assert found.energy_ns == min(energy(order) for order in itertools.permutations(range(6)))
    assert [energy(order) for order in found.orders] == sorted(energy(order) for order in found.orders)
    assert 1 < len(found.orders) == len(set(found.orders))
    assert found == anneal(energy, its, 1, seed, 1500)
    assert anneal(energy, its, 1, seed, 10**9, within_s=0).orders[0] == tuple(range(6))


@pytest.mark.parametrize("seed", range(40))
def test_many_orders_at_once_are_weighed_as_one_by_one(seed):
    source = random.Random(seed)
    node, nodes = source.choice((1, 2, 4)), source.choice((2, 4, 8))
    there = random_links(source, nodes, node)
    rows = [[speed * source.uniform(0.8, 1.2) for speed in row] for row in there.bytes_per_s]
    latency = [[source.uniform(1e-6, 1e-4) for _ in row] for row in rows]
    there = replace(there, bytes_per_s=rows, latency_s=latency, nics=source.choice((1, 2)))
    count = node * nodes
    tp = source.choice([tp for tp in (1, 2, 4) if node % tp == 0])
    pp = source.choice([pp for pp in (2, 4, 8) if count % (tp * pp) == 0])
    dp, chunks = count // (tp * pp), source.choice((1, 1, 3))
    its = Parallel(
        tp=tp, pp=pp, dp=dp, chunks=chunks, microbatch=1, global_batch=2 * dp * pp,
        schedule="interleaved" if chunks > 1 else "1f1b", sequence_parallel=tp > 1,
        distributed_optimizer=dp > 1 and source.random() < 0.5, recompute=source.choice(list(Recompute)),
    )  # fmt: skip
    model = replace(SMALL, layers=48, tied_embeddings=source.random() < 0.5)
    if seed % 2:  # layers that take longer than their launches, with exchanges of 8-bit numbers
        model = replace(model, hidden=4096, heads=32, sequence=2048, kernels=Kernels(fp8=True))
    profile = Profile(tp, 1, Both(3e6, 5e6), Both(1e6, 0), Both(0, 2e6), 1e-10, step_s=0.1, waits=1.1)
    energy = Energy(model, A100, 0.45, its, there, Passes([profile]) if source.random() < 0.5 else None)
    units = [source.sample(range(count // tp), count // tp) for _ in range(5)]
    orders = np.array([[unit * tp + rank for unit in row for rank in range(tp)] for row in units])
    assert ManyOrders.fits(model, its, there)
    overlapping = replace(model, kernels=Kernels(overlaps=Overlaps(gradients=True)))
    assert not ManyOrders.fits(overlapping, its, there)
    energies, means = energy.many(orders)
    assert energies.tolist() == [energy(order) for order in orders.tolist()]
    assert (means <= energies).all()


@pytest.mark.parametrize("as_pipette", [False, True])
def test_annealing_goes_on_where_orders_are_weighed_one_by_one(as_pipette):
    its = Parallel(pp=2, cp=2, dp=2, microbatch=1, global_batch=8)
    there = random_links(random.Random(3), 8, 1)
    assert not ManyOrders.fits(SMALL, its, there)
    energy = Energy(SMALL, A100, 0.45, its, there)
    found = anneal(energy, its, 1, 0, 300, as_pipette=as_pipette)
    assert found.energy_ns == energy(found.orders[0]) < found.identity_ns
    assert found.moves == 300


def test_with_one_kind_of_link_annealing_has_nothing_to_do():
    its = Parallel(pp=4, microbatch=1, global_batch=12)
    there = Links.uniform(NodeNetwork("n", 1e9, 1e9, 4), 1)
    assert anneal(Energy(SMALL, A100, 0.45, its, there), its, 4).moves == 0


def test_what_may_not_fit_is_dropped_by_the_upper_end_of_its_interval():
    training = read_flags([*FLAGS.split(), "--pipeline-model-parallel-size", "2"])
    plain = cluster()
    best = search(Evaluator(training, plain, links(plain)), 1).proposals[0]
    low, high = best.interval_bytes
    assert low < max(one.total_bytes for one in best.memory) < best.peak_bytes < high
    evaluator = Evaluator(training, plain, links(plain))
    most = int(plain.room_bytes / best.margins.high)
    assert evaluator.fits(most)
    assert not evaluator.fits(most + 2)
    assert best.cycles()[0].slots
    assert all(slot.free_bytes < plain.room_bytes - best.memory[0].total_bytes for slot in best.cycles()[0].slots)


def test_old_gpus_have_no_flash_attention():
    training = read_flags([*FLAGS.split(), "--bf16", "--attention-backend", "flash"])
    its = Parallel(pp=2, microbatch=1, global_batch=training.global_batch)
    new, old = cluster(gpu="a100-40gb"), cluster(gpu="v100-32gb")
    flash, scores = (Evaluator(training, one, links(one)).least_bytes(its) for one in (new, old))
    unfused = read_flags([*FLAGS.split(), "--bf16", "--attention-backend", "unfused"])
    assert flash < scores == Evaluator(unfused, new, links(new)).least_bytes(its)


def test_a_deterministic_training_may_keep_its_scores():
    """Its interval reaches to that of unfused attention, unless a backend is asked for."""
    flags = [*FLAGS.split(), "--pipeline-model-parallel-size", "2", "--micro-batch-size", "4"]
    its = Parallel(pp=2, dp=2, microbatch=4, global_batch=16)

    def found(*more: str, **changes):
        one = cluster(**changes)
        evaluator = Evaluator(read_flags([*flags, *more]), one, links(one))
        return evaluator.proposal(evaluator.iteration(its))

    flash, scores, given = (found("--attention-backend", name) for name in ("flash", "unfused", "fused"))
    left = found("--deterministic-mode")
    assert left.memory == flash.memory
    assert left.interval_bytes[1] == pytest.approx(scores.interval_bytes[1], abs=2)
    assert left.interval_bytes[0] == flash.interval_bytes[0]
    assert found().margins == found("--deterministic-mode", "--attention-backend", "fused").margins == given.margins
    between = f"{(flash.interval_bytes[1] + scores.interval_bytes[1]) // 2 + (2 << 30)}"
    assert found("--attention-backend", "flash", memory=between) is not None
    assert found("--deterministic-mode", memory=between) is None


def test_experts_and_corrections_have_intervals_of_their_own():
    experts, dense = margins(replace(SMALL, experts=8)), margins(SMALL)
    corrected = margins(SMALL, corrected=True)
    assert experts.high > dense.high > corrected.high > 1 > dense.low
    assert experts.shown > dense.shown > corrected.shown == 1
    assert margins(replace(SMALL, word_head=True)).high > experts.high
    graphs = margins(SMALL, flags=["--cuda-graph-impl", "local", "--fp8-format=hybrid"])
    assert graphs == replace(dense, low=dense.low * 0.85)
    assert list(least_known(["--fp8-format=hybrid", "--bf16"])) == ["--fp8-format"]


# The value of bubbles


def test_bubbles_are_worth_no_more_than_their_share_and_nothing_without_any():
    flags = (
        "--num-layers 24 --hidden-size 4096 --num-attention-heads 32 --seq-length 2048 --vocab-size 50257 "
        "--global-batch-size 64 --bf16 --pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 1"
    )
    training = read_flags(flags.split())
    its = cluster(1, 8)
    kinds = fill_kinds(its.gpu, None)
    one = search(Evaluator(training, its, links(its)), 1).proposals[0]
    full = valued(one, kinds)
    assert 0.5 * one.bubble_share * 8 < full.gpus_worth < one.bubble_share * 8
    assert full.net_gpu_s == pytest.approx(one.iteration_s * (8 - full.gpus_worth))
    assert valued(replace(one, room_bytes=one.interval_bytes[1]), kinds).gpus_worth < full.gpus_worth
    none = replace(training, fixed={"pp": 1, "tp": 4})
    assert valued(search(Evaluator(none, its, links(its)), 1).proposals[0], kinds).gpus_worth == 0


def test_a_jobs_file_may_name_any_kind_of_the_catalog(tmp_path):
    jobs = tmp_path / "jobs.yaml"
    jobs.write_text("jobs: [{name: efficientnet-v2-l-inference, command: x}, {name: bert-large-training, command: x}]")
    assert {kind.name for kind in fill_kinds(A100, jobs)} == {"efficientnet-v2-l-inference", "bert-large-training"}
    jobs.write_text("jobs: [{name: other, command: x}]")
    with pytest.raises(ConfigError, match=r"job 'other' has no profile; expected a name among .*efficientnet-v2-l-tra"):
        fill_kinds(A100, jobs)


def test_a_slow_gpu_takes_longer():
    its, large = Parallel(pp=2, microbatch=4, global_batch=32), replace(SMALL, hidden=8192, sequence=2048)
    slow = replace(A100, peak_flops=A100.peak_flops / 2, memory_bandwidth=A100.memory_bandwidth / 2)
    there = lay_out(Links.uniform(NodeNetwork("n", 1e30, 1e30, 2, 0.0), 1), its, range(2))
    step_ns = round(STEP_LAUNCHES * LAUNCH_S * 1e9)
    fast_ns, slow_ns = (timeline(iteration(large, gpu, 0.5, its, there)).period_ns - step_ns for gpu in (A100, slow))
    assert slow_ns == pytest.approx(2 * fast_ns, rel=1e-6)
