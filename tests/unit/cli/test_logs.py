"""``pipefill logs``: what a job printed, also while it prints it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.fill.cli import main
from megatron.fill.folders import output_file
from megatron.fill.status import Status
from megatron.fill.store import Claim, JobStore, Progress, open_store
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    opened = open_store(tmp_path)
    opened.submit([NewJob("digits", Work())])
    yield opened
    opened.close()


def start(store: JobStore, folder: Path) -> Claim:
    claim = store.claim("agent", [1], 3600, device="rank 0 of runs/first on host")
    assert claim is not None
    folder.mkdir(parents=True)
    output_file(folder).parent.mkdir(exist_ok=True)
    assert store.place(claim, str(folder))
    return claim


def job(run_dir: Path) -> Path:
    """The job's folder in a run."""
    return run_dir / "jobs" / "digits-1"


Run = Callable[..., subprocess.CompletedProcess[bytes]]


def logs(tmp_path: Path, *arguments: str) -> list[str]:
    return ["logs", "digits", "--store", str(tmp_path), *arguments]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """The command in this process."""

    def call(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        monkeypatch.setattr(sys, "argv", ["pipefill", *logs(tmp_path, *arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capfdbinary.readouterr()
        return subprocess.CompletedProcess(sys.argv, int(ended.value.code or 0), written.out, written.err)

    return call


def follow(tmp_path: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("pipefill")), *logs(tmp_path, "-f", *arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_the_output_with_what_is_no_text_made_visible(run, store, tmp_path):
    start(store, job(tmp_path))
    output_file(job(tmp_path)).write_bytes(b"one\ntwo \xff\nthree")
    assert run().stdout == b"one\ntwo \\xff\nthree"
    assert run("--lines", "2").stdout == b"two \\xff\nthree"
    assert run("-n", "0").stdout == b""
    lines = [json.loads(line) for line in run("--json").stdout.splitlines()]
    assert lines == [{"job": "digits", "line": line} for line in ("one", "two �", "three")]


def test_nothing_that_it_printed_commands_the_terminal(run, store, tmp_path):
    start(store, job(tmp_path))
    printed = "\x1b]0;title\x07\r\t1\n\x9b2J caf\u00e9 \u202e\U0001f680\x7f"
    output_file(job(tmp_path)).write_text(printed, encoding="utf-8", newline="")
    shown = "^[]0;title^G^M\t1\n\\x9b2J caf\u00e9 \\u202e\U0001f680^?"
    assert run().stdout.decode() == shown
    lines = [json.loads(line)["line"] for line in run("--json").stdout.splitlines()]
    assert lines == printed.split("\n")


@pytest.mark.parametrize("kind", ["link", "pipe", "flood", "folder that is a link"])
def test_what_no_agent_wrote_is_not_read(run, store, tmp_path, kind):
    folder = job(tmp_path)
    start(store, folder)
    (tmp_path / "secret").mkdir()
    output = output_file(folder)
    (tmp_path / "secret" / output.name).write_text("secret")
    if kind == "link":
        output.symlink_to(tmp_path / "secret" / output.name)
    elif kind == "pipe":
        os.mkfifo(output)
    elif kind == "flood":
        with output.open("wb") as file:
            file.truncate(1 << 40)
    else:
        output.parent.rmdir()
        output.parent.symlink_to(tmp_path / "secret")
    ran = run()
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert b"digits-1.log, cannot be read: " in ran.stderr


def test_none_yet_and_none_here(run, store, tmp_path):
    ran = run()
    assert (ran.returncode, ran.stdout) == (2, b"")
    assert ran.stderr == (b"pipefill: error: job digits (1) is QUEUED and has printed nothing yet; -f waits for it\n")
    start(store, job(tmp_path))
    ran = run()
    assert ran.returncode == 2
    assert b"is RUNNING, rank 0 of runs/first on host; its output" in ran.stderr
    assert b"is not there, or not on this machine" in ran.stderr


def test_following_waits_reads_on_and_ends_with_the_job(store, tmp_path):
    with follow(tmp_path) as process:
        assert process.stdout is not None
        claim = start(store, job(tmp_path))
        with output_file(job(tmp_path)).open("ab", buffering=0) as output:
            output.write(b"one\n")
            assert process.stdout.readline() == b"one\n"
            output.write(b"two\n")
            assert process.stdout.readline() == b"two\n"
            output.write(b"three")
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        assert process.stdout.read() == b"three"
        assert process.wait() == 0


def test_following_a_job_that_begins_anew(store, tmp_path):
    claim = start(store, job(tmp_path))
    output_file(job(tmp_path)).write_bytes(b"the first attempt\n")
    with follow(tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"the first attempt\n"
        store.release(claim, Status(JobState.QUEUED, detail="the main job ended"), Progress(), {})
        elsewhere = job(tmp_path / "elsewhere")
        claim = start(store, elsewhere)
        output_file(elsewhere).write_bytes(b"the second one\n")
        assert process.stdout.readline() == b"the second one\n"
        output_file(elsewhere).write_bytes(b"short\n")
        assert process.stdout.readline() == b"short\n"
        store.finish(claim, Status(JobState.FAILED, detail="why"), Progress(), {})
        assert process.wait() == 0


def test_following_as_json_gives_whole_lines(store, tmp_path):
    claim = start(store, job(tmp_path))
    with follow(tmp_path, "--json") as process, output_file(job(tmp_path)).open("ab", buffering=0) as output:
        assert process.stdout is not None
        output.write(b"one\ntw")
        assert json.loads(process.stdout.readline()) == {"job": "digits", "line": "one"}
        output.write(b"o")
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        assert json.loads(process.stdout.readline()) == {"job": "digits", "line": "two"}
        assert process.stdout.read() == b""
