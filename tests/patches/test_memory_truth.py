"""What a stage is said to hold against Megatron's own iteration under fake tensors, and the tracker that counts it."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from megatron.core.models.bert.bert_lm_head import BertLMHead
from megatron.core.models.bert.pooler import Pooler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron.fill.wings.configure.room import memory
from megatron.fill.wings.mainjob.held import micro_batch
from megatron.fill.wings.mainjob.kernels import Kernels
from megatron.fill.wings.mainjob.model import Latent, ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from tests.e2e import training
from tests.e2e.launch import FRESH, WARM
from tests.support import memory_truth
from tests.support.memory_cases import asked
from tests.support.memory_tracker import StorageTracker
from tests.support.memory_truth import Asked, Truth, answers, truths

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the CPU backend is for machines without CUDA")

GPT = ModelSpec(layers=2, hidden=256, heads=8, sequence=256, vocabulary=2048, positions=256)
EXPERTS = ModelSpec(
    layers=2,
    hidden=256,
    heads=8,
    sequence=256,
    vocabulary=2048,
    query_groups=4,
    swiglu=True,
    experts=4,
    experts_per_token=2,
    hidden_dropout=False,
    attention_dropout=False,
)
LATENT = replace(
    EXPERTS,
    layers=4,
    query_groups=None,
    latent=Latent(query=192, keys=128, head=32, rotated=16, value=32),
    dense_layers=1,
    dense_ffn=2048,
    predicted=1,
)
LATER = replace(GPT, positions=0, sequence=512, predicted=3)
UNFUSED = Kernels(fused_gate=False)
SHARED = replace(EXPERTS, layers=4, shared_width=2048)
VIRTUAL: dict[str, Any] = {"chunks": 2, "schedule": "interleaved", "global_batch": 2}
WIDE = replace(EXPERTS, layers=8, ffn_hidden=4096, experts=0, experts_per_token=1)
SELECTIVE: dict[str, Any] = {"recompute": Recompute.SELECTIVE, "recompute_modules": ("core_attn", "mlp", "moe")}
CASES = [
    ((GPT, Parallel(pp=2, tp=2, dp=2, global_batch=6, sequence_parallel=True, distributed_optimizer=True)), 0),
    ((GPT, Parallel(pp=2, global_batch=3, recompute=Recompute.SELECTIVE)), 1),
    ((WIDE, Parallel(pp=2, global_batch=3, recompute=Recompute.FULL, recomputed=1)), 0),
    ((WIDE, Parallel(pp=2, global_batch=3, recompute=Recompute.FULL, recomputed=3)), 1),
    ((EXPERTS, Parallel(pp=1, dp=2, ep=2, global_batch=2, distributed_optimizer=True)), 0),
    ((replace(EXPERTS, shared_width=512), Parallel(pp=1, dp=2, ep=2, global_batch=2, distributed_optimizer=True)), 0),
    ((replace(GPT, layers=4), Parallel(pp=2, global_batch=2, stage_layers=(3, 1))), 1),
    ((replace(GPT, layers=7), Parallel(pp=2, **VIRTUAL, stage_layers=(0, 4, 2, 1))), 0),
    ((WIDE, Parallel(pp=2, global_batch=2, **SELECTIVE)), 0),
    ((SHARED, Parallel(pp=2, global_batch=2, **SELECTIVE)), 0),
    ((SHARED, Parallel(pp=2, global_batch=2, recompute=Recompute.SELECTIVE, recompute_modules=("shared_experts",))), 0),
    ((LATENT, Parallel(pp=2, global_batch=2)), 0),
    ((LATENT, Parallel(pp=2, global_batch=2)), 1),
    ((LATENT, Parallel(pp=2, global_batch=2, recompute=Recompute.FULL, recomputed=1)), 1),
    ((LATENT, Parallel(pp=3, global_batch=2, stage_layers=(2, 2, 0), later_stage=1)), 1),
    ((replace(LATER, layers=4), Parallel(pp=3, global_batch=2, stage_layers=(3, 1, 0), later_stage=1)), 1),
    ((SHARED, Parallel(pp=2, tp=2, global_batch=2, sequence_parallel=True)), 0),
    ((replace(SHARED, kernels=UNFUSED), Parallel(pp=2, global_batch=2)), 0),
    ((replace(WIDE, kernels=UNFUSED), Parallel(pp=2, global_batch=2)), 0),
    ((LATER, Parallel(pp=1, global_batch=2, recompute=Recompute.FULL)), 0),
]


NOT_RUN = Asked(("--num-layers", "2"), 0, 1)
ENDLESS = asked((GPT, Parallel(pp=1, global_batch=1, **SELECTIVE)), 0)


@pytest.fixture(scope="module")
def found() -> list[Truth | RuntimeError]:
    """The truths of all cases, and of the two that have none, by one process.

    It is forked from one that has imported torch.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(WARM, os.environ[FRESH])
        patch.setattr(memory_truth, "PYTHON", [sys.executable, str(training.HERE / "launch.py"), "0"])
        return list(answers([*(asked(*one) for one in CASES), NOT_RUN, ENDLESS]))


