"""Trainings whose memory is found by ``memory_truth``: forty of every kind, and as many random ones as are wanted."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from megatron.fill.wings.configure.flags import layout_flags
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from tests.support.memory_truth import Asked

Case = tuple[ModelSpec, Parallel]

_GPT = ModelSpec(layers=8, hidden=2048, heads=16, sequence=2048, vocabulary=51200, positions=2048)
_SMALL = replace(_GPT, hidden=1024, sequence=1024, positions=1024)
_LLAMA = ModelSpec(
    layers=8,
    hidden=2048,
    heads=32,
    sequence=2048,
    vocabulary=32768,
    ffn_hidden=5632,
    query_groups=8,
    swiglu=True,
    tied_embeddings=False,
    hidden_dropout=False,
    attention_dropout=False,
)
_EXPERTS = replace(_LLAMA, hidden=1024, heads=16, ffn_hidden=2048, experts=8, experts_per_token=2)
_SELECTIVE: dict[str, Any] = {"recompute": Recompute.SELECTIVE}
_FULL: dict[str, Any] = {"recompute": Recompute.FULL}
_SP: dict[str, Any] = {"sequence_parallel": True}
_DIST: dict[str, Any] = {"distributed_optimizer": True}


def _its(pp: int, batch: int, **fields: Any) -> Parallel:
    if fields.get("chunks", 1) > 1:
        fields["schedule"] = "interleaved"
    return Parallel(pp=pp, global_batch=batch, **fields)


CASES: dict[str, Case] = {
    "one GPU": (_SMALL, _its(1, 2)),
    "pipeline": (_GPT, _its(4, 5)),
    "few micro-batches": (_GPT, _its(4, 2)),
    "eight stages": (_GPT, _its(8, 8)),
    "micro-batch of 2": (_GPT, _its(4, 10, microbatch=2)),
    "micro-batch of 4": (_SMALL, _its(2, 12, microbatch=4)),
    "tensor": (_GPT, _its(2, 3, tp=4)),
    "tensor, sequence": (_GPT, _its(2, 3, tp=4, **_SP)),
    "tensor 8, sequence": (_GPT, _its(2, 3, tp=8, **_SP)),
    "wide, tensor 8": (replace(_GPT, hidden=8192, heads=64), _its(4, 4, tp=8, **_SP)),
    "replicas": (_GPT, _its(2, 12, dp=4)),
    "distributed": (_GPT, _its(2, 12, dp=4, **_DIST)),
    "distributed over 64": (_GPT, _its(2, 192, dp=64, **_DIST)),
    "tensor, distributed": (_GPT, _its(2, 16, tp=2, dp=4, **_SP, **_DIST)),
    "selective": (_GPT, _its(4, 5, **_SELECTIVE)),
    "selective, tensor": (_GPT, _its(2, 3, tp=4, **_SP, **_SELECTIVE)),
    "selective, micro-batch of 4": (_SMALL, _its(2, 12, microbatch=4, **_SELECTIVE)),
    "full": (_GPT, _its(4, 5, **_FULL)),
    "full, tensor": (_GPT, _its(2, 3, tp=4, **_SP, **_FULL)),
    "full, distributed": (_GPT, _its(4, 20, dp=2, microbatch=2, **_DIST, **_FULL)),
    "virtual": (_GPT, _its(2, 4, chunks=2)),
    "virtual, tensor": (_GPT, _its(2, 2, tp=4, chunks=2, **_SP)),
    "virtual, selective": (_GPT, _its(2, 4, chunks=2, **_SELECTIVE)),
    "virtual, full": (_GPT, _its(2, 4, chunks=2, **_FULL)),
    "uneven": (_GPT, _its(4, 5, first_layers=1, last_layers=1)),
    "uneven, two stages": (replace(_GPT, layers=7), _its(2, 3, first_layers=4, last_layers=3)),
    "uneven, selective": (replace(_GPT, layers=10), _its(4, 5, first_layers=3, last_layers=1, **_SELECTIVE)),
    "long": (replace(_SMALL, sequence=8192, positions=8192), _its(2, 2)),
    "long, selective": (replace(_SMALL, sequence=8192, positions=8192), _its(2, 2, tp=2, **_SP, **_SELECTIVE)),
    "short": (replace(_GPT, sequence=512, positions=512), _its(4, 10, microbatch=2)),
    "large vocabulary": (replace(_SMALL, vocabulary=262144), _its(4, 5)),
    "large vocabulary, tensor": (replace(_GPT, vocabulary=262144), _its(2, 3, tp=4, **_SP, **_SELECTIVE)),
    "no dropout": (replace(_GPT, hidden_dropout=False, attention_dropout=False), _its(4, 5)),
    "groups, swiglu": (_LLAMA, _its(4, 5)),
    "groups, swiglu, tensor": (_LLAMA, _its(2, 6, tp=4, dp=2, **_SP, **_DIST)),
    "groups, swiglu, selective": (_LLAMA, _its(2, 4, chunks=2, **_SELECTIVE)),
    "experts": (_EXPERTS, _its(2, 4)),
    "experts, divided": (_EXPERTS, _its(2, 12, dp=4, ep=4, **_DIST)),
    "experts, tensor": (_EXPERTS, _its(2, 6, tp=2, dp=2, ep=2, **_SP, **_DIST, **_SELECTIVE)),
    "half precision": (_GPT, _its(4, 10, dp=2, precision=Precision.FP16, **_DIST)),
}


def random_case(source: random.Random) -> Case:
    """A small training of any kind, on up to 512 GPUs; few passes, so that its truth is found in seconds."""
    tp, pp = source.choice((1, 1, 2, 4, 8)), source.choice((1, 2, 2, 4, 4, 8))
    chunks = source.choice((1, 1, 1, 2)) if pp > 1 else 1
    microbatch, dp = source.choice((1, 1, 2, 4)), source.choice((1, 1, 2, 4, 8))
    experts = source.choice((0, 0, 0, 8))
    llama, dropout = bool(experts) or source.random() < 0.4, source.random() < 0.5
    heads = source.choice((8, 16, 32))
    rest = pp > 2 and chunks == 1 and source.random() < 0.3
    each = source.choice((1, 1, 2)) if pp > 2 else source.choice((1, 2, 3))
    model = ModelSpec(
        layers=each * (pp - 2) + 2 if rest else each * pp * chunks,
        hidden=heads * source.choice((64, 128)),
        heads=heads,
        sequence=(sequence := source.choice((512, 1024, 2048, 4096))),
        vocabulary=source.choice((16384, 32768, 51200, 131072)),
        ffn_hidden=heads * source.choice((192, 256, 352)) if llama else None,
        query_groups=8 if llama and source.random() < 0.7 else None,
        swiglu=llama,
        tied_embeddings=source.random() < 0.5,
        experts=experts,
        experts_per_token=source.choice((1, 2)) if experts else 1,
        positions=0 if llama else sequence,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    microbatches = pp * source.choice((1, 2)) if chunks > 1 else min(pp + source.choice((0, 1)), 8)
    its = _its(
        pp,
        microbatches * microbatch * dp,
        tp=tp,
        dp=dp,
        ep=source.choice([its for its in (1, 2, 4, 8) if dp % its == 0]) if experts else 1,
        chunks=chunks,
        microbatch=microbatch,
        sequence_parallel=tp > 1 and (bool(experts) or source.random() < 0.8),
        recompute=source.choice(list(Recompute)),
        precision=source.choice((Precision.BF16,) * 4 + (Precision.FP16, Precision.FP32)),
        distributed_optimizer=dp > 1 and source.random() < 0.7,
        **({"first_layers": 1, "last_layers": 1} if rest else {}),
    )
    return model, its


def model_flags(model: ModelSpec) -> list[str]:
    """A model as Megatron's flags.  Its tokenizer adds one to ``--vocab-size``."""
    flags = [
        *("--num-layers", str(model.layers), "--hidden-size", str(model.hidden)),
        *("--num-attention-heads", str(model.heads), "--seq-length", str(model.sequence)),
        *("--max-position-embeddings", str(model.positions or model.sequence)),
        *("--position-embedding-type", "learned_absolute" if model.positions else "rope"),
        *("--vocab-size", str(model.vocabulary - 1), "--ffn-hidden-size", str(model.dense_ffn or model.ffn)),
    ]
    if model.latent is not None:
        latent = model.latent
        flags += ["--multi-latent-attention", "--qk-layernorm", "--no-rope-fusion", "--kv-lora-rank", str(latent.keys)]
        flags += ["--qk-head-dim", str(latent.head), "--qk-pos-emb-head-dim", str(latent.rotated)]
        flags += ["--v-head-dim", str(latent.value)]
        flags += ["--q-lora-rank", str(latent.query)] if latent.query else []
    if model.dense_layers:
        rest = model.layers - model.dense_layers
        flags += ["--moe-layer-freq", f"([0]*{model.dense_layers}+[1]*{rest})", "--moe-ffn-hidden-size", str(model.ffn)]
    if model.predicted:
        flags += ["--mtp-num-layers", str(model.predicted)]
    if model.groups < model.heads:
        flags += ["--group-query-attention", "--num-query-groups", str(model.groups)]
    if model.experts:
        flags += ["--num-experts", str(model.experts), "--moe-router-topk", str(model.experts_per_token)]
    if model.shared_width:
        flags += ["--moe-shared-expert-intermediate-size", str(model.shared_width)]
    switches = {
        "--moe-router-pre-softmax": bool(model.experts) and model.experts_per_token == 1,  # as Megatron demands
        "--swiglu": model.swiglu,
        "--no-bias-swiglu-fusion": model.swiglu and not model.kernels.fused_gate,
        "--disable-bias-linear": model.swiglu,
        "--untie-embeddings-and-output-weights": not model.tied_embeddings,
    }
    flags += [flag for flag, on in switches.items() if on]
    for flag, on in (("--hidden-dropout", model.hidden_dropout), ("--attention-dropout", model.attention_dropout)):
        flags += [] if on else [flag, "0"]
    return flags


def asked(case: Case, stage: int) -> Asked:
    """The first rank of a stage."""
    model, its = case
    reduced = ["--bf16", "--grad-reduce-in-bf16", "--no-gradient-accumulation-fusion"]
    flags_of = {Precision.BF16: ["--bf16"], Precision.FP16: ["--fp16"], Precision.BF16_GRADIENTS: reduced}
    precision = flags_of.get(its.precision, [])
    flags = [
        *model_flags(model),
        *layout_flags(its, model.predicted),
        "--global-batch-size",
        str(its.global_batch),
        *precision,
    ]
    return Asked(tuple(flags), stage * its.gpus // its.pp, its.gpus)


def stages(its: Parallel) -> list[int]:
    """Which are compared: both ends."""
    return sorted({0, its.pp - 1})
