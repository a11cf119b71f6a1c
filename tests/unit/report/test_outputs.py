import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megatron.fill.errors import FillError
from megatron.fill.folders import BETWEEN
from megatron.fill.records.agent import AgentFile
from megatron.fill.records.segment import SegmentEnding
from megatron.fill.report import Report, compose, print_report, profile, shares
from megatron.fill.report.schema import AccountReport, NamedTime
from megatron.fill.report.timeline import draw_timeline, join, subtract
from megatron.fill.report.trace import write_trace
from megatron.fill.report.window import Shown, choose_window, near
from megatron.fill.status import Cause, Status
from megatron.fill.types import CycleKey, JobRecord, JobState, RankRecord, WorkerRecord
from tests.support.segments import write_segment
from tests.support.synthetic import LAST, MS, START_NS, is_filling, report_of, synthetic_run


def shifted(record: RankRecord, by_ns: int, node: int) -> RankRecord:
    def move(values: Sequence[Any]) -> list[Any]:
        return [replace(value, start_ns=value.start_ns + by_ns, end_ns=value.end_ns + by_ns) for value in values]

    info = replace(record.info, node=node, nodes=node + 1)
    return RankRecord(info, move(record.iterations), move(record.bubbles), move(record.spans))


# --- the window


def test_window_goes_to_where_side_tasks_ran() -> None:
    ranks, workers, _ = synthetic_run()
    window = choose_window(ranks, workers, 2)
    assert window is not None
    assert (window.first, window.last) == (7, 8)
    assert is_filling(7)
    assert window.duration_ns == 202 * MS
    bare = choose_window(
        [replace(r, iterations=[replace(i, filling=False) for i in r.iterations]) for r in ranks], [], 2
    )
    assert bare is not None
    assert (bare.first, bare.last) == (9, 10)


def test_window_without_common_iterations() -> None:
    ranks, workers, _ = synthetic_run()
    assert choose_window([], [], 2) is None
    assert choose_window([ranks[0], replace(ranks[1], iterations=[])], workers, 2) is None
    everything = choose_window(ranks, workers, 99)
    assert everything is not None
    assert (everything.first, everything.last) == (1, LAST)


def test_clocks_of_nodes_are_aligned() -> None:
    ranks, _, _ = synthetic_run()
    ranks[1] = shifted(ranks[1], 5 * 10**15, node=1)
    window = choose_window(ranks, [], 2)
    assert window is not None
    assert window.shift_ns == {0: 0, 1: -5 * 10**15}
    start = ranks[1].iterations[window.first - 1].start_ns
    assert window.place(1, start, start + MS) == (0, MS)
    assert window.place(0, START_NS, START_NS + MS) is None
    assert window.place(0, window.start_ns - MS, window.start_ns + MS) == (0, MS)


def test_only_what_is_near_the_window_is_looked_at() -> None:
    _, record = synthetic_run()[0]
    unfilled = replace(record, iterations=[replace(item, filling=False) for item in record.iterations])
    window = choose_window([unfilled], [], 1)
    assert window is not None
    assert (window.first, window.last) == (LAST, LAST)
    kept = near(record.bubbles, window)
    assert {bubble.iteration for bubble in kept} == {LAST - 1, LAST}  # an evaluation's have the number before
    assert sum(bubble.forward_only for bubble in kept) == 2
    assert near([], window) == ()


# --- the trace


def test_trace(tmp_path: Path) -> None:
    ranks, workers, _ = synthetic_run()
    write_trace(tmp_path / "trace.json", Shown(ranks, workers, iterations=2))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert names == {"rank 0 (stage 0)", "rank 1 (stage 1)", "main job", "bubbles", "side task"}
    timed = defaultdict(list)
    for event in events:
        assert event["ph"] in "MX"
        assert {"name", "pid", "tid", "ts"} <= set(event)
        if event["ph"] == "X":
            timed[event["pid"], event["tid"]].append(event)
            assert event["dur"] > 0
            assert 0 <= event["ts"] <= event["ts"] + event["dur"] <= 202_000
    counts = {key: len(its) for key, its in timed.items()}
    assert counts == {(0, 1): 10, (0, 2): 4, (0, 3): 14, (1, 1): 10, (1, 2): 4, (1, 3): 12}
    bubble = timed[0, 2][1]
    assert (bubble["name"], bubble["ts"], bubble["dur"]) == ("interior", 60_000, 10_000)
    assert bubble["args"] | {"index": 1, "predicted_ms": 11.0, "steps": 3, "overrun_us": 2100.0} == bubble["args"]
    assert bubble["args"]["seq"] > 0
    assert {event["name"] for event in timed[1, 3]} == {"graph"}
    for its in timed.values():
        assert_nested(its)


