"""``pipefill submit``, ``list``, ``show``, ``cancel`` and ``retry``, as a shell runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.cli import main, views
from megatron.fill.status import Cause, Status
from megatron.fill.store import JobStore, Progress, open_store
from megatron.fill.trial import check
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work

JOBS = """
jobs:
  - {name: digits, task: "tasks:Digits", args: {epochs: 20}, count: 2, priority: 1, user: grace}
  - {name: compress, command: gzip --best corpus.txt, memory: 2GiB}
"""
TASKS = """
from megatron.fill import SideTask
print("imported")

class Digits(SideTask):
    def create(self, epochs=1):
        raise AssertionError("nothing of it is run")
"""


def write_jobs(folder: Path, text: str = JOBS) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o755)  # jobs may run as a user without rights
    (folder / "tasks.py").write_text(TASKS)
    (folder / "jobs.yaml").write_text(text)


@dataclass
class Ran:
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def pipefill(tmp_path, monkeypatch, capsys):
    """Runs the command in an empty folder with its width of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("PIPEFILL_STORE", "run")

    def run(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["pipefill", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return Ran(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def store(tmp_path, pipefill):
    """The store that ``pipefill`` uses."""
    opened = open_store(tmp_path / "run")
    yield opened
    opened.close()


def running(store: JobStore, name: str, progress: Progress, **values) -> None:
    [job] = store.submit([NewJob(name, Work("tasks:Pi"), **values)])
    claim = store.claim("agent", [job.id], 3600, device="rank 1 of runs/first on host")
    assert claim is not None
    store.heartbeat(claim, progress, 3600)


def finished(store: JobStore, name: str, state: JobState = JobState.FAILED, reason: str = "why") -> None:
    [job] = store.submit([NewJob(name, Work("tasks:Pi"))])
    claim = store.claim("agent", [job.id], 3600)
    assert claim is not None
    store.finish(claim, Status(state, detail=reason), Progress(5.0, 5.0), {"loss": float("nan")})


@pytest.mark.parametrize("given", ["flag", "environment"])
def test_a_password_that_ps_shows_is_warned_of(pipefill, monkeypatch, given):
    pytest.importorskip("psycopg")
    where = "postgresql://ada:secret@127.0.0.1:1/x?connect_timeout=1"
    monkeypatch.setenv("PIPEFILL_STORE", where if given == "environment" else "")
    ran = pipefill("list", *(["--store", where] if given == "flag" else []))
    masked = where.replace("secret", "***")
    assert (f"the password of --store {masked} is in ps for all users to see" in ran.err) == (given == "flag")
    assert "secret" not in ran.err + ran.out


class TestSubmit:
    def test_the_jobs_of_a_file_are_queued(self, pipefill, tmp_path):
        write_jobs(tmp_path / "sub")
        jobs = pipefill("submit", "sub/jobs.yaml", "--user", "ada", "--json").json
        assert [(job["name"], job["user"], job["priority"]) for job in jobs] == [
            ("digits-0", "grace", 1),
            ("digits-1", "grace", 1),
            ("compress", "ada", 0),
        ]
        search = [str(tmp_path / "sub"), str(tmp_path)]
        assert jobs[0]["work"] == {
            "task": "tasks:Digits",
            "command": None,
            "args": {"epochs": 20},
            "memory_bytes": None,
            "env": {},
            "search": search,
            "array": [0, 2],
            "timeout_s": None,
            "retries": 0,
            "after": [],
            "side_throughput": None,
        }
        assert [job["work"]["array"] for job in jobs] == [[0, 2], [1, 2], None]
        assert jobs[2]["work"]["command"] == ["gzip", "--best", "corpus.txt"]
        assert jobs[2]["work"]["memory_bytes"] == 2**31
        assert (tmp_path / "run" / "jobs.db").exists()

    def test_again_it_is_the_same_jobs(self, pipefill, tmp_path):
        (tmp_path / "jobs.yaml").write_text(JOBS)
        first = pipefill("submit", "jobs.yaml", "--no-check")
        assert first.status == 0
        (tmp_path / "jobs.yaml").write_text(JOBS.replace("count: 2", "count: 3"))
        second = pipefill("submit", "jobs.yaml", "--no-check")
        there = "Already there, and left as they are: 3 of 4: digits-0, digits-1, compress\n"
        assert second.out.endswith(there)
        assert "Already there" not in first.out
        again = pipefill("submit", "jobs.yaml", "--no-check", "--json").json
        assert [(job["id"], job["already_there"]) for job in again] == [(1, True), (2, True), (4, True), (3, True)]
        assert len(pipefill("list", "--json").json) == 4

    def test_on_a_terminal_the_next_commands_follow(self, pipefill, tmp_path, monkeypatch):
        (tmp_path / "jobs.yaml").write_text("jobs: [{name: one, command: ls}]")
        assert "Next:" not in pipefill("submit", "jobs.yaml", "--no-check", "--store", "my run").out
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        lines = pipefill("submit", "jobs.yaml", "--no-check", "--store", "my run").out.splitlines()
        commands = [f"  pipefill {command} --store 'my run'" for command in ("list", "show one", "logs one")]
        assert lines[-4:] == ["Next:", *commands]
        assert pipefill("submit", "jobs.yaml", "--no-check").out.splitlines()[-3] == "  pipefill list"
        assert "Next:" not in pipefill("submit", "jobs.yaml", "--no-check", "--json").out

    def test_of_many_the_first_are_shown(self, pipefill, tmp_path):
        (tmp_path / "jobs.yaml").write_text("jobs: [{name: many, command: ls, count: 60}]")
        *rows, last = pipefill("submit", "jobs.yaml", "--no-check").out.splitlines()
        assert len(rows) == 1 + 50
        assert last == "The first 50 of 60 jobs are shown; pipefill list --all shows all."
        *rows, last = pipefill("list").out.splitlines()
        assert len(rows) == 1 + 50
        assert last == "Shown: the first 50 of 60 QUEUED jobs. --all lists every job."
        assert len(pipefill("list", "--all").out.splitlines()) == 1 + 60
        assert len(pipefill("list", "--json").json) == 60
        assert (
            "60 of 60: many-0, many-1, many-2, many-3, many-4, ..." in pipefill("submit", "jobs.yaml", "--no-check").out
        )

    def test_a_wrong_file_submits_nothing(self, pipefill, tmp_path):
        (tmp_path / "jobs.yaml").write_text("jobs: [{name: a, task: x}]")
        ran = pipefill("submit", "jobs.yaml")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == "pipefill: error: jobs.yaml, line 1: job 'a': task is 'x': expected module:Class\n"
        assert not (tmp_path / "run").exists()

    @pytest.mark.parametrize(
        ("store", "said"),
        [
            ("mysql://db/jobs", "is a database of another kind (mysql)"),
            ("postgresql+psycopg://pipefill@/jobs?host=/nowhere", "connection is bad"),
            ("jobs.db", "file is not a database"),
        ],
    )
    def test_a_wrong_store_is_named_before_the_jobs_are_looked_at(self, pipefill, tmp_path, monkeypatch, store, said):
        if "psycopg" in store:
            pytest.importorskip("psycopg", reason="needs the extra postgres")
        write_jobs(tmp_path, json.dumps({"jobs": [{"name": "module", "task": "gone:Digits"}]}))
        monkeypatch.setattr(check, "examine", pytest.fail)
        (tmp_path / "jobs.db").write_text("no database")
        ran = pipefill("submit", "jobs.yaml", "--store", store)
        assert ran.status == 2
        assert said in ran.err

    def test_what_does_not_exist_is_not_submitted(self, pipefill, tmp_path, monkeypatch):
        monkeypatch.delitem(sys.modules, "tasks", raising=False)  # of a test before this one
        jobs = [
            {"name": "module", "task": "gone:Digits", "count": 3},
            {"name": "class", "task": "tasks:Digit"},
            {"name": "args", "task": "tasks:Digits", "args": {"epoch": 3}},
            {"name": "program", "command": "gzipp --best"},
            {"name": "file", "command": "/etc/passwd"},
            {"name": "good", "task": "tasks:Digits"},
        ]
        write_jobs(tmp_path, json.dumps({"jobs": jobs}))
        ran = pipefill("submit", "jobs.yaml")
        assert (ran.status, ran.out) == (2, "")
        said = "jobs.yaml: job '{}': {}"
        fits = "args do not fit Digits.create(): got an unexpected keyword argument 'epoch'; it takes epochs"
        assert ran.err.removeprefix("pipefill: error: ").splitlines() == [
            said.format("module-0", "importing gone failed: ModuleNotFoundError: No module named 'gone'"),
            said.format("class", "tasks has no Digit; it has Digits"),
            said.format("args", fits),
            said.format("program", "command not found: gzipp"),
            said.format("file", "not an executable file: /etc/passwd"),
            "nothing is submitted; --no-check submits them all the same",
        ]
        assert "tasks" not in sys.modules
        assert not (tmp_path / "run").exists()
        assert len(pipefill("submit", "jobs.yaml", "--no-check", "--json").json) == 8

    def test_jobs_that_cannot_be_looked_at_can_be_submitted_all_the_same(self, pipefill, tmp_path, monkeypatch):
        monkeypatch.setattr(check, "program", lambda name: ["sh", "-c", "echo 'no sandbox here' >&2"])
        write_jobs(tmp_path)
        ran = pipefill("submit", "jobs.yaml")
        assert ran.status == 2
        assert ran.err == (
            "pipefill: error: the jobs cannot be looked at: no sandbox here; --no-check submits them unseen\n"
        )
        assert pipefill("submit", "jobs.yaml", "--no-check").status == 0


class TestList:
    def test_progress_is_told(self, pipefill, store):
        running(store, "digits", Progress(14_370, 28_740, "samples", 95.5))
        running(store, "forever", Progress(1_234_567, None, "tokens", None))
        [head, digits, forever] = [line.split() for line in pipefill("list").out.splitlines()]
        assert head == ["ID", "NAME", "STATE", "DONE", "%", "RATE", "LEFT"]
        assert digits == ["1", "digits", "RUNNING", "14.4k/28.7k", "samples", "50", "95.5/s", "2m30s"]
        assert forever == ["2", "forever", "RUNNING", "1.23M", "tokens"]

    def test_it_fits_into_80_columns(self, pipefill, store):
        progress = Progress(123_456_789_000, 999_999_999_000, "images", 0.00123)
        for name in ("a" * 80, "short"):
            running(store, name, progress, user=f"user of {name}")
        out = pipefill("list").out
        assert max(len(line) for line in out.splitlines()) <= 80
        for cell in ("USER", "short", "RUNNING", "images", "12", "0.00123/s"):
            assert cell in out

    def test_the_last_ten_that_finished(self, pipefill, store):
        for number in range(12):
            finished(store, f"done-{number}", JobState.SUCCEEDED)
        store.submit([NewJob("waits", Work())])
        ran = pipefill("list")
        assert [line.split()[1] for line in ran.out.splitlines()[1:-1]] == [f"done-{n}" for n in range(2, 12)] + [
            "waits"
        ]
        assert ran.out.splitlines()[-1] == "Shown: the last 10 of the finished jobs. --all lists every job."
        assert len(pipefill("list", "--all", "--json").json) == 13
        assert [job["name"] for job in pipefill("list", "--state", "queued", "--json").json] == ["waits"]

    def test_why_a_job_failed_is_said_in_a_line(self, pipefill, store):
        finished(store, "odd", reason="ValueError: no such data\n" + 80 * "x")
        finished(store, "well", JobState.SUCCEEDED, reason="")
        *_, last = pipefill("list").out.splitlines()
        assert last.startswith("FAILED odd (1): ValueError: no such data xxxx")
        assert len(last) == 80
        assert last.endswith("…")

    def test_the_cause_of_a_state_is_a_fixed_word(self, pipefill, store):
        claim = store.claim("agent", [job.id for job in store.submit([NewJob("slow", Work("tasks:Pi"))])], 3600)
        assert claim is not None
        store.finish(claim, Status(JobState.FAILED, Cause.TIMEOUT, "60"), Progress(), {})
        [job] = pipefill("list", "--json").json
        assert (job["state"], job["cause"]) == ("FAILED", "timeout")
        assert job["reason"] == "it ran for longer than its timeout of 60 s"
        assert "status" not in job

    def test_no_jobs(self, pipefill, store):
        assert pipefill("list").out == "There are no jobs.\n"
        assert pipefill("list", "--json").json == []

    def test_nothing_a_job_says_commands_the_terminal(self, pipefill, store):
        finished(store, "odd", reason="\x1b[2J[red]gone[/red]\nnext")
        out = pipefill("show", "odd").out
        assert "\x1b" not in out
        assert "[red]gone[/red] next" in out


class TestShow:
    def test_a_running_job(self, pipefill, store):
        running(store, "digits", Progress(10, 40, "samples", 0.5, 7, 3.0, 1_700_000_000.0), user="ada", priority=3)
        out = pipefill("show", "digits").out
        for text in (
            "state      RUNNING",
            "job        digits (1)",
            "what       tasks:Pi",
            "user       ada",
            "device     rank 1 of runs/first on host",
            "done       10/40 samples (25%)",
            "rate       0.5/s",
            "(in 1m00s)",
            "on devices 3s, 7 steps",
        ):
            assert " ".join(text.split()) in " ".join(out.split())

    def test_what_it_is_after_how_long_and_how_often_it_may_run(self, pipefill, store):
        names = [f"first-{number}" for number in range(8)]
        store.submit([NewJob(name, Work("tasks:Pi")) for name in names])
        claim = store.claim("agent", [store.find("first-0").id], 60)
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        store.submit([NewJob("last", Work("tasks:Pi", after=tuple(names), retries=2, timeout_s=5400.0))])
        out = " ".join(pipefill("show", "last").out.split())
        firsts = ", ".join(f"{name} (QUEUED)" for name in names[1:6])
        assert f"after {firsts}, ..., 1 of 8 SUCCEEDED" in out
        assert "retries 0 of 2 used" in out
        assert "timeout 1h30m" in out

    def test_as_json_with_every_documented_field(self, pipefill, store):
        running(store, "digits", Progress(10, 40, "samples", 0.5))
        before = time.time()
        job = pipefill("show", "1", "--json").json
        assert (job["percent"], job["remaining_s"], job["state"]) == (25.0, 60.0, "RUNNING")
        assert job["ends_s"] >= before + 60
        help_text = pipefill("show", "--help").out
        assert [field for field in job if field not in help_text] == []

    def test_json_has_no_nan(self, pipefill, store):
        finished(store, "odd")
        assert pipefill("show", "odd", "--json").json["result"] == {"loss": None}

    def test_no_such_job(self, pipefill, store):
        running(store, "digits", Progress())
        ran = pipefill("show", "digit")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err == "pipefill: error: there is no job 'digit'; the closest: digits\n"


def lost(store: JobStore, *names: str) -> None:
    """Jobs whose agent went without a word."""
    jobs = store.submit([NewJob(name, Work("tasks:Pi")) for name in names])
    claims = [store.claim("agent", [job.id], 3600, device="rank 1 of runs/first on host") for job in jobs]
    for claim in claims:
        assert claim is not None
        store.heartbeat(claim, Progress(135, 400, rate=13.0), 0.001)
    time.sleep(0.01)


class TestLost:
    """After a kill, a preemption or with a lost node, nothing is shown as running that is not."""

    def test_list_says_so_and_shows_no_rate(self, pipefill, store):
        running(store, "runs", Progress(10, 20, rate=1.0))
        lost(store, "gone")
        [_, runs, gone, said] = pipefill("list").out.splitlines()
        assert runs.split() == ["1", "runs", "RUNNING", "10/20", "steps", "50", "1/s", "10s"]
        assert gone.split() == ["2", "gone", "LOST", "135/400", "steps", "33"]
        assert said.startswith("LOST: its agent is not heard of any more")
        assert store.get(2).state is JobState.RUNNING  # to look changes nothing

    def test_show_says_since_when(self, pipefill, store):
        lost(store, "gone")
        out = " ".join(pipefill("show", "gone").out.split())
        assert out.startswith("state LOST")
        assert "its agent's lease ended 20" in out
        assert "s ago); it goes on from its last checkpoint" in out
        assert "13/s" not in out
        assert "ends" not in out
        job = pipefill("show", "gone", "--json").json
        assert (job["state"], job["rate"], job["remaining_s"], job["ends_s"]) == ("LOST", None, None, None)
        assert job["lost_s"] == job["lease_until_s"]

    def test_cancel_and_retry_work(self, pipefill, store):
        lost(store, "gone", "away")
        assert pipefill("cancel", "gone", "--json").json[0]["state"] == "CANCELLED"
        assert pipefill("retry", "away", "--json").json[0]["state"] == "QUEUED"
        assert [line.split()[2] for line in pipefill("list").out.splitlines()[1:]] == ["CANCELLED", "QUEUED"]


class TestCancelAndRetry:
    def test_each_of_several(self, pipefill, store):
        store.submit([NewJob("waits", Work())])
        running(store, "runs", Progress())
        finished(store, "done", JobState.SUCCEEDED)
        ran = pipefill("cancel", "waits", "2", "done", "nope", "--json")
        assert [(job["name"], job["state"], job["cancelling"]) for job in ran.json] == [
            ("waits", "CANCELLED", False),
            ("runs", "RUNNING", True),
        ]
        assert ran.status == 2
        assert ran.err == (
            "pipefill: error: job done (3) is SUCCEEDED; expected a job that has not finished; there is no job 'nope'\n"
        )
        assert "CANCELLING" in pipefill("list").out
        assert pipefill("retry", "waits").status == 0
        assert store.find("waits").state is JobState.QUEUED


class TestCommand:
    def test_without_a_store(self, pipefill, monkeypatch):
        monkeypatch.delenv("PIPEFILL_STORE")
        ran = pipefill("list")
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("pipefill: error: no job store given; expected --store URL, FILE or FOLDER, or")

    def test_a_store_that_is_not_there_is_not_made(self, pipefill, tmp_path):
        ran = pipefill("list", "--store", "typo")
        assert ran.status == 2
        assert ran.err == (
            f"pipefill: error: there is no job store {tmp_path}/typo/jobs.db; "
            "expected a database file, or a folder with one\n"
        )
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("arguments", [["bogus"], ["list", "--bad"], ["show"], ["list", "--state", "odd"]])
    def test_wrong_usage_is_one_line(self, pipefill, arguments):
        ran = pipefill(*arguments)
        assert (ran.status, ran.out) == (2, "")
        assert ran.err.startswith("pipefill: error: ")
        assert ran.err.count("\n") == 1

    def test_help_is_not_an_error(self, pipefill):
        for arguments in ([], ["--help"], ["list", "-h"]):
            ran = pipefill(*arguments)
            assert (ran.status, ran.err) == (0, "")
            assert "Usage: pipefill" in ran.out
            assert "<bool>" not in ran.out

    def test_help_imports_nothing_slow(self):
        slow = ("torch", "sqlalchemy", "matplotlib", "megatron.core", "pandas")
        code = f"import sys, megatron.fill.cli.app; sys.exit(any(name in sys.modules for name in {slow}))"
        assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

    def test_the_shell_completes_jobs(self, store, tmp_path):
        store.submit([NewJob("digits", Work()), NewJob("pagerank", Work())])
        done = subprocess.run(
            [Path(sys.executable).with_name("pipefill")],
            env=os.environ
            | {
                "_PIPEFILL_COMPLETE": "complete_bash",
                "COMP_WORDS": f"pipefill show --store {tmp_path}/run di",
                "COMP_CWORD": "4",
                "PIPEFILL_STORE": "",
            },
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.stdout.split(), done.stderr) == (["digits"], "")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7, "7"),
        (0.25, "0.25"),
        (1437, "1.44k"),
        (999_900, "1000k"),
        (99.96, "100"),
        (28_740, "28.7k"),
        (1e7, "10M"),
        (2.5e14, "250T"),
    ],
)
def test_numbers_are_short(value, text):
    assert views._number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, ""), (59.4, "59s"), (59.9, "1m00s"), (3600, "1h00m"), (90_000, "1d01h"), (float("inf"), "never")],
)
def test_durations_are_short(seconds, text):
    assert views._duration(seconds) == text


def test_a_finished_job_is_shown_as_done(pipefill, store):
    for name, state, done in (("done", JobState.SUCCEEDED, 374.9999999999962), ("half", JobState.FAILED, 374.9)):
        [job] = store.submit([NewJob(name, Work("tasks:Pi"))])
        claim = store.claim("agent", [job.id], 3600)
        assert claim is not None
        store.finish(claim, Status(state), Progress(done, 375.0, "s"), {})
    assert [line.split()[-1] for line in pipefill("list").out.splitlines()[1:]] == ["100", "99"]


def test_absurd_numbers_take_no_more_room_than_others(pipefill, store):
    running(store, "absurd", Progress(1e-100, 1e100, rate=1e-100))
    [_, line] = pipefill("list").out.splitlines()
    assert line.split() == ["1", "absurd", "RUNNING", "1e-100/1e+100", "steps", "0", "1e-100/s", "never"]
    assert pipefill("show", "absurd").status == 0
