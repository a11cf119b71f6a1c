"""Iteration times that others have measured on GPUs with Megatron: the errors of the configurator's predictions.

Of the folder it reads

- ``megatron_functional_tests.csv``, as ``configure_gpu_memory`` does: small models on one node, most of whose time is
  that of launching kernels.  Those that ``mainjob.roofline`` has learned a constant from are apart, as *taught*;
- ``ground_truth_multi.csv``, if it is there: vTrain's trainings over nodes (``data/`` of
  <https://github.com/VIA-Research/vTrain>).  Nothing is learned from them;
- ``b200_release_v1.2_summary.json``, if it is there: SimuMax's trainings on eight B200 (``docs/b200/`` of
  <https://github.com/MooreThreads/SimuMax>), whose models are in its ``configs/models``.  Of its figures only those of
  single kernels and collectives are learned from;
- Sailor's trainings on nodes of four GH200, if they are there: ``OPT-350_*.csv``, as ``configure_waits`` reads them, in
  half precision, and ``clariden/``, the folder of that name in ``sailor/Planner/simulations/validation`` of
  <https://github.com/eth-easl/sailor>, in TF32, whose plans have the seconds of an iteration (``real``).  Its folder
  ``mit`` has stages of unlike GPUs, which are not expressible.

What vTrain's table leaves out is in its ``config/validation``: all layers are computed again (``use_checkpoint``; none
of these layouts fits its GPUs otherwise), and a node has 800 Gbit/s.  They ran with DeepSpeed's pipeline, in which each
tensor-parallel rank sends its part of what passes between stages (``pipe_partitioned``, its default).

vTrain's ``ground_truth_single.csv`` is not read, as nothing in it was measured: with one replica, a layout's times are
a constant, a time for each layer, one for each microbatch and one for each of both, exactly to the nanosecond.

A *choice* is a model, a batch and a number of GPUs in several layouts: is the one that is predicted to be the fastest
within 3% of the fastest, or one of those that are shown as tied with it?  Those of three layouts and more are counted
over all files, too.  A *pair* is that one and another that is
predicted to take up to 10% longer: by how much is the ratio of their times off?  A *jump* is a training that takes over
3% longer for a sample and pass than another that has smaller micro-batches alone: no model of passes has any.
"""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple
from unittest.mock import patch

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_text
from megatron.fill.wings.configure import latency
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.peaks import laid_out
from megatron.fill.wings.configure.ranked import MODEL_ERROR
from megatron.fill.wings.configure.search import Evaluator
from megatron.fill.wings.mainjob.analytic import boundary_bytes, stage_cost
from megatron.fill.wings.mainjob.hardware import GIB, GPUS, NETWORKS, GpuKind, Network
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel
from scripts.benchmarks import configure_b200
from scripts.benchmarks.configure_gpu_memory import FUNCTIONAL, laid_out_as
from scripts.benchmarks.configure_waits import BANDWIDTH, read_waits

