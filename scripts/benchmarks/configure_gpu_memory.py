"""Peaks that others have measured on GPUs with Megatron: the errors of the configurator's predictions.

The folder holds ``megatron_functional_tests.csv``: NVIDIA's functional tests, each with its flags and the bytes that
torch's allocator had at most on the last rank.  It is read where it is.  A row whose flags the configurator refuses
counts as not expressible.  Peaks of SimuMax's trainings on B200 (``configure_b200.py``) are apart: of other models, on
all ranks.  Nothing was chosen with them in view but what Transformer Engine's fused loss keeps.

Judged is the figure that ``configure`` shows, the accounting times a factor (``room.Margins``); the interval is of the
accounting.

A measurement is *superseded* if it is 10% or more from the median of its recipe's: the flags do not tell the two apart.
The platform may: those that no recipe of core_v0.19.0 runs on any more have what was measured with PyTorch 24.01, in
whose container Transformer Engine has no deterministic flash attention for A100 (FlashAttention has it from 2.4.1 on).
These are predicted with unfused attention; figures *as configured* have them as ``configure`` itself would.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass
from math import ceil, floor, lcm
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.wings.configure.peaks import laid_out
from megatron.fill.wings.configure.room import Margins, least_known, margins, memory
from megatron.fill.wings.configure.search import unfused
from megatron.fill.wings.mainjob.kernels import Kernels
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel
from scripts.benchmarks.configure_b200 import GPUS, published

FUNCTIONAL = "megatron_functional_tests.csv"
_PEAK = "mem_max_allocated_bytes_last_rank"
_NODE = 8  # GPUs of a test, unless its layout needs more; half of them in recipes of one GB200 node
_CAPABILITY = {"a100": 8, "h100": 9, "b200": 10}  # major, by the platform's name
# As the bytes between their iterations tell.  The shorter runs, which end in _sm, are of as many.
_GPUS = {
    "mixtral/mixtral_8x7b_tp1pp4ep8vpp8_release": 64,
    "mixtral/deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": 32,
}
_FORMER = "lts_dgxa100_dracooci"  # how the platforms begin that were measured with PyTorch 24.01
_TOKENIZER = {"bert": "BertWordPieceLowerCase"}  # the others have GPT-2's, unless their flags name one
# Of the file that these recipes name in --tokenizer-model, nemotron_2_256k.model; the table has no paths.
_VOCABULARIES = {"GPTSentencePieceTokenizer": "256000"}
_MIB = 1 << 20
# Work of the forward and of the backward pass's thread: a handle of cuBLAS each, and so a workspace each.
_THREADS = 2
_BELOW = 0.02
_SUPERSEDED = 0.1


def workspace_bytes(kernels: Kernels, capability: int, routed: bool = False) -> int:
    """Return the bytes of the workspaces of matrix products.

    As in PyTorch's ``CublasHandlePool`` and Transformer Engine's ``module/base.py``.

    Args:
        capability: the GPUs' major compute capability; 9 is Hopper.
        routed: True for a model with experts, whose router's product is Transformer Engine's with local layers too
            (Megatron-core 0.19, ``transformer/moe/moe_utils.py``, ``RouterGatingLinearFunction``).
    """
    torch = 32 * _MIB if capability >= 9 or kernels.deterministic else 8 * _MIB + 128 * 1024
    own = (32 if capability >= 9 else 4) * _MIB if kernels.transformer_engine or routed else 0
    return _THREADS * torch + own


@dataclass(frozen=True, slots=True)
class Row:
    """A measured training.

    Attributes:
        accounted_bytes: by the accounting; 0 if it is refused.
        configured_bytes: likewise, as ``configure`` itself accounts, which knows no platform's software.
        upper_bytes: likewise; that of unfused attention, which the interval ends with, where the flags leave it open.
        margins: what ``configure`` shows of it.
        least_known: True if it has a flag with which peaks are known least; no interval is learned from it.
        refused: reason why it cannot be expressed, or "".
    """

    recipe: str
    platform: str
    group: tuple[str, ...]
    measured_bytes: int
    accounted_bytes: int
    configured_bytes: int
    upper_bytes: int
    margins: Margins
    least_known: bool
    refused: str

    @property
    def error(self) -> float:
        """The prediction's relative error; below 0 if the GPU held more."""
        return self.margins.shown / self.ratio - 1

    @property
    def error_as_configured(self) -> float:
        """Likewise of what ``configure`` says."""
        return self.margins.shown * self.configured_bytes / self.measured_bytes - 1

    @property
    def ratio(self) -> float:
        """The measured over the accounted peak."""
        return self.measured_bytes / self.accounted_bytes


