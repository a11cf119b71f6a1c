"""The report on a terminal, readable in 80 columns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from megatron.fill.display import STATE_COLOURS, amount, counted, one_line, percent, results
from megatron.fill.records.segment import SegmentEnding
from megatron.fill.report.advice import advice
from megatron.fill.report.idle import late_lines, print_account, print_timers, print_waits
from megatron.fill.report.rows import listed, new_table, totals_table
from megatron.fill.report.schema import (
    Cost,
    CycleBubble,
    JobReport,
    Percentiles,
    RankCycle,
    RankReport,
    Report,
    SegmentReport,
    Slowdown,
    Totals,
)
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.report.window import MANY
from megatron.fill.types import PIPELINE_KINDS, JobState

_GIB = 2**30
_BRAKES = 5  # stops of one rank that are printed
_JOBS, _SEGMENTS = 40, 10  # numbers of jobs and segments that are printed
_LEAST = 0.0005  # share of the whole from which on a use has a column: all of them are too wide for 80 columns
_ENDED = {
    SegmentEnding.RUNNING: "goes on",
    SegmentEnding.WELL: "ended by itself",
    SegmentEnding.FAILED: "failed",
    SegmentEnding.CUT: "was cut off",
}


def print_report(report: Report, console: Console) -> None:
    """Print the bubbles of each rank (of each stage, if there are many ranks), the jobs, and how well filling went."""
    console.print(_rank_table(report), "")
    if report.total.fillable_s:
        console.print(_use_table(report), "")
    print_account(report.account, console, report.command)
    print_timers(report.timers, console)
    print_waits(report.waits, console)
    if report.jobs:
        shown = sorted(report.jobs, key=lambda job: job.state is not JobState.FAILED)[:_JOBS]
        shown = shown if len(report.jobs) > _JOBS else report.jobs
        console.print(_job_table(shown), "")
        for line in _below_jobs(report.jobs, shown):
            console.print(line, highlight=False, markup=False)
    settling_s = report.total.settling_s
    lacking = [layer.name for layer in report.sandbox if layer.lacks]
    lines = [
        *_segment_lines(report.segments),
        *_record_lines(report),
        *([f"bubbles that passed while jobs started, in no ratio: {settling_s:,.2f} s"] if settling_s else []),
        *_outside_lines(report.total),
        *late_lines(report.late),
        *_lines(report),
        *(cost_lines(report.cost) if report.jobs else []),
        *_brake_lines(report.ranks),
        *([f"the sandbox of jobs lacks {', '.join(lacking)}; see pipefill doctor"] if lacking else []),
        *([said] if (said := advice(report)) else []),
    ]
    for line in lines:
        console.print(escape(line), highlight=False)


def print_cycle(cycles: Sequence[RankCycle], console: Console) -> None:
    """Print the bubble cycle of each rank in training and, if there was any, in evaluation."""
    for cycle in cycles:
        where = f"rank {cycle.rank} (stage {cycle.stage})"
        took = "" if cycle.iteration_ms is None else f": iterations of {cycle.iteration_ms:.1f} ms"
        if cycle.training:
            console.print(_cycle_table(f"Bubbles of {where}{took}", cycle.training), "")
        elif cycle.iteration_ms is None and not cycle.evaluation:
            console.print(f"{where} has written no iteration down", highlight=False)
        elif cycle.iteration_ms is not None:
            console.print(f"{where} had no bubbles{took}", highlight=False)
        if cycle.evaluation:
            console.print(_cycle_table(f"Evaluation bubbles of {where}", cycle.evaluation), "")


def _rank_table(report: Report) -> Table:
    title = "Bubbles of the main job, in seconds by kind, and what side tasks used"
    if len(report.ranks) > MANY:
        title = f"Bubbles of the main job, {len(report.ranks):,} ranks by stage, in seconds by kind"
    bubbles = [f">{kind}" for kind in PIPELINE_KINDS]
    headings = [">iters", ">median\nms", ">bubble\nshare", *bubbles, ">used", ">harvest\nratio"]
    return totals_table(report, title, headings, _rank_cells)


def _rank_cells(totals: Totals) -> list[str]:
    time = totals.iteration_time
    return [
        str(totals.iterations),
        _short(time.median_s * 1e3) if time else "-",
        percent(totals.bubble_share),
        *(_short(totals.bubble_s.get(kind, 0.0)) for kind in PIPELINE_KINDS),
        "-" if totals.harvested_s is None else _short(totals.harvested_s),
        "-" if totals.harvest_ratio is None else f"{totals.harvest_ratio:.3f}",
    ]


def _use_table(report: Report) -> Table:
    total = report.total.time_use_ns
    least_ns = _LEAST * sum(total.values())
    used = [use for use in TimeUse if use is TimeUse.STEPS or total[use] > least_ns]

    def cells(totals: Totals) -> list[str]:
        whole_ns = sum(totals.time_use_ns.values())
        return [f"{totals.time_use_ns[use] / whole_ns:.1%}" if whole_ns else "-" for use in used]

    headings = [f">{use.heading}" for use in used]
    return totals_table(report, "Where the bubble time with filling on went", headings, cells)


def _job_table(jobs: Sequence[JobReport]) -> Table:
    table = new_table("Jobs", "job", "<state", ">rank", "work done", ">per s in\nbubbles", "reason")
    table.columns[0].max_width = table.columns[3].max_width = 18
    for job in jobs:
        table.add_row(
            escape(one_line(job.name)),
            f"[{STATE_COLOURS[job.state]}]{job.state}[/]",
            "-" if job.rank is None else str(job.rank),
            escape(one_line(f"{amount(job.work_done)} {job.unit}".rstrip())),
            "-" if job.rate is None else amount(job.rate),
            escape(one_line(job.reason)),
        )
    return table


def _below_jobs(jobs: Sequence[JobReport], shown: Sequence[JobReport]) -> Iterator[str]:
    """Yield how many jobs are not shown, and the first values that the task of each shown one reported."""
    if len(shown) < len(jobs):
        states = Counter(job.state for job in jobs)
        counts = ", ".join(f"{count:,} {state}" for state, count in sorted(states.items()))
        yield f"{len(shown)} of {len(jobs):,} jobs are shown ({counts}); report.json has them all"
    lines = [f"  {one_line(job.name)}: {results(job.result)}" for job in shown if job.result]
    if lines:
        yield from ("Results", *lines, "")


def _segment_lines(segments: Sequence[SegmentReport]) -> Iterator[str]:
    """Yield a line for each of the last segments; none for a single segment that ended by itself."""
    if len(segments) == 1 and segments[0].ending is SegmentEnding.WELL and not segments[0].between_steps:
        return
    yield "the run so far:" if segments[-1].ending is SegmentEnding.RUNNING else "the run:"
    for segment in segments[-_SEGMENTS:]:
        what = f"iterations {segment.first_iteration} to {segment.last_iteration}"
        what = what if segment.iterations else "no iteration recorded"
        lacking = segment.ranks - segment.recorded
        said = f", no record of {lacking} of its {segment.ranks} ranks" if lacking > 0 else ""
        yield f"  segment {segment.number}: {what}, {_ENDED[segment.ending]}{said}"
        if segment.between_steps:
            steps = counted(segment.between_steps, "step")
            yield f"    then {steps} of jobs without a training, {segment.between_s:,.1f} s"
    if len(segments) > _SEGMENTS:
        yield f"  and {len(segments) - _SEGMENTS} before them"


def _record_lines(report: Report) -> Iterator[str]:
    """Yield a line for each loss by a full disk or a deleted folder, and for the harvests that are unknown for it."""
    several = len(report.segments) > 1
    for segment in report.segments:
        of = f" of segment {segment.number}" if several else ""
        if segment.lost_until is not None:
            yield f"records{of}: deleted while it trained; what was before iteration {segment.lost_until + 1} is lost"
        if segment.unwritten:
            yield f"records{of}: the last ones of {listed(segment.unwritten)} could not be written; only this has them"
        if segment.cut:
            yield f"records{of}: of {listed(segment.cut)} there were more than memory could hold; the end is lost"
    unknown = defaultdict(list)
    for rank in report.ranks:
        if rank.harvest_unknown:
            unknown[rank.harvest_unknown].append(rank.rank)
    for why, ranks in unknown.items():
        yield f"harvest of {listed(ranks)} not known (-) and in no sum: {why}"


def _slowdown(found: Slowdown, pairs: str) -> str:
    low, high = found.ci95
    return f"{found.mean:+.2%} (95% interval {low:+.2%} to {high:+.2%}, {found.pairs} {pairs})"


def _lines(report: Report) -> Iterator[str]:
    summary, paired_blocks = report.summary, report.segments[-1].paired_blocks
    if summary.slowdown:
        slowdown = _slowdown(summary.slowdown, f"pair{'s' if summary.slowdown.pairs > 1 else ''} of blocks")
    elif paired_blocks:
        slowdown = f"not known, for no two blocks of {paired_blocks} iterations with and without filling were recorded"
    else:
        slowdown = "not measured; --fill-paired-blocks measures it"
    yield f"main job slowdown: {slowdown}"
    if summary.watching:
        yield f"... by watching alone: {_slowdown(summary.watching, 'iterations that were not watched')}"
    elif any(rank.device != "cpu" for rank in report.ranks):  # marks in its stream are work for a GPU
        yield "... by watching alone: not measured; --fill-paired-blocks of 3 or more measures it"
    if not report.jobs:
        return
    if summary.fill_efficiency is None:
        yield "fill efficiency: not known (no job was measured alone)"
    else:
        yield f"fill efficiency: {summary.fill_efficiency:.3f} of the work per second that the jobs do alone"
    yield f"bubble to first step: {_distribution(summary.open_to_step_us)}"
    yield f"overrun of the bubble: {_distribution(summary.overrun_us)}"


def _outside_lines(total: Totals) -> list[str]:
    """Return a line on each kind of wait outside the pipeline that could be filled."""
    return [
        f"{kind}: waited for {its.total_s:.1f} s outside the pipeline; used {its.harvested_s:.1f} s of the "
        f"{its.fillable_s:.1f} s that could be filled"
        for kind, its in total.outside.items()
        if round(its.fillable_s, 1)  # else the line would say 0.0 s
    ]


def cost_lines(cost: Cost) -> Iterator[str]:
    """Yield lines with the training's time with and without filling, and the saving or the inputs missing for it."""
    if cost.with_s is not None:
        without = "not known" if cost.without_s is None else f"{cost.without_s:,.2f} s"
        yield f"time of the training with filling: {cost.with_s:,.2f} s; the same without: {without}"
    if cost.saving is None or cost.saving_ci95 is None or cost.prices is None:
        yield f"cost saving: not known, for lack of {' and '.join(cost.lacking)}"
        return
    low, high = cost.saving_ci95
    prices = f"at {cost.prices.main:g} an hour for the training and {cost.prices.side:g} for a side device"
    yield f"cost saving: {cost.saving:+.2%} (95% interval {low:+.2%} to {high:+.2%}), {prices}"
    side_s = sum(work.side_s or 0.0 for work in cost.work)
    measured = sum(work.measured for work in cost.work)
    stated = len(cost.work) - measured
    of = [f"{stated} by the throughput in the jobs file"] if stated else []
    of += [f"{measured} by the rate alone on this device"] if measured else []
    yield f"  side work: {side_s:,.2f} s of a side device; of jobs: {', '.join(of) or 'none'}"


