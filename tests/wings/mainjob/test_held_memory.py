"""What a stage's GPU holds while passes run; ``tests/patches/test_memory_truth.py`` compares it with Megatron's own."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from megatron.fill.pipeline.bubbles import peak_activation_bytes, peak_pass_bytes
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.wings.configure.details import detailed
from megatron.fill.wings.configure.flags import layout_flags
from megatron.fill.wings.configure.peaks import laid_out
from megatron.fill.wings.configure.room import memory
from megatron.fill.wings.mainjob import analytic, roofline
from megatron.fill.wings.mainjob.hardware import GPUS
from megatron.fill.wings.mainjob.held import held_memory, micro_batch, passes
from megatron.fill.wings.mainjob.kernels import Kernels
from megatron.fill.wings.mainjob.memory import expert_parameters, layer_activation_bytes, stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.mainjob.tape import Step, kept_bytes, layer_tape, peak_bytes

GPT = ModelSpec(layers=8, hidden=1024, heads=16, sequence=1024, vocabulary=51200, positions=1024)
ONE = Parallel(pp=1, global_batch=1)
LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tensor": {"tp": 4},
    "sequence": {"tp": 4, "sequence_parallel": True},
    "large micro-batch": {"microbatch": 2, "global_batch": 2},
    "single precision": {"precision": "fp32"},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("kind", [Recompute.NONE, Recompute.SELECTIVE])
def test_a_layer_keeps_what_the_published_formula_says(name, kind):
    """Korthikanti et al. 2022, Table 2, whose masks are half as wide in single precision."""
    its = replace(ONE, recompute=kind, **LAYOUTS[name])
    masks = 0.0
    if its.precision is Precision.FP32:
        masks = 2 * GPT.sequence * GPT.hidden + (GPT.heads * GPT.sequence**2 if kind is Recompute.NONE else 0)
    assert kept_bytes(layer_tape(GPT, its)) + masks == pytest.approx(layer_activation_bytes(GPT, its))


def test_full_recomputation_keeps_the_layers_input():
    full, none = (layer_tape(GPT, replace(ONE, recompute=kind)) for kind in (Recompute.FULL, Recompute.NONE))
    assert kept_bytes(full) == 2 * 1024 * 1024
    assert peak_bytes(full) == peak_bytes(none) + 2 * 2 * 1024 * 1024  # the output again, and its gradient


def test_the_peak_is_where_tape_and_gradients_are_most_together():
    tape = [Step("a", 10, 1), Step("b", 5, 100), Step("c", 20, 2)]
    assert kept_bytes(tape) == 35
    assert peak_bytes(tape) == 115
    assert peak_bytes([]) == 0


def test_without_more_in_the_backward_pass_the_peak_is_what_forward_passes_keep():
    for schedule in (make_schedule("1f1b", 4, 6), make_schedule("interleaved", 4, 8, 2), make_schedule("zb-h1", 4, 6)):
        kept = [10 * (1 + stage) for stage in range(schedule.virtual_stages)]
        assert peak_pass_bytes(schedule, kept, kept) == peak_activation_bytes(schedule, kept)
        most = [its + 7 for its in kept]
        assert peak_pass_bytes(schedule, kept, most) == tuple(its + 7 for its in peak_activation_bytes(schedule, kept))
    with pytest.raises(ValueError, match="3 peak_bytes; expected 2: one each"):
        peak_pass_bytes(make_schedule("1f1b", 2, 2), [1, 1], [1, 1, 1])


def test_virtual_stages_are_told_apart_only_where_they_differ():
    its = Parallel(pp=2, chunks=4, schedule="interleaved", global_batch=4)
    first, last = (passes(micro_batch(GPT, its), its, its.layers(GPT), rank) for rank in (0, 1))
    assert len(first) == len(last) == 4
    assert first[1] == first[2] == first[3] == last[0] == last[1] == last[2]
    assert first[0].kept_bytes > first[1].kept_bytes  # tokens with their mask, and the dropout after the embedding
    assert last[3].kept_bytes > last[2].kept_bytes  # the logits


def test_one_stage_holds_a_tied_gradient_and_several_do_not():
    tied = replace(GPT, vocabulary=2048)
    untied = replace(tied, tied_embeddings=False)
    once, two = (memory(model, ONE)[0].activations_bytes for model in (tied, untied))
    assert once - two == 2 * tied.embedding_parameters
    its = Parallel(pp=2, global_batch=4)
    assert memory(tied, its)[0].activations_bytes == memory(untied, its)[0].activations_bytes


def test_the_optimizers_step_counts_where_it_is_more():
    its = replace(ONE, precision=Precision.FP16)
    held = held_memory(GPT, its, micro_batch(GPT, its), 0, 0.0)
    assert held.total_bytes - micro_batch(GPT, its).buffer == pytest.approx(20 * held.weights_bytes / 2)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", (1024, True, True)),
        ("--max-position-embeddings 4096", (4096, True, True)),
        ("--position-embedding-type rope --hidden-dropout 0", (0, False, True)),
        ("--position-embedding-type=none --attention-dropout=0.0", (0, True, False)),
        ("--use-rotary-position-embeddings --hidden-dropout lots", (0, True, True)),
    ],
)
def test_positions_and_dropout_are_read_from_the_flags(flags, expected):
    found = detailed(replace(GPT, positions=7), flags.split())
    assert (found.positions, found.hidden_dropout, found.attention_dropout) == expected


def test_positions_are_on_the_first_stage_whole():
    its = Parallel(pp=2, tp=2, global_batch=4)
    with_them, without = (memory(replace(GPT, positions=count), its) for count in (1024, 0))
    assert with_them[0].weights_bytes - without[0].weights_bytes == 2 * 1024 * 1024
    assert with_them[1].weights_bytes == without[1].weights_bytes


@pytest.mark.parametrize(
    ("flags", "flash", "turned"),
    [
        ("--bf16", True, True),
        ("--fp16 --attention-backend fused", True, False),
        ("", False, False),  # single precision
        ("--bf16 --attention-backend unfused", False, False),
        ("--bf16 --transformer-impl local --attention-backend flash --use-flash-attn", False, False),
    ],
)
def test_attention_follows_from_the_flags(flags, flash, turned):
    found = detailed(GPT, flags.split()).kernels
    assert (found.flash, found.turned) == (flash, turned)
    assert not detailed(replace(GPT, heads=2), ["--bf16"]).kernels.flash  # heads of 512 channels


@pytest.mark.parametrize(
    ("flags", "fused"),
    [
        ("--swiglu", True),
        ("--swiglu --disable-bias-linear", True),
        ("--swiglu --no-bias-swiglu-fusion", False),
        ("--quick-geglu --disable-bias-linear", False),
        ("--quick-geglu --no-bias-gelu-fusion", False),
        ("--quick-geglu", True),  # of experts
    ],
)
def test_gates_are_fused_as_megatron_fuses_them(flags, fused):
    assert detailed(GPT, flags.split()).kernels.fused_gate is fused


def test_flash_attention_keeps_statistics_in_the_place_of_scores():
    cudnn = replace(GPT, kernels=Kernels(transformer_engine=True, flash=True))
    selective = kept_bytes(layer_tape(GPT, replace(ONE, recompute=Recompute.SELECTIVE)))
    statistics = 4 * GPT.sequence * GPT.heads
    assert kept_bytes(layer_tape(cudnn, ONE)) == selective + statistics
    library = replace(GPT, kernels=Kernels(transformer_engine=True, flash=True, turned=True))
    output = 2 * GPT.sequence * GPT.hidden
    assert kept_bytes(layer_tape(library, ONE)) == selective + statistics  # one sample is in both orders
    two = replace(ONE, microbatch=2, global_batch=2)
    assert kept_bytes(layer_tape(library, two)) == 2 * (selective + statistics + output)
    rotated = replace(cudnn, positions=0)  # the projection stays, as values are a view of it
    assert kept_bytes(layer_tape(rotated, ONE)) == kept_bytes(layer_tape(cudnn, ONE)) + 2 * output


def test_a_softmax_in_single_precision_keeps_it_if_it_is_not_fused():
    local = ["--transformer-impl", "local", "--attention-softmax-in-fp32"]
    assert not detailed(GPT, local).kernels.wide_softmax
    assert not detailed(GPT, ["--transformer-impl", "local", "--no-masked-softmax-fusion"]).kernels.wide_softmax
    plain = replace(GPT, kernels=Kernels(wide_softmax=True))
    assert detailed(GPT, [*local, "--no-masked-softmax-fusion"]).kernels.wide_softmax
    scores = 2 * GPT.heads * GPT.sequence**2
    assert kept_bytes(layer_tape(plain, ONE)) == kept_bytes(layer_tape(GPT, ONE)) + scores
    whole, wide = (replace(one, attention_dropout=False) for one in (GPT, plain))  # the mixture has a copy of its own
    assert kept_bytes(layer_tape(wide, ONE)) == kept_bytes(layer_tape(whole, ONE)) + 2 * scores


def test_the_loss_and_deferred_gradients_are_on_the_last_stage():
    its = Parallel(pp=2, global_batch=4)
    base = memory(GPT, its)
    logits = GPT.sequence * GPT.vocabulary
    product = 2 * (GPT.sequence * GPT.hidden + GPT.embedding_parameters)  # gradients of the input and of the weights
    for flags, expected in (
        ("--cross-entropy-loss-fusion", 4 * logits),
        ("--cross-entropy-loss-fusion --cross-entropy-fusion-impl te", product - 4 * logits),
        ("--defer-embedding-wgrad-compute", 4 * 2 * (logits + GPT.sequence * GPT.hidden)),
        ("--defer-embedding-wgrad-compute --wgrad-deferral-limit 3", 3 * 2 * (logits + GPT.sequence * GPT.hidden)),
    ):
        found = memory(detailed(GPT, ["--transformer-impl", "local", *flags.split()]), its)
        assert found[0] == base[0]
        assert found[1].total_bytes - base[1].total_bytes == expected


def test_products_that_add_gradients_up_keep_a_stand_in_for_each_shape_of_weights():
    its = Parallel(pp=2, tp=2, global_batch=4)
    flags = ["--bf16", "--no-gradient-accumulation-fusion"]
    summed, made = (memory(detailed(GPT, flags[:count]), its) for count in (1, 2))
    layer, output = 2 * GPT.matrix_parameters // its.tp, 2 * GPT.embedding_parameters // its.tp
    assert summed[1].total_bytes - made[1].total_bytes == layer + output  # the loss is larger than that gradient
    assert 0 < summed[0].total_bytes - made[0].total_bytes < layer  # less what a layer's pass does not make
    experts = replace(GPT, experts=4, experts_per_token=2, swiglu=True, dense_layers=2)
    one = experts.attention_parameters + experts.mlp_parameters
    several = Parallel(pp=4, global_batch=8)
    kept = [memory(detailed(experts, flags[:count]), several)[2].total_bytes for count in (1, 2)]
    assert 0 < kept[0] - kept[1] <= 2 * one  # one expert's, whose gradient is not made


def test_experts_of_fewer_tensor_ranks_are_larger_and_have_fewer_replicas():
    model = replace(GPT, experts=4, swiglu=True)
    its = Parallel(pp=2, tp=4, dp=2, ep=2, global_batch=4, sequence_parallel=True, distributed_optimizer=True)
    alone = replace(its, expert_tp=1)
    alone.check(model)
    assert expert_parameters(model, alone, 0) == 4 * expert_parameters(model, its, 0)
    assert (its.expert_replicas, alone.expert_replicas) == (1, 4)
    kept, other = (kept_bytes(layer_tape(model, one)) for one in (its, alone))
    assert kept - other == 2 * GPT.sequence * GPT.hidden * 3 / 4  # tokens that are not gathered
    with pytest.raises(ValueError, match="expert_tp is 3; expected a divisor of tp \\* cp \\* dp, 8"):
        replace(its, expert_tp=3).check(model)
    with pytest.raises(ValueError, match="ep is 8; expected a divisor of the 4 ranks of experts"):
        replace(its, ep=8, expert_tp=2).check(model)


def test_embedding_and_loss_count_as_layers():
    its = Parallel(pp=4, chunks=2, global_batch=4, schedule="interleaved", embedding_is_layer=True, loss_is_layer=True)
    assert its.layers(replace(GPT, layers=6)) == (0, 1, 1, 1, 1, 1, 1, 0)
    assert replace(its, loss_is_layer=False).layers(replace(GPT, layers=15)) == (1, 2, 2, 2, 2, 2, 2, 2)
    with pytest.raises(ValueError, match="pp \\* chunks is 4 \\* 2; expected a divisor of the model's 10"):
        its.layers(GPT)


def test_the_first_layers_of_each_virtual_stage_are_computed_again_if_flags_say_how_many():
    flags = ["--num-layers", "8", "--hidden-size", "256", "--num-attention-heads", "4", "--seq-length", "256"]
    flags += ["--vocab-size", "1024", "--global-batch-size", "4", "--pipeline-model-parallel-size", "2"]
    full = [*flags, "--recompute-granularity", "full", "--recompute-method"]
    counts = [[*full, "block", "--recompute-num-layers", str(count)] for count in range(5)]
    none, *some, every = (laid_out(given, 2) for given in [flags, *counts, full[:-1]])
    held = [[one.total_bytes for one in memory(*case)] for case in (none, *some, every)]
    assert held[1] == held[0]  # none
    assert held[5] == held[6]  # all four
    assert all(more[stage] > less[stage] for more, less in pairwise(held[1:6]) for stage in (0, 1))
    times = [roofline.stage_cost(model, GPUS["a100-80gb"], its, 0.5, 4, False, 0, 0) for model, its in some]
    steps = {more.backward_ns - less.backward_ns for less, more in pairwise(times)}
    assert max(steps) - min(steps) <= 1  # as much for each layer
    assert layout_flags(some[3][1])[-4:] == ["--recompute-method", "block", "--recompute-num-layers", "3"]


def test_layers_that_predict_later_tokens_may_have_a_stage_of_their_own():
    """It has the embedding too, and the last one the output layer and all losses."""
    model = replace(GPT, predicted=2, tied_embeddings=False)
    none = Parallel(pp=4, global_batch=8, stage_layers=(GPT.layers - 1, 1, 0, 0))
    apart = replace(none, later_stage=2)
    counts = [[stage_parameters(model, its, rank) for rank in range(4)] for its in (none, apart)]
    assert counts[0][:2] == counts[1][:2]
    assert sum(counts[0]) == sum(counts[1])
    assert counts[0][3] - counts[1][3] == counts[1][2] - counts[0][2]
    assert counts[1][3] == stage_parameters(replace(model, predicted=0), none, 3)
    for of in (roofline, analytic):
        gpu = GPUS["a100-80gb"]
        both, own, output = (
            of.stage_cost(model, gpu, none, 0.5, 0, last, 0.0, 0.0, 0, later)
            for last, later in ((True, 2), (False, 2), (True, 0))
        )
        assert both.forward_ns == pytest.approx(own.forward_ns + output.forward_ns, abs=1)
        assert output.forward_ns > 0
    given = "--pipeline-model-parallel-layout", f"E{'t' * (GPT.layers - 1)}|t|mm|L"
    assert tuple(layout_flags(apart, 2)[-2:]) == given


def test_layers_that_predict_later_tokens_are_not_computed_again_by_blocks():
    """As without recomputation, whichever layers of the stage are."""
    model = replace(GPT, predicted=1)
    none = Parallel(pp=2, global_batch=2)
    every = replace(none, recompute=Recompute.FULL)
    block = replace(every, recomputed=4)  # all layers of a stage
    kept = [passes(micro_batch(model, its), its, its.layers(model), 1)[0].kept_bytes for its in (none, every, block)]
    later = [micro_batch(model, its).later.kept_bytes for its in (none, every)]
    assert kept[2] - kept[1] == later[0] - later[1] > 0
    without = [memory(replace(GPT, predicted=0), its)[1] for its in (every, block)]
    assert without[0] == without[1]
