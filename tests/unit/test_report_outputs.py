import json
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.fill.errors import FillError
from megatron.fill.records import write_agent, write_rank
from megatron.fill.report import (
    Report,
    build_report,
    compose,
    draw_timeline,
    write_trace,
)
from megatron.fill.report.bars import join, subtract
from megatron.fill.report.window import choose_window
from megatron.fill.types import RankRecord, WorkerRecord
from tests.unit.synthetic import LAST, MS, START_NS, is_filling, synthetic_run


def shifted(record: RankRecord, by_ns: int, node: int) -> RankRecord:
    def move(values: list[Any]) -> list[Any]:
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


# --- the trace


def test_trace(tmp_path: Path) -> None:
    ranks, workers, _ = synthetic_run()
    write_trace(tmp_path / "trace.json", ranks, workers, iterations=2)
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
    write_trace(tmp_path / "trace.json", [replace(ranks[0], iterations=[])], [])
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
    draw_timeline(tmp_path / "timeline.png", ranks, workers)
    image = pixels(tmp_path / "timeline.png")
    for colour in ("#56B4E9", "#0072B2", "#8F8F8F", "#FAF8F2", "#E69F00", "#009E73"):
        assert share_of(image, colour) > 0.005, colour
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.png"]


def test_timeline_of_many_ranks_jobs_and_of_nothing(tmp_path: Path) -> None:
    (record, _), (worker, *_), _ = synthetic_run()
    ranks = [replace(record, info=replace(record.info, rank=rank, stage=rank)) for rank in range(16)]
    workers: list[WorkerRecord] = [replace(worker, rank=rank, job=f"job {rank}") for rank in range(16)]
    draw_timeline(tmp_path / "16.png", ranks, workers)
    draw_timeline(tmp_path / "0.png", [], [])
    assert 900 < pixels(tmp_path / "16.png").shape[0] < 1600
    assert pixels(tmp_path / "0.png").min() < 0.5


def test_bars() -> None:
    assert subtract([(0, 10)], []) == [(0, 10)]
    assert subtract([(0, 10), (20, 5)], [(2, 3), (4, 2), (9, 12)]) == [(0, 2), (6, 3), (21, 4)]
    assert subtract([(0, 10)], [(0, 10)]) == []
    assert subtract([(0, 10)], [(1, 8), (2, 1)]) == [(0, 1), (9, 1)]
    assert join([(0, 1), (1.5, 1), (9, 1)], 1) == [(0, 2.5), (9, 1)]
    assert join([(0, 5), (5.5, 5)], 1) == [(0, 5), (5.5, 5)]


# --- the run folder


def test_compose(tmp_path: Path) -> None:
    ranks, workers, jobs = synthetic_run()
    for record in ranks:
        write_rank(tmp_path / "ranks" / f"rank{record.info.rank}.json", record)
    write_agent(tmp_path / "agents" / "agent0.json", workers[:1], jobs[:1])
    write_agent(tmp_path / "agents" / "agent1.json", workers[1:], jobs[1:])
    report = compose(tmp_path, "train")
    assert report == build_report(ranks, workers, jobs, "train")
    assert Report.model_validate_json((tmp_path / "report.json").read_text()) == report
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_compose_without_records(tmp_path: Path) -> None:
    with pytest.raises(FillError, match="nothing to report"):
        compose(tmp_path, "train")


def test_importing_the_report_is_light() -> None:
    heavy = ("torch", "matplotlib", "megatron.core")
    code = f"import sys, megatron.fill.report; print([name for name in {heavy} if name in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
