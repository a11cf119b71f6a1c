"""How others choose a layout, to compare with: AMP's latency model, and Megatron's rule of thumb."""

from __future__ import annotations

from collections import Counter

from megatron.fill.configure.latency import Iteration
from megatron.fill.configure.search import Evaluator, Proposal
from megatron.fill.mainjob.parallel import Recompute


def amp_ns(its: Iteration) -> int:
    """The iteration by AMP's model (Li et al. 2022, arXiv 2210.07297, section 3.3).

    The slowest stage runs all micro-batches but one, the first passes all stages and links, and then the slowest stage
    reduces.  That transfers keep 1F1B from going on is not in it.
    """
    passes = [stage.forward_ns + stage.backward_ns for stage in its.costs.stages]
    links = max(sum(map(sum, transfers[:-1])) for transfers in its.transfers_ns)
    tail = max(step + reduce for step, reduce in zip(its.costs.optimizer_ns, its.reduce_ns, strict=True))
    return (its.parallel.microbatches - 1) * max(passes) + sum(passes) + links + tail


def amp(evaluator: Evaluator) -> Proposal | None:
    """AMP's choice among the layouts that it knows: no virtual stages, no context parallelism, nothing recomputed.

    AMP does not look at memory; here it is spared layouts that do not fit.
    """
    best: tuple[int, Iteration] | None = None
    for its in evaluator.candidates(evaluator.cluster.gpus, Counter()):
        if its.chunks > 1 or its.cp > 1 or its.recompute is not Recompute.NONE:
            continue
        times = evaluator.iteration(its)
        if best is None or amp_ns(times) < best[0]:
            best = amp_ns(times), times
    return None if best is None else evaluator.proposal(best[1])


def rule_of_thumb(evaluator: Evaluator) -> Proposal | None:
    """Megatron's (Narayanan et al. 2021, section 3): tensor parallelism as wide as a node, then as few stages as fit.

    With micro-batches of 1, and without virtual stages and recomputation.
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
