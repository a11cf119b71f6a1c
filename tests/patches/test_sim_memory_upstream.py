"""The simulator's memory against that of the installed package: ``megatron.training.theoretical_memory_usage``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.pipeline.bubbles import peak_activation_bytes
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.wings.mainjob.memory import activation_bytes, stage_memory
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from tests.patches.fresh import python

GPT = ModelSpec(layers=48, hidden=2048, heads=16, sequence=1024, vocabulary=51200)
LLAMA = replace(GPT, ffn_hidden=5632, query_groups=4, swiglu=True, tied_embeddings=False)
SP: dict[str, Any] = {"sequence_parallel": True, "recompute": Recompute.SELECTIVE}
CASES = {
    "alone": (GPT, Parallel(pp=1, global_batch=4, **SP)),
    "pipeline": (GPT, Parallel(pp=4, global_batch=16, **SP)),
    "few micro-batches": (GPT, Parallel(pp=4, global_batch=2, **SP)),
    "tensor": (GPT, Parallel(tp=4, pp=4, global_batch=16, microbatch=2, **SP)),
    "distributed": (GPT, Parallel(tp=2, pp=2, dp=8, global_batch=64, distributed_optimizer=True, **SP)),
    "untied, swiglu, groups": (LLAMA, Parallel(tp=2, pp=4, global_batch=16, **SP)),
    "interleaved": (GPT, Parallel(tp=2, pp=4, chunks=3, schedule="interleaved", global_batch=16, **SP)),
    "without sequence parallelism": (GPT, Parallel(tp=4, pp=4, global_batch=16, recompute=Recompute.SELECTIVE)),
}
UPSTREAM = """
import json, sys
from argparse import Namespace
from megatron.training.theoretical_memory_usage import (
    compute_activation_memory, compute_activation_memory_without_sp, compute_weight_and_optimizer_memory)
found = []
for case in json.loads(sys.argv[1]):
    args = Namespace(**case["args"])
    activations = compute_activation_memory if args.sequence_parallel else compute_activation_memory_without_sp
    found.append([compute_weight_and_optimizer_memory(args), activations(args, case["microbatches"])])
print("FOUND", json.dumps(found))
"""


def arguments(model: ModelSpec, parallel: Parallel) -> dict[str, Any]:
    """What Megatron's parser would make of it."""
    return {
        "kv_channels": model.hidden // model.heads,
        "num_attention_heads": model.heads,
        "hidden_size": model.hidden,
        "group_query_attention": model.query_groups is not None,
        "num_query_groups": model.groups,
        "num_experts": None,
        "swiglu": model.swiglu,
        "moe_shared_expert_intermediate_size": None,
        "moe_latent_size": None,
        "mtp_num_layers": None,
        "num_layers": model.layers,
        "normalization": "LayerNorm",
        "multi_latent_attention": False,
        "padded_vocab_size": model.vocabulary,
        "untie_embeddings_and_output_weights": not model.tied_embeddings,
        "ffn_hidden_size": model.ffn,
        "expert_tensor_parallel_size": parallel.tp,
        "expert_model_parallel_size": 1,
        "pipeline_model_parallel_size": parallel.pp,
        "tensor_model_parallel_size": parallel.tp,
        "virtual_pipeline_model_parallel_size": parallel.chunks if parallel.chunks > 1 else None,
        "world_size": parallel.gpus,
        "data_parallel_size": parallel.dp,
        "use_distributed_optimizer": parallel.distributed_optimizer,
        "seq_length": model.sequence,
        "micro_batch_size": parallel.microbatch,
        "sequence_parallel": parallel.sequence_parallel,
    }


@pytest.fixture(scope="module")
def upstream() -> dict[str, tuple[float, float]]:
    """Weights with optimizer, and activations, of the fullest rank, in bytes; in one process, as the import is slow."""
    asked = [{"args": arguments(*case), "microbatches": case[1].microbatches} for case in CASES.values()]
    done = python("-c", UPSTREAM, json.dumps(asked), megatron=True)
    assert done.returncode == 0, done.stderr
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    return dict(zip(CASES, map(tuple, json.loads(line.removeprefix("FOUND "))), strict=True))


def peaks(model: ModelSpec, parallel: Parallel) -> tuple[int, ...]:
    schedule = make_schedule(
        parallel.schedule, parallel.pp, parallel.microbatches, parallel.chunks, parallel.group_size
    )
    return peak_activation_bytes(schedule, activation_bytes(model, parallel))


@pytest.mark.parametrize("name", CASES)
def test_weights_and_optimizer_are_upstreams(name, upstream):
    model, parallel = CASES[name]
    ours = stage_memory(model, parallel, 0, 0)
    per_parameter = 6 + 12 / parallel.dp if parallel.distributed_optimizer else 18
    expected = upstream[name][0]
    if parallel.pp > 1:  # upstream gives each stage a share of the final layer norm; here the last one has it
        expected -= per_parameter * model.final_norm_parameters / parallel.pp
    assert ours.total_bytes == pytest.approx(expected, abs=2)


@pytest.mark.parametrize("name", [name for name, (model, _) in CASES.items() if model is GPT])
def test_activations_are_upstreams(name, upstream):
    """The first stage's.  Upstream counts all of a GPT's heads and no gate, so LLAMA's are left out."""
    model, parallel = CASES[name]
    expected = upstream[name][1]
    if not parallel.sequence_parallel:
        expected /= 1.05  # upstream's allowance for temporaries there; here it is in MainJob.memory_reserve_bytes
    # Upstream multiplies the embedding's by the interleaved schedule's penalty, which is the layers'.
    tolerance = 0.005 if parallel.chunks > 1 else 1e-6
    assert peaks(model, parallel)[0] == pytest.approx(expected, rel=tolerance)
