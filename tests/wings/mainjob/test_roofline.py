"""Analytical times of passes, operation by operation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron.fill.wings.mainjob import analytic
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.kernels import Kernels
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from megatron.fill.wings.mainjob.roofline import LAUNCH_S, busy_share, launches, layer_parts, stage_cost

A100 = replace(GPUS["a100-80gb"], flash_attention=1.0, processors=0)
LARGE = ModelSpec(layers=4, hidden=8192, heads=64, sequence=2048, vocabulary=51200)
ITS = Parallel(pp=1, microbatch=2, global_batch=2)


def cost(model=LARGE, its=ITS, layers=4, is_last=False, exchange=0.0):
    later = model.predicted if is_last else 0
    return stage_cost(model, A100, its, 0.5, layers, is_last, exchange, exchange, later=later)


def test_products_take_their_operations_and_small_ones_their_traffic():
    without = replace(A100, memory_bandwidth=1e30)
    parts = layer_parts(LARGE, without, ITS, 0.5)
    rate = 0.5 * A100.peak_flops
    assert parts["core_attn"].forward_s == pytest.approx(LARGE.attention_flops(2) / rate)
    products = parts["rest"].forward_s + parts["mlp"].forward_s
    assert products == pytest.approx(LARGE.matrix_flops(2) / rate)
    assert sum(part.backward_s for part in parts.values()) == pytest.approx(2 * LARGE.layer_flops(2) / rate)
    fast = replace(A100, peak_flops=1e30)
    tiny = layer_parts(replace(LARGE, sequence=1), fast, replace(ITS, microbatch=1), 0.5)["mlp"]
    weights = 2 * LARGE.mlp_parameters / (A100.traffic * A100.memory_bandwidth)
    assert tiny.forward_s == pytest.approx(weights, rel=1e-2)
    assert tiny.backward_s == pytest.approx(5 * weights, rel=1e-2)  # weights once; their gradients' 4 bytes twice


def test_processors_without_a_tile_have_nothing_to_do_unless_a_long_sum_is_shared_out():
    ends = 4096 / (4096 + 128)
    assert busy_share(0, 1, 1, 1) == 1
    assert busy_share(128, 4096, 1024, 4096) == ends  # 128 tiles of 128 x 256
    assert busy_share(100, 4096, 1024, 4096) == pytest.approx(0.64 * ends)  # two rounds of a hundred
    assert busy_share(128, 1024, 4000, 4096) == pytest.approx(4000 / 4096 * ends)
    assert busy_share(128, 512, 2048, 4096) == pytest.approx(ends / 4)
    assert busy_share(128, 512, 2048, 32768) == pytest.approx(8192 / (8192 + 128))  # in four parts
    whole, idle = (layer_parts(LARGE, replace(A100, processors=count), ITS, 0.5)["mlp"] for count in (128, 120))
    assert whole.forward_s < idle.forward_s
    assert whole.backward_s < idle.backward_s


def test_small_layers_take_as_long_as_their_launches():
    small = replace(LARGE, hidden=512, heads=8, sequence=512)
    forward, backward = launches(small, ITS)
    found = cost(small)
    assert (found.forward_ns, found.backward_ns) == (round(4e9 * forward * LAUNCH_S), round(4e9 * backward * LAUNCH_S))
    experts = replace(small, experts=4)
    wide = Parallel(tp=2, cp=2, ep=2, pp=1, sequence_parallel=True, microbatch=2, global_batch=2)
    assert all(more > less for more, less in zip(launches(experts, wide), (forward, backward), strict=True))


def test_a_graph_is_one_launch():
    experts = replace(LARGE, experts=4)
    plain, attention, layer, every = (
        launches(replace(experts, kernels=Kernels(graphs=names)), ITS)
        for names in ((), ("attn", "moe_router", "mlp"), ("layer",), ("iteration",))
    )
    assert (layer, every) == ((1, 1), (0, 0))
    assert (plain[0] - attention[0], plain[1] - attention[1]) == (13, 26)  # the MLP's are not there
    assert launches(replace(LARGE, kernels=Kernels(graphs=("attn", "mlp", "moe"))), ITS) == (2, 4)


def test_what_is_sent_once_to_each_rank_is_moved_less():
    experts = replace(LARGE, experts=8, experts_per_token=4)
    its = replace(ITS, dp=2, ep=2, global_batch=4)
    all_to_all, once = (
        layer_parts(replace(experts, kernels=Kernels(dispatcher=name)), A100, its, 0.5)["moe"].forward_s
        for name in ("", "deepep")
    )
    tokens_bytes = 2 * ITS.microbatch * LARGE.sequence * LARGE.hidden
    sent = 2 * experts.chosen_share(1 / 2)  # 69 of 70 choices have an expert of each half
    assert sent == pytest.approx(2 * 69 / 70)
    copies = 2 * (1 + 3 * 4) - 2 * (sent + 4)
    assert all_to_all - once == pytest.approx(1.33 * copies * tokens_bytes / (A100.traffic * A100.memory_bandwidth))


def test_8_bit_numbers_take_launches_outside_of_graphs():
    """Five for each of a layer's four products, and twice as many in the backward pass."""
    for kind in (LARGE, replace(LARGE, experts=8, experts_per_token=2, kernels=Kernels(grouped=True))):
        plain, small = (launches(replace(kind, kernels=replace(kind.kernels, fp8=fp8)), ITS) for fp8 in (False, True))
        assert (small[0] - plain[0], small[1] - plain[1]) == (20, 40)
    plain, small = (launches(replace(LARGE, kernels=Kernels(graphs=("attn",), fp8=fp8)), ITS) for fp8 in (False, True))
    assert small[0] - plain[0] == 10


