"""Baselines that choose a layout: AMP's and Varuna's latency models, and Megatron's rule of thumb."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron.fill.wings.configure.latency import Iteration
from megatron.fill.wings.configure.search import Evaluator, Proposal
from megatron.fill.wings.mainjob.parallel import Recompute


def amp_ns(its: Iteration) -> int:
    """The iteration by AMP's model (Li et al. 2022, arXiv 2210.07297, section 3.3).

    The slowest stage runs all microbatches but one, the first passes all stages and links, and then the slowest stage
    reduces.  That transfers keep 1F1B from going on is not in it.
    """
    passes = [stage.forward_ns + stage.backward_ns for stage in its.costs.stages]
    links = max(sum(map(sum, transfers[:-1])) for transfers in its.transfers_ns)
    tail = max(step + reduce for step, reduce in zip(its.costs.optimizer_ns, its.reduce_ns, strict=True))
    return (its.parallel.microbatches - 1) * max(passes) + sum(passes) + links + tail


def varuna_ns(its: Iteration) -> int:
    """The iteration as Varuna's simulator has it (Athlur et al. 2022, EuroSys: "Varuna: scalable, low-cost training").

    Transfers overlap with passes: while a pipeline is full, a microbatch takes as long as the passes of the slowest
    stage or as the slowest link in one direction, whichever is longer, and only the first one waits for all links.
    Passes compute again what they did not keep.
    """
    passes = [stage.forward_ns + stage.backward_ns for stage in its.costs.stages]
    slowest = 0
    for transfers in its.transfers_ns:
        links = [time_ns for both in transfers[:-1] for time_ns in both]
        each = max([*passes, *links])
        slowest = max(slowest, (its.parallel.microbatches - 1) * each + sum(passes) + sum(links))
    return slowest + max(step + reduce for step, reduce in zip(its.costs.optimizer_ns, its.reduce_ns, strict=True))


def amp(evaluator: Evaluator) -> Proposal | None:
    """AMP's choice among the layouts that it knows: no virtual stages, no context parallelism, nothing recomputed.

    AMP does not look at memory; here it is spared layouts that do not fit.
    """
    times = (
        evaluator.iteration(its)
        for its in evaluator.candidates(evaluator.cluster.gpus, Counter())
        if its.chunks == its.cp == 1 and its.recompute is Recompute.NONE
    )
    return _least(evaluator, times, amp_ns)


def varuna(evaluator: Evaluator) -> Proposal | None:
    """Varuna's choice: pipeline and data parallelism alone, everything computed again, no virtual stages."""
    times = (
        evaluator.iteration(replace(its, recompute=Recompute.FULL))
        for its in evaluator.candidates(evaluator.cluster.gpus, Counter())
        if its.chunks == its.cp == its.tp == its.ep == 1
    )
    return _least(evaluator, times, varuna_ns)


def _least(evaluator: Evaluator, times: Iterable[Iteration], estimate: Callable[[Iteration], int]) -> Proposal | None:
    """The one with the least estimate, among those that fit."""
    for one in sorted(times, key=estimate):
        found = evaluator.proposal(one)
        if found is not None:
            return found
    return None


def rule_of_thumb(evaluator: Evaluator) -> Proposal | None:
    """Megatron's (Narayanan et al. 2021, section 3): tensor parallelism as wide as a node, then as few stages as fit.

    With microbatches of 1, and without virtual stages and recomputation.
    """
    fitting = [
        its
        for its in evaluator.candidates(evaluator.cluster.gpus, Counter())
        if its.chunks == its.cp == its.ep == its.microbatch == 1 and its.recompute is Recompute.NONE
    ]
    for its in sorted(fitting, key=lambda one: (-one.tp, one.pp)):
        found = evaluator.proposal(evaluator.iteration(its))
        if found is not None:
            return found
    return None
