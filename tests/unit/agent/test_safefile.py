"""Files in a job's folder, where the job may have put anything, and the folder itself."""

from __future__ import annotations

import fcntl
import os
import stat
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.agent.admission import JobUser, default_user
from megatron.fill.agent.folder import BoundedOutput, folder_name, job_folder, occupied
from megatron.fill.folders import lock_file, output_file
from megatron.fill.linux import safefile
from megatron.fill.store.values import Job
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore

WORK = Work("m:C")


def job(name: str = "pi", directory: str = "") -> Job:
    store = MemoryStore()
    [made] = store.submit([NewJob(name, WORK)])
    return replace(made, directory=directory, attempt=2)


def test_a_file_is_never_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "pi-1.log").symlink_to(victim)
    output = BoundedOutput(tmp_path / "pi-1.log")
    output.write(b"evil")
    output.close()
    assert victim.read_text() == "untouched"
    assert (tmp_path / "pi-1.log").read_text() == "evil"


def test_output_outlives_a_full_disk(tmp_path):
    output = BoundedOutput(tmp_path / "pi-1.log")
    with Path("/dev/full").open("wb", buffering=0) as full:
        output._file.close()
        output._file = full
        output.write(b"lost")
        output.close()
    assert output.total_bytes == 4


def test_a_folder_is_made_and_cleared_and_earlier_output_is_kept(tmp_path):
    directory = job_folder(tmp_path, job(), None)
    assert directory is not None
    assert directory == tmp_path / "jobs" / "pi-1"
    for name in ("result.json", "profile.json", "checkpoint.pt"):
        (directory / name).write_text(name)
    output_file(directory).write_text("the first attempt's")
    assert job_folder(tmp_path, job(), None) == directory
    assert [path.name for path in directory.iterdir()] == ["checkpoint.pt"]
    assert not output_file(directory).exists()
    assert (tmp_path / "output" / "pi-1.1.log").read_text() == "the first attempt's"


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "..", ".", "a\nb"])
def test_a_name_cannot_leave_its_folder(tmp_path, name):
    assert folder_name(job(name)) == "job-1"
    assert job_folder(tmp_path, job(name), None) == tmp_path / "jobs" / "job-1"


def test_a_folder_of_an_earlier_run_is_used_again(tmp_path):
    before = job_folder(tmp_path / "first", job(), None)
    assert before is not None
    with occupied(before):
        pass
    assert job_folder(tmp_path / "second", job(directory=str(before)), None) == before


@pytest.mark.parametrize(
    "how", ["no run's", "another name", "link", "link above", "dots", "relative", "others' lock", "\0"]
)
def test_a_folder_that_only_the_store_knows_is_neither_made_nor_handed_over(tmp_path, how, user):
    """Whoever may write to the store may write any folder there."""
    victim = tmp_path / "victim" / "jobs" / "pi-1"
    if how != "no run's":
        made = job_folder(tmp_path / "victim", job(), None)
        assert made == victim
        with occupied(victim):
            pass
    (tmp_path / "link").symlink_to(tmp_path / "victim")
    given = {
        "another name": victim.with_name("other-1"),
        "link above": tmp_path / "link" / "jobs" / "pi-1",
        "dots": tmp_path / "victim" / "jobs" / ".." / "jobs" / "pi-1",
        "relative": Path("jobs") / "pi-1",
        "\0": Path(f"{victim}\0"),
    }.get(how, victim)
    if how == "link":
        victim.rename(tmp_path / "aside")
        victim.symlink_to(tmp_path / "aside")
    if how == "others' lock":
        lock_file(victim).parent.chmod(0o777)
    own = job_folder(tmp_path / "run", job(directory=str(given)), user)
    assert own == tmp_path / "run" / "jobs" / "pi-1"
    assert victim.exists() == (how != "no run's")
    assert not victim.exists() or victim.stat().st_uid == os.geteuid()
    if own is not None and user is not None:
        assert own.stat().st_uid == user.uid


@pytest.fixture
def user() -> JobUser | None:
    return default_user()


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pi-1").symlink_to(tmp_path)
    assert job_folder(tmp_path, job(), None) is None


def test_two_workers_never_share_a_folder(tmp_path):
    folder = job_folder(tmp_path, job(), None)
    assert folder is not None
    with occupied(folder), pytest.raises(OSError, match="another worker is still in"), occupied(folder):
        pass
    with occupied(folder):
        pass


def test_who_can_open_a_job_s_folder_cannot_keep_its_worker_out(tmp_path):
    folder = job_folder(tmp_path, job(), None)
    assert folder is not None
    opened = os.open(folder, os.O_RDONLY)
    fcntl.flock(opened, fcntl.LOCK_EX)
    with occupied(folder):
        assert stat.S_IMODE(lock_file(folder).stat().st_mode) == 0o600
        assert stat.S_IMODE(lock_file(folder).parent.stat().st_mode) == 0o700
    os.close(opened)


def test_a_worker_that_leaves_a_folder_is_waited_for(tmp_path):
    folder = job_folder(tmp_path, job(), None)
    assert folder is not None
    entered, left = threading.Event(), threading.Event()

    def holder() -> None:
        with occupied(folder):
            entered.set()
            time.sleep(0.2)
            left.set()

    thread = threading.Thread(target=holder)
    thread.start()
    entered.wait()
    with occupied(folder):
        assert left.is_set()
    thread.join()


def test_folders_where_files_were_are_cleared_away(tmp_path):
    known = job(directory="")
    directory = job_folder(tmp_path, known, None)
    assert directory is not None
    for name in ("profile.json", "result.json"):
        (directory / name / "inner").mkdir(parents=True)
    assert job_folder(tmp_path, known, None) == directory
    assert not (directory / "profile.json").exists()
    (directory / "spec.json" / "inner").mkdir(parents=True)
    safefile.write_text(directory / "spec.json", "{}")
    assert (directory / "spec.json").read_text() == "{}"


def test_a_link_is_removed_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    safefile.remove(tmp_path / "link")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    safefile.remove(tmp_path / "nothing")


def test_a_folder_that_a_job_made_very_deep_is_removed(tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    kept.touch()
    monkeypatch.chdir(tmp_path)  # which is left at the end
    try:
        for _ in range(3000):
            os.mkdir("deep")
            os.chdir("deep")
        os.symlink(kept, "link")
    finally:
        os.chdir(tmp_path)
    safefile.remove(tmp_path / "deep")
    assert os.listdir(tmp_path) == ["kept"]


def test_what_cannot_be_removed_is_reported():
    with pytest.raises(OSError, match="/proc/self/status cannot be removed"):
        safefile.remove_tree(Path("/proc/self/status"))
