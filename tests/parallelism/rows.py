"""The trainings of ``check.py``, each with what must be seen of its ranks for its flags to have had effect.

An expectation is a path into the facts that ``probe.py`` writes, and the value there on every rank; see
``Stages``, ``AtLeast``, ``Has``, ``Lacks`` and ``Starts`` for others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01 --swiglu --disable-bias-linear "
    "--expert-model-parallel-size 2"
)
INTERLEAVED = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1"
TENSOR, CONTEXT, SHARDED = "--tensor-model-parallel-size 2", "--context-parallel-size 2", "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
ALLTOALL = "--moe-token-dispatcher-type alltoall"


@dataclass(frozen=True, slots=True)
class AtLeast:
    least: float

    def met(self, value: Any) -> bool:
        return value >= self.least


@dataclass(frozen=True, slots=True)
class Has:
    """A list has this in it."""

    part: str

    def met(self, value: Any) -> bool:
        return self.part in value


@dataclass(frozen=True, slots=True)
class Lacks:
    """A list has not this in it."""

    part: str

    def met(self, value: Any) -> bool:
        return self.part not in value


@dataclass(frozen=True, slots=True)
class Starts:
    """A text begins with this."""

    text: str

    def met(self, value: Any) -> bool:
        return value.startswith(self.text)


@dataclass(frozen=True, slots=True)
class Stages:
    """Expectations of the ranks of the first stage and of those of the last."""

    first: Any
    last: Any


Expected = Mapping[str, Any]  # by path


@dataclass(frozen=True, slots=True)
class Row:
    """A training of two stages.

    Attributes:
        ranks: how many.
        flags: besides the model's, quoted as in a shell.
        expected: what must be seen of its ranks.
        without: the model's flags that are left out, with their values.
        iterations: how many it needs for what is expected, if more than the others.
    """

    ranks: int
    flags: str = ""
    expected: Expected = field(default_factory=dict)
    without: tuple[str, ...] = ()
    iterations: int = 0


def at(facts: Mapping[str, Any], path: str) -> Any:
    """The value at a path such as ``groups.tensor`` or ``layer_input.0``; None if nothing is there."""
    value: Any = facts
    try:
        for part in path.split("."):
            value = value[int(part) if isinstance(value, list) else part]
    except (KeyError, IndexError):
        return None
    return value


def unmet(expected: Expected, ranks: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each expectation that a rank does not meet; one where nothing is expected or no rank was seen."""
    if not expected:
        return ["nothing is expected of this row"]
    if not ranks:
        return ["no rank wrote what it trains"]
    return [
        f"{path} of rank {rank} is {at(facts, path)!r}; expected {wanted!r}"
        for path, value in expected.items()
        for rank, facts in enumerate(ranks)
        if not _met(wanted := _of(value, facts["stage"]), at(facts, path))
    ]


def _of(value: Any, stage: int) -> Any:
    if isinstance(value, Stages):
        return value.last if stage else value.first
    return value


def _met(wanted: Any, value: Any) -> bool:
    if value is None:
        return False
    return wanted.met(value) if hasattr(wanted, "met") else bool(wanted == value)


SPLIT = {"groups.tensor": 2}
SEQUENCE = {"config.sequence_parallel": True, "layer_input.0": 8}  # of 16
CONTEXTS = {"groups.context": 2, "layer_input.0": 8}
REPLICAS = {"groups.data": 2}
REDUCED = {"ddp.overlap_grad_reduce": True, "calls.gradients_ready": AtLeast(1)}
SHARDS = {"ddp.use_distributed_optimizer": True, "optimizers": Has("DistributedOptimizer")}
OVERLAPS = {
    **REDUCED,
    **SHARDS,
    "ddp.overlap_param_gather": True,
    "calls.parameters_waited": AtLeast(1),
}
EXPERTS = {"groups.experts": 2, "config.num_moe_experts": 4, "modules": Has("TopKRouter")}
SENT = {**EXPERTS, "calls.alltoall": AtLeast(1), "calls.allgather": 0}
CHUNKS = {"layers": [1, 1]}