def test_numbers_of_each_expert_are_made_smaller_one_after_the_other():
    """Where experts have few tokens each, by the least time of a launch: two products forward, two backward."""
    model = replace(LARGE, sequence=8, experts=8, experts_per_token=2, kernels=Kernels(grouped=True))
    plain, small = (
        layer_parts(replace(model, kernels=replace(model.kernels, fp8=fp8)), A100, ITS, 0.5)["moe"]
        for fp8 in (False, True)
    )
    assert small.forward_s - plain.forward_s <= 2 * 8 * 9e-6 < small.forward_s


def flash_s(microbatch: int, ranks: int = 1) -> float:
    """The forward pass of flash attention by hand: half of the scores, and half of a block's rows with all keys."""
    rows = microbatch * LARGE.heads / ranks * LARGE.sequence / 2 + 128 * 128 / 2
    return rows * 4 * LARGE.sequence * LARGE.head / (0.5 * A100.peak_flops)


def test_flash_attention_computes_half_of_the_scores_and_moves_none():
    unfused, flash = (
        layer_parts(replace(LARGE, kernels=Kernels(flash=flash)), A100, ITS, 0.5)["core_attn"]
        for flash in (False, True)
    )
    assert flash.forward_s == pytest.approx(flash_s(2))
    assert unfused.forward_s > 2 * flash.forward_s
    assert unfused.backward_s > flash.backward_s == pytest.approx(2.5 * flash.forward_s)


def test_heads_wider_than_128_channels_are_slower():
    """Of as many operations in all, as SimuMax measured on A100 and B200."""
    narrow, wide = (
        replace(LARGE, heads=heads, channels=channels, kernels=Kernels(flash=True))
        for heads, channels in ((48, 128), (32, 192))
    )
    assert narrow.attention_flops(64) == wide.attention_flops(64)
    one, other = (
        layer_parts(model, A100, replace(ITS, microbatch=64, global_batch=64 * 32), 0.5)["core_attn"]
        for model in (narrow, wide)
    )
    assert one.forward_s / other.forward_s == pytest.approx(0.82, rel=0.01)


def test_a_gpu_may_be_slower_at_its_clock_and_at_attention():
    model = replace(LARGE, kernels=Kernels(flash=True))
    usual, slow = (
        layer_parts(model, gpu, ITS, 0.5) for gpu in (A100, replace(A100, sustained=0.5, flash_attention=0.8))
    )
    assert slow["core_attn"].forward_s == pytest.approx(usual["core_attn"].forward_s / 0.5 / 0.8)
    product_s = 2 * 2 * LARGE.sequence * LARGE.mlp_parameters / (0.5 * A100.peak_flops)
    assert slow["mlp"].forward_s - usual["mlp"].forward_s == pytest.approx(product_s)


