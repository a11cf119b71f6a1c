"""NVIDIA's published trainings: is their layout among the first five that the configurator names, or tied with them?

Of the folder it reads ``performance-summary.md`` and ``performance-summary-archive.md`` (``docs/`` of
<https://github.com/NVIDIA-NeMo/Megatron-Bridge>): layouts and measured throughput by model, system, precision, batch
and number of GPUs.  Of equal trainings the newest counts.  The tables say nothing of flags: those of the performance
recipes there, in the release of a table's container, are in ``_RECIPES`` and ``_NO_TENSOR_OVERLAP``, and all are taken
to have the flags that overlap other exchanges.  A training is *not expressible* if its model's attention, layers or
optimizer are, or its precision, or if it is fully sharded.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.ranked import MODEL_ERROR, parts, ranks
from megatron.fill.wings.configure.rows import in_order
from megatron.fill.wings.configure.search import Evaluator, Proposal, search
from megatron.fill.wings.mainjob.hardware import GIB
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute

_FILES = ("performance-summary.md", "performance-summary-archive.md")
_SYSTEMS = {  # GPU, network and the GPUs of an NVLink domain that layouts divide
    "DGX-H100": ("h100-80gb", "dgx-h100", 8),
    "DGX-B200": ("b200", "dgx-b200", 8),
    "DGX-B300": ("b300", "dgx-b300", 8),
    "DGX-GB200": ("gb200", "gb200-nvl72", 64),
    "DGX-GB300": ("gb300", "gb300-nvl72", 64),
}
_PRECISIONS = {
    "BF16": "--use-precision-aware-optimizer",  # whose state is in single precision
    "FP8": "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather",
    "MXFP8": "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather",
}
_OTHER_NAMES = {"FP8-CS": "FP8", "FP8-MX": "MXFP8"}
_ALL = (
    "--bf16 --grad-reduce-in-bf16 --swiglu --disable-bias-linear --untie-embeddings-and-output-weights "
    "--position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm "
    "--no-create-attention-mask-in-dataloader --cross-entropy-loss-fusion --cross-entropy-fusion-impl te "
    "--overlap-grad-reduce --overlap-param-gather "
)
_LLAMA = _ALL + "--group-query-attention --num-query-groups 8 --vocab-size 128256 "
_EXPERTS = _ALL + ("--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --expert-tensor-parallel-size 1 ")
_QWEN = (
    _EXPERTS + "--group-query-attention --num-query-groups 4 --kv-channels 128 --qk-layernorm --vocab-size 151936 "
    "--num-experts 128 --moe-router-topk 8 "
)
_MODELS = {
    "LLAMA3_8B": _LLAMA + "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --ffn-hidden-size 14336",
    "LLAMA3_70B": _LLAMA + "--num-layers 80 --hidden-size 8192 --num-attention-heads 64 --ffn-hidden-size 28672",
    "LLAMA3.1_405B": _LLAMA
    + "--num-layers 126 --hidden-size 16384 --num-attention-heads 128 --ffn-hidden-size 53248 "
    + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "Qwen3_30B_a3B": _QWEN
    + "--num-layers 48 --hidden-size 2048 --num-attention-heads 32 --ffn-hidden-size 6144 --moe-ffn-hidden-size 768",
    "Qwen3_235B_a22B": _QWEN
    + "--num-layers 94 --hidden-size 4096 --num-attention-heads 64 --ffn-hidden-size 12288 --moe-ffn-hidden-size 1536 "
    + "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
    "DeepSeekV3": _EXPERTS
    + "--num-layers 61 --hidden-size 7168 --num-attention-heads 128 --ffn-hidden-size 18432 --vocab-size 129280 "
    + "--num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 2048 --moe-shared-expert-intermediate-size 2048 "
    + "--moe-layer-freq ([0]*3+[1]*58) --multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 "
    + "--qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128 --mtp-num-layers 1",
}
_HIDDEN = "--overlap-moe-expert-parallel-comm"
_ALL_TO_ALL = "--moe-token-dispatcher-type alltoall"
_DEEP = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend deepep"
_HYBRID = "--moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"
_GRAPHS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn moe_router moe_preprocess"
_WHOLE = "--cuda-graph-impl full_iteration"
_HIDDEN_WHOLE = f"{_HYBRID} {_HIDDEN} {_WHOLE}"
_OUTPUT = "--fp8-output-proj"
_UP = "--recompute-granularity selective --recompute-modules mla_up_proj"
# Flags of the recipes by which a training was published, in the release of its container: those that change which
# layouts there are, or their times.
_RECIPES = {
    "LLAMA3_8B on 8 GB300, FP8, 128": _WHOLE,
    "LLAMA3_8B on 8 GB200, FP8, 128": _WHOLE,
    "LLAMA3_8B on 8 B200, FP8, 128": _WHOLE,
    "Qwen3_30B_a3B on 8 GB300, MXFP8, 512": _HIDDEN_WHOLE,
    "Qwen3_30B_a3B on 8 GB200, MXFP8, 512": _HIDDEN_WHOLE,
    "Qwen3_30B_a3B on 8 B300, MXFP8, 512": _HIDDEN_WHOLE,
    "Qwen3_30B_a3B on 8 B200, MXFP8, 512": f"{_HYBRID} {_GRAPHS}",
    "Qwen3_30B_a3B on 16 H100, FP8, 1024": _HYBRID,
    "Qwen3_30B_a3B on 16 H100, FP8, 512": f"{_ALL_TO_ALL} {_HIDDEN}",
    "Qwen3_235B_a22B on 64 B200, MXFP8, 1024": f"{_ALL_TO_ALL} {_HIDDEN}",
    "Qwen3_235B_a22B on 256 GB300, MXFP8, 8192": _HIDDEN_WHOLE,
    "Qwen3_235B_a22B on 256 GB200, MXFP8, 8192": _HIDDEN_WHOLE,
    "Qwen3_235B_a22B on 256 GB300, BF16, 8192": f"{_HYBRID} {_GRAPHS}",
    "Qwen3_235B_a22B on 256 GB200, BF16, 8192": f"{_HYBRID} {_GRAPHS}",
    "Qwen3_235B_a22B on 256 B300, MXFP8, 8192": _HYBRID,
    "Qwen3_235B_a22B on 256 B200, MXFP8, 8192": _ALL_TO_ALL,
    "Qwen3_235B_a22B on 256 H100, FP8, 8192": f"{_ALL_TO_ALL} {_HIDDEN}",
    "Qwen3_235B_a22B on 256 H100, FP8, 2048": f"{_ALL_TO_ALL} {_HIDDEN}",
    "DeepSeekV3 on 256 GB300, MXFP8, 4096": f"{_HIDDEN_WHOLE} {_OUTPUT}",
    "DeepSeekV3 on 256 GB300, MXFP8, 15360": f"{_HIDDEN_WHOLE} {_OUTPUT}",
    "DeepSeekV3 on 256 GB200, MXFP8, 4096": f"{_HIDDEN_WHOLE} {_OUTPUT} {_UP}",
    "DeepSeekV3 on 256 B300, MXFP8, 4096": f"{_HYBRID} {_GRAPHS} {_UP}",
    "DeepSeekV3 on 256 B200, MXFP8, 4096": f"{_DEEP} {_HIDDEN} {_GRAPHS} {_UP} mlp",
    "DeepSeekV3 on 256 B200, MXFP8, 2048": f"{_ALL_TO_ALL} {_UP}",
}
# Those whose recipes, in all releases, leave what tensor-parallel ranks exchange beside nothing.
_NO_TENSOR_OVERLAP = ("DeepSeekV3", "Qwen3_235B_a22B on 256 H100")
_FIRST = 5
_LARGE = 128  # GPUs; constants come from the times of trainings on more, but nothing from their layouts
_SHAPE = ("tp", "pp", "cp", "ep", "chunks", "microbatch")


@dataclass(frozen=True, slots=True)
class Published:
    """A published training; ``shape`` is its layout in the order of ``_SHAPE``."""

    model: str
    system: str
    precision: str
    gpus: int
    batch: int
    sequence: int
    sharded: bool
    shape: tuple[int, ...] = field(compare=False)
    tokens_s: float = field(compare=False)

    @property
    def name(self) -> str:
        return f"{self.model} on {self.gpus} {self.system.removeprefix('DGX-')}, {self.precision}, {self.batch}"

    def training(self) -> Training:
        """Its flags; ConfigError if it is not expressible."""
        if self.sharded or self.model not in _MODELS or self.precision not in _PRECISIONS:
            raise ConfigError(f"{self.model} in {self.precision}: expected a model and a precision that flags express")
        flags = f"{_MODELS[self.model]} {_PRECISIONS[self.precision]} --seq-length {self.sequence} "
        flags += f"--global-batch-size {self.batch} {_RECIPES.get(self.name, '')}"
        flags += "" if self.name.startswith(_NO_TENSOR_OVERLAP) else " --tp-comm-overlap"
        return read_flags(flags.split(), ran=True)

    def cluster(self) -> Cluster:
        gpu, network, node = _SYSTEMS[self.system]
        node = min(node, self.gpus)
        return Cluster.model_validate(
            {"nodes": self.gpus // node, "gpus_per_node": node, "gpu": gpu, "network": network}
        )

    @property
    def measured_s(self) -> float:
        return self.batch * self.sequence / self.tokens_s / self.gpus


def read_published(folder: Path) -> list[Published]:
    """Read the tables of pre-training.

    Raises:
        ConfigError: one of them cannot be read.
    """
    texts = [read_text(folder / name, "a page of published figures") for name in _FILES]
    return list(dict.fromkeys(one for text in texts for one in _tables(text)))


def _tables(text: str) -> Iterator[Published]:
    headings: dict[str, str] = {}
    columns: list[str] = []
    for line in text.splitlines():
        if line.startswith("#"):
            level, _, title = line.partition(" ")
            headings = {level: title} if level == "##" else headings | {level: title}
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if "#-GPUs" in cells:
            columns = cells
        elif len(cells) == len(columns) and "Pre-Training" in headings.get("###", "") and "---" not in line:
            its = dict(zip(columns, cells, strict=True))
            kind, _, name = headings["####"].partition(": ")
            found = _published(its | {kind: name})
            if found is not None:
                yield found


def _published(its: dict[str, str]) -> Published | None:
    """None if the precision is not given, or tokens are dropped."""
    precision, model = its.get("Precision", "").split(" ")[0], its["Model"]
    if not precision or "tokendrop" in model or its["System"] not in _SYSTEMS:
        return None
    columns = ("TP", "PP", "CP", "EP", "VP", "MBS")
    name = model.split(" ")[0]
    return Published(
        model=f"{name} without MTP" if "w/o" in model else name,
        system=its["System"],
        precision=_OTHER_NAMES.get(precision, precision),
        gpus=_number(its["#-GPUs"]),
        batch=_number(its["GBS"]),
        sequence=_number(its["Sequence Length"]),
        sharded=_number(its.get("FSDP", "0"), 0) > 0,
        shape=tuple(_number(its[name]) for name in columns),
        tokens_s=_number(its["Tokens / sec / GPU"]),
    )


def _number(cell: str, other: int = 1) -> int:
    found = re.match(r"[0-9]+", cell)
    return int(found[0]) if found else other


def shape_of(its: Parallel) -> tuple[int, ...]:
    return tuple(getattr(its, name) for name in _SHAPE)


@dataclass(frozen=True, slots=True)
class Found:
    """What the search says: the place and the rank of the published layout, and the layout that is first.

    Attributes:
        place: number of the row that has it, as the first or tied with that; None if none has.
        place_alone: its place if each number of virtual stages had a row of its own.
        named: the row names the published number of virtual stages first.
        over_first: by how much it is slower than the fastest; None if it does not fit by the accounting.
        more: what it has more of than the fastest, as shares of that one's time, by part.
        search_s: CPU time of the search.
    """

    published: Published
    place: int | None
    place_alone: int | None
    named: bool
    rank: int | None
    over_first: float | None
    more: dict[str, float]
    error: float | None
    first: Proposal
    search_s: float

    def row(self) -> dict[str, Any]:
        """Its figures, and layouts as in ``_SHAPE``; no measured time."""
        shape, first = (" ".join(map(str, its)) for its in (self.published.shape, shape_of(self.first.parallel)))
        figures = {
            name: getattr(self, name)
            for name in ("place", "place_alone", "named", "rank", "over_first", "more", "error")
        }
        return {"shape": shape, "first": first, **figures, "search_s": round(self.search_s, 1)}


def find(one: Published, top: int = 40) -> Found:
    """Search for the published training's layout.

    Raises:
        ConfigError: it is not expressible.
    """
    training, cluster = one.training(), one.cluster()
    evaluator = Evaluator(training, cluster, cluster.links(Path()))
    began_s = time.process_time()
    rows = search(evaluator, top, MODEL_ERROR).rows
    search_s = time.process_time() - began_s
    alone = in_order([its for row in rows for its in row], MODEL_ERROR, cluster.gpus_per_node)
    fastest = min(alone, key=lambda its: its.iteration_s)
    times = sorted(its.iteration_s for its in alone)
    shapes = [[shape_of(its.parallel) for its in row] for row in rows]
    place = next((at for at, row in enumerate(shapes, 1) if one.shape in row), None)
    own = _own(evaluator, one.shape)
    rank, over_first, error, more = None, None, None, {}
    if own is not None:
        rank = ranks([its for its in times if its < own.iteration_s] + [own.iteration_s], MODEL_ERROR)[-1]
        over_first, error = own.iteration_s / times[0] - 1, own.iteration_s / one.measured_s - 1
        has, had = (asdict(parts(its, evaluator)) for its in (own, fastest))
        more = {name.removesuffix("_s"): round((has[name] - had[name]) / times[0], 4) for name in has}
    return Found(
        one,
        place,
        next((at for at, its in enumerate(alone, 1) if shape_of(its.parallel) == one.shape), None),
        place is not None and shapes[place - 1][0] == one.shape,
        rank if rank and rank <= len(times) else None,
        over_first,
        more,
        error,
        rows[0][0],
        search_s,
    )


def _own(evaluator: Evaluator, shape: Sequence[int]) -> Proposal | None:
    """The published layout, with the least recomputation that fits; None if there is no such layout."""
    fixed = dict(evaluator.training.fixed) | dict(zip(_SHAPE, shape, strict=True))
    training = replace(evaluator.training, fixed=fixed)
    try:
        return search(Evaluator(training, evaluator.cluster, evaluator.links), 1).proposals[0]
    except ConfigError:
        return None


def measure_recipes(folder: Path, most_gpus: int) -> dict[str, Any]:
    """The figures of the trainings on so many GPUs at most, with a row for each, which it prints too.

    Raises:
        ConfigError: there is none.
    """
    rows = [one for one in read_published(folder) if one.gpus <= most_gpus]
    if not rows:
        raise ConfigError(f"{folder}: no table has a training on at most {most_gpus} GPUs; expected at least one")
    found: list[Found] = []
    for one in rows:
        try:
            found.append(find(one))
        except ConfigError as error:
            print(f"  {one.name:<58} {'fully sharded' if one.sharded else error}")
            continue
        _print(found[-1])
    return _figures(rows, found)


def _print(its: Found) -> None:
    shown = [f"{'-' if value is None else f'{value:+.1%}':>7}" for value in (its.over_first, its.error)]
    best, parallel = its.first, its.first.parallel
    recompute = "" if parallel.recompute is Recompute.NONE else f" {parallel.recompute.value}"
    print(
        f"  {its.published.name:<46} {its.published.shape!s:<20} {its.place or '-':>4}{' ' if its.named else '~'} "
        f"{its.place_alone or '-':>4} "
        f"{its.rank or '-':>4} {shown[0]} "
        f"{shown[1]} {its.more} first {shape_of(parallel)}{recompute} {best.iteration_s:.2f} s, "
        f"{best.peak_bytes / GIB:.0f} GiB; "
        f"searched for {its.search_s:.0f} s",
        flush=True,
    )


def _figures(rows: Sequence[Published], found: Sequence[Found]) -> dict[str, Any]:
    small, large = ([its for its in found if (its.published.gpus > _LARGE) == there] for there in (False, True))
    return {
        "published": len(rows),
        **_of(small),
        **({"large": _of(large)} if large else {}),
        "rows": {its.published.name: its.row() for its in found},
    }


def _of(found: Sequence[Found]) -> dict[str, Any]:
    errors = [abs(its.error) for its in found if its.error is not None]
    places: dict[str, list[int | None]] = {
        "recipes_in_first_five": [its.rank for its in found],
        "exactly_in_first_five": [its.place for its in found],
        "named_in_first_five": [its.place if its.named else None for its in found],
        "alone_in_first_five": [its.place_alone for its in found],
    }
    return {
        "expressible": len(found),
        **{name: fmean((at or _FIRST + 1) <= _FIRST for at in its) if its else None for name, its in places.items()},
        "refused": sum(its.error is None for its in found),
        "time_mean": fmean(errors) if errors else None,
    }