def test_the_trace_has_the_accounts_of_the_ranks_that_are_in_it(tmp_path: Path) -> None:
    ranks, workers, _ = synthetic_run()
    times = [NamedTime(name="forward", compute=True, time_s=1.5, share=1.0, long_s=1.5)]
    one = AccountReport(
        rank=0, stage=0, wall_s=1.5, named_share=1.0, idle_share=0.0, long_idle_s=0.0, blind=False, times=times
    )
    accounts = [one.model_copy(update={"rank": rank}) for rank in (0, 1, 7, None)]
    write_trace(tmp_path / "trace.json", Shown(ranks, workers), accounts)
    about = json.loads((tmp_path / "trace.json").read_text())["otherData"]
    assert about["account_s"] == {"rank 0": {"forward": 1.5}, "rank 1": {"forward": 1.5}}


def assert_nested(events: list[dict]) -> None:
    """On one thread, an event lies inside another or outside it."""
    open_ends: list[float] = []
    for event in events:
        while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
            open_ends.pop()
        end = event["ts"] + event["dur"]
        assert not open_ends or end <= open_ends[-1] + 1e-6
        open_ends.append(end)


def test_trace_of_nothing(tmp_path: Path) -> None:
    ranks, _, _ = synthetic_run()
    write_trace(tmp_path / "trace.json", Shown([replace(ranks[0], iterations=[])], []))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M"}


# --- the picture


def pixels(path: Path) -> np.ndarray:
    from matplotlib.image import imread

    return imread(path)[..., :3]


