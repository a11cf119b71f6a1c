"""The best configurations: all are bounded, and those that may be among the best are timed.

``search`` returns what timing every configuration would.  Configurations are taken in the order of their bound
(``latency.bound_ns``), and left out once it exceeds the worst of the best that were timed.
In the same way, ``room.least_bytes`` drops only what cannot fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.bubbles import bubble_cycle, bubble_share
from megatron.fill.pipeline.timeline import Timeline
from megatron.fill.profiles import BubbleCycle
from megatron.fill.wings.configure.cluster import Cluster
from megatron.fill.wings.configure.correction import Correction
from megatron.fill.wings.configure.flags import Training, layout_flags, pairs, with_values
from megatron.fill.wings.configure.latency import Iteration, bound_ns, iteration, timeline
from megatron.fill.wings.configure.layout import Layout, lay_out, replicas_last
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.overlap import recomputations, startable
from megatron.fill.wings.configure.passes import Passes
from megatron.fill.wings.configure.room import Margins, least_bytes, margins, memory
from megatron.fill.wings.configure.rows import in_rows, layout_of
from megatron.fill.wings.configure.rules import open_rules, whole_problem
from megatron.fill.wings.configure.space import layouts, padded
from megatron.fill.wings.mainjob.hardware import GIB, GpuKind
from megatron.fill.wings.mainjob.memory import StageMemory
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel

_MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration that fits, timed."""

    parallel: Parallel
    order: tuple[int, ...]  # the physical rank of each logical one
    timeline: Timeline  # with the first and the last pass of each rank alone
    memory: tuple[StageMemory, ...]  # memory of a GPU of each stage
    room_bytes: int  # bytes that a training may take of a GPU
    margins: Margins  # the figure that is shown of the memory, and its interval, relative to it

    @property
    def iteration_s(self) -> float:
        return self.timeline.period_ns / 1e9

    @property
    def bubble_share(self) -> float:
        return bubble_share(self.timeline)

    @property
    def peak_bytes(self) -> int:
        """Peak of the fullest GPU, as it is shown: rather above what it will be than below."""
        return int(self._most_bytes * self.margins.shown)

    @property
    def interval_bytes(self) -> tuple[int, int]:
        """The ends of the interval of the fullest GPU's peak."""
        return int(self._most_bytes * self.margins.low), self.margins.most_bytes(self._most_bytes)

    @property
    def _most_bytes(self) -> int:
        return max(its.total_bytes for its in self.memory)

    def cycles(self) -> list[BubbleCycle]:
        """The bubbles of each stage's GPUs, with the memory that the upper end of the training's interval leaves."""
        return [
            bubble_cycle(self.timeline, stage, self.room_bytes - self.margins.most_bytes(its.total_bytes))
            for stage, its in enumerate(self.memory)
        ]


@dataclass(frozen=True, slots=True)
class Found:
    """Result of a search."""

    rows: tuple[tuple[Proposal, ...], ...]  # the best layouts first, as ``in_rows`` has them
    configurations: int  # number of configurations bounded, those that do not fit included
    timed: int  # number of them that were timed
    excluded: Counter[str]  # number of them left out, by the constraint

    @property
    def proposals(self) -> list[Proposal]:
        """The first of each row."""
        return [row[0] for row in self.rows]


# Compute capabilities from which each of Transformer Engine's flash kernels is deterministic, and it has FP8.
_ALWAYS_DETERMINISTIC, _HAS_FP8 = 9.0, 8.9


def decided(model: ModelSpec, gpu: GpuKind) -> ModelSpec:
    """The model with the attention that Transformer Engine takes on these GPUs, where it depends on them.

    Deterministic, it leaves out cuDNN's flash attention before Hopper, and takes the library's if it is there and is
    2.4.1 or later (Transformer Engine's ``get_attention_backend``).
    """
    if not gpu.flash_attention:
        return unfused(model)
    if gpu.capability >= _ALWAYS_DETERMINISTIC:
        return replace(model, kernels=replace(model.kernels, undecided=False))
    return model


def unfused(model: ModelSpec) -> ModelSpec:
    """The model with attention that keeps its scores."""
    return replace(model, kernels=replace(model.kernels, flash=False, turned=False, undecided=False))


