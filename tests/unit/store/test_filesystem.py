"""Which file system a job store is on."""

from __future__ import annotations

import errno
import sqlite3

import pytest

from megatron.fill.errors import StoreError
from megatron.fill.store import filesystem, open_store
from megatron.fill.store.filesystem import network_file_system
from megatron.fill.work import NewJob, Work

MOUNTS = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
40 22 0:44 / /home rw shared:5 - nfs4 server:/home rw
41 40 0:45 / /home/ada/fast rw - xfs /dev/sdb1 rw
42 22 0:46 / /with\\040blank rw - lustre 10.0.0.1@tcp:/scratch rw
43 22 0:47 / /covered rw - nfs server:/covered rw
44 43 0:48 / /covered rw - tmpfs none rw
damaged line
"""


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    """Has this process see other mounts."""

    def see(text):
        (tmp_path / "mountinfo").write_text(text)
        monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "mountinfo")

    return see


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/srv/jobs.db", ""),
        ("/home", "nfs4"),
        ("/home/ada/jobs.db", "nfs4"),
        ("/home/ada/fast/jobs.db", ""),
        ("/homes/jobs.db", ""),
        ("/with blank/runs/jobs.db", "lustre"),
        ("/covered/jobs.db", ""),
    ],
)
def test_the_innermost_mount_counts(mounts, path, kind):
    mounts(MOUNTS)
    assert network_file_system(path) == kind


def test_without_proc_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(filesystem, "MOUNTS", tmp_path / "nothing")
    assert network_file_system("/home") == ""


@pytest.mark.parametrize(("kind", "journal"), [("nfs4", "delete"), ("ext4", "wal")])
def test_a_store_that_several_machines_may_see_has_no_write_ahead_log(mounts, tmp_path, kind, journal):
    mounts(f"22 1 8:1 / / rw - {kind} x rw\n")
    store = open_store(tmp_path / "jobs.db")
    store.submit([NewJob("pi", Work("m:Pi"))])
    connection = sqlite3.connect(tmp_path / "jobs.db")
    assert connection.execute("PRAGMA journal_mode").fetchone() == (journal,)
    connection.close()
    store.close()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_refused(monkeypatch, tmp_path, number):
    def lockf(file, operation):
        raise OSError(number, "no locks here")

    monkeypatch.setattr(filesystem.fcntl, "lockf", lockf)
    with pytest.raises(StoreError, match=r"no file locks, .*expected: a file on a local disk"):
        open_store(tmp_path / "jobs.db")


def test_a_lock_that_another_process_has_is_a_lock(monkeypatch, tmp_path):
    def lockf(file, operation):
        raise BlockingIOError(errno.EAGAIN, "somebody has it")

    monkeypatch.setattr(filesystem.fcntl, "lockf", lockf)
    open_store(tmp_path / "jobs.db").close()