def read_rows(folder: Path) -> list[Row]:
    """Read and predict the rows.

    Raises:
        ConfigError: the file cannot be used.
    """
    path = folder / FUNCTIONAL
    lines = list(csv.DictReader(read_text(path, "a table of measured trainings").splitlines()))
    if not lines or not {"recipe", "platform", "flags", _PEAK} <= lines[0].keys():
        raise ConfigError(f"{path}: expected columns recipe, platform, flags and {_PEAK}")
    return [_row(line) for line in lines if line[_PEAK]]


def _row(line: dict[str, str]) -> Row:
    flags, gpus = laid_out_as(line)
    accounted = configured = upper = 0
    its_margins, refused = Margins(1.0, 1.0), ""
    group: tuple[str, ...] = ("refused",)
    try:
        model, its = laid_out(flags, gpus)
        capability = next((number for name, number in _CAPABILITY.items() if name in line["platform"]), 8)
        work = workspace_bytes(model.kernels, capability, bool(model.experts))
        accounted = configured = upper = memory(model, its)[-1].total_bytes + work
        its_margins = margins(model, flags=flags)
        if model.kernels.undecided:
            kept = memory(unfused(model), its)[-1].total_bytes + work
            upper = max(accounted, kept)
            if line["platform"].startswith(_FORMER):
                model, accounted, upper = unfused(model), kept, kept
        group = _group(model, its, line["recipe"])
    except ConfigError as error:
        refused = str(error)
    row = line["recipe"], line["platform"], group
    return Row(*row, int(line[_PEAK]), accounted, configured, upper, its_margins, bool(least_known(flags)), refused)