class Evaluator:
    """Costs of a training's configurations on a cluster; links of one layout are looked up once.

    Args:
        passes: measured passes; None for the analytic model.
        correction: learned correction of their memory; None for the accounting alone.

    Raises:
        ConfigError: the GPUs have no such numbers.

    Attributes:
        models: the model by tensor parallelism, as Megatron pads it and these GPUs compute it.
        kinds: recomputation that a configuration may have, the least first.
    """

    def __init__(
        self,
        training: Training,
        cluster: Cluster,
        links: Links,
        passes: Passes | None = None,
        correction: Correction | None = None,
    ) -> None:
        self.training = training
        self.cluster = cluster
        self.links = links
        self.passes = passes
        self.correction = correction
        self._layouts: dict[tuple[int | None, ...], Layout] = {}
        self.models = {tp: self._model(tp) for tp in range(1, cluster.gpus_per_node + 1)}
        if self.models[1].kernels.fp8 and 0 < cluster.gpu.capability < _HAS_FP8:
            raise ConfigError(
                f"--fp8-format on {cluster.gpu.name}: expected GPUs of compute capability {_HAS_FP8} or more, such as "
                "Hopper's, as Transformer Engine does"
            )
        self.margins = margins(self.models[1], correction is not None, training.others)
        if training.replicas_last and cluster.measured is not None:
            raise ConfigError(
                "--use-tp-pp-dp-mapping on a measured network: expected it left out, as ranks are placed where the "
                "iteration is shortest"
            )
        self.kinds = recomputations(self.models[1], training.fixed)
        self._rules = open_rules(pairs(training.others))

    def first(self, nodes: int) -> Evaluator:
        """Return the evaluator of the first nodes alone."""
        cluster = self.cluster.model_copy(update={"nodes": nodes})
        return Evaluator(self.training, cluster, self.links.first(cluster.gpus), self.passes, self.correction)

    def _model(self, tp: int) -> ModelSpec:
        """The model on the cluster's GPUs, which may be too old for the attention that flags choose."""
        model = padded(self.training, tp)
        if self.cluster.gpu.fp8_any_order and model.kernels.fp8_per_tensor:
            model = replace(model, kernels=replace(model.kernels, fp8_copies=1))
        return decided(model, self.cluster.gpu)

    def least_bytes(self, its: Parallel) -> int:
        """Least bytes that the fullest GPU holds."""
        least = least_bytes(self.models[its.tp], its)
        return least if self.correction is None else int(least * self.correction.least_factor)

    def iteration(self, its: Parallel, order: Sequence[int] | None = None) -> Iteration:
        """A configuration's times; ``order`` None for the cluster's own."""
        if order is not None:
            layout = lay_out(self.links, its, order)
        else:
            shape = its.tp, its.cp, its.ep, its.expert_tp, its.pp, its.dp
            if shape not in self._layouts:
                own = replicas_last(its) if self.training.replicas_last else None
                self._layouts[shape] = lay_out(self.links, its, own)
            layout = self._layouts[shape]
        model, cluster = self.models[its.tp], self.cluster
        return iteration(model, cluster.gpu, cluster.efficiency, its, layout, self.passes)

    def fits(self, held_bytes: int) -> bool:
        """Return True if the upper end of a peak's interval is within the room."""
        return self.margins.most_bytes(held_bytes) <= self.cluster.room_bytes

    def proposal(self, times: Iteration, order: Sequence[int] | None = None) -> Proposal | None:
        """It timed; None if it does not fit after all."""
        its = times.parallel
        held, interval = self.held(its)
        if interval.most_bytes(max(one.total_bytes for one in held)) > self.cluster.room_bytes:
            return None
        chosen = tuple(range(its.gpus) if order is None else order)
        line = timeline(times)
        line = replace(line, spans=tuple((row[0], row[-1]) for row in line.spans))  # all of them can be megabytes
        return Proposal(its, chosen, line, held, self.cluster.room_bytes, interval)

    def held(self, its: Parallel) -> tuple[tuple[StageMemory, ...], Margins]:
        """Memory of a GPU of each stage, and the interval of the fullest one's peak."""
        held = memory(self.models[its.tp], its)
        if self.correction is not None:
            held = self.correction.corrected(self.models[its.tp], its, held)
        return held, self._interval(its, max(one.total_bytes for one in held))

    def _interval(self, its: Parallel, peak_bytes: int) -> Margins:
        """The interval of a layout's peak, up to that of unfused attention where flags leave it open."""
        model = self.models[its.tp]
        if not model.kernels.undecided or self.correction is not None:
            return self.margins
        most = max(one.total_bytes for one in memory(unfused(model), its))
        return replace(self.margins, high=self.margins.high * max(1.0, most / peak_bytes))

    def refused(self, its: Parallel) -> str:
        """Return why Megatron refuses the training's flags with those of a layout; "" if it does not."""
        if not self._rules:
            return ""
        flags = [*startable(self.training.others, its), *layout_flags(its, self.training.model.predicted)]
        return whole_problem(pairs(flags), its.chunks, self._rules)

    def candidates(self, excluded: Counter[str]) -> Iterator[Parallel]:
        """Those that may fit; each with the least recomputation with which it does."""
        for its in layouts(self.training, self.cluster.gpus, self.cluster.gpus_per_node, excluded):
            if self.passes is not None and its.tp not in self.passes.tensors:
                excluded[f"--profile has no run with --tensor-model-parallel-size {its.tp}"] += 1
                continue
            for kind in self.kinds:
                one = its if kind is its.recompute else replace(its, recompute=kind)
                if reason := self.refused(one):
                    excluded[reason] += 1
                    continue
                if self.fits(self.least_bytes(one)):
                    yield one
                    break
                excluded[_MEMORY] += 1


