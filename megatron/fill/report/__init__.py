"""Reports of a run: ``report.json``, tables on a terminal, a trace and a picture, made from its raw records."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from megatron.fill import wings
from megatron.fill.errors import FillError
from megatron.fill.linux.files import write_text
from megatron.fill.records.segment import NoRecords, RankFiles, Segment, read_segments
from megatron.fill.records.unwritten import Unwritten
from megatron.fill.report.account import account, account_records, timers
from megatron.fill.report.build import Part, ReportBuilder
from megatron.fill.report.cycle import bubble_cycle, write_cycles
from megatron.fill.report.idle import print_account, print_timers, print_waits
from megatron.fill.report.jobs import Ask, job_reports
from megatron.fill.report.schema import Awaited, RankCycle, Report
from megatron.fill.report.seen import seen
from megatron.fill.report.terminal import print_cycle, print_report
from megatron.fill.report.timeline import draw_timeline
from megatron.fill.report.trace import write_trace
from megatron.fill.report.window import MANY, Shown, choose_shown
from megatron.fill.types import JobRecord, Prices, RankRecord

__all__ = ["Ask", "Report", "compose", "print_report", "profile"]

type Page = Callable[[Report, Sequence[RankFiles], Sequence[JobRecord], Shown], None]

REPORT, TRACE, TIMELINE = "report.json", "trace.json", "timeline.png"  # in a run folder


def compose(
    run_dir: Path,
    ask: Ask = lambda names: {},
    prices: Prices | None = None,
    *,
    ended: Segment | None = None,
    unwritten: Mapping[int, Unwritten] | None = None,
    page: Page | None = None,
    show: Callable[[Report], None] = lambda report: None,
) -> Report:
    """Build the report of a run folder and write ``report.json``, ``trace.json`` and ``timeline.png`` into it.

    The run may still be going on, have ended or have been cut off.  FillError if no rank left a record, a record cannot
    be read, or not all of these files could be written.

    Args:
        ask: looks up, in the job store, the jobs whose end is not in the records.
        prices: used instead of the prices that the run was started with.
        ended: the segment that has just ended; the run folder may lack it or its end.
        unwritten: records of ``ended`` that are in no file, by rank.
        page: writes the report as an HTML page, too (``page.write_page``); None for none.
        show: shows the report to the user, also where it cannot be written.
    """
    segments = _segments(run_dir, ended)
    left = {ended.number: unwritten or {}} if ended else {}
    files = {segment.number: segment.files(left.get(segment.number)) for segment in segments}
    builder = ReportBuilder()
    jobs: list[tuple[int, JobRecord]] = []
    for rank in sorted(set().union(*files.values())):
        builder.add(_parts({number: its[rank] for number, its in files.items() if rank in its}, jobs))
    between = {segment.number: _between(segment) for segment in segments}
    jobs += [(number, job) for number, its in between.items() for job in its]
    if builder.empty:
        raise FillError(f"{run_dir}: no rank has left a record yet, so there is nothing to report")
    report = builder.report(segments, job_reports(segments, jobs, ask), prices, left, between)
    try:
        shown = _shown(builder, segments, files)
        report = report.model_copy(update={"waits": _waits(shown.ranks)})
        write_text(run_dir / REPORT, report.model_dump_json(indent=2) + "\n")
        write_trace(run_dir / TRACE, shown, report.account)
        draw_timeline(run_dir / TIMELINE, shown, report.summary, report.account)
        if page is not None:
            page(report, [its for ranks in files.values() for its in ranks.values()], [job for _, job in jobs], shown)
    except OSError as error:
        raise FillError(f"{run_dir}: the report cannot be written there: {error.strerror or error}") from error
    finally:
        show(report)
    return report


def _segments(run_dir: Path, ended: Segment | None) -> list[Segment]:
    """Return the run's segments in order, with ``ended`` in place of what the folder holds of it."""
    if ended is None:
        return read_segments(run_dir)
    with suppress(NoRecords):  # its folder may be gone
        return [*(one for one in read_segments(run_dir) if one.number != ended.number), ended]
    return [ended]


def _parts(files: Mapping[int, RankFiles], jobs: list[tuple[int, JobRecord]]) -> Iterator[Part]:
    """Yield a rank's records of each segment; the jobs of its agents are appended to ``jobs``."""
    for number, its in files.items():
        attempts = its.attempts(steps=False)
        jobs += [(number, job) for job, _ in attempts]
        record = its.record(spans=False)
        if record is not None:
            unknown = "its agent could not write what they did" if its.behind else ""
            if record.lost_until:
                unknown = f"its record up to iteration {record.lost_until} was deleted"
            yield Part(number, record, [worker for _, worker in attempts], unknown)


def _between(segment: Segment) -> list[JobRecord]:
    """Return the records of what jobs did after a segment, without a training; their harvest is all time in steps."""
    attempts = [one for its in segment.between().values() for one in its.attempts(steps=False)]
    return [replace(job, harvested_s=worker.alone_ns / 1e9) for job, worker in attempts]


def _shown(builder: ReportBuilder, segments: Sequence[Segment], files: Mapping[int, Mapping[int, RankFiles]]) -> Shown:
    """Return the records that picture, trace and page show, with spans and steps."""
    number, ranks, which = choose_shown(builder.segments)
    its = [(record, files[number][rank]) for rank in ranks if (record := files[number][rank].record()) is not None]
    several = f"segment {number} of {len(segments)}" if len(segments) > 1 and its else ""
    return Shown(
        [record for record, _ in its],
        [worker for _, files_of in its for _, worker in files_of.attempts()],
        ", ".join(part for part in (several, which) if part),
        segments[-1].trace_iterations,
    )


def profile(segment: Segment, path: Path, console: Console, unwritten: Mapping[int, Unwritten]) -> None:
    """Print the bubble cycle of each rank of a segment, and the account of its time; write the cycles to ``path``.

    Of few ranks it is also printed whom they waited for.  ``unwritten`` are records that are in no file, by rank.
    FillError if no rank left a record, or one cannot be read; OSError if the file cannot be written.
    """
    files = segment.files(unwritten)
    few = len(files) <= MANY
    records, cycles = list[RankRecord](), list[RankCycle]()
    for its in files.values():
        record = its.record(spans=few)
        if record is not None:
            cycles.append(bubble_cycle(seen(record)))
            records += [record] if few else []
    if not cycles:
        raise FillError(f"{segment.folder}: no rank has left a record, so there is nothing to report")
    print_cycle(cycles, console)
    left = account_records([segment])
    accounts = account([segment], left)
    print_account(accounts, console, segment.command)
    print_timers(timers(left, accounts), console)
    print_waits(_waits(records), console)
    write_cycles(path, cycles)


def _waits(records: Sequence[RankRecord]) -> list[Awaited]:
    """Return whom the ranks waited for, longest first, by the wing that knows the schedules."""
    return [one for module in wings.modules("report") for one in module.waits(records)]
