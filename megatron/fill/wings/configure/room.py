"""Check that a layout fits the GPUs' memory: a bound that takes no schedule, the peak of the schedule, its interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megatron.fill.pipeline.bubbles import peak_pass_bytes
from megatron.fill.pipeline.schedules import interleaved_warmup
from megatron.fill.wings.configure.latency import schedule_of
from megatron.fill.wings.mainjob.held import Pass, held_memory, micro_batch, passes
from megatron.fill.wings.mainjob.memory import StageMemory
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel


@dataclass(frozen=True, slots=True)
class Margins:
    """Figures of a peak, relative to the accounting."""

    low: float  # lower end of an interval that nine in ten measured peaks are in
    high: float  # its upper end
    # The figure that is shown: above three in four measured peaks, and not in the middle, as a training that runs out
    # of memory costs more than memory that stays free.
    shown: float = 1.0

    def most_bytes(self, accounted_bytes: float) -> int:
        """Return the upper end for a peak by the accounting."""
        return int(accounted_bytes * self.high)


# Quantiles of measured over predicted peaks (scripts/benchmarks/configure_gpu_memory.py): 5% and 95%, rounded outwards
# to whole percents, and no nearer than 1%, as accounting and Megatron's own iteration differ by so much; and 75%,
# rounded to whole percents.
_DENSE = Margins(0.98, 1.02, 1.01)
_EXPERTS = Margins(0.99, 1.03, 1.02)  # tokens are not routed evenly
_BERT = Margins(0.99, 1.09, 1.02)  # not all that it holds with tensor parallelism is accounted for
_CORRECTED = Margins(0.99, 1.01)  # a learned correction has its own margin
# Flags with which peaks are known least, and by how much the ends of the interval are further then: those that one or
# two measured trainings had, whose peaks say it; with (1, 1) none was measured that differs in this flag alone.
_LEAST_KNOWN = {
    "--cuda-graph-impl": Margins(0.85, 1.0),  # what graphs hold counts as free between their replays
    "--fp8-format": Margins(1.0, 1.0),
}


def margins(model: ModelSpec, corrected: bool = False, flags: Sequence[str] = ()) -> Margins:
    """Return the interval of a model's peaks.

    Args:
        corrected: True if a correction was learned from peaks on the GPUs in question.
        flags: Megatron's, of the training.
    """
    if corrected:
        return _CORRECTED
    found = _EXPERTS if model.experts else _BERT if model.word_head else _DENSE
    for wider in least_known(flags).values():
        found = replace(found, low=found.low * wider.low, high=found.high * wider.high)
    return found


def least_known(flags: Sequence[str]) -> dict[str, Margins]:
    """Return those of a training's flags with which peaks are known least, and factors on the interval's ends."""
    given = {flag.partition("=")[0] for flag in flags}
    return {flag: wider for flag, wider in _LEAST_KNOWN.items() if flag in given}


def least_bytes(model: ModelSpec, its: Parallel) -> int:
    """Least bytes that the fullest GPU holds; with 1F1B exactly that.

    A rank of 1F1B holds the microbatches of its warm-up and one more when its first backward pass begins.  So it is
    with virtual stages, where each of them counts as the smallest of the rank.
    """
    parts, layers = micro_batch(model, its), its.layers(model)
    dense = its.dense_layers(model)
    # of stages that are alike, the first has most passes in flight; those at the ends are like no other
    first: dict[object, int] = {}
    for stage in range(its.pp):
        alike = tuple((layers[virtual], dense[virtual], virtual == its.later_stage) for virtual in its.held(stage))
        first.setdefault(stage if stage in (0, its.pp - 1) else alike, stage)
    stages = first.values()
    peaks = ((stage, _held(its, passes(parts, its, layers, stage, dense), stage)) for stage in stages)
    return max(held_memory(model, its, parts, stage, peak).total_bytes for stage, peak in peaks)


def _held(its: Parallel, own: list[Pass], stage: int) -> float:
    m, pp = its.microbatches, its.pp
    count = min(pp - stage, m)
    if its.chunks > 1:
        count = min(interleaved_warmup(pp, m, its.chunks, its.group_size or pp, stage) + 1, m * its.chunks)
    return (count - 1) * min(one.kept_bytes for one in own) + min(one.peak_bytes for one in own)


def memory(model: ModelSpec, its: Parallel) -> tuple[StageMemory, ...]:
    """Peak memory of a GPU of each stage, by the schedule."""
    parts, layers = micro_batch(model, its), its.layers(model)
    dense = its.dense_layers(model)
    ranks = [passes(parts, its, layers, rank, dense) for rank in range(its.pp)]
    held = ((virtual, one) for rank, own in enumerate(ranks) for virtual, one in zip(its.held(rank), own, strict=True))
    there = [one for _, one in sorted(held, key=lambda pair: pair[0])]
    peaks = peak_pass_bytes(schedule_of(its), [one.kept_bytes for one in there], [one.peak_bytes for one in there])
    return tuple(held_memory(model, its, parts, stage, peak) for stage, peak in enumerate(peaks))