def _brake_lines(ranks: Sequence[RankReport]) -> Iterator[str]:
    """Yield lines on the automatic brake for the rank with the most stops; the others stop at about the same times."""
    rank = max(ranks, key=lambda rank: len(rank.brakes), default=None)
    if rank is None or not rank.brakes:
        return
    count, several = len(rank.brakes), sum(bool(rank.brakes) for rank in ranks)
    yield f"automatic brake: stopped filling {_times(count)} on {several} of {len(ranks)} ranks; on rank {rank.rank}:"
    for brake in rank.brakes[:_BRAKES]:
        yield f"  after iteration {brake.iteration}, {brake.slowdown:+.1%}; again from {brake.until}"
    if count > _BRAKES:
        yield f"  and {_times(count - _BRAKES)} more"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _cycle_table(title: str, bubbles: Sequence[CycleBubble]) -> Table:
    times = (">mean\nms", ">p10\nms", ">p90\nms", ">starts at\nms")
    table = new_table(title, ">index", "<kind", *times, ">share of\niteration", ">free\nGiB", ">seen")
    for bubble in bubbles:
        its_ms = (bubble.mean_ms, bubble.p10_ms, bubble.p90_ms, bubble.offset_ms)
        cells = [f"{ms:.2f}" if ms < 1000 else f"{ms:.1f}" for ms in its_ms]
        free = f"{bubble.free_bytes / _GIB:.1f}" if bubble.free_bytes else "-"
        table.add_row(str(bubble.index), str(bubble.kind), *cells, percent(bubble.share), free, str(bubble.count))
    return table


def _short(value: float) -> str:
    """Format in at most six characters, for values below a million."""
    if value >= 1000 or value == 0:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def _distribution(times: Percentiles | None) -> str:
    if times is None:
        return "no step ran in a bubble"
    return f"p50 {times.p50:,.0f} us, p99 {times.p99:,.0f} us, max {times.max:,.0f} us ({times.count:,} bubbles)"
