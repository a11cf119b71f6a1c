"""Ranks of configurations with their ties, and the reason why one comes before another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fill.wings.configure.latency import stage_times
from megatron.fill.wings.configure.rows import safer
from megatron.fill.wings.configure.search import Evaluator, Proposal
from megatron.fill.wings.configure.value import Valued
from megatron.fill.wings.mainjob.hardware import GIB

# Differences up to which the order of two predictions is not known (docs/benchmarks/configure.json): of blind ones from
# a measured profile their mean error, ``blind_mean``; without one, a difference above which five in six pairs of
# layouts on 64 to 512 A100 are in the right order; nine in ten are above ``ordered_from`` of ``over_nodes``.
ERROR, MODEL_ERROR = 0.013, 0.08
_LEAST_S, _LEAST_GIB, _LEAST_GPUS = 0.00005, 0.05, 0.005  # smaller differences are not named


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of an iteration, in seconds, as the mean over its GPUs."""

    passes_s: float  # computation of passes; measured ones have their tensor-parallel exchange in them
    bubbles_s: float
    step_s: float  # all else: communication outside bubbles and the optimizer


def ranks(values: Sequence[float], error: float = ERROR) -> list[int]:
    """Rank of each value, from 1; within the error of the least of a rank, they are tied, in any order."""
    found: list[int] = []
    for at, value in enumerate(values):
        tied = at > 0 and value <= (1 + error) * min(values[found[-1] - 1 :])
        found.append(found[-1] if tied else at + 1)
    return found


def parts(proposal: Proposal, evaluator: Evaluator) -> Parts:
    """Split an iteration of a configuration."""
    its, cluster = proposal.parallel, evaluator.cluster
    alone = [(0.0, 0.0)] * its.pp  # seconds exchanged in a pass
    stages = stage_times(evaluator.models[its.tp], cluster.gpu, cluster.efficiency, its, alone, evaluator.passes)
    passes_s = its.microbatches * sum(one.forward_ns + one.backward_ns for one in stages) / its.pp / 1e9
    bubbles_s = proposal.bubble_share * proposal.iteration_s
    return Parts(passes_s, bubbles_s, proposal.iteration_s - passes_s - bubbles_s)


def why(first: Valued, second: Valued, evaluator: Evaluator, by_time: bool = True) -> str:
    """Differences of one configuration to another: time by parts, memory, and fill work.

    Of different numbers of GPUs it compares GPU-seconds, since twice as many take half the time by themselves.

    Args:
        by_time: they are ranked by time: then also what makes the first safer, if it is longer.
    """
    one, other = (parts(each.proposal, evaluator) for each in (first, second))
    counts = first.proposal.parallel.gpus, second.proposal.parallel.gpus
    same = counts[0] == counts[1]
    of_one, of_other, unit = (1e3, 1e3, "ms") if same else (*counts, "GPU-s")
    differences = {
        "bubbles": of_one * one.bubbles_s - of_other * other.bubbles_s,
        "communication and step": of_one * one.step_s - of_other * other.step_s,
        "passes": of_one * one.passes_s - of_other * other.passes_s,
    }
    named = [] if same else [f"{counts[0]} GPUs instead of {counts[1]}"]
    least = 1e3 * _LEAST_S
    named += [f"{name} {_signed(value)} {unit}" for name, value in differences.items() if abs(value) >= least]
    gib = (first.proposal.peak_bytes - second.proposal.peak_bytes) / GIB
    named += [f"memory {gib:+.1f} GiB"] if abs(gib) >= _LEAST_GIB else []
    gpus = first.gpus_worth - second.gpus_worth
    named += [f"fill {gpus:+.2f} GPUs"] if abs(gpus) >= _LEAST_GPUS else []
    said = ", ".join(named) or "no difference"
    longer = by_time and first.proposal.iteration_s > second.proposal.iteration_s
    reason = safer(first.proposal, second.proposal, evaluator.cluster.gpus_per_node) if longer else ""
    return f"{said}; tied in time, {reason}" if reason else said


def _signed(value: float) -> str:
    return f"{value:+,.0f}" if abs(value) >= 1000 else f"{value:+.4g}"