_OVER_NODES = "ground_truth_multi.csv"
_TIME = "iteration_time_median_s"
_NODE, _SAILORS_NODE = 8, 4  # GPUs
_GPUS = {"a100": ("a100-80gb", "dgx-a100"), "h100": ("h100-80gb", "dgx-h100")}  # by the platform's name
_ONE_EFFICIENCY = 0.45  # the simulator's
_CLOSE, _PAIRED, _LARGE = 0.03, 0.1, 3
_RIGHT, _MOST_PERCENT = 0.9, 100
_JUMP = 0.03
_FLAGS = {
    "--num-layers": "# layers",
    "--hidden-size": "hidden size",
    "--num-attention-heads": "attention heads",
    "--seq-length": "sequence length",
    "--global-batch-size": "global batch",
    "--micro-batch-size": "micro batch",
    "--tensor-model-parallel-size": "tensor parallelism",
    "--pipeline-model-parallel-size": "pipeline parallelism",
}
_ASSUMED = (
    "--vocab-size 51200 --fp16 --transformer-impl local --recompute-granularity full --recompute-method uniform "
    "--recompute-num-layers 1"
)
_THEIRS = replace(NETWORKS["dgx-a100"], name="vtrain", inter_node_bytes_s=800e9 / 8)
# NVIDIA GH200 data sheet: an H100 with 96 GB of faster memory.  TF32 has half of the peak.
_GH200 = replace(GPUS["h100-80gb"], name="gh200", memory_bytes=96 * GIB, memory_bandwidth=4e12)
_GH200_TF32 = replace(_GH200, peak_flops=_GH200.peak_flops / 2)
_ALPS = Network("alps", 450e9, _SAILORS_NODE * BANDWIDTH, _SAILORS_NODE)
_PLANS = {  # models of Sailor's plans, by the folder's name
    "OPT-350": "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --vocab-size 50272",
    "GPT-NEO": "--num-layers 32 --hidden-size 2560 --num-attention-heads 32 --vocab-size 128256",
}
_PLAN = (
    " --seq-length 2048 --transformer-impl local --tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} "
    "--micro-batch-size {mbs} --global-batch-size {gbs}"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """A training whose iterations were timed.

    Attributes:
        choice: equal for what may be chosen between.
        in_parts: each tensor-parallel rank sends its part of what passes between stages.
    """

    training: Training
    parallel: Parallel
    gpu: str | GpuKind
    network: str | Network
    choice: Hashable
    measured_s: float
    in_parts: bool = False
    node: int = _NODE

    @property
    def name(self) -> str:
        """Its model and layout."""
        its, model = self.parallel, self.training.model
        return f"{model.layers} layers, {model.hidden} wide; tp {its.tp}, pp {its.pp}, micro-batch {its.microbatch}"

    @property
    def taught(self) -> bool:
        """True if a constant was learned from it."""
        its, model = self.parallel, self.training.model
        return model.hidden == 512 and not model.experts and its.tp == its.cp == 1

    def predicted_s(self, **own: float) -> float:
        """The prediction, in seconds; ``own`` are fields of the cluster."""
        gpus = self.parallel.gpus
        shape = {"nodes": -(-gpus // self.node), "gpus_per_node": min(gpus, self.node)}
        cluster = Cluster.model_validate(shape | own | {"gpu": self.gpu, "network": self.network})
        evaluator = Evaluator(self.training, cluster, cluster.links(Path()))
        sent_bytes = _part_bytes if self.in_parts else latency.p2p_bytes
        with patch.object(latency, "p2p_bytes", sent_bytes):
            return latency.timeline(evaluator.iteration(self.parallel)).period_ns / 1e9


def _part_bytes(model: ModelSpec, its: Parallel) -> float:
    return boundary_bytes(model, its) / its.tp


def read_small(folder: Path) -> tuple[list[Timed], int]:
    """Read the functional tests; those of other GPUs, or with flags that are refused, are only counted."""
    found: list[Timed] = []
    lines = [line for line in _lines(folder / FUNCTIONAL) if line.get(_TIME)]
    for line in lines:
        known = next((its for name, its in _GPUS.items() if name in line["platform"]), None)
        flags, gpus = laid_out_as(line)
        try:
            model, its = laid_out(flags, gpus)
            training = read_flags(flags, ran=True)
        except ConfigError:
            continue
        if known is not None:
            found.append(Timed(training, its, *known, (model, its.global_batch, gpus, known), float(line[_TIME])))
    return found, len(lines) - len(found)


def read_over_nodes(folder: Path) -> list[Timed]:
    """Read vTrain's trainings whose tensor parallelism is within a node; none if the file is not there."""
    path = folder / _OVER_NODES
    lines = _lines(path) if path.exists() else []
    return [_over_nodes(line) for line in lines if int(line["tensor parallelism"]) <= _NODE]


def _over_nodes(line: dict[str, str]) -> Timed:
    flags = [text for flag, column in _FLAGS.items() for text in (flag, line[column])] + _ASSUMED.split()
    training, gpus = read_flags(flags, ran=True), int(line["# GPUs"])
    choice = tuple(line[name] for name in ("Parameters (billion)", "# GPUs", "global batch"))
    _, its = laid_out(flags, gpus)
    return Timed(training, its, "a100-80gb", _THEIRS, choice, float(line["iteration time (ms)"]) / 1e3, in_parts=True)


def read_b200(folder: Path) -> dict[str, list[Timed]]:
    """Read SimuMax's trainings, by kind of model and attention; none if the file is not there."""
    kinds: dict[str, list[Timed]] = defaultdict(list)
    for one in configure_b200.published(folder):
        training, parallel = read_flags(one.flags, ran=True), laid_out(one.flags, configure_b200.GPUS)[1]
        choice = training.model, training.global_batch
        kinds[f"b200_{one.kind}"].append(Timed(training, parallel, "b200", "dgx-b200", choice, one.iteration_s))
    return kinds


def read_sailor(folder: Path) -> dict[str, list[Timed]]:
    """Read Sailor's trainings on GH200, by who ran them; none if the files are not there."""
    kinds: dict[str, list[Timed]] = defaultdict(list)
    for one in read_waits(folder, least_stages=1):
        choice = one.parallel.gpus, one.parallel.global_batch
        its = read_flags(one.flags, ran=True), one.parallel, _GH200, _ALPS, choice, one.iteration_ms / 1e3
        kinds["aceso"].append(Timed(*its, node=_SAILORS_NODE))
    for path in sorted(folder.glob("clariden/*/*/plan_config_*.json")):
        kinds["sailor"] += _planned(path)
    return kinds


def _planned(path: Path) -> list[Timed]:
    """Read a plan, which counts the embedding as a layer of the first stage, and the output as one of the last.

    None if it has layers of another model, as ``GPT-NEO/N4/plan_config_N4_D4.json`` has.
    """
    plan = json.loads(read_text(path, "a plan of Sailor's"))
    its, name = plan["pipeline_list"][0], path.parent.parent.name
    (tp,) = {tp for stage in its["tmp_per_stage"] for _, tp in stage}
    text = _PLANS[name] + _PLAN.format(tp=tp, pp=its["num_stages"], mbs=plan["mbs"], gbs=plan["gbs"])
    training, gpus = read_flags(text.split(), ran=True), tp * sum(its["dp"])
    parallel = laid_out(text.split(), gpus)[1]
    counts = [len(stage) for stage in its["layers_per_stage"]]
    counts[0] -= 1
    counts[-1] -= 1
    if sum(counts) != training.model.layers:
        return []
    parallel, choice = replace(parallel, stage_layers=tuple(counts)), (name, gpus, parallel.global_batch)
    return [Timed(training, parallel, _GH200_TF32, _ALPS, choice, plan["real"], node=_SAILORS_NODE)]


def _lines(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(read_text(path, "a table of measured trainings").lstrip("\ufeff").splitlines()))


def measure_gpu_time(folder: Path) -> dict[str, Any]:
    """The figures, of each of the files that are there."""
    small, refused = read_small(folder)
    kinds = {name: [r for r in small if r.taught == its] for name, its in (("small", False), ("small_taught", True))}
    kinds |= {"over_nodes": read_over_nodes(folder)} | read_b200(folder) | read_sailor(folder)
    figures = {name: _figures(rows) for name, rows in kinds.items() if rows}
    counts = {name: sum(its[name] for its in figures.values()) for name in ("choices", "right", "large", "large_right")}
    return figures | {"all_choices": counts, "not_expressible": refused}


def _figures(rows: Sequence[Timed]) -> dict[str, Any]:
    ratios = [one.predicted_s() / one.measured_s - 1 for one in rows]
    by_tensor: dict[int, list[float]] = defaultdict(list)
    for one, ratio in zip(rows, ratios, strict=True):
        by_tensor[one.parallel.tp].append(abs(ratio))
    with patch.multiple(latency, stage_cost=stage_cost, STEP_LAUNCHES=0):
        simulated = [one.predicted_s(efficiency=_ONE_EFFICIENCY) / one.measured_s - 1 for one in rows]
    choices = _choices(rows)
    lost = [its[0].measured_s / min(one.measured_s for one in its) - 1 for its in choices]
    pairs = [error for its in choices for error in _pairs(its)]
    large = [its for choice, its in zip(choices, lost, strict=True) if len(choice) >= _LARGE]
    ordered = [pair for its in choices for pair in combinations(its, 2)]
    return {
        "rows": len(rows),
        "mean": fmean(map(abs, ratios)),
        "median": median(map(abs, ratios)),
        "mean_by_one_efficiency": fmean(map(abs, simulated)),
        **{f"mean_tp{tp}": fmean(errors) for tp, errors in sorted(by_tensor.items())},
        "lowest": min(ratios),
        "lowest_is": rows[ratios.index(min(ratios))].name,
        "highest": max(ratios),
        "jumps": _jumps(rows),
        "choices": len(lost),
        "right": sum(its <= _CLOSE for its in lost),
        "large": len(large),
        "large_right": sum(its <= _CLOSE for its in large),
        "tied_right": sum(_has_close_tie(its) for its in choices),
        "missed": [_missed(its) for its, share in zip(choices, lost, strict=True) if share > _CLOSE],
        "lost_mean": fmean(lost) if lost else None,
        "pairs": len(pairs),
        "ratio_mean": fmean(map(abs, pairs)) if pairs else None,
        "ordered": len(ordered),
        "right_beyond_ties": _right(ordered, MODEL_ERROR),
        "ordered_from": _ordered_from(ordered),
    }


class Layout(NamedTuple):
    """A layout of a choice."""

    predicted_s: float
    measured_s: float
    name: str


def _choices(rows: Sequence[Timed]) -> list[list[Layout]]:
    """Return each choice's layouts, in the order of the predictions."""
    choices: dict[Hashable, dict[Parallel, list[Timed]]] = defaultdict(lambda: defaultdict(list))
    for one in rows:
        choices[one.choice][one.parallel].append(one)
    return [
        sorted(
            Layout(fmean(r.predicted_s() for r in its), median(r.measured_s for r in its), its[0].name)
            for its in layouts.values()
        )
        for layouts in choices.values()
        if len(layouts) > 1
    ]


def _missed(choice: Sequence[Layout]) -> str:
    """Return which layout was named instead of the fastest, and by how much either is off."""
    named, best = choice[0], min(choice, key=lambda its: its.measured_s)
    own, other = (its.predicted_s / its.measured_s - 1 for its in (named, best))
    return (
        f"{named.name} ({own:+.1%}) takes {named.measured_s / best.measured_s - 1:.1%} longer than {best.name} "
        f"({other:+.1%}), which is predicted {best.predicted_s / named.predicted_s - 1:.1%} behind it"
    )


def _has_close_tie(choice: Sequence[Layout]) -> bool:
    """Return True if one of those that are shown as tied for the first rank is close to the fastest."""
    tied = [its.measured_s for its in choice if its.predicted_s <= (1 + MODEL_ERROR) * choice[0].predicted_s]
    return min(tied) <= (1 + _CLOSE) * min(its.measured_s for its in choice)


def _jumps(rows: Sequence[Timed]) -> int:
    """Return how many rows take longer for a sample and pass than those that have smaller micro-batches alone."""
    layouts: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for one in rows:
        its = one.parallel
        each_s = one.measured_s / (its.microbatches * its.chunks + its.pp - 1) / its.microbatch
        layouts[one.choice, replace(its, microbatch=1)].append((its.microbatch, each_s))
    return sum(
        each_s > (1 + _JUMP) * min((other_s for other, other_s in layout if other < size), default=each_s)
        for layout in layouts.values()
        for size, each_s in layout
    )


def _pairs(choice: Sequence[Layout]) -> list[float]:
    """Return by how much the predicted ratio of each pair's times is off."""
    first, *others = choice
    return [
        its.predicted_s / first.predicted_s / (its.measured_s / first.measured_s) - 1
        for its in others
        if its.predicted_s <= (1 + _PAIRED) * first.predicted_s
    ]


def _right(pairs: Sequence[tuple[Layout, Layout]], apart: float) -> float | None:
    """Return the share of pairs in the right order, of those that are predicted to be further apart."""
    further = [
        other.measured_s > one.measured_s for one, other in pairs if other.predicted_s > (1 + apart) * one.predicted_s
    ]
    return fmean(further) if further else None


def _ordered_from(pairs: Sequence[tuple[Layout, Layout]]) -> float | None:
    """Return the difference of predictions, in whole percents, above which nine in ten pairs are in the right order."""
    each = range(_MOST_PERCENT)
    return next((percent / 100 for percent in each if (_right(pairs, percent / 100) or 0.0) >= _RIGHT), None)