def test_the_accounting_is_what_megatron_allocates(found):
    """Small sizes make what the accounting leaves out, biases among it, larger than it is."""
    for (case, stage), truth in zip(CASES, found[:-2], strict=True):
        assert isinstance(truth, Truth), truth
        held = memory(*case)[stage]
        assert held.total_bytes == pytest.approx(truth.peak_bytes, rel=0.02), case
        assert held.total_bytes - held.activations_bytes == pytest.approx(truth.states_bytes, rel=0.01), case


def test_what_megatron_does_not_run_is_an_error_that_says_which(found, monkeypatch):
    monkeypatch.setattr(memory_truth, "answers", lambda asked: iter(found[-3:]))
    read = truths([])
    assert next(read) == found[-3]
    with pytest.raises(RuntimeError, match="rank 0 of --num-layers 2: "):
        next(read)


def test_a_recomputation_that_never_ends_is_an_error_too(found):
    """Megatron's own, of a dense MLP that leaves its bias to the layer."""
    assert isinstance(found[-1], RuntimeError)
    assert "returns its bias never ends; expected no bias" in str(found[-1])


def test_the_tracker_counts_storages_once_and_forgets_them():
    with FakeTensorMode(), StorageTracker() as tracker:
        one = torch.empty(1000, dtype=torch.float32)
        view = one.view(10, 100)[2:]
        assert tracker.now_bytes == 4000
        del one
        assert tracker.now_bytes == 4000
        del view
        assert (tracker.now_bytes, tracker.peak_bytes) == (0, 4000)
        tracker.restart()
        assert tracker.peak_bytes == 0


def test_the_tracker_sees_a_leak():
    """Of a training step that keeps its activations; one that lets them go ends where it began."""
    kept: list[torch.Tensor] = []

    def step(weights: torch.Tensor, leaks: bool) -> None:
        hidden = torch.empty(64, 128) @ weights
        hidden.relu().sum().backward()
        weights.grad = None
        if leaks:
            kept.append(hidden.detach())

    with FakeTensorMode(), StorageTracker() as tracker:
        weights = torch.nn.Parameter(torch.empty(128, 256))
        step(weights, False)
        gc.collect()
        before = tracker.now_bytes
        step(weights, False)
        gc.collect()
        assert tracker.now_bytes == before
        step(weights, True)
        gc.collect()
        assert tracker.now_bytes == before + 4 * 64 * 256


def test_a_fused_function_counts_with_what_it_returns_and_keeps():
    def gelu(given: torch.Tensor) -> torch.Tensor:
        return (given * 2 + 1).tanh() * 3  # tanh keeps its result; the rest is let go of

    with FakeTensorMode(), StorageTracker() as tracker:
        given = torch.empty(100, requires_grad=True)
        tracker.restart()
        out = tracker.fused(gelu)(given)
        assert tracker.peak_bytes == tracker.now_bytes == 3 * 400
        out.sum().backward()


def test_berts_heads_have_the_parameters_and_keep_the_activations_that_are_counted():
    config = TransformerConfig(num_layers=2, hidden_size=256, num_attention_heads=8, perform_initialization=False)
    words, pairs = replace(GPT, word_head=True), replace(GPT, word_head=True, pair_head=True)
    with FakeTensorMode(), StorageTracker() as tracker:
        head, pooler = BertLMHead(256, config), Pooler(256, lambda weight: weight, config)
        binary = torch.nn.Linear(256, 2)
        counts = [sum(its.numel() for its in module.parameters()) for module in (head, pooler, binary)]
        given = torch.empty(256, 1, 256, requires_grad=True)
        before = tracker.now_bytes
        found = head(given)
        kept = tracker.now_bytes - before
        assert found.shape == given.shape
    assert words.head_parameters == counts[0]
    assert pairs.head_parameters == sum(counts)
    its = Parallel(pp=1, global_batch=1, precision=Precision.FP32)
    more = micro_batch(words, its).output - micro_batch(GPT, its).output
    assert more == pytest.approx(kept, rel=0.02)  # the norm's two numbers per token are left out