def laid_out_as(line: dict[str, str]) -> tuple[list[str], int]:
    """Return a measured training's flags, and its number of GPUs."""
    given = json.loads(line["flags"])
    tp, pp, cp, ep = (int(line[name] or 1) for name in ("tp", "pp", "cp", "ep"))
    expert_tp = int(given.get("--expert-tensor-parallel-size", tp))
    unit = lcm(tp * cp, expert_tp * ep if ep > 1 else 1) * pp
    node = _NODE // 2 if line["recipe"].endswith("1node") else _NODE
    return _flags(given, line), _GPUS.get(line["recipe"].removesuffix("_sm"), -(-node // unit) * unit)


def _flags(given: dict[str, str], line: dict[str, str]) -> list[str]:
    found = []
    for flag, value in given.items():
        found += [flag] if value == "true" else [flag, value]
    if "--vocab-size" not in given:
        named = given.get("--tokenizer-type")
        tokenizer = named or _TOKENIZER.get(line["recipe"].split("/")[0], "GPT2BPETokenizer")
        size = _VOCABULARIES.get(tokenizer)
        found += ["--vocab-size", size] if size else [] if named else ["--tokenizer-type", tokenizer]
    for flag, value in (("--transformer-impl", line["impl"]),):
        if flag not in given and value:
            found += [flag, value]
    if line["tp"] != given.get("--tensor-model-parallel-size"):
        found += ["--tensor-model-parallel-size", line["tp"]]
    return found


def _group(model: ModelSpec, its: Parallel, recipe: str) -> tuple[str, ...]:
    return (
        "te" if model.kernels.transformer_engine else "local",
        "flash" if model.kernels.flash else "unfused",
        its.recompute.value,
        its.precision.value,
        "experts" if model.experts else "bert" if recipe.startswith("bert") else "dense",
        f"cp{its.cp}",
    )


def measure_gpu_memory(folder: Path) -> dict[str, Any]:
    """The figures; those of "recipes" are for reading, as a file with them would repeat the measurements."""
    rows = read_rows(folder)
    told = [row for row in rows if not row.refused]
    groups: dict[str, list[float]] = defaultdict(list)
    recipes: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        peaks[row.recipe].append(row.measured_bytes)
    for row in told:
        groups[" ".join(row.group)].append(row.error)
        recipes[row.recipe].append(row.error)
    usual = {recipe: median(measured) for recipe, measured in peaks.items()}
    current = [row for row in told if abs(row.measured_bytes / usual[row.recipe] - 1) < _SUPERSEDED]
    sources = [row for row in current if not row.least_known]
    dense, experts = (_of(told, "experts", there) for there in (False, True))
    return {
        "dense_mean": _mean(dense),
        "dense_worst": max((abs(row.error) for row in dense), default=None),
        "dense_mean_as_configured": fmean(abs(row.error_as_configured) for row in dense) if dense else None,
        "dense_worst_as_configured": max((abs(row.error_as_configured) for row in dense), default=None),
        "dense_mean_current": _mean(_of(current, "experts", False)),
        "dense_worst_current": max((abs(row.error) for row in _of(current, "experts", False)), default=None),
        "below_truth": fmean(row.error < -_BELOW for row in told),
        "below_truth_current": fmean(row.error < -_BELOW for row in current) if current else None,
        "below_truth_families": _below(told, sources),
        "above_interval": fmean(row.measured_bytes > row.margins.most_bytes(row.upper_bytes) for row in told),
        "below_truth_as_configured": fmean(row.error_as_configured < -_BELOW for row in told),
        "experts_mean": _mean(experts),
        "context_mean": _mean([row for row in told if "cp1" not in row.group]),
        "expressible": len(told) / len(rows),
        "held_by_interval": _held(told, sources, lambda row: row.recipe),
        "held_by_interval_current": _held(current, sources, lambda row: row.recipe),
        "held_by_interval_families": _held(told, sources, lambda row: row.group),
        "quantiles": _quantiles(sources),
        "b200": b200_errors(folder),
        "b200_reserved": _reserved(folder),
        "groups": {name: _shown(errors) for name, errors in sorted(groups.items())},
        "recipes": {name: _shown(errors) for name, errors in recipes.items()}
        | {row.recipe: row.refused for row in rows if row.refused},
    }


def b200_errors(folder: Path) -> dict[str, dict[str, float]]:
    """Return the errors on SimuMax's fullest ranks of each stage, by kind; trainings of other batches hold as much."""
    kinds: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(dict)
    for one in published(folder):
        model, its = laid_out(one.flags, GPUS)
        work = workspace_bytes(model.kernels, _CAPABILITY["b200"], bool(model.experts))
        shown = margins(model, flags=one.flags).shown
        ranks = GPUS // its.pp
        fullest = [max(one.peaks[stage * ranks : (stage + 1) * ranks]) for stage in range(its.pp)]
        held = zip(memory(model, its), fullest, strict=True)
        kinds[one.kind][one.peaks] = [shown * (its.total_bytes + work) / peak - 1 for its, peak in held]
    return {
        kind: {
            "peaks": len(errors),
            "mean": fmean(map(abs, errors)),
            "lowest": min(errors),
            "highest": max(errors),
        }
        for kind, found in kinds.items()
        if (errors := [error for several in found.values() for error in several])
    }


def _reserved(folder: Path) -> dict[str, float]:
    """Return by which share the allocator reserves more than it hands out, over the ranks of SimuMax's trainings."""
    more = [share for one in published(folder) for share in one.reserved]
    return {"median": median(more), "highest": max(more)} if more else {}


def _of(rows: Sequence[Row], name: str, there: bool) -> list[Row]:
    return [row for row in rows if (name in row.group) == there]


def _held(rows: Sequence[Row], sources: Sequence[Row], family: Callable[[Row], Hashable]) -> float:
    """Return the share of rows in the interval that rows of other families give, for their kind of model.

    It is what ``configure`` prints, but not wider for flags with which peaks are known least, as only those rows say
    by how much; a row without two others counts as outside.
    """
    held = 0
    for row in rows:
        its = _margins(_others(row, sources, family))
        if its is not None:
            held += its.low * row.accounted_bytes <= row.measured_bytes <= its.high * row.upper_bytes
    return held / len(rows)


def _below(rows: Sequence[Row], sources: Sequence[Row]) -> float:
    """Return the share of rows that are more than 2% above the figure that other families' peaks would have shown."""
    shown = ((row, _margins(_others(row, sources, lambda one: one.group))) for row in rows)
    return fmean((1.0 if its is None else its.shown) / row.ratio - 1 < -_BELOW for row, its in shown)


def _others(row: Row, sources: Sequence[Row], family: Callable[[Row], Hashable]) -> list[Row]:
    return [one for one in sources if _kind(one) == _kind(row) and family(one) != family(row)]


def _kind(row: Row) -> str:
    return next((kind for kind in ("experts", "bert") if kind in row.group), "dense")


def _quantiles(rows: Sequence[Row]) -> dict[str, dict[str, float] | None]:
    """Return what is said of each kind of model, as ``room.margins`` has it."""
    kinds = ("dense", "bert", "experts")
    its = {kind: _margins([row for row in rows if _kind(row) == kind]) for kind in kinds}
    return {name: None if one is None else asdict(one) for name, one in its.items()}


def _margins(rows: Sequence[Row]) -> Margins | None:
    """Return what measured over accounted peaks say, by their quantiles as ``room`` has them; None of fewer than two.

    The ends are those of 5% and 95%, rounded outwards, 1% from 1 at least; what is shown is that of 75%.
    """
    if len(rows) < 2:
        return None
    cuts = quantiles([row.ratio for row in rows], n=20, method="inclusive")
    low, high = min(floor(100 * cuts[0]), 99) / 100, max(ceil(100 * cuts[-1]), 101) / 100
    return Margins(low, high, round(cuts[14], 2))


def _mean(rows: Sequence[Row]) -> float | None:
    return fmean(abs(row.error) for row in rows) if rows else None


def _shown(errors: Sequence[float]) -> str:
    mean = fmean(abs(error) for error in errors)
    return f"{len(errors)} rows, mean {mean:.1%}, from {min(errors):+.1%} to {max(errors):+.1%}"
