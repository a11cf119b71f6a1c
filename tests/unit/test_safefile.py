"""Files in a job's folder, where the job may have put anything, and the folder itself."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.agent.folder import folder_name, job_folder, occupied
from megatron.fill.agent.output import BoundedOutput
from megatron.fill.linux import safefile
from megatron.fill.store.memory import MemoryStore
from megatron.fill.store.port import Job, NewJob
from megatron.fill.work import Work

WORK = Work("m:C")


def job(name: str = "pi", directory: str = "") -> Job:
    store = MemoryStore()
    [made] = store.submit([NewJob(name, WORK)])
    return replace(made, directory=directory, attempt=2)


def test_a_file_is_never_written_through_a_link(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("untouched")
    (tmp_path / "output.log").symlink_to(victim)
    output = BoundedOutput(tmp_path / "output.log")
    output.write(b"evil")
    output.close()
    assert victim.read_text() == "untouched"
    assert (tmp_path / "output.log").read_text() == "evil"


def test_output_outlives_a_full_disk(tmp_path):
    output = BoundedOutput(tmp_path / "output.log")
    with Path("/dev/full").open("wb", buffering=0) as full:
        output._file.close()
        output._file = full
        output.write(b"lost")
        output.close()
    assert output.total_bytes == 4


def test_a_folder_is_made_and_cleared(tmp_path):
    directory = job_folder(tmp_path, job(), None)
    assert directory is not None
    assert directory == tmp_path / "jobs" / "pi-1"
    for name in ("result.json", "profile.json", "checkpoint.pt", "output.log"):
        (directory / name).write_text(name)
    assert job_folder(tmp_path, job(), None) == directory
    assert sorted(path.name for path in directory.iterdir()) == ["checkpoint.pt", "output-1.log"]


@pytest.mark.parametrize("name", ["../../etc", "/etc", "a/b", "..", ".", "a\nb"])
def test_a_name_cannot_leave_its_folder(tmp_path, name):
    assert folder_name(job(name)) == "job-1"
    assert job_folder(tmp_path, job(name), None) == tmp_path / "jobs" / "job-1"


def test_a_folder_of_an_earlier_run_is_used_only_if_it_is_one(tmp_path):
    before = tmp_path / "first" / "jobs" / "pi-1"
    assert job_folder(tmp_path / "second", job(directory=str(before)), None) == before
    elsewhere = str(tmp_path / "elsewhere")
    assert job_folder(tmp_path / "second", job(directory=elsewhere), None) == tmp_path / "second" / "jobs" / "pi-1"


def test_a_folder_that_is_a_link_is_refused(tmp_path):
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "pi-1").symlink_to(tmp_path)
    assert job_folder(tmp_path, job(), None) is None


def test_two_workers_never_share_a_folder(tmp_path):
    with occupied(tmp_path), pytest.raises(OSError, match="another worker is still in"), occupied(tmp_path):
        pass
    with occupied(tmp_path):
        pass


def test_a_worker_that_leaves_a_folder_is_waited_for(tmp_path):
    entered, left = threading.Event(), threading.Event()

    def holder() -> None:
        with occupied(tmp_path):
            entered.set()
            time.sleep(0.2)
            left.set()

    thread = threading.Thread(target=holder)
    thread.start()
    entered.wait()
    with occupied(tmp_path):
        assert left.is_set()
    thread.join()


def test_folders_where_files_were_are_cleared_away(tmp_path):
    known = job(directory="")
    directory = job_folder(tmp_path, known, None)
    assert directory is not None
    for name in ("profile.json", "result.json", "output.log"):
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
