"""A run's report as one HTML page, which needs no network: figures, charts that zoom, jobs and events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from megatron.fill.display import amount, one_line, percent
from megatron.fill.errors import FillError
from megatron.fill.linux.files import write_text
from megatron.fill.records.segment import RankFiles
from megatron.fill.records.slowdown import Estimate
from megatron.fill.report import charts
from megatron.fill.report.schema import JobReport, Report
from megatron.fill.report.series import Series
from megatron.fill.report.window import Shown
from megatron.fill.status import Cause, JobState
from megatron.fill.types import JobRecord

_MOST_JOBS, _MOST_EVENTS = 500, 500
_QUIET = (Cause.FINISHED, Cause.NONE)  # of attempts that are no events


def library() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script, from ``vl-convert-python``; FillError without it."""
    try:
        import vl_convert
    except ImportError as error:
        raise FillError(f"{error}: the page needs pip install 'pipefill[page]'") from error
    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def write_page(
    path: Path,
    run_dir: Path,
    report: Report,
    files_of_ranks: Iterable[RankFiles],
    attempts: Iterable[JobRecord],
    shown: Shown,
) -> None:
    """Write the page, from the files of each rank in each segment and the records of all attempts at jobs too.

    FillError if the scripts for charts are not installed; OSError if the file cannot be written.
    """
    series = _series(report, files_of_ranks)
    bins = series.bins() if series else []
    charted = {
        "timeline": charts.timeline(shown),
        "account": charts.account(report, {record.info.rank for record in shown.ranks}),
        "waits": charts.waits(report),
        "parts": charts.iteration_parts(series.parts()) if series else None,
        "uses": charts.time_uses(report),
        "harvest": charts.harvest(bins),
        "times": charts.iteration_times(bins),
        "predictions": charts.predictions(series.predictions()) if series else None,
    }
    there = {name: chart for name, chart in charted.items() if chart is not None}
    template = Template(files(__package__).joinpath("page.html").read_text(encoding="utf-8"))
    text = template.substitute(
        title=escape(str(run_dir)),
        command=escape(report.command),
        figures="".join(_figures(report, series.slowdown if series else None)),
        tables="\n".join((*_jobs(report.jobs), *_cost(report), *_events(report, attempts))),
        charts=json.dumps(there, separators=(",", ":")).replace("</", "<\\/"),
        library=library(),
    )
    write_text(path, text)


def _series(report: Report, files_of_ranks: Iterable[RankFiles]) -> Series | None:
    edges = [(one.first_iteration, one.last_iteration) for one in report.segments]
    firsts, lasts = ([edge for edge in side if edge is not None] for side in zip(*edges, strict=True))
    if not firsts:
        return None
    series = Series(min(firsts), max(lasts))
    for its in files_of_ranks:
        record = its.record()
        if record is not None:
            series.add(record, its.attempts(steps=False))
    return series


def _figures(report: Report, probed: Estimate | None) -> list[str]:
    summary = report.summary
    slowdown, by = "not measured", "slowdown by filling"
    if (paired := summary.slowdown) is not None:
        slowdown, by = _slowdown(paired.mean, *paired.ci95), f"{by}, with its 95% interval"
    elif probed is not None:
        slowdown, by = _slowdown(*probed[:3]), f"{by}, by the brake's probes, with its 95% interval"
    states = [job.state for job in summary.jobs]
    done = states.count(JobState.SUCCEEDED)
    shown = [
        (f"{summary.iterations:,}", "iterations"),
        (percent(summary.bubble_share, "not known"), "of the time in bubbles"),
        (percent(summary.harvest_ratio, "not known"), "of fillable bubbles harvested"),
        (slowdown, by),
        (f"{done} of {len(states)}", "jobs done"),
        (str(summary.brakes), "stops by the brake"),
    ]
    return [f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for value, name in shown]


def _jobs(jobs: Sequence[JobReport]) -> Iterable[str]:
    if not jobs:
        return
    more = f" (the first {_MOST_JOBS} of {len(jobs):,})" if len(jobs) > _MOST_JOBS else ""
    yield f"<h2>Jobs{more}</h2><p>The device seconds are those inside steps, in bubbles and between trainings.</p>"
    rows = [
        (
            job.name,
            str(job.state),
            "-" if job.rank is None else str(job.rank),
            f"{amount(job.work_done)} {job.unit}",
            f"{job.harvested_s:,.1f}",
            "-" if job.rate is None else amount(job.rate),
            str(len(job.attempts)),
            job.reason,
        )
        for job in jobs[:_MOST_JOBS]
    ]
    yield _table(["job", "state", "rank", "work", "device s", "per s", "attempts", "reason"], rows, {2, 4, 5, 6})


def _cost(report: Report) -> Iterable[str]:
    cost = report.cost
    if cost.saving is None:
        if report.jobs and cost.lacking:
            yield f"<p>The saving is not known; missing: {escape('; '.join(cost.lacking))}.</p>"
        return
    low, high = cost.saving_ci95 or (cost.saving, cost.saving)
    yield f"<p>Saving: {cost.saving:.1%} of the training's cost (95% interval {low:.1%} to {high:.1%}).</p>"


def _events(report: Report, attempts: Iterable[JobRecord]) -> Iterable[str]:
    timed = [(one.started_s, f"the training starts (segment {one.number})") for one in report.segments]
    timed += [(one.ended_s, f"it ends: {one.ending}") for one in report.segments if one.ended_s is not None]
    timed += [
        (job.ended_s, f"{one_line(job.name)}, attempt {job.attempt}, rank {job.rank}: {job.state}, {job.reason}")
        for job in attempts
        if job.status.cause not in _QUIET and job.state is not JobState.RUNNING
    ]
    rows = [(time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(when)), what) for when, what in sorted(timed)]
    rows += [
        (
            f"iteration {brake.iteration}",
            f"rank {rank.rank}: the brake stops filling until iteration {brake.until}, slowdown {brake.slowdown:.1%}",
        )
        for rank in report.ranks
        for brake in rank.brakes
    ]
    more = f" (the last {_MOST_EVENTS} of {len(rows):,})" if len(rows) > _MOST_EVENTS else ""
    yield f"<h2>Events{more}</h2>"
    yield _table(["when", "event"], rows[-_MOST_EVENTS:], set())


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], right: set[int]) -> str:
    def cells(values: Sequence[str], tag: str) -> str:
        classes = [' class="n"' if at in right else "" for at in range(len(values))]
        whole = [f"<{tag}{css}>{escape(text)}</{tag}>" for css, text in zip(classes, values, strict=True)]
        return f"<tr>{''.join(whole)}</tr>"

    body = "".join(cells(row, "td") for row in rows)
    return f'<div class="scroll"><table>{cells(heads, "th")}{body}</table></div>'


def _slowdown(mean: float, low: float, high: float) -> str:
    return f"{mean:+.2%} ({low:+.1%} to {high:+.1%})"
