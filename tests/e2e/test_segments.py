"""A training that is killed in the middle and started again in the same run folder: one report covers both segments."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.rank.recorder import WRITE_EVERY
from megatron.fill.records.segment import last_segment
from tests.e2e.deaths import Fate, die, in_turn, kill, traced
from tests.e2e.training import Running, processes, settings, start, train_until, warm_python, write_jobs
from tests.support.waiting import until

JOB = {"name": "spin", "task": "tasks:Spin", "args": {"milliseconds": 0.5}}
FLAGS = f"--fill-checkpoint-seconds 0.5 {settings(warmup_iterations=3, lease_seconds=2)}"


def pipefill(*arguments: str) -> str:
    code = "from megatron.fill.cli import main; main()"
    command = [sys.executable, *warm_python(), "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


def report(run: Path) -> dict[str, Any]:
    return json.loads(pipefill("report", str(run), "--json"))


def written(run: Path) -> dict[Path, bytes]:
    """What a training writes at its start."""
    return {path: path.read_bytes() for path in [*run.glob("agents/*.json"), *run.glob("records/*/segment.json")]}


def test_a_killed_training_and_its_restart_have_one_report(tmp_path):
    flags, run = f"{write_jobs(tmp_path, JOB)} {FLAGS}", tmp_path / "run"
    running = Running(tmp_path, flags)
    try:
        running.wait_for_jobs({"spin": lambda job: job.progress.checkpoint_s and job.progress.harvested_s > 0.1})
        # The agents write down what runs every ten seconds.
        running.wait(lambda: list(last_segment(run).folder.glob("agent*.running.jsonl")))
        running.wait(lambda: len(list(last_segment(run).records())) == 2)
        assert report(run)["segments"][0]["ending"] == "running"
        before = written(run)
        second = start(tmp_path, flags)
        said, _ = second.communicate(timeout=240)
        assert second.returncode == 2, said
        assert said.count(f"error: the run folder {run} is in use by another training (its rank 0, process") == 1
        assert "Traceback" not in said
        assert " iteration " not in said
        assert written(run) == before
        kill(running)
    finally:
        running.process.kill()
    [cut] = report(run)["segments"]
    assert (cut["number"], cut["ending"], cut["recorded"], cut["ended_s"]) == (1, "cut off", 2, None)
    assert cut["iterations"] >= WRITE_EVERY
    assert (run / "timeline.png").stat().st_size > 10_000
    until(lambda: running.job("spin").lost(running.store.now_s()))
    assert "LOST" in pipefill("list", "--store", str(run))

    def goes_on(job: Any) -> bool:
        return job.attempt >= 2 and job.progress.harvested_s > 0.1

    trained = train_until(tmp_path, flags, {"spin": goes_on}, iterations=2 * WRITE_EVERY)
    first, second = trained.report["segments"]
    assert first == cut
    assert (second["ending"], second["recorded"], second["first_iteration"]) == ("by itself", 2, 1)
    assert "segment 1: iterations 1 to" in trained.output
    assert "was cut off" in trained.output
    assert trained.report["total"]["iterations"] == first["iterations"] + second["iterations"]
    attempts = trained.jobs["spin"]["attempts"]
    assert [attempt["segment"] for attempt in attempts] == sorted(attempt["segment"] for attempt in attempts)
    assert {attempt["segment"] for attempt in attempts} == {1, 2}
    assert attempts[0]["state"] == "RUNNING"
    assert attempts[0]["steps"] > 0
    assert trained.jobs["spin"]["state"] == "QUEUED"
    assert trained.report["total"]["steps"] == sum(attempt["steps"] for attempt in attempts)
    again = report(run)
    assert again["total"] == trained.report["total"]
    assert again["jobs"] == trained.report["jobs"]
    assert not processes(str(tmp_path))


def test_jobs_go_on_after_each_death_and_lose_no_more_than_since_a_checkpoint(tmp_path):
    found = die(tmp_path, in_turn(2))
    assert [death.kind for death in found] == ["node", "rank"]
    assert all(death.lost_steps >= 0 for death in found)
    assert max(death.lost_s for death in found) < 1 + 10  # the interval, and a busy machine
    assert not processes(str(tmp_path))


def test_deaths_come_from_a_trace_of_spot_machines(tmp_path):
    trace = tmp_path / "trace.csv"
    added = [f"0,add,n{number}" for number in range(4)]
    trace.write_text(
        "\n".join([*added, "60000,remove,n0", "180000,remove,n1", "180000,remove,n2", "", "190000,add,n5"])
    )
    assert traced(trace, 60) == [Fate("rank"), Fate("node", 2.0)]


@pytest.mark.parametrize("line", ["60000,remove,n7", "soon,add,n1", "60000,add", "60000,gone,n0"])
def test_a_line_of_a_trace_that_is_none_is_said(tmp_path, line):
    (tmp_path / "trace.csv").write_text(f"0,add,n0\n{line}\n")
    with pytest.raises(ValueError, match="line 2"):
        traced(tmp_path / "trace.csv", 60)