ROWS: dict[str, Row] = {
    "step-batch-size-schedule": Row(
        2,
        # In sequences of 64 tokens the batch is of 4 after 16 iterations and of 8 after 40.
        '--step-batch-size-schedule "0:2 2K:4 8K:8" --seq-length 64 --max-position-embeddings 64',
        {"batch_changes": AtLeast(2), "forwards.0": 2},
        without=("--global-batch-size",),
        iterations=45,
    ),
    "tensor": Row(4, TENSOR, SPLIT),
    "tensor-sequence": Row(4, f"{TENSOR} --sequence-parallel", {**SPLIT, **SEQUENCE}),
    "data": Row(4, "", REPLICAS),
    "data-overlapped": Row(4, "--overlap-grad-reduce", {**REPLICAS, **REDUCED}),
    "data-unaligned": Row(
        4,
        f"{SHARDED} --overlap-grad-reduce --no-align-grad-reduce",
        {**REPLICAS, **REDUCED, **SHARDS, "reduced_for_all_stages_at_once": False},
    ),
    "distributed-optimizer": Row(4, SHARDED, {**REPLICAS, **SHARDS}),
    "distributed-optimizer-overlapped": Row(4, OVERLAPPED, {**REPLICAS, **OVERLAPS}),
    "context": Row(4, CONTEXT, CONTEXTS),
    "experts-alltoall": Row(4, f"{MOE} {ALLTOALL}", SENT),
    "experts-allgather": Row(
        4,
        f"{MOE} --moe-token-dispatcher-type allgather",
        {**EXPERTS, "calls.alltoall": 0, "calls.allgather": AtLeast(1)},
    ),
    "tensor-data": Row(8, f"{TENSOR} --sequence-parallel {OVERLAPPED}", {**SPLIT, **SEQUENCE, **REPLICAS, **OVERLAPS}),
    "tensor-data-gpipe": Row(
        8,
        f"{TENSOR} --fill-pipeline-schedule gpipe",
        {**SPLIT, **REPLICAS, "order": "F0 F0 F0 F0 B0 B0 B0 B0"},
    ),
    "tensor-pipeline-data-order": Row(
        8, f"{TENSOR} --use-tp-pp-dp-mapping", {**SPLIT, **REPLICAS, "pipeline_stride": 2}
    ),
    "tensor-context": Row(
        8,
        f"{TENSOR} --sequence-parallel {CONTEXT}",
        {**SPLIT, **CONTEXTS, "config.sequence_parallel": True, "layer_input.0": 4},
    ),
    "tensor-experts": Row(8, f"{TENSOR} --sequence-parallel {MOE} {ALLTOALL}", {**SPLIT, **SEQUENCE, **SENT}),
    "context-data-experts": Row(8, f"{CONTEXT} {MOE} {ALLTOALL} {SHARDED}", {**CONTEXTS, **REPLICAS, **SENT, **SHARDS}),
    "interleaved-data": Row(4, f"{INTERLEAVED} {OVERLAPPED}", {**CHUNKS, **REPLICAS, **OVERLAPS}),
    "interleaved-tensor": Row(4, f"{INTERLEAVED} {TENSOR} --sequence-parallel", {**CHUNKS, **SPLIT, **SEQUENCE}),
    "interleaved-flush": Row(
        2,
        f"{INTERLEAVED} --overlap-p2p-communication-warmup-flush",
        {**CHUNKS, "config.overlap_p2p_comm_warmup_flush": True},
    ),
    "interleaved-groups": Row(
        2,
        f"{INTERLEAVED} --microbatch-group-size-per-virtual-pipeline-stage 4",
        {**CHUNKS, "config.microbatch_group_size_per_vp_stage": 4, "order": Starts("F0 F0 F0 F0 F1")},
    ),
    "interleaved-experts": Row(4, f"{INTERLEAVED} {MOE} {ALLTOALL}", {**CHUNKS, **SENT}),
    "interleaved-experts-overlapped": Row(
        4,
        f"{INTERLEAVED} {MOE} {ALLTOALL} --bf16 --overlap-moe-expert-parallel-comm",
        {**CHUNKS, **SENT, "dtypes": Has("torch.bfloat16"), "calls.layers_overlapped": AtLeast(1)},
    ),
    "recompute-full": Row(
        2,
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        {"config.recompute_granularity": "full", "calls.recomputed": AtLeast(1)},
    ),
    "recompute-selective": Row(
        2,
        "--recompute-granularity selective",
        {"config.recompute_granularity": "selective", "calls.recomputed": AtLeast(1)},
    ),
    "llama": Row(
        2,
        "--swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope "
        "--group-query-attention --num-query-groups 2",
        {
            "activation": "silu",
            "config.gated_linear_unit": True,
            "config.add_bias_linear": False,
            "modules": Has("RMSNorm"),
            "position_embedding": "rope",
            "query_rows": 64,  # 32 of four heads' queries, 16 of two groups' keys, 16 of their values
        },
    ),
    "bf16": Row(4, "--bf16", {"dtypes": Has("torch.bfloat16")}),
    "fp16": Row(4, "--fp16", {"dtypes": Has("torch.float16"), "loss_scale": AtLeast(2)}),
    "uneven-first": Row(2, "--num-layers 4 --decoder-first-pipeline-num-layers 1", {"layers": Stages([1], [3])}),
    "uneven-last": Row(2, "--num-layers 4 --decoder-last-pipeline-num-layers 1", {"layers": Stages([3], [1])}),
    "uneven-layout": Row(2, "--num-layers 3 --pipeline-model-parallel-layout Et|ttL", {"layers": Stages([1], [2])}),
    "embedding-counted": Row(
        2, "--num-layers 3 --account-for-embedding-in-pipeline-split", {"layers": Stages([1], [2])}
    ),
    "loss-counted": Row(2, "--num-layers 3 --account-for-loss-in-pipeline-split", {"layers": Stages([2], [1])}),
    "untied-embeddings": Row(2, "--untie-embeddings-and-output-weights", {"tied_embeddings": False}),
    "more-tokens": Row(
        2,
        "--mtp-num-layers 1 --position-embedding-type rope --use-rotary-position-embeddings",
        {
            "position_embedding": "rope",
            "modules": Stages(Lacks("MultiTokenPredictionBlock"), Has("MultiTokenPredictionBlock")),
        },
    ),
    # Four microbatches in each of two iterations.
    "evaluations": Row(4, "--eval-interval 3 --eval-iters 2", {"evaluated.3": 8, "evaluated.6": 8}),
    "loss-per-token": Row(4, "--calculate-per-token-loss", {"config.calculate_per_token_loss": True}),
    "zeros-and-norm": Row(
        2,
        "--log-num-zeros-in-grad --log-params-norm",
        {"zeros_counted": True, "calls.parameter_norms": AtLeast(1)},
    ),
    "memory-emptied": Row(2, "--empty-unused-memory-level 2", {"calls.cache_emptied": AtLeast(10)}),
    "embedding-deferred": Row(2, "--defer-embedding-wgrad-compute", {"config.defer_embedding_wgrad_compute": True}),
    "optimizer-instances": Row(
        8,
        f"{SHARDED} --num-distributed-optimizer-instances 2 --overlap-grad-reduce --calculate-per-token-loss",
        {**SHARDS, **REDUCED, "groups.optimizer_instances": 2, "config.calculate_per_token_loss": True},
    ),
    "gather-with-step": Row(
        4,
        f"{INTERLEAVED} {OVERLAPPED} --overlap-param-gather-with-optimizer-step --ckpt-format torch",
        {**CHUNKS, **REPLICAS, **OVERLAPS, "gather_with_step": True, "calls.parameters_sent": AtLeast(1)},
    ),
}