def share_of(image: np.ndarray, colour: str) -> float:
    wanted = np.array([int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return float((np.abs(image - wanted).max(axis=2) < 0.02).mean())


def test_timeline_shows_every_lane(tmp_path: Path) -> None:
    ranks, workers, _ = synthetic_run()
    draw_timeline(tmp_path / "timeline.png", Shown(ranks, workers))
    image = pixels(tmp_path / "timeline.png")
    for colour in ("#56B4E9", "#0072B2", "#8F8F8F", "#FAF8F2", "#E69F00", "#009E73"):
        assert share_of(image, colour) > 0.005, colour
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]


def accounts(count: int) -> list[AccountReport]:
    """An account of some ranks, then that of all: a quarter each of four names, one of them without a colour."""
    names = ("forward", "save", "drain", "a new wait")
    times = [NamedTime(name=name, compute=name == "forward", time_s=25.0, share=0.25, long_s=0.0) for name in names]
    return [
        AccountReport(
            rank=rank,
            stage=rank,
            wall_s=100.0,
            named_share=1.0,
            idle_share=0.75,
            long_idle_s=0.0,
            blind=False,
            times=times,
        )
        for rank in (*range(count), None)
    ]


def test_the_account_is_below_the_iterations(tmp_path: Path) -> None:
    ranks, workers, _ = synthetic_run()
    draw_timeline(tmp_path / "alone.png", Shown(ranks, workers))
    draw_timeline(tmp_path / "below.png", Shown(ranks, workers), accounts=accounts(20))  # of other ranks, too
    alone, below = (pixels(tmp_path / f"{name}.png") for name in ("alone", "below"))
    added = below[alone.shape[0] :]
    assert 80 < len(added) < 200
    for name in ("forward", "save", "drain", "a new wait"):
        assert share_of(added, shares.colour(name)) > 0.02
    draw_timeline(tmp_path / "none.png", Shown(ranks, workers), accounts=accounts(0))
    assert pixels(tmp_path / "none.png").shape == alone.shape


def test_the_bars_of_an_account_add_up_to_all_its_time() -> None:
    (one, whole) = accounts(1)
    little = NamedTime(name="load", compute=False, time_s=0.1, share=0.001, long_s=0.0)
    both = [account.model_copy(update={"times": [*account.times, little]}) for account in (one, whole)]
    names = shares.shown_names(both)
    assert names == ["forward", "drain", "save", "a new wait", "others"]
    assert sum(part.time_s for part in shares.bars(both[0], names)) == pytest.approx(100.1)


def luminance(colour: str) -> float:
    """As WCAG 2 defines it."""
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", [*shares.COLOURS, "a new wait"])
def test_a_share_can_be_read_on_its_bar(name: str) -> None:
    dark, light = sorted((luminance(shares.colour(name)), luminance(shares.ink(name))))
    assert (light + 0.05) / (dark + 0.05) > 3


def test_timeline_of_many_ranks_jobs_and_of_nothing(tmp_path: Path) -> None:
    (record, _), (worker, *_), _ = synthetic_run()
    ranks = [replace(record, info=replace(record.info, rank=rank, stage=rank)) for rank in range(16)]
    workers: list[WorkerRecord] = [replace(worker, rank=rank, job=f"job {rank}") for rank in range(16)]
    draw_timeline(tmp_path / "16.png", Shown(ranks, workers))
    draw_timeline(tmp_path / "0.png", Shown([], []))
    assert 1200 < pixels(tmp_path / "16.png").shape[0] < 2200
    assert pixels(tmp_path / "0.png").min() < 0.5


def test_bars() -> None:
    assert subtract([(0, 10)], []) == [(0, 10)]
    assert subtract([(0, 10), (20, 5)], [(2, 3), (4, 2), (9, 12)]) == [(0, 2), (6, 3), (21, 4)]
    assert subtract([(0, 10)], [(0, 10)]) == []
    assert subtract([(0, 10)], [(1, 8), (2, 1)]) == [(0, 1), (9, 1)]
    assert join([(0, 1), (1.5, 1), (9, 1)], 1) == [(0, 2.5), (9, 1)]
    assert join([(0, 5), (5.5, 5)], 1) == [(0, 5), (5.5, 5)]


# --- the run folder


def attempts_of(workers: list[WorkerRecord], jobs: list[JobRecord]) -> list[tuple[JobRecord, WorkerRecord]]:
    by_name = {job.name: job for job in jobs}
    return [(by_name[worker.job], worker) for worker in workers]


def test_compose(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    write_segment(tmp_path, ranks, attempts_of(workers, jobs), sandbox={"pid": "", "user": "not root"})
    report = compose(tmp_path)
    alone = report_of(ranks, workers, jobs[:3], "train")
    assert report.ranks == alone.ranks
    assert (report.total, report.summary, report.cycle, report.jobs) == (
        alone.total,
        alone.summary,
        alone.cycle,
        alone.jobs,
    )
    assert [(layer.name, layer.lacks) for layer in report.sandbox] == [("pid", ""), ("user", "not root")]
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_whom_the_ranks_waited_for_is_in_the_report_and_printed_without_jobs(tmp_path: Path) -> None:
    ranks, _, _ = synthetic_run()
    records = [replace(record, schedule=CycleKey("1f1b", 2)) for record in ranks]
    segment = write_segment(tmp_path, records).segment
    assert [(one.rank, one.peer, one.computed_s) for one in compose(tmp_path).waits] == [(0, 1, 0.3), (1, 0, 0.3)]
    console = Console(file=(text := StringIO()))
    profile(segment, tmp_path / "bubbles.json", console, {})
    assert "Waits for other stages, latest 10 iterations: 0.60 s" in text.getvalue()


def test_compose_without_records(tmp_path: Path) -> None:
    with pytest.raises(FillError, match="holds no records"):
        compose(tmp_path)
    write_segment(tmp_path, [])
    with pytest.raises(FillError, match="no rank has left a record yet"):
        compose(tmp_path)


def later(record: RankRecord, iterations: int, by_ns: int) -> RankRecord:
    """The same once more, so many iterations on."""

    def move(values: Sequence[Any]) -> list[Any]:
        return [
            replace(one, iteration=one.iteration + iterations, start_ns=one.start_ns + by_ns, end_ns=one.end_ns + by_ns)
            for one in values
        ]

    return RankRecord(record.info, move(record.iterations), move(record.bubbles), move(record.spans))


def test_a_report_covers_all_segments(tmp_path: Path) -> None:
    """The first one was cut off after iteration 8, and the second went on from a checkpoint at 6."""
    ranks, workers, jobs = synthetic_run()
    attempts = attempts_of(workers, jobs)
    cut = [replace(one, iterations=one.iterations[:8]) for one in ranks]
    began = [(replace(job, status=Status(JobState.RUNNING), attempt=1, ended_s=1.0), its) for job, its in attempts]
    running = {0: began[:1], 1: began[1:]}
    write_segment(tmp_path, cut, running=running, command="first", ending=SegmentEnding.CUT)
    ended = [
        (
            replace(job, attempt=2, ended_s=2.0, status=Status(JobState.SUCCEEDED)),
            replace(its, steps=[(start + 10**12, end + 10**12) for start, end in its.steps]),
        )
        for job, its in attempts[:2]
    ]
    write_segment(tmp_path, [later(one, 6, 10**12) for one in ranks], ended, command="second", jobs=["train", "late"])
    asked: list[set[str]] = []

    def ask(names: Collection[str]) -> dict[str, JobRecord]:
        asked.append(set(names))
        return {"late": replace(jobs[3], status=Status(JobState.QUEUED, detail="the store says so"))}

    report = compose(tmp_path, ask)
    assert report.command == "second"
    spans = [(one.number, one.ending, one.first_iteration, one.last_iteration) for one in report.segments]
    assert spans == [(1, SegmentEnding.CUT, 1, 8), (2, SegmentEnding.WELL, 7, 16)]
    assert [(one.iterations, one.ranks, one.recorded) for one in report.segments] == [(8, 2, 2), (10, 2, 2)]
    one = report_of(ranks, workers, jobs)
    assert report.total.iterations == 18
    assert report.total.iteration_s == pytest.approx(2.008 + 1.608)
    assert one.total.harvested_s is not None
    assert report.total.harvested_s == pytest.approx(2 * one.total.harvested_s - workers[2].harvested_ns / 1e9)
    assert report.summary.slowdown is not None
    assert report.summary.slowdown.pairs == 2 + 1  # blocks of two: the cut left one whole pair
    assert report.summary.slowdown.mean == pytest.approx(0.01)
    assert report.cycle[0].training[0].count == one.cycle[0].training[0].count
    states = {job.name: (job.state, job.reason) for job in report.jobs}
    cut_off = "its agent went without a word while it ran; pipefill list tells where it is now"
    assert states == {
        "train": (JobState.SUCCEEDED, ""),
        "resize": (JobState.SUCCEEDED, ""),
        "graph": (JobState.RUNNING, cut_off),
        "late": (JobState.QUEUED, "the store says so"),
    }
    assert asked == [{"late", "graph"}]
    train = next(job for job in report.jobs if job.name == "train")
    assert train.work_done == 2 * 224
    assert [(its.segment, its.state, its.work_done) for its in train.attempts] == [
        (1, JobState.RUNNING, 224),
        (2, JobState.SUCCEEDED, 224),
    ]
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["ranks"] == "segment 2 of 2"
    assert {event["name"] for event in trace["traceEvents"]} >= {"iteration 14", "train"}
    text = printed(report)
    assert "segment 1: iterations 1 to 8, was cut off" in text
    assert "segment 2: iterations 7 to 16, ended by itself" in text


def test_the_store_tells_where_a_job_is_that_was_cut_off(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    job = replace(jobs[0], status=Status(JobState.RUNNING))
    write_segment(tmp_path, ranks, running={0: [(job, workers[0])]}, ending=SegmentEnding.CUT)
    for directory, expected in ((job.directory, JobState.QUEUED), ("jobs/another-9", JobState.RUNNING)):
        told = replace(job, status=Status(JobState.QUEUED, detail="waits"), directory=directory)
        [one] = compose(
            tmp_path,
            lambda names: {told.name: told},  # noqa: B023
        ).jobs
        assert one.state is expected
        assert one.work_done == job.work_done


def test_the_store_tells_what_became_of_a_job_whose_end_it_did_not_hear(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    job = replace(jobs[0], status=Status(JobState.SUCCEEDED, Cause.FINISHED, unheard=True))
    write_segment(tmp_path, ranks, [(job, workers[0])])
    again = replace(job, status=Status(JobState.QUEUED, Cause.TRAINING_ENDED))
    assert compose(tmp_path, lambda names: {}).jobs[0].state is JobState.SUCCEEDED
    assert compose(tmp_path, lambda names: dict.fromkeys(names, again)).jobs[0].state is JobState.QUEUED


def test_a_report_of_a_run_that_goes_on(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    job = replace(jobs[0], status=Status(JobState.RUNNING))
    opened = write_segment(tmp_path, ranks[:1], running={0: [(job, workers[0])]}, ending=None, ranks=3)
    report = compose(tmp_path)
    [segment], [its] = report.segments, report.jobs
    assert (segment.ending, segment.ranks, segment.recorded) == (SegmentEnding.RUNNING, 3, 1)
    assert (its.state, its.reason) == (JobState.RUNNING, "")
    assert "segment 1: iterations 1 to 10, goes on, no record of 2 of its 3 ranks" in printed(report)
    opened.end(SegmentEnding.WELL)


def test_what_jobs_did_between_two_trainings_counts_for_them_and_in_no_ratio(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    attempts = attempts_of(workers, jobs)
    segment = write_segment(tmp_path, ranks, attempts).segment
    before = compose(tmp_path)
    (segment.folder / BETWEEN).mkdir()
    job, worker = attempts[0]
    alone = WorkerRecord(worker.job, worker.rank, 0, 0.0, 0, 3_000 * MS, 20.0)
    again = replace(job, steps=1_234, work_done=20.0, harvested_s=0.0, attempt=9, ended_s=job.ended_s + 9)
    AgentFile(segment.folder / BETWEEN, worker.rank).add(again, alone)
    report = compose(tmp_path)
    assert (report.total, report.summary.harvest_ratio) == (before.total, before.summary.harvest_ratio)
    [counted] = report.segments
    assert (counted.between_steps, counted.between_s) == (1_234, pytest.approx(3.0))
    was, now = (next(one for one in its.jobs if one.name == job.name) for its in (before, report))
    assert now.steps == was.steps + 1_234
    assert now.work_done == was.work_done + 20
    assert now.harvested_s == pytest.approx(was.harvested_s + 3)
    assert "then 1,234 steps of jobs without a training, 3.0 s" in printed(report)


def printed(report: Report) -> str:
    console = Console(width=80, record=True, file=StringIO())
    print_report(report, console)
    return console.export_text()


def test_of_many_ranks_one_replica_is_drawn_and_stages_are_listed(tmp_path: Path) -> None:
    """Ten replicas of two stages, of which the one in place 3 ran side tasks."""
    ranks, workers, jobs = synthetic_run()
    many = [
        replace(
            record,
            info=replace(record.info, rank=2 * place + record.info.stage, world_size=20, data_parallel_rank=place),
        )
        for place in range(10)
        for record in ranks
    ]
    moved = [replace(worker, rank=worker.rank + 6) for worker in workers]
    write_segment(tmp_path, many, attempts_of(moved, jobs))
    report = compose(tmp_path)
    assert [(stage.stage, stage.ranks) for stage in report.stages] == [(0, 10), (1, 10)]
    assert report.stages[0].harvested_s == report.ranks[6].harvested_s
    assert report.stages[0].iteration_s == pytest.approx(10 * report.ranks[0].iteration_s)
    assert report.stages[0].iterations == 10
    assert report.total.iterations == 10
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["otherData"]["ranks"] == "data-parallel rank 3 of 10"
    assert {event["pid"] for event in trace["traceEvents"]} == {6, 7}
    assert pixels(tmp_path / "timeline.png").shape[0] < 600
    text = printed(report)
    assert "20 ranks by stage" in text
    rows = text.split("Where the")[0].splitlines()
    assert [row.split()[0] for row in rows if row.split() and row.split()[0].isdigit()] == ["0", "1"]
    assert max(map(len, text.splitlines())) <= 80


def test_importing_the_report_is_light() -> None:
    heavy = ("torch", "matplotlib", "megatron.core")
    code = f"import sys, megatron.fill.report; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