def test_a_layer_that_predicts_a_later_token_has_a_loss_of_its_own():
    plain, later = (cost(model, is_last=True) for model in (LARGE, replace(LARGE, predicted=1)))
    layer_ns = cost().forward_ns / 4
    output_ns = plain.forward_ns - 4 * layer_ns
    joined_ns = 1e9 * 2 * 2 * LARGE.sequence * 2 * LARGE.hidden**2 / (0.5 * A100.peak_flops)
    assert later.forward_ns - plain.forward_ns == pytest.approx(layer_ns + output_ns + joined_ns)


def test_context_parallel_ranks_add_up_what_the_parts_of_the_keys_give():
    """By hand: three quarters of the other rank's part is seen; sums are in single precision."""
    its = replace(ITS, cp=2)
    found = layer_parts(replace(LARGE, kernels=Kernels(flash=True)), A100, its, 0.5)["core_attn"]
    attention_s = flash_s(2, ranks=2)
    query_s = 2 * LARGE.sequence * LARGE.hidden / (A100.traffic * A100.memory_bandwidth)
    assert found.forward_s == pytest.approx(attention_s + 1.75 * 5 * query_s)
    assert found.backward_s == pytest.approx(2.5 * attention_s + 1.75 * 3 * 3 * query_s)


@pytest.mark.parametrize(("per_tensor", "rate"), [(True, 2), (False, 1.8)])
def test_products_of_8_bit_numbers_take_less_and_the_making_of_these_numbers(per_tensor, rate):
    """With a scale for each block (MXFP8) they take more than with one for a tensor."""
    plain, small = (
        layer_parts(replace(LARGE, kernels=Kernels(fp8=fp8, fp8_per_tensor=per_tensor)), A100, ITS, 0.5)["mlp"]
        for fp8 in (False, True)
    )
    numbers = 2 * LARGE.sequence * (LARGE.hidden + LARGE.ffn)
    made_s = 3 * numbers / (A100.traffic * A100.memory_bandwidth)
    product_s = 2 * 2 * LARGE.sequence * LARGE.mlp_parameters / (0.5 * A100.peak_flops)
    assert plain.forward_s - small.forward_s == pytest.approx(product_s * (1 - 1 / rate) - made_s)
    assert plain.backward_s - small.backward_s == pytest.approx(2 * product_s * (1 - 1 / rate) - made_s)


def test_an_output_layer_in_8_bit_numbers_takes_less():
    small = replace(LARGE, kernels=Kernels(fp8=True))
    with_output = replace(LARGE, kernels=Kernels(fp8=True, fp8_output=True))
    saved_ns = cost(small, is_last=True).forward_ns - cost(with_output, is_last=True).forward_ns
    made_ns = 1e9 * 3 * 2 * LARGE.sequence * LARGE.hidden / (A100.traffic * A100.memory_bandwidth)
    product_ns = 1e9 * LARGE.output_flops(2) / (0.5 * A100.peak_flops)
    assert saved_ns == pytest.approx(product_ns * (1 - 1 / 1.8) - made_ns, rel=1e-6)
    assert cost(small) == cost(with_output)


def test_recomputation_adds_the_forward_passes_of_what_it_names():
    plain = cost(exchange=1e-3)
    full = cost(its=replace(ITS, recompute=Recompute.FULL), exchange=1e-3)
    assert full.backward_ns == pytest.approx(plain.backward_ns + plain.forward_ns)
    parts = layer_parts(LARGE, A100, ITS, 0.5)
    named = replace(ITS, recompute=Recompute.SELECTIVE, recompute_modules=("core_attn", "mlp"))
    again = parts["core_attn"].forward_s + parts["mlp"].forward_s + 0.5e-3
    assert cost(its=named, exchange=1e-3).backward_ns == pytest.approx(plain.backward_ns + 4e9 * again)
    shared = replace(LARGE, experts=2, experts_per_token=2, shared_width=8192)
    named = replace(named, recompute_modules=("moe",))
    parts = layer_parts(shared, A100, ITS, 0.5)
    again = parts["moe"].forward_s + parts["shared_experts"].forward_s
    assert cost(shared, named).backward_ns == pytest.approx(cost(shared).backward_ns + 4e9 * again)


