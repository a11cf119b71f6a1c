"""A recipe made small enough for a few cores: its sizes shrink, its features stay.

What has to go because it needs Transformer Engine, CUDA, a file or a service that is not here is listed with each
recipe.  ``{folder}`` in the flags stands for the folder of the training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from tests.parallelism.recipes.read import FROZEN, PIPELINE, RESUMED, Recipe, Value

MOST_RANKS = 8
ENDLESS = 100_000  # iterations; the training is ended from outside
SCHEDULE = 100  # iterations, of the learning rate
SEQUENCE, VOCABULARY, HEAD = 32, 255, 8  # tokens, words, width of a head
TENSOR, CONTEXT = "--tensor-model-parallel-size", "--context-parallel-size"
EXPERT, EXPERT_TENSOR = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
PER_CHUNK, CHUNKS = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
# The recipe's point, if it has one of these: nothing is reduced or sharded where there is one data-parallel rank.
DATA_PARALLEL = (
    *("--use-distributed-optimizer", "--overlap-grad-reduce", "--ddp-average-in-collective"),
    "--check-weight-hash-across-dp-replicas-interval",
)
# With one of these the number of layers is part of the recipe.
UNEVEN = (
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers", "--pipeline-model-parallel-layout"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
)
FIXED = {
    "--seq-length": SEQUENCE,
    "--max-position-embeddings": SEQUENCE,
    "--micro-batch-size": 1,
    "--kv-channels": HEAD,
    "--moe-ffn-hidden-size": 32,
    "--moe-shared-expert-intermediate-size": 32,
    "--q-lora-rank": 16,
    "--kv-lora-rank": 16,
    "--qk-head-dim": HEAD,
    "--qk-pos-emb-head-dim": HEAD,
    "--v-head-dim": HEAD,
    "--dsa-indexer-n-heads": 4,
    "--dsa-indexer-head-dim": 16,
    "--dsa-indexer-topk": 16,
    "--make-vocab-size-divisible-by": 128,
    "--lr-decay-iters": SCHEDULE,
    "--lr-warmup-iters": 1,
    "--eval-interval": 6,
    "--eval-iters": 1,
    "--manual-gc-interval": 4,
    "--save-interval": ENDLESS,  # one is saved at the end
    "--save-retain-interval": ENDLESS,
    "--check-weight-hash-across-dp-replicas-interval": 4,
}
# None: the flag goes.
REPLACED: dict[str, dict[str, str | None]] = {
    "--transformer-impl": {"transformer_engine": "local"},
    "--attention-backend": {"fused": "unfused", "flash": "unfused", "auto": "unfused"},
    "--cross-entropy-fusion-impl": {"te": "native"},
    "--distributed-backend": {"nccl": "gloo"},
}
NEEDS_CUDA = (
    *("--use-flash-attn", "--moe-grouped-gemm", "--moe-permute-fusion", "--moe-router-fusion", "--tp-comm-overlap"),
    *("--tp-comm-overlap-cfg", "--te-rng-tracker", "--use-flashinfer-fused-rope"),
)
# Files and services that are not here, and what says when to end.
GONE = (
    *("--data-path", "--vocab-file", "--merge-file", "--tokenizer-type", "--tokenizer-model", "--tiktoken-pattern"),
    *("--vocab-size", "--padded-vocab-size", "--num-workers", "--exit-interval", "--exit-duration-in-mins"),
    *("--train-iters", "--tensorboard-dir", "--wandb-project", "--wandb-entity", "--wandb-exp-name"),
    "--wandb-save-dir",
)
WORDS = f"--mock-data --tokenizer-type NullTokenizer --vocab-size {VOCABULARY}"
# In a very short sequence no word is masked, and the loss is 0 / 0.
BERT_WORDS = (
    "--data-path {folder}/corpus --tokenizer-type HuggingFaceTokenizer --tokenizer-model {folder}/tokenizer "
    "--short-seq-prob 0"
)


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A recipe as it is trained here.

    Attributes:
        flags: all but those of PipeFill; ``{folder}`` in them stands for the training's folder.
        resumed: it is trained to a checkpoint, and from there on by a second start.
        replaced: what had to change besides sizes, in words.
    """

    ranks: int
    flags: tuple[str, ...]
    resumed: bool
    replaced: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """The parallel sizes of a training."""

    tensor: int
    pipeline: int
    context: int
    expert: int
    expert_tensor: int
    data: int = 1

    @property
    def ranks(self) -> int:
        """The fewest that hold a whole number of pipelines and of experts' pipelines, times the data-parallel ranks."""
        dense, sparse = self.tensor * self.context, self.expert * self.expert_tensor
        return math.lcm(dense, sparse) * self.pipeline * self.data

    @property
    def replicas(self) -> int:
        """Data-parallel ranks as Megatron counts them."""
        return self.ranks // (self.tensor * self.pipeline * self.context)


