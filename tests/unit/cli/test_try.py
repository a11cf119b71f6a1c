"""``pipefill try``: what it is given, what it refuses, and how it exits; the trial itself is not run here."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.cli import main
from megatron.fill.given.jobs import JobSpec
from megatron.fill.trial import check, run
from megatron.fill.trial.examine import Examined
from megatron.fill.trial.result import Ended, Options, Steps, Trial

JOBS = """
jobs:
  - {name: count, task: "counts:Count", args: {turns: 3}, memory: 1GiB, count: 3}
  - {name: other, task: "counts:Other"}
  - {name: zip, command: gzip x}
"""


@dataclass
class Ran:
    status: int
    out: str
    err: str
    tried: list[tuple[JobSpec, list[str], Options]] = field(default_factory=list)


@pytest.fixture
def pipefill(tmp_path, monkeypatch, capsys) -> Callable[..., Ran]:
    """Runs the command in a folder with some files; each job ends as ``endings`` says, OK if it does not."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "jobs.yaml").write_text(JOBS)
    (tmp_path / "counts.py").write_text("raise AssertionError('nothing is imported here')")
    (tmp_path / "my-counts.py").touch()

    def ran(
        *arguments: str,
        refuse: str = "",
        endings: dict[str, Ended] | None = None,
        ends: tuple[str, signal.Signals] | None = None,
    ) -> Ran:
        tried: list[tuple[JobSpec, list[str], Options]] = []

        def examine(jobs: Any, search: list[str], settings: Any) -> list[Examined]:
            return [Examined("no such module" if job.name == refuse else "", resumable=True) for job in jobs]

        def try_job(job: JobSpec, found: Any, search: list[str], options: Options, folder: Path, say: Any) -> Trial:
            tried.append((job, search, options))
            if ends is not None and ends[0] == job.name:
                signal.raise_signal(ends[1])
            trial = Trial(job.name, job.what, "cpu", Ended.OK, steps=Steps(7, 1.0, 2.0, 3.0), folder=str(folder))
            return replace(trial, ended=(endings or {}).get(job.name, Ended.OK))

        monkeypatch.setattr(check, "examine", examine)
        monkeypatch.setattr(run, "try_job", try_job)
        monkeypatch.setattr(sys, "argv", ["pipefill", "try", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err, tried)

    return ran


def test_one_of_each_kind_of_the_jobs_of_a_file_is_tried(pipefill, tmp_path):
    done = pipefill("jobs.yaml", "--device", "cpu")
    assert done.status == 0
    assert [job.name for job, _, _ in done.tried] == ["count-0", "other", "zip"]
    assert done.tried[0][1] == [str(tmp_path)]
    assert max(map(len, done.out.splitlines())) <= 80
    assert done.out.count("It would run.") == 3


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("as_json", [True, False])
def test_a_trial_that_is_cut_off_shows_the_jobs_that_had_been_tried(pipefill, number, status, as_json):
    before = signal.getsignal(number)
    done = pipefill("jobs.yaml", "--device", "cpu", *(["--json"] if as_json else []), ends=("zip", number))
    assert done.status == status
    assert done.err.endswith("cut off: 2 of 3 jobs had been tried\n")
    if as_json:
        assert [trial["job"] for trial in json.loads(done.out)] == ["count-0", "other"]
    else:
        assert done.out.count("It would run.") == 2
    assert signal.getsignal(number) is before


def test_a_job_is_chosen_by_name(pipefill):
    done = pipefill("jobs.yaml", "--job", "other", "--job", "count", "--device", "cpu")
    assert [job.name for job, _, _ in done.tried] == ["other", "count-0"]


@pytest.mark.parametrize("target", ["counts.py:Count", "counts:Count"])
def test_a_class_is_tried_with_its_arguments(pipefill, tmp_path, target):
    arguments = ["turns=3", "rate=1.5", "names=[a, b]", "text=a=b", "day=2026-01-01", "--memory", "256MiB"]
    [(job, search, options)] = pipefill(target, *arguments, "--device", "cpu", "--bubble-ms", "20", "--network").tried
    assert (job.name, job.task, job.memory) == ("count", "counts:Count", 256 << 20)
    assert job.args == {"turns": 3, "rate": 1.5, "names": ["a", "b"], "text": "a=b", "day": "2026-01-01"}
    assert search == [str(tmp_path)]
    assert (options.bubble_ms, options.period_ms, options.seconds, options.device) == (20, 80, 5, "cpu")
    assert options.settings == {"grace_ms": 500.0, "bind": [], "network": True, "sharing": "auto"}


def test_the_exit_status_tells_a_failure_from_what_does_not_exist(pipefill):
    device = ("--device", "cpu")
    assert pipefill("jobs.yaml", *device, endings={"other": Ended.FAILED}).status == 1
    done = pipefill("jobs.yaml", *device, refuse="other", endings={"zip": Ended.FAILED})
    assert done.status == 2
    assert "It cannot run: no such module" in done.out
    assert [job.name for job, _, _ in done.tried] == ["count-0", "zip"]


def test_json_is_a_list_and_only_a_kept_folder_is_named(pipefill, tmp_path):
    [one] = json.loads(pipefill("counts:Count", "--json", "--device", "cpu").out)
    assert (one["ended"], one["steps"]["p99_ms"], one["folder"]) == ("ok", 2.0, "")
    [one] = json.loads(pipefill("counts:Count", "--json", "--device", "cpu", "--keep", "kept").out)
    assert one["folder"] == str(tmp_path / "kept" / "count")
    assert (tmp_path / "kept").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing argument 'FILE'"),
        (["none.yaml"], "none.yaml: cannot be read"),
        (["none.py:Count"], "none.py: there is no such file; expected a jobs file, module:Class or path.py:Class"),
        (["my-counts.py:Count"], "my-counts.py: cannot be imported by that name"),
        (["counts:"], "'counts:': expected a jobs file, module:Class or path.py:Class"),
        (["counts:Count", "turns"], "argument 'turns': expected NAME=VALUE"),
        (["counts:Count", "tu rns=1"], "argument 'tu rns=1': expected NAME=VALUE"),
        (["counts:Count", "turns=[1"], "argument 'turns=[1': the value is not YAML"),
        (["counts:Count", "turns=.inf"], "argument 'turns=.inf': the value .inf is not a finite number"),
        (["counts:Count", "turns={a: 1, a: 2}"], "the value 'a' is there twice"),
        (["counts:Count", "--memory", "lots"], "--memory is 'lots': expected a size above 0"),
        (["counts:Count", "--job", "count"], "--job count: counts:Count is one task"),
        (["jobs.yaml", "turns=1"], "argument 'turns=1': expected none with a jobs file"),
        (["jobs.yaml", "--memory", "1GiB"], "--memory 1GiB: expected none with a jobs file"),
        (["jobs.yaml", "--job", "cout"], "--job is 'cout': expected one of jobs.yaml: count-0, count-1, count-2"),
        (["counts:Count", "--bubble-ms", "0"], "Invalid value for '--bubble-ms'"),
        (["counts:Count", "--seconds", "nan"], "Invalid value for '--seconds'"),
        (["counts:Count", "--seconds", "inf"], "Invalid value for '--seconds'"),
        (["counts:Count", "--bubble-ms", "50", "--every-ms", "50"], "--every-ms is 50: expected more than --bubble-ms"),
        (["counts:Count", "--bind", "data"], "--bind data: expected an absolute path"),
        (["counts:Count", "--keep", "."], "--keep .: cannot be made: File exists"),
        (["counts:Count", "--device", "tpu"], "--device is 'tpu': expected cpu or cuda:0"),
        (["counts:Count", "--device", "cuda:99"], "--device is 'cuda:99', which is not there: "),
    ],
)
def test_what_makes_no_sense_is_said_in_a_line(pipefill, arguments, message):
    device = [] if "--device" in arguments or not arguments else ["--device", "cpu"]
    done = pipefill(*arguments, *device)
    assert (done.status, done.out, done.tried) == (2, "", [])
    [line] = done.err.splitlines()
    assert line.startswith("pipefill: error: ")
    assert message in line
