"""``pipefill report``, as a shell runs it."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.cli import main
from megatron.fill.folders import BETWEEN
from megatron.fill.records.agent import AgentFile
from megatron.fill.records.segment import SegmentEnding
from megatron.fill.status import Cause, Status
from megatron.fill.store import Claim, Progress, open_store
from megatron.fill.store.queue import JobStore
from megatron.fill.types import JobState, Prices
from megatron.fill.work import NewJob, Work
from tests.support.segments import write_segment
from tests.support.synthetic import synthetic_run

WORK = Work("m:C")


@pytest.fixture
def pipefill(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["pipefill", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return ended.value.code or 0, *capsys.readouterr()

    return run


@pytest.fixture
def claimed(pipefill, tmp_path) -> Iterator[tuple[JobStore, Claim]]:
    """The store in the run folder, with a job that an agent of its first rank has."""
    store = open_store("run")
    [job] = store.submit([NewJob("train", WORK)])
    claim = store.claim("agent", [job.id], 3600, f"rank 0 of {tmp_path}/run on host")
    assert claim is not None
    store.place(claim, "jobs/train-1")
    yield store, claim
    store.close()


def test_the_report_of_a_run_that_was_cut_off(pipefill, tmp_path, claimed):
    ranks, workers, jobs = synthetic_run()
    store, claim = claimed
    store.heartbeat(claim, Progress(224, 1000, "images"), 0.001)
    time.sleep(0.01)
    started = replace(jobs[0], status=Status(JobState.RUNNING), directory="jobs/train-1", result={})
    about: dict[str, Any] = {"store": f"sqlite:///{tmp_path}/run/jobs.db", "jobs": ["train"]}
    write_segment(tmp_path / "run", ranks, running={0: [(started, workers[0])]}, ending=SegmentEnding.CUT, **about)
    status, out, err = pipefill("report", "run")
    assert (status, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "segment 1: iterations 1 to 10, was cut off" in text
    assert "train RUNNING" in text
    assert "its agent is gone" in text
    assert text.endswith("report.json, trace.json and timeline.png in run")
    assert {path.name for path in (tmp_path / "run").iterdir()} >= {"report.json", "trace.json", "timeline.png"}
    status, out, _ = pipefill("report", "run", "--json")
    assert json.loads(out) == json.loads((tmp_path / "run" / "report.json").read_text())


@pytest.mark.usefixtures("claimed")
def test_a_job_that_goes_on_between_two_trainings_runs(pipefill, tmp_path):
    ranks, workers, jobs = synthetic_run()
    started = replace(jobs[0], status=Status(JobState.RUNNING), directory="jobs/train-1", attempt=2)
    ended = replace(started, status=Status(JobState.QUEUED, Cause.TRAINING_ENDED), attempt=1)
    opened = write_segment(tmp_path / "run", ranks, [(ended, workers[0])], store=f"sqlite:///{tmp_path}/run/jobs.db")
    (opened.segment.folder / BETWEEN).mkdir()
    AgentFile(opened.segment.folder / BETWEEN, 0).show([(started, workers[0])])
    _, out, _ = pipefill("report", "run", "--json")
    [its] = json.loads(out)["jobs"]
    assert (its["state"], its["cause"]) == ("RUNNING", "")


def test_without_the_store_it_is_what_the_records_say(pipefill, tmp_path):
    ranks, _, _ = synthetic_run()
    write_segment(
        tmp_path / "run", ranks, ending=SegmentEnding.CUT, store=f"sqlite:///{tmp_path}/gone.db", jobs=["train"]
    )
    status, out, _ = pipefill("report", "run")
    assert status == 0
    assert "train" in out
    assert "no agent had it" in " ".join(out.split())
    assert not (tmp_path / "gone.db").exists()


def test_a_command_whose_output_is_closed_does_its_work(pipefill, tmp_path, monkeypatch):
    ranks, _, _ = synthetic_run()
    write_segment(tmp_path / "run", ranks)
    monkeypatch.setattr(sys, "stdout", None)
    assert pipefill("report", "run")[0] == 0
    assert (tmp_path / "run" / "report.json").exists()


def test_in_a_narrow_terminal_no_figure_is_cut(pipefill, tmp_path, monkeypatch):
    ranks, _, _ = synthetic_run()
    write_segment(tmp_path / "run", ranks)
    _, wide, _ = pipefill("report", "run")
    monkeypatch.setenv("COLUMNS", "60")
    assert pipefill("report", "run")[1] == wide


def test_prices_are_those_of_the_run_unless_others_are_given(pipefill, tmp_path):
    ranks, workers, jobs = synthetic_run()
    attempts = [(replace(job, side_throughput=100.0), its) for job, its in zip(jobs, workers, strict=False)]
    write_segment(tmp_path / "run", ranks, attempts, prices=Prices(4.0, 0.5))
    status, out, _ = pipefill("report", "run")
    assert status == 0
    assert max(map(len, out.splitlines())) <= 80
    text = " ".join(out.split())
    assert "cost saving: +139.00% (95% interval +139.00% to +139.00%), at 4 an hour for the training and 0.5" in text
    assert "side work: 4.48 s of a side device; of jobs: 3 by the throughput in the jobs file" in text
    assert "time of the training with filling: 0.40 s; the same without: 0.40 s" in text
    _, out, _ = pipefill("report", "run", "--json", "--price", "side=1,main=4")
    cost = json.loads(out)["cost"]
    assert cost["prices"] == {"main": 4.0, "side": 1.0}
    assert cost["saving"] == pytest.approx(4.48 / (0.4 * 4) - 0.01)


@pytest.mark.parametrize("folder", ["nowhere", "."])
def test_what_is_no_run_folder_is_one_line(pipefill, tmp_path, folder):
    status, out, err = pipefill("report", folder)
    assert (status, out) == (2, "")
    assert err.startswith("pipefill: error: ")
    assert "; expected a run folder, as the training printed it\n" in err
    assert list(tmp_path.iterdir()) == []