@pytest.mark.parametrize("kind", [stage_cost, analytic.stage_cost])
def test_blocks_of_recomputation_begin_with_layers_without_experts_and_end_before_later_tokens(kind):
    """Of three layers that are computed again, two have no experts here, so one of four with experts is."""

    def backward_ns(its, layers, is_last=False, before=0, model=LARGE):
        later = model.predicted if is_last else 0
        return kind(model, A100, its, 0.5, layers, is_last, 1e-3, 1e-3, before, later).backward_ns

    block = replace(ITS, recompute=Recompute.FULL, recomputed=3)
    forward_ns = kind(LARGE, A100, ITS, 0.5, 4, False, 1e-3, 1e-3).forward_ns / 4
    plain = backward_ns(ITS, 4)
    assert backward_ns(block, 4) - plain == pytest.approx(3 * forward_ns)
    assert backward_ns(block, 4, before=2) - plain == pytest.approx(forward_ns)
    assert backward_ns(block, 4, before=3) == plain
    later = replace(LARGE, predicted=1)
    uniform = replace(ITS, recompute=Recompute.FULL)
    plain = backward_ns(ITS, 4, True, model=later)
    assert backward_ns(block, 4, True, model=later) - plain == pytest.approx(3 * forward_ns)
    assert backward_ns(uniform, 4, True, model=later) - plain == pytest.approx(5 * forward_ns)
    assert backward_ns(uniform, 0, True, model=later) - backward_ns(ITS, 0, True, model=later) == pytest.approx(
        forward_ns
    )


def test_products_of_experts_are_slower_at_once_but_launched_together():
    model = replace(LARGE, experts=8, experts_per_token=2)
    at_once = replace(model, kernels=Kernels(grouped=True))
    apart, together = (layer_parts(its, A100, ITS, 0.5)["moe"].forward_s for its in (model, at_once))
    assert apart < together < 2 * apart
    assert launches(model, ITS)[0] - launches(at_once, ITS)[0] == 3 * 7
    alone = replace(ITS, dp=8, ep=8, global_batch=16)
    assert layer_parts(model, A100, alone, 0.5) == layer_parts(at_once, A100, alone, 0.5)
    assert launches(model, alone) == launches(at_once, alone)


def test_products_of_small_experts_at_once_take_their_launches_unless_a_graph_has_them():
    experts = replace(LARGE, hidden=512, heads=8, ffn_hidden=64, experts=64, experts_per_token=8)
    plain, graphed = (
        layer_parts(replace(experts, kernels=Kernels(grouped=True, graphs=graphs)), A100, ITS, 0.5)["moe"]
        for graphs in ((), ("iteration",))
    )
    moved_s = 2 * ITS.microbatch * LARGE.sequence * 512 * (2 + 6 * 8) / (A100.traffic * A100.memory_bandwidth)
    assert plain.forward_s > 2 * 64 * 9e-6 + moved_s > graphed.forward_s
    assert plain.backward_s > 4 * 64 * 9e-6 + moved_s > graphed.backward_s


def test_the_last_stage_has_the_output_layer_and_parallelism_divides_it():
    inner, last = cost(), cost(is_last=True)
    output_ns = 1e9 * LARGE.output_flops(2) / (0.5 * A100.peak_flops)
    assert last.forward_ns - inner.forward_ns > output_ns
    assert last.backward_ns - inner.backward_ns > 2 * output_ns
    assert cost(replace(LARGE, vocabulary=0), is_last=True) == cost(replace(LARGE, vocabulary=0))
    halved = cost(its=replace(ITS, tp=2, sequence_parallel=True), is_last=True)
    assert 0.49 < halved.forward_ns / last.forward_ns < 0.55
    experts = replace(LARGE, experts=8, experts_per_token=2, kernels=Kernels(grouped=True))
    alone = layer_parts(experts, A100, replace(ITS, dp=8, ep=8, global_batch=16), 0.5)["moe"].forward_s
    grouped = layer_parts(experts, A100, replace(ITS, dp=2, ep=2, global_batch=4), 0.5)["moe"].forward_s
    dense = layer_parts(LARGE, A100, ITS, 0.5)["mlp"].forward_s
    assert 2 * dense < alone < 2.2 * dense  # tokens are put in order beside it
    rows = ITS.microbatch * LARGE.sequence * 2 / 4  # of an expert, as two ranks' tokens go to four experts each
    assert grouped - alone == pytest.approx(2 * dense * 200 / rows, rel=0.05)
