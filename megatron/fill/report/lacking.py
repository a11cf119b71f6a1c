"""Messages about records of a run that are missing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from megatron.fill.report.schema import Report

_NAMED = 6  # ranks named in a message


def record_lines(report: Report) -> Iterator[str]:
    """Yield a line for each loss by a full disk or a deleted folder, and for the harvests that are unknown for it."""
    several = len(report.segments) > 1
    for segment in report.segments:
        of = f" of segment {segment.number}" if several else ""
        if segment.lost_until is not None:
            yield f"records{of}: deleted while it trained; what was before iteration {segment.lost_until + 1} is lost"
        if segment.unwritten:
            yield f"records{of}: the last ones of {_ranks(segment.unwritten)} could not be written; only this has them"
        if segment.cut:
            yield f"records{of}: of {_ranks(segment.cut)} there were more than memory could hold; the end is lost"
    unknown = defaultdict(list)
    for rank in report.ranks:
        if rank.harvest_unknown:
            unknown[rank.harvest_unknown].append(rank.rank)
    for why, ranks in unknown.items():
        yield f"harvest of {_ranks(ranks)} not known (-) and in no sum: {why}"


def _ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_NAMED])) + (f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else "")
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
