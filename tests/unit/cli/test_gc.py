"""``pipefill gc``: what old runs have left goes; what runs, waits, is young or is not ours stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.fill.cli import main
from megatron.fill.cli.leftovers import _name
from megatron.fill.folders import PARTS, PRIVATE, lock_file, output_file
from megatron.fill.linux import safefile
from megatron.fill.records.segment import SegmentEnding
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import Job, Progress, open_store
from megatron.fill.store.sql import SqlStore
from megatron.fill.work import NewJob, Work
from tests.support.segments import write_segment

DAY_S = 86400
DONE = Status(JobState.SUCCEEDED, Cause.FINISHED)


@pytest.fixture
def gc(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["pipefill", "gc", "--older-than", "30d", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        said = capsys.readouterr()
        assert (ended.value.code or 0) == status, said.err
        return said.out + said.err

    return run


def made(run: Path, days: float, store: str = "", ending: SegmentEnding | None = SegmentEnding.WELL) -> Path:
    """A run folder whose training ended so many days ago."""
    for part in PARTS:
        (run / part).mkdir(parents=True, mode=0o700 if part in PRIVATE else 0o755)
    opened = write_segment(run, [], ending=ending, store=store or f"sqlite:///{run}/jobs.db")
    (run / "agents" / "agent0.log").write_text("begun\n")
    (run / "report.json").write_text("{}")
    file, then_s = opened.segment.folder / "segment.json", time.time() - days * DAY_S
    if ending is not None:
        file.write_text(json.dumps(json.loads(file.read_text()) | {"ended_s": then_s}) + "\n")
    for path in [*run.rglob("*")]:
        os.utime(path, (then_s, then_s))
    return run


def job(store: Path | str, run: Path, name: str, days: float | None, after: tuple[str, ...] = ()) -> Job:
    """A job with a folder, a checkpoint and output in a run; finished so many days ago, or put back if None."""
    queue = SqlStore(store, clock=lambda: time.time() - (days or 0) * DAY_S)
    [new] = queue.submit([NewJob(name, Work("m:C", after=after))])
    claim = queue.claim("agent", [new.id], 60)
    assert claim is not None
    directory = run / "jobs" / f"{name}-{new.id}"
    directory.mkdir()
    (directory / "checkpoint.pt").write_bytes(b"x" * 100_000)
    output_file(directory).write_text("done\n")
    lock_file(directory).touch(mode=0o600)
    queue.place(claim, str(directory))
    if days is None:
        queue.release(claim, Status(JobState.QUEUED), Progress(), {})
    else:
        queue.finish(claim, DONE, Progress(), {})
    found = queue.get(new.id)
    queue.close()
    return found


def names(where: Path) -> list[str]:
    store = open_store(where, create=False)
    found = [job.name for job in store.list()]
    store.close()
    return found


def test_an_old_run_goes_as_a_whole_but_not_before_it_is_told_to(gc, tmp_path):
    run, young = made(tmp_path / "old", 40), made(tmp_path / "young", 20)
    job(run, run, "digits", 40)
    job(run, run, "pi", 41)
    before = sorted(run.rglob("*"))
    for option in ([], ["--dry-run"]):
        first, second, last = gc("old", "young", *option).splitlines()
        assert first.startswith(f"{run}: the whole run, ")
        assert second.startswith(f"{young}: nothing; the run stays: last used 20")
        assert last.endswith(" and the rows of 1 job in 1 store would go; --remove removes them for good")
    assert sorted(run.rglob("*")) == before
    said = json.loads(gc("old", "young", "--remove", "--json"))
    assert (said["dry_run"], said["runs"][0]["whole"], said["runs"][1]["whole"]) == (False, True, False)
    assert said["size_bytes"] == said["runs"][0]["size_bytes"] > 200_000
    assert not run.exists()
    assert (young / "report.json").exists()


def test_a_folder_that_is_no_run_is_left_and_the_others_go(gc, tmp_path):
    run, damaged = made(tmp_path / "old", 40), made(tmp_path / "damaged", 40)
    (damaged / "records" / "1" / "segment.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    others = ["empty", "file", "damaged"]
    assert f"pipefill: not removed: {tmp_path}/empty/records: holds no records" in gc("old", *others, status=1)
    assert run.exists()
    said = json.loads(gc("old", *others, "--remove", "--json", status=1).partition("\npipefill: ")[0])
    assert [Path(one["run"]).name for one in said["runs"]] == ["old"]
    named = zip(said["failures"], others, strict=True)
    assert all(failure.startswith(str(tmp_path / name)) for failure, name in named)
    assert not run.exists()
    assert (damaged / "report.json").exists()
    assert "/file: is no folder; expected a run folder" in gc(*others, status=2)


def test_what_others_put_into_a_run_folder_stays(gc, tmp_path):
    run = made(tmp_path / "old", 40)
    (run / "notes.txt").write_text("mine")
    gc("old", "--remove")
    assert [path.name for path in run.iterdir()] == ["notes.txt"]


def test_of_a_training_that_runs_the_old_jobs_go(gc, tmp_path):
    run = made(tmp_path / "run", 40, ending=None)
    first, needed, young = job(run, run, "a", 40), job(run, run, "b", 39), job(run, run, "c", 1)
    waits = job(run, run, "waits", None, after=("b",))
    assert "1 folder of jobs, " in gc("run")
    said = gc("run", "--remove")
    assert f"{run}: 1 folder of jobs, " in said
    assert "the run stays: its training runs" in said
    assert not any(path.exists() for path in (Path(first.directory), output_file(Path(first.directory))))
    assert not lock_file(Path(first.directory)).exists()
    for stays in (needed, young, waits):
        assert Path(stays.directory, "checkpoint.pt").exists()
    assert names(run) == ["b", "c", "waits"]
    assert (run / "records" / "1" / "segment.json").exists()


def test_a_hostile_job_takes_nothing_with_it(gc, tmp_path):
    run = made(tmp_path / "old", 40, ending=None)
    victim = tmp_path / "victim"
    (victim / "inside").mkdir(parents=True)
    evil, forged = job(run, run, "evil", 40), job(run, run, "forged", 40)
    job(run, run, "newest", 1)
    folder = Path(evil.directory)
    (folder / "out").symlink_to(victim)
    (folder / "checkpoint.pt").unlink()
    (folder / "checkpoint.pt").symlink_to(victim / "inside")
    deep = f"import os; os.chdir({str(folder)!r})\nfor _ in range(3000): os.mkdir('d'); os.chdir('d')"
    subprocess.run([sys.executable, "-c", deep], check=True)
    store = SqlStore(run, clock=lambda: time.time() - 40 * DAY_S)
    with store._engine.begin() as connection:  # as another user of the store may write it
        connection.exec_driver_sql("UPDATE pipefill_jobs SET directory = ? WHERE id = ?", (str(victim), forged.id))
    store.close()
    gc("old", "--remove")
    assert not folder.exists()
    assert (victim / "inside").is_dir()
    assert names(run) == ["forged", "newest"]  # its folder is no job's folder, so nothing is touched


def test_a_run_stays_whose_folder_a_job_of_another_run_still_needs(gc, tmp_path):
    store = tmp_path / "shared.db"
    old, now = (made(tmp_path / name, days, f"sqlite:///{store}") for name, days in (("old", 40), ("now", 0)))
    done, moved = job(store, old, "done", 40), job(store, old, "moved", None)
    assert f"{old}: 1 folder of jobs" in gc("old", "now", "--remove")
    assert (Path(done.directory).exists(), Path(moved.directory).exists()) == (False, True)
    queue = SqlStore(store)
    queue.cancel(moved.id)
    queue.close()
    job(store, now, "newest", 0)
    assert f"job moved ({moved.id}), which stays, has its folder there" in gc("old", "now", "--remove")


def test_a_store_that_nodes_share(gc, tmp_path, postgres):
    url = postgres.new_database()
    old, now = (made(tmp_path / name, days, url) for name, days in (("old", 40), ("now", 0)))
    job(url, old, "done", 40)
    job(url, now, "newest", 0)
    assert f"{old}: the whole run, " in gc("old", "now", "--remove")
    assert not old.exists()
    store = open_store(url)
    assert [job.name for job in store.list()] == ["newest"]
    store.close()


def test_the_password_of_a_store_is_the_users():
    assert _name("postgresql://ada:secret@db/x") == _name("postgresql+psycopg://ada:***@db/x")  # as records have it


def test_a_run_stays_whose_jobs_are_not_known(gc, tmp_path):
    run = made(tmp_path / "old", 40, f"sqlite:///{tmp_path}/gone.db")
    said = gc("old", "--remove")
    assert f"{run}: nothing; the run stays: its jobs are not known: there is no job store {tmp_path}/gone.db" in said


def test_a_run_folder_that_was_moved_has_its_store_with_it(gc, tmp_path):
    run = made(tmp_path / "old", 40)
    job(run, run, "digits", 40)
    run.rename(tmp_path / "moved")
    gc("moved", "--remove")
    assert not (tmp_path / "moved").exists()


def test_a_training_that_begins_meanwhile_keeps_its_run(gc, tmp_path):
    run = made(tmp_path / "old", 40)
    code = f"import fcntl, sys; f = open({str(run / 'run.lock')!r}, 'w'); fcntl.lockf(f, fcntl.LOCK_EX)"
    code += "; print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        assert "nothing; the run stays: a training has begun in it" in gc("old", "--remove")
        assert (run / "report.json").exists()
        other.communicate()
    assert "the whole run" in gc("old", "--remove")


def test_a_link_in_the_place_of_a_part_is_not_followed(gc, tmp_path):
    run = made(tmp_path / "old", 40)
    (run / "output").rmdir()
    (tmp_path / "elsewhere").mkdir()
    (run / "output").symlink_to(tmp_path / "elsewhere")
    assert "the run stays: output in it is a link" in gc("old", "--remove")
    assert (tmp_path / "elsewhere").is_dir()


def test_what_cannot_be_removed_is_named_and_the_run_is_still_one(gc, tmp_path, monkeypatch):
    run = made(tmp_path / "old", 40)
    remove = safefile.remove

    def refuse(path: Path) -> None:
        if path.name == "agents":
            raise OSError(f"{path} cannot be removed: not permitted")
        remove(path)

    monkeypatch.setattr(safefile, "remove", refuse)
    assert f"pipefill: not removed: {run}/agents cannot be removed: not permitted" in gc("old", "--remove", status=1)
    monkeypatch.setattr(safefile, "remove", remove)
    assert "the whole run" in gc("old", "--remove")
    assert not run.exists()
