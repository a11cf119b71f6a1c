"""Why a run filled nothing, and what would help."""

from __future__ import annotations

from megatron.fill.report.schema import Report


def advice(report: Report) -> str:
    """One sentence for the user of a run that served jobs and did nothing with them; empty where it did."""
    store = report.segments[-1].store if report.segments else ""
    total = report.total
    if not store or total.steps:
        return ""
    if not sum(total.bubble_s.values()) and len(report.stages) == 1:
        return (
            "nothing was filled, for a training in one pipeline stage has no bubbles; "
            "--pipeline-model-parallel-size 2 or more makes some"
        )
    if not report.jobs:
        return f"nothing was filled, for there were no jobs; pipefill submit JOBS.yaml --store {store} adds some"
    if not total.fillable_s:
        return (
            f"nothing was filled: bubbles are open to jobs after --fill-warmup-iterations, and while no brake or pause "
            f"is on, which of these {total.iterations} iterations was none; a longer training helps"
        )
    longest_ms = max((bubble.median_ms for cycle in report.cycle for bubble in cycle.training), default=0.0)
    return (
        f"nothing was filled: no job did a step in a bubble; the reasons are above. The longest bubbles are of "
        f"{longest_ms:.1f} ms, and steps have to be shorter; pipefill profile and plan tell what fits"
    )
