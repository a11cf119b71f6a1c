"""Slowdown, recovery, blame, and the table of a chaos run, from made-up records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.chaos import measure
from megatron.fill.chaos.campaign import Findings, Window
from megatron.fill.chaos.injector import Deed
from megatron.fill.chaos.kinds import HONEST, KINDS
from megatron.fill.chaos.mainjob import Segment
from megatron.fill.chaos.results import compile_result, print_result
from megatron.fill.chaos.verdict import Lost, Submitted
from megatron.fill.records import write_agent, write_rank
from megatron.fill.types import Iteration, JobRecord, JobState, RankInfo, RankRecord

SECOND = 1_000_000_000
WINDOWS = [
    Window(0, 10 * SECOND, faults=True),
    Window(10 * SECOND, 20 * SECOND, faults=False),
    Window(20 * SECOND, 30 * SECOND, faults=True),
    Window(30 * SECOND, 35 * SECOND, faults=False),
]


def iterations(quiet_ns: int = SECOND // 10, fault_ns: int = SECOND // 10) -> list[Iteration]:
    """One after the other for 35 s, as long as the window they are in says."""
    found, now_ns = [], 0
    while now_ns < 35 * SECOND:
        window = next(one for one in WINDOWS if one.start_ns <= now_ns < one.end_ns)
        end_ns = now_ns + (fault_ns if window.faults else quiet_ns)
        found.append(Iteration(len(found) + 1, now_ns, end_ns))
        now_ns = end_ns
    return found


def record(name: str, start_s: float, end_s: float, rank: int = 0) -> JobRecord:
    return JobRecord(
        name=name,
        what="",
        state=JobState.FAILED,
        reason="",
        work_done=0.0,
        unit="steps",
        rank=rank,
        started_ns=int(start_s * SECOND),
        ready_ns=int((start_s + 0.25) * SECOND),
        ended_ns=int(end_s * SECOND),
    )


def findings(run_dir: Path = Path("none"), failure: str = "", differing: tuple[int, ...] = ()) -> Findings:
    jobs = [
        Submitted(1, "hang-0", KINDS["hang"], 0, run_dir / "none"),
        Submitted(2, "sigsegv-1", KINDS["sigsegv"], 0, run_dir / "none"),
        Submitted(3, "honest-2", HONEST, 60, run_dir / "none"),
    ]
    deeds = [
        Deed("agent-kill", 2 * SECOND, 3 * SECOND, rank=1),
        Deed("store-away", 25 * SECOND, 28 * SECOND),
    ]
    segment = Segment(run_dir, 0, 35 * SECOND, failure, differing)
    return Findings({}, jobs, deeds, [], WINDOWS, [segment], [])


def test_slowdown_is_paired_by_windows():
    slowdown = measure.slowdown(WINDOWS, iterations(fault_ns=SECOND // 10 * 11 // 10))
    assert slowdown is not None
    assert slowdown.pairs == 2
    assert slowdown.mean == pytest.approx(0.1)
    assert measure.slowdown(WINDOWS[:1], iterations()) is None


def test_slowdown_by_kind_looks_at_the_iterations_that_overlap_a_fault():
    seen = iterations()
    slow = [
        replace(one, end_ns=one.end_ns + SECOND // 20) if 2 * SECOND <= one.start_ns < 3 * SECOND else one
        for one in seen
    ]
    by_kind = measure.slowdown_by_kind(findings(), slow)
    assert by_kind == {"agent-kill": pytest.approx(0.5), "store-away": pytest.approx(0.0)}


def test_recovery_is_from_an_end_or_a_blow_to_the_next_start_at_that_rank_in_the_same_window(tmp_path):
    records = [
        record("hang-0", 1, 4),
        record("sigsegv-1", 4.5, 9),  # nothing follows in its window
        record("honest-2", 21, 22),
        record("honest-2", 3.5, 5, rank=1),
    ]
    write_agent(tmp_path / "agents" / "agent0.json", [], records)
    found = {one.kind: one for one in measure.recoveries(findings(tmp_path))}
    assert set(found) == {"hang", "agent-kill"}
    assert found["hang"].seconds == pytest.approx(0.5)
    assert found["agent-kill"].seconds == pytest.approx(1.5)
    assert found["hang"].startup_s == pytest.approx(0.25)


def test_what_goes_wrong_is_laid_to_the_faults_just_before(tmp_path):
    assert measure.blamed(findings(), 29 * SECOND) == {"store-away"}
    assert measure.blamed(findings(), 24 * SECOND) == set()
    write_rank(
        tmp_path / "ranks" / "rank0.json",
        RankRecord(RankInfo(0, 2, 0, 2, 0, 1, 0, 2), iterations(), [], []),
    )
    harmed = replace(findings(tmp_path, differing=(41, 42, 43)), lost=[Lost("hang-0", "hang", "it is QUEUED")])
    kinds = [KINDS[name] for name in ("agent-kill", "store-away", "hang")]
    result = compile_result(harmed, kinds, wanted=2, not_run={"disk-full": "only root can"})
    rows = {row.kind: row for row in result.kinds}
    assert {kind: row.loss_differences for kind, row in rows.items()} == {"agent-kill": 3, "store-away": 0, "hang": 0}
    assert rows["hang"].jobs_lost == 1
    assert result.summary["loss_differences"] == 3
    assert not result.passed
    plain = result.as_dict("pipefill chaos")
    assert set(plain) == {"command", "summary", "kinds", "not_run", "lost"}
    assert plain["not_run"] == [{"kind": "disk-full", "why": "only root can"}]


def test_a_run_without_harm_has_passed_and_its_table_fits_80_columns(capsys):
    kinds = [kind for kind in KINDS.values() if kind.source != "gpu"]
    result = compile_result(findings(), kinds, wanted=2, not_run={})
    assert result.passed
    assert not replace(result, wanted=3).passed
    print_result(result, Console(width=80))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert all(kind.name in printed for kind in kinds)
    assert "2 faults of 2 kinds" in printed
