"""What a stage's GPU holds while passes run; ``tests/patches/test_memory_truth.py`` compares it with Megatron's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.pipeline.bubbles import peak_activation_bytes, peak_pass_bytes
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.wings.configure.details import detailed
from megatron.fill.wings.configure.room import memory
from megatron.fill.wings.mainjob.held import held_memory, micro_batch, passes
from megatron.fill.wings.mainjob.memory import layer_activation_bytes
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
