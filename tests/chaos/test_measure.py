"""Slowdown, recovery, blame, and the table of a chaos run, from made-up records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from megatron.fill.status import Status
from megatron.fill.types import Iteration, JobRecord, JobState, RankInfo, RankRecord, WorkerRecord
from tests.chaos import harm, measure
from tests.chaos.campaign import Findings, Stretch
from tests.chaos.deed import Deed
from tests.chaos.kinds import HONEST, KINDS
from tests.chaos.mainjob import TrainingRun
from tests.chaos.marks import Note, mark, prepare
from tests.chaos.printed import print_result
from tests.chaos.results import compile_result
from tests.chaos.verdict import Lost, Submitted
from tests.support.segments import write_segment

SECOND = 1_000_000_000
WINDOWS = [
    Stretch(0, 10 * SECOND, faults=True),
    Stretch(10 * SECOND, 20 * SECOND, faults=False),
    Stretch(20 * SECOND, 30 * SECOND, faults=True),
    Stretch(30 * SECOND, 35 * SECOND, faults=False),
]


def iterations(quiet_ns: int = SECOND // 10, fault_ns: int = SECOND // 10) -> list[Iteration]:
    """Iterations for 35 s, one after the other, each with the duration that its window gives."""
    found: list[Iteration] = []
    now_ns = 0
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
        status=Status(JobState.FAILED),
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
    segment = TrainingRun(run_dir, 0, 35 * SECOND, failure, differing)
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
    attempts = [(one, WorkerRecord(one.name, one.rank or 0, 0, 0.0, 0, 0, 0.0)) for one in records]
    write_segment(tmp_path, [], attempts)
    found = {one.kind: one for one in measure.recoveries(findings(tmp_path))}
    assert set(found) == {"hang", "agent-kill"}
    assert found["hang"].seconds == pytest.approx(0.5)
    assert found["agent-kill"].seconds == pytest.approx(1.5)
    assert found["hang"].startup_s == pytest.approx(0.25)


def test_what_goes_wrong_is_laid_to_the_faults_just_before(tmp_path):
    assert measure.blamed(findings(), 29 * SECOND) == {"store-away"}
    assert measure.blamed(findings(), 24 * SECOND) == set()
    write_segment(tmp_path, [RankRecord(RankInfo(0, 2, 0, 2, 0, 1, 0, 2), iterations(), [], [])])
    harmed = replace(findings(tmp_path, differing=(41, 42, 43)), lost=[Lost("hang-0", "hang", "it is QUEUED")])
    kinds = [KINDS[name] for name in ("agent-kill", "store-away", "hang")]
    result = compile_result(harmed, kinds, wanted=2, not_run={"disk-full": "only root can"})
    rows = {row.kind: row for row in result.kinds}
    assert {kind: row.loss_differences for kind, row in rows.items()} == {"agent-kill": 3, "store-away": 0, "hang": 0}
    assert rows["hang"].jobs_lost == 1
    assert result.summary["loss_differences"] == 3
    assert not result.passed
    plain = result.as_dict("python -m tests.chaos")
    assert set(plain) == {
        "command",
        "summary",
        "kinds",
        "not_run",
        "never_tried",
        "untested",
        "controls",
        "lost",
        "stalls",
    }
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
    assert "2 faults (2 marks) of 2 kinds" in printed


def test_an_iteration_of_two_seconds_more_than_usual_is_a_stall_and_laid_to_the_faults_in_it():
    seen = iterations()
    stalled = [replace(one, end_ns=one.end_ns + 3 * SECOND) if one.iteration == 15 else one for one in seen]
    assert harm.stalls(findings(), seen) == []
    (stall,) = harm.stalls(findings(), stalled)
    assert (stall.iteration, stall.seconds, stall.kinds) == (15, pytest.approx(3.1), ("agent-kill",))
    assert harm.longest_s(findings(), seen)["agent-kill"] == pytest.approx(0.1)


def test_the_hundred_iterations_after_a_fault_are_compared_with_the_slower_quiet_window():
    assert harm.slowed(findings(), iterations())["agent-kill"].beyond is False
    slower = harm.slowed(findings(), iterations(fault_ns=SECOND // 10 * 12 // 10))["agent-kill"]
    assert slower.mean == pytest.approx(0.2, abs=0.01)
    assert slower.beyond
    assert not harm.Slowed(0.2, noise=0.3).beyond


def test_a_window_that_is_slow_by_its_nature_is_compared_with_none():
    windows = [replace(WINDOWS[0], alone=True), *WINDOWS[1:]]
    seen = iterations(fault_ns=SECOND // 10 * 12 // 10)
    alone = replace(findings(), windows=windows)
    assert "agent-kill" not in harm.slowed(alone, seen)
    slowdown = measure.slowdown(windows, seen)
    assert slowdown is not None
    assert slowdown.pairs == 1


def test_what_was_observed_names_the_worst_first(tmp_path):
    kind = KINDS["mount"]
    job = Submitted(1, "mount-0", kind, 60, tmp_path / "marks")
    prepare(job.notes)
    seen = replace(findings(), jobs=[job], deeds=[])
    (row,) = compile_result(seen, [kind], 1, {}).kinds
    assert (row.injected, row.marks, row.observed) == (0, 0, "was not seen")
    for _ in range(3):
        mark(job.notes, Note.FAULT)
    mark(job.notes, Note.HELD, "EPERM")
    (row,) = compile_result(seen, [kind], 1, {}).kinds
    assert (row.injected, row.marks, row.observed) == (1, 3, "as expected; refused: EPERM")
    assert row.expected == "refused; SUCCEEDED, work done once"
    lost = replace(seen, lost=[Lost("mount-0", "mount", "got through: \x1b[2J")])
    result = compile_result(lost, [kind], 1, {})
    assert result.kinds[0].observed == "LOST: got through: \x1b[2J"
    assert not result.passed


def test_what_a_job_says_does_nothing_to_the_terminal(capsys, tmp_path):
    lost = replace(findings(), lost=[Lost("hang-0", "hang", "got through: \x1b[2J\n\x9b31m" + "x" * 500)])
    print_result(compile_result(lost, [KINDS["hang"]], 1, {}), Console(width=80, force_terminal=False))
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\x9b" not in printed
    assert max(map(len, printed.partition("lost:")[0].splitlines())) <= 80
