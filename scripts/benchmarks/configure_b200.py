"""SimuMax's trainings on eight B200, which the configurator's memory and times are compared with.

The folder may hold ``b200_release_v1.2_summary.json`` (``docs/b200/`` of <https://github.com/MooreThreads/SimuMax>).
Flags are those of its ``simu_tools/megatron_scripts``, models those of its ``configs/models``; a name says the rest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron.fill.given.files import read_text

B200 = "b200_release_v1.2_summary.json"
GPUS = 8
_SEQUENCE = "4096"  # where a name has none
_COMMON = (
    "--bf16 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights --position-embedding-type rope "
    "--hidden-dropout 0 --attention-dropout 0 --use-distributed-optimizer --cross-entropy-loss-fusion "
    "--cross-entropy-fusion-impl te --no-masked-softmax-fusion --no-create-attention-mask-in-dataloader "
    "--micro-batch-size 1 "
)
_LATENT = (
    "--num-attention-heads 128 --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --v-head-dim 128 --moe-layer-freq ([0]*1+[1]*3) --moe-grouped-gemm "
)
_MODELS = {
    "llama3-70b": "--hidden-size 8192 --num-attention-heads 64 --group-query-attention --num-query-groups 8 "
    "--ffn-hidden-size 28672 --vocab-size 128256",
    "llama3-405b": "--hidden-size 16384 --num-attention-heads 128 --group-query-attention --num-query-groups 16 "
    "--ffn-hidden-size 53248 --vocab-size 128256",
    "deepseekv2": f"{_LATENT}--hidden-size 5120 --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 --num-experts 160 "
    "--moe-router-topk 6 --moe-shared-expert-intermediate-size 3072 --vocab-size 102400",
    "deepseekv3": f"{_LATENT}--hidden-size 7168 --ffn-hidden-size 18432 --moe-ffn-hidden-size 2048 --num-experts 256 "
    "--moe-router-topk 8 --moe-shared-expert-intermediate-size 2048 --vocab-size 129280",
}


@dataclass(frozen=True, slots=True)
class Published:
    """A training that was measured.

    Attributes:
        kind: ``dense``, ``experts`` or, for dense models with context parallelism, ``context``.
        flags: Megatron's.
        peaks: the most that torch's allocator held on each rank, in bytes.
        reserved: by which share of it the most that the allocator had reserved there is more.
    """

    name: str
    kind: str
    flags: tuple[str, ...]
    iteration_s: float
    peaks: tuple[int, ...]
    reserved: tuple[float, ...]


def published(folder: Path) -> Iterator[Published]:
    """Read the trainings; none if the file is not there."""
    path = folder / B200
    for line in json.loads(read_text(path, "SimuMax's figures"))["rows"] if path.exists() else []:
        its = dict(re.findall("(tp|ep|pp|cp|seq)([0-9]+)", line["case"]))
        degrees = [int(its.get(name, "1")) for name in ("tp", "pp", "cp")]
        flags = f"{_COMMON}{next(text for name, text in _MODELS.items() if line['model'].startswith(name))}"
        flags += f" --num-layers {line['layer_num']} --seq-length {its.get('seq', _SEQUENCE)}"
        flags += f" --global-batch-size {GPUS // prod(degrees) * line['mbc']}"
        flags += " --tensor-model-parallel-size {} --pipeline-model-parallel-size {} --context-parallel-size {}".format(
            *degrees
        )
        flags += " --sequence-parallel" * (degrees[0] > 1) + f" --expert-model-parallel-size {its.get('ep', 1)}"
        kind = "experts" if "deepseek" in line["model"] else "dense" if degrees[2] == 1 else "context"
        held = [line["peak_memory_by_rank_mb"][str(rank)] for rank in range(GPUS)]
        peaks = tuple(round(its["max_allocated_mb"] * 2**20) for its in held)
        reserved = tuple(its["max_reserved_mb"] / its["max_allocated_mb"] - 1 for its in held)
        yield Published(line["case"], kind, tuple(flags.split()), line["real_ms"] / 1e3, peaks, reserved)