def search(evaluator: Evaluator, top: int = 10, error: float = 0.0) -> Found:
    """The best layouts, each with its best numbers of virtual stages; ranks in the cluster's own order.

    Args:
        top: number of rows.
        error: share of a time within which the order of two is not known; rows have what ties with their best.

    Raises:
        ConfigError: none fits; the message names what excludes them.
    """
    excluded: Counter[str] = Counter()
    bounded = []
    for number, its in enumerate(evaluator.candidates(excluded)):
        times = evaluator.iteration(its)
        bounded.append((bound_ns(times), number, times))
    bounded.sort(key=lambda one: one[:2])
    configurations = len(bounded) + excluded[_MEMORY]
    found: list[Proposal] = []
    fastest: dict[tuple[int, ...], int] = {}  # time of each layout in ns
    last_ns, tied = inf, 1 + error  # what a configuration of another layout has to be below
    timed = 0

    def most_ns(its: Parallel) -> float:
        """The time with which a configuration may be in the rows."""
        own_ns = fastest.get(layout_of(its), inf)
        return tied * own_ns if own_ns <= last_ns else last_ns

    for least_ns, _, times in bounded:
        if least_ns > most_ns(times.parallel):
            continue
        timed += 1
        for one in _with_recompute(evaluator, times, excluded):
            layout, period_ns = layout_of(one.parallel), one.timeline.period_ns
            fastest[layout] = min(period_ns, fastest.get(layout, period_ns))
            if len(fastest) >= top:
                ordered = sorted(fastest.values())
                last_ns = max(ordered[top - 1], tied * ordered[0])
            found = [its for its in (*found, one) if its.timeline.period_ns <= most_ns(its.parallel)]
    if not found:
        raise ConfigError(_nothing(evaluator, excluded))
    rows = in_rows(found, error, evaluator.cluster.gpus_per_node)[:top]
    return Found(tuple(rows), configurations, timed, excluded)


def _with_recompute(evaluator: Evaluator, times: Iteration, excluded: Counter[str]) -> Iterator[Proposal]:
    """The configuration; where only its bound fits, the one with more recomputation that does."""
    its, kinds = times.parallel, evaluator.kinds
    for kind in kinds[kinds.index(its.recompute) :]:
        other = its if kind is its.recompute else replace(its, recompute=kind)
        if evaluator.refused(other):
            continue
        found = evaluator.proposal(times if other is its else evaluator.iteration(other))
        if found is not None:
            yield found
            return
        excluded[_MEMORY] += 1


def _most_recomputed(evaluator: Evaluator) -> Iterator[Parallel]:
    """Every layout with the most recomputation with which Megatron starts it."""
    cluster, passes = evaluator.cluster, evaluator.passes
    for its in layouts(evaluator.training, cluster.gpus, cluster.gpus_per_node, Counter()):
        if passes is None or its.tp in passes.tensors:
            kinds = (replace(its, recompute=kind) for kind in reversed(evaluator.kinds))
            yield from islice((one for one in kinds if not evaluator.refused(one)), 1)


def _nothing(evaluator: Evaluator, excluded: Counter[str]) -> str:
    """Reason why no configuration fits."""
    cluster = evaluator.cluster
    where = f"{cluster.gpus} x {cluster.gpu.name}"
    head = f"no configuration of these flags fits {where}"
    if excluded[_MEMORY]:
        its = min(_most_recomputed(evaluator), key=evaluator.least_bytes)
        held, interval = evaluator.held(its)
        least = max(one.total_bytes for one in held)
        most = interval.most_bytes(least)
        why = "" if interval == evaluator.margins else " with unfused attention, which --attention-backend can exclude"
        smallest = f"{head}: of the {excluded[_MEMORY]} that Megatron would start, the smallest"
        if excluded.total() == 1:
            smallest = f"this layout does not fit {where}: it"
        return (
            f"{smallest} needs {least / GIB:.2f} GiB of a GPU, at most {most / GIB:.2f} GiB{why}; expected at most "
            f"{cluster.room_bytes / GIB:.2f} GiB"
        )
    if excluded.total() == 1:
        (reason,) = excluded
        if "expected" in reason:
            return f"this layout does not go on {where}: {reason}"
        given = with_values(evaluator.training, reason)
        return f"this layout does not go on {where}{given and f' with {given}'}: expected that {reason}"
    reasons = "; ".join(f"{count} for: {reason}" for reason, count in excluded.most_common(3))
    return f"{head}: excluded are {reasons}"
