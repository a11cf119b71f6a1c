"""What a stage's GPU holds; ``tests/patches/test_sim_memory_upstream.py`` compares it with Megatron's accounting."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.wings.mainjob.hardware import GIB, GPUS, NETWORKS
from megatron.fill.wings.mainjob.memory import (
    StageMemory,
    activation_bytes,
    layer_activation_bytes,
    stage_memory,
    stage_parameters,
    working_bytes,
)
from megatron.fill.wings.mainjob.model import MODELS, ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.sim.mainjob import MainJob

GPT = ModelSpec(layers=24, hidden=1024, heads=16, sequence=1024, vocabulary=51200)
ONE = Parallel(pp=1, global_batch=1)


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[ModelSpec, Parallel]:
    tp, pp, chunks = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    model = ModelSpec(
        layers=pp * chunks * draw(st.integers(1, 3)),
        hidden=64 * draw(st.integers(1, 8)),
        heads=16,
        sequence=64 * draw(st.integers(1, 8)),
        vocabulary=draw(st.sampled_from([0, 1024])),
        query_groups=draw(st.sampled_from([None, 4, 8])),
        swiglu=draw(st.booleans()),
        tied_embeddings=draw(st.booleans()),
    )
    return model, Parallel(
        tp=tp,
        pp=pp,
        chunks=chunks,
        microbatch=draw(st.integers(1, 3)),
        global_batch=12,
        sequence_parallel=draw(st.booleans()),
        precision=draw(st.sampled_from(Precision)),
    )


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "recompute", "units"),
    [  # Korthikanti et al. 2022, Table 2, with 5 a s / h = 80
        (1, False, "none", 34 + 80),
        (4, False, "none", 10 + 24 / 4 + 80 / 4),
        (4, True, "none", (34 + 80) / 4),
        (4, False, "selective", 10 + 24 / 4),
        (4, True, "selective", 34 / 4),
        (4, False, "full", 2),
    ],
)
def test_a_layers_activations_are_those_of_the_table(tp, sequence_parallel, recompute, units):
    its = replace(ONE, tp=tp, microbatch=1, sequence_parallel=sequence_parallel, recompute=recompute)
    assert layer_activation_bytes(GPT, its) == pytest.approx(units * 1024 * 1024)


def test_single_precision_takes_twice_as_much():
    fp32 = replace(ONE, precision=Precision.FP32)
    assert layer_activation_bytes(GPT, fp32) == 2 * layer_activation_bytes(GPT, ONE)


@given(laid_out())
@settings(max_examples=60)
def test_the_stages_hold_the_model_once(case):
    model, its = case
    held = [stage_parameters(model, its, rank) for rank in range(its.pp)]
    replicated = model.layers * model.norm_parameters + model.final_norm_parameters
    copied = model.embedding_parameters if model.tied_embeddings and its.pp > 1 else 0
    assert sum(held) * its.tp == pytest.approx(model.parameters + (its.tp - 1) * replicated + copied)


@given(laid_out())
@settings(max_examples=60)
def test_recomputing_more_and_dividing_further_never_takes_more(case):
    model, its = case
    sizes = [layer_activation_bytes(model, its, kind) for kind in Recompute]
    assert sizes == sorted(sizes, reverse=True)
    divided = replace(its, sequence_parallel=True)
    assert layer_activation_bytes(model, divided) <= layer_activation_bytes(model, its)
    assert sum(activation_bytes(model, divided)) <= sum(activation_bytes(model, its))


def test_only_the_ends_keep_more_than_their_layers():
    its = replace(ONE, pp=4)
    first, second, third, last = activation_bytes(GPT, its)
    assert second == third == 6 * layer_activation_bytes(GPT, its)
    assert first - second == 1024 * (8 + 1024)  # token ids, and the dropout's mask
    assert last - second == 4 * 1024 * (1024 + 51200)
    bare = replace(GPT, vocabulary=0)
    assert len(set(activation_bytes(bare, its))) == 1


def test_blocks_of_recomputation_leave_the_last_layers_of_a_stage_whole():
    """Of two stages of three layers, two each are computed again; the first has two without experts."""
    model = replace(GPT, layers=6, vocabulary=0, experts=4, dense_layers=2)
    its = replace(ONE, pp=2, recompute=Recompute.FULL, recomputed=2)
    again = layer_activation_bytes(model, its)
    whole = layer_activation_bytes(model, its, Recompute.NONE)
    assert activation_bytes(model, its) == (2 * again + whole,) * 2
    bare = layer_activation_bytes(model.bare, its, Recompute.NONE)
    assert activation_bytes(model, replace(its, recomputed=1)) == (again + bare + whole, again + 2 * whole)


@pytest.mark.parametrize(
    ("precision", "distributed", "per_parameter"),
    [  # Megatron's guide to the distributed optimizer
        ("bf16", False, 18),
        ("bf16", True, 6 + 12 / 4),
        ("fp16", False, 20),
        ("fp16", True, 4 + 16 / 4),
        ("fp32", False, 16),
        ("fp32", True, 8 + 8 / 4),
    ],
)
def test_bytes_per_parameter(precision, distributed, per_parameter):
    its = Parallel(pp=2, dp=4, global_batch=4, precision=precision, distributed_optimizer=distributed)
    expected = per_parameter * stage_parameters(GPT, its, 1)
    assert stage_memory(GPT, its, 1, 0).total_bytes == pytest.approx(expected, abs=2)


def test_full_recomputation_works_on_one_whole_layer():
    its = replace(ONE, recompute=Recompute.FULL)
    assert working_bytes(GPT, ONE) == 0
    assert working_bytes(GPT, its) == layer_activation_bytes(GPT, ONE)
    assert stage_memory(GPT, its, 0, 1000).activations_bytes == 1000 + working_bytes(GPT, its)


def test_the_total_is_the_sum():
    assert StageMemory(1, 20, 300, 4000).total_bytes == 4321


def job(**changes) -> MainJob:
    its: dict[str, Any] = {"pp": 4, "global_batch": 8, "recompute": "selective"} | changes
    return MainJob("llm", GPT, GPUS["a100-40gb"], NETWORKS["dgx-a100"], Parallel(**its))


def test_1f1b_holds_fewer_micro_batches_on_later_stages_and_gpipe_all():
    one, all_at_once = job(), job(schedule="gpipe")
    kept = activation_bytes(GPT, one.parallel)
    assert [one.memory(stage).activations_bytes for stage in range(4)] == [
        min(8, 4 - stage) * size for stage, size in enumerate(kept)
    ]
    assert [all_at_once.memory(stage).activations_bytes for stage in range(4)] == [8 * size for size in kept]


def test_free_memory_is_what_the_job_leaves_and_offloading_adds_the_optimizers():
    its = job()
    for stage in range(4):
        memory = its.memory(stage)
        assert its.free_bytes(stage) + memory.total_bytes + its.memory_reserve_bytes == its.gpu.memory_bytes
        offloaded = replace(its, offload_optimizer=True)
        assert offloaded.free_bytes(stage) == its.free_bytes(stage) + memory.optimizer_bytes


def test_an_offloaded_optimizer_and_activations_are_never_there_together():
    its = job()
    stages = [its.memory(stage) for stage in range(4)]
    most = max(one.total_bytes - min(one.optimizer_bytes, one.activations_bytes) for one in stages)
    either = its.memory_reserve_bytes + most
    small = replace(its.gpu, memory_bytes=either)
    assert min(map(replace(its, gpu=small, offload_optimizer=True).free_bytes, range(4))) >= 0
    with pytest.raises(ValueError, match=r"stage \d needs"):
        replace(its, gpu=small)
    with pytest.raises(ValueError, match=r"stage \d needs"):
        replace(its, gpu=replace(small, memory_bytes=either - 1), offload_optimizer=True)


def test_a_job_that_does_not_fit_says_which_stage_needs_how_much():
    its = Parallel(pp=16, global_batch=16)
    message = r"stage 0 needs .* GiB \(weights .*activations .*expected at most the 16.00 GiB of v100-16gb"
    with pytest.raises(ValueError, match=message):
        MainJob("llm", MODELS["gpt-40b"], GPUS["v100-16gb"], NETWORKS["p3dn.24xlarge"], its)


# FreeRide's trainings in four stages: the micro-batch, and what its artifact leaves of the GPU to side tasks, in GiB.
FREERIDE = {
    "freeride-1.2b": (12, (5, 12, 21, 32)),
    "freeride-3.6b": (3, (3, 9, 16, 24)),
    "freeride-6b": (1, (1, 6, 10, 14)),
}


def freeride(name: str) -> MainJob:
    microbatch, _ = FREERIDE[name]
    # Its attention keeps no scores: else no stage would fit.
    its = Parallel(
        pp=4,
        microbatch=microbatch,
        global_batch=4 * microbatch,
        precision=Precision.FP32,
        recompute=Recompute.SELECTIVE,
    )
    gpu, network = GPUS["rtx-6000-ada"], NETWORKS["pcie4"]
    return MainJob("main", MODELS[name], gpu, network, its, 0.08, memory_reserve_bytes=0)


@pytest.mark.parametrize(("name", "least"), [*zip(FREERIDE, [0.87, 0.86, 0.77], strict=True)])
def test_freerides_main_jobs_are_not_taken_to_hold_more_than_they_do(name, least):
    """What its artifact leaves to side tasks is what they hold with contexts, buffers and slack, in whole GiB.

    That rest is 0 to 9 GiB, grows with the model and is nowhere listed, so of the sum only a part can be asked for.
    """
    main = freeride(name)
    for stage, free_gib in enumerate(FREERIDE[name][1]):
        there = main.gpu.memory_bytes - free_gib * GIB
        assert least * there <= main.memory(stage).total_bytes <= there


@pytest.mark.parametrize("name", FREERIDE)
def test_each_micro_batch_in_flight_holds_what_it_does_in_freerides_main_jobs(name):
    """Stages 0 and 3 differ by three of them; the rest of what they hold is nearly the same, and so cancels out."""
    main, free_gib = freeride(name), FREERIDE[name][1]
    difference = main.memory(0).total_bytes - main.memory(3).total_bytes
    # 13 to 27 GiB, each of them rounded to a whole one.
    assert difference / GIB == pytest.approx(free_gib[3] - free_gib[0], abs=1.7)
