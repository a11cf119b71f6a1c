"""Late ranks: those that the others of their group waited for.

Ranks that wait for each other go on together, so the one that came last has waited least.  Over a run, the ranks of a
group that waited less than the middle between the least and the most are the late ones: in a pipeline those of the
slowest stage, in a save those that wrote longest.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from megatron.fill.report.schema import AccountReport, Late, RankReport
from megatron.fill.types import BubbleKind

_LEAST = 0.01  # of the time in iterations; a smaller difference is noise
_ALL, _OTHERS = "all ranks", "other groups"
# By name in the account: what the ranks of such a group have in common.
_GROUPS: dict[str, Callable[[RankReport], tuple[int, ...]]] = {
    "tensor group": lambda rank: (rank.stage, rank.data_parallel_rank, rank.context_parallel_rank),
    "context group": lambda rank: (rank.stage, rank.data_parallel_rank, rank.tensor_parallel_rank),
    "expert group": lambda rank: (rank.stage, rank.expert_data_parallel_rank),
    # Gradients are also reduced over the ranks of context parallelism.
    "data group": lambda rank: (rank.stage, rank.tensor_parallel_rank),
    _ALL: lambda _: (),
}


def late(ranks: Sequence[RankReport], accounts: Sequence[AccountReport]) -> list[Late]:
    """Return the late ranks by what the others waited in, those that were waited for longest first.

    Waits in other groups count in the pipeline: Megatron's own are those of a model's ranks between iterations.
    """
    named = {one.rank: {its.name: its.time_s for its in one.times} for one in accounts if one.rank is not None}
    found = _late("save", ranks, {rank.rank: _in_saves(rank) for rank in ranks})
    in_pipeline_s = {
        rank.rank: sum((*rank.bubble_s.values(), *rank.evaluation_bubble_s.values()))
        + named.get(rank.rank, {}).get(_OTHERS, 0.0)
        for rank in ranks
    }
    for name, common in _GROUPS.items():
        for group in _by([rank for rank in ranks if rank.rank in named], common):
            waited_s = {rank.rank: named[rank.rank].get(name, 0.0) for rank in group}
            found += _late(name, group, waited_s)
            if name != _ALL:  # who waited for a late rank of its stage did not itself keep other stages waiting
                for rank, its_s in waited_s.items():
                    in_pipeline_s[rank] += its_s - min(waited_s.values())
    for group in _by(ranks, lambda its: (its.data_parallel_rank, its.tensor_parallel_rank, its.context_parallel_rank)):
        found += _late("pipeline", group, {rank.rank: in_pipeline_s[rank.rank] for rank in group})
    return sorted(found, key=lambda one: -one.late_s)


def _by(ranks: Sequence[RankReport], common: Callable[[RankReport], tuple[int, ...]]) -> list[list[RankReport]]:
    groups: defaultdict[tuple[int, ...], list[RankReport]] = defaultdict(list)
    for rank in ranks:
        groups[common(rank)].append(rank)
    return list(groups.values())


def _in_saves(rank: RankReport) -> float:
    waits = rank.outside.get(BubbleKind.SAVE)
    return waits.total_s if waits else 0.0


def _late(wait: str, group: Sequence[RankReport], waited_s: Mapping[int, float]) -> list[Late]:
    """Return the late ranks of one group; none if its ranks waited about as long."""
    least_s, most_s = min(waited_s.values(), default=0.0), max(waited_s.values(), default=0.0)
    if not group or most_s - least_s <= _LEAST * fmean(rank.iteration_s for rank in group):
        return []
    middle_s = (least_s + most_s) / 2
    found = sorted(rank for rank, its_s in waited_s.items() if its_s < middle_s)
    others = waited_s.keys() - set(found)
    late_s = fmean(waited_s[rank] for rank in others) - fmean(waited_s[rank] for rank in found)
    return [Late(wait=wait, ranks=found, others=len(others), late_s=late_s)]