def layout(flags: Mapping[str, Value]) -> Layout:
    """The parallel sizes of a recipe, halved one after the other until they fit on ``MOST_RANKS``."""
    tensor = int(flags.get(TENSOR, 1))
    sizes = {
        "expert": int(flags.get(EXPERT, 1)),
        "pipeline": int(flags[PIPELINE]),
        "tensor": tensor,
        "context": int(flags.get(CONTEXT, 1)),
        "expert_tensor": int(flags.get(EXPERT_TENSOR, tensor)),
    }
    for name, least in (("expert", 2), ("pipeline", 4), ("tensor", 2), ("expert_tensor", 2), ("context", 2)):
        if Layout(**sizes).ranks > MOST_RANKS:
            sizes[name] = min(sizes[name], least)
            if EXPERT_TENSOR not in flags:
                sizes["expert_tensor"] = sizes["tensor"]
    if Layout(**sizes).ranks > MOST_RANKS:
        sizes["pipeline"] = 2
    found = Layout(**sizes)
    wanted = any(name in flags for name in DATA_PARALLEL) and found.replicas == 1
    return Layout(**sizes, data=2 if wanted and 2 * found.ranks <= MOST_RANKS else 1)


def shrink(recipe: Recipe) -> Shrunk:
    """The recipe with small sizes, on as few ranks as its kinds of parallelism need, at most ``MOST_RANKS``."""
    flags, placed, replaced = dict(recipe.flags), layout(recipe.flags), list[str]()
    for name, size in _parallel(placed).items():
        if name in flags and int(flags[name]) != size:
            replaced.append(f"{name} {flags[name]} -> {size}")
            flags[name] = str(size)
    for name, values in REPLACED.items():
        if name in flags and (new := values.get(str(flags[name]))) is not None:
            if name != "--distributed-backend":
                replaced.append(f"{name} {flags[name]} -> {new}")
            flags[name] = new
    for name in NEEDS_CUDA:
        if flags.pop(name, None) is not None:
            replaced.append(f"without {name}")
    for name in GONE:
        flags.pop(name, None)
    if flags.get("--async-save") and flags.get("--async-strategy") != "mcore":
        flags["--async-strategy"] = "mcore"  # the other is of a package for CUDA
        replaced.append("--async-strategy mcore")
    if recipe.kind in FROZEN:
        replaced.append("from its own first iterations, not NVIDIA's checkpoint")
    flags |= {name: str(size) for name, size in FIXED.items() if name in flags}
    flags |= {name: "1" for name, value in flags.items() if value == "${REPEAT}"}  # the number of the test's run
    flags |= _model(flags, placed) | _batches(flags, placed)
    if recipe.family == "bert" and flags.get("--spec") != "local":
        replaced.append("--spec local --attention-backend local")  # its script's --transformer-impl
        flags |= {"--spec": "local", "--attention-backend": "local"}
    flags |= {"--save": "{folder}/checkpoints", "--load": "{folder}/checkpoints", "--data-cache-path": "{folder}/cache"}
    words = BERT_WORDS if recipe.family == "bert" else WORDS
    return Shrunk(
        placed.ranks, (*_arguments(flags), *words.split()), recipe.kind in RESUMED, tuple(sorted(set(replaced)))
    )


def _parallel(placed: Layout) -> dict[str, int]:
    return {
        TENSOR: placed.tensor,
        PIPELINE: placed.pipeline,
        CONTEXT: placed.context,
        EXPERT: placed.expert,
        EXPERT_TENSOR: placed.expert_tensor,
    }


def _model(flags: Mapping[str, Value], placed: Layout) -> dict[str, str]:
    """Its sizes: a layer in each chunk of the pipeline, two chunks a rank where it is interleaved."""
    heads = max(4, 2 * placed.tensor)
    sizes = {"--num-attention-heads": heads, "--hidden-size": HEAD * heads}
    if "--ffn-hidden-size" in flags:
        sizes["--ffn-hidden-size"] = 2 * HEAD * heads
    if "--num-query-groups" in flags:
        sizes["--num-query-groups"] = heads // 2
    layers = int(flags.get("--num-layers", 0))
    if layers and not any(name in flags for name in UNEVEN):
        interleaved = PER_CHUNK in flags or CHUNKS in flags
        layers = placed.pipeline * (2 if interleaved else 1)
        sizes |= {name: size for name, size in ((PER_CHUNK, 1), (CHUNKS, 2)) if name in flags}
    if layers:
        sizes["--num-layers"] = layers
    found = {name: str(size) for name, size in sizes.items()}
    if "--num-experts" in flags:
        experts = min(int(flags["--num-experts"]), max(4, 2 * placed.expert))
        topk = min(int(flags.get("--moe-router-topk", 2)), 2)
        found |= {"--num-experts": str(experts), "--moe-router-topk": str(topk)}
        if "--moe-router-num-groups" in flags:
            found |= {"--moe-router-num-groups": "2", "--moe-router-group-topk": "1"}
        if str(flags.get("--moe-layer-freq", "")).startswith("(") and layers != int(flags["--num-layers"]):
            found["--moe-layer-freq"] = f"([0]*1+[1]*{layers - 1})"
    return found


def _batches(flags: Mapping[str, Value], placed: Layout) -> dict[str, str]:
    """Four micro-batches a pipeline or two groups of them, and a schedule of the learning rate as short as the run."""
    group = int(flags.get("--microbatch-group-size-per-virtual-pipeline-stage", 2))
    batch = max(4, 2 * group) * placed.replicas
    found: dict[str, str] = {}
    if "--step-batch-size-schedule" in flags:  # batches from so many tokens on
        step = 4 * batch * SEQUENCE
        found["--step-batch-size-schedule"] = f"0:{batch} {step}:{2 * batch} {3 * step}:{3 * batch}"
        found["--eval-global-batch-size"] = str(batch)
    else:
        found["--global-batch-size"] = str(batch)
    samples = {"--train-samples": ENDLESS, "--lr-decay-samples": SCHEDULE, "--lr-warmup-samples": 2}
    for name, iterations in samples.items():
        if name in flags:
            found[name] = "0" if flags[name] == "0" else str(iterations * batch)
    if "--train-samples" not in flags and "--lr-warmup-samples" in flags and "--lr-decay-iters" not in flags:
        found["--lr-decay-iters"] = str(SCHEDULE)
    return found


def _arguments(flags: Mapping[str, Value]) -> list[str]:
    """A schedule of batches and a pattern of layers are one argument, other values with spaces several."""
    arguments = []
    for name, value in flags.items():
        arguments.append(name)
        if name in ("--step-batch-size-schedule", "--moe-layer-freq"):
            arguments.append(str(value))
        elif value is not True:
            arguments += str(value).split()
    return arguments
