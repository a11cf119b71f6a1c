"""A store is copied while it is used, and restored, by the commands of docs/operate.md."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import Claim, JobStore, Progress, open_store
from megatron.fill.work import NewJob, Work

DONE = Status(JobState.SUCCEEDED, Cause.FINISHED)
PROGRESS = Progress(3, 10, steps=3)


def submit(store: JobStore, *names: str) -> None:
    store.submit([NewJob(name, Work("m:C")) for name in names])


def filled(where: str) -> JobStore:
    """A store with one job that is done, one that runs and one that waits."""
    store = open_store(where)
    submit(store, "done", "runs", "waits")
    assert store.finish(claimed(store, "done"), DONE, PROGRESS, {"loss": 1.5})
    assert store.heartbeat(claimed(store, "runs"), PROGRESS, 1) == "held"
    return store


def claimed(store: JobStore, name: str, lease_s: float = 3600) -> Claim:
    claim = store.claim("agent", [store.find(name).id], lease_s)
    assert claim is not None
    return claim


@contextmanager
def used(where: str) -> Iterator[None]:
    """Another thread submits and cancels jobs meanwhile."""
    ended = threading.Event()

    def use() -> None:
        store = open_store(where)
        while not ended.is_set():
            [job] = store.submit([NewJob("busy", Work("m:C"))])
            store.cancel(job.id)
        store.close()

    thread = threading.Thread(target=use)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def check(where: str) -> None:
    """All that was there at the backup is there, what came later is not, and the running job goes on by itself."""
    store = open_store(where, create=False)
    done, runs, waits = (store.find(name) for name in ("done", "runs", "waits"))
    assert (done.status, done.result, done.progress) == (DONE, {"loss": 1.5}, PROGRESS)
    assert (runs.attempt, runs.progress, waits.state) == (1, PROGRESS, JobState.QUEUED)
    assert "later" not in {job.name for job in store.list()}
    numbers = [job.id for job in store.list()]
    submit(store, "another")
    assert store.find("another").id > max(numbers)
    if runs.state is JobState.RUNNING:
        while not store.recover():
            pass  # its lease is a second long
    assert claimed(store, "runs").attempt == 2
    store.close()


@pytest.mark.skipif(shutil.which("sqlite3") is None, reason="needs the program sqlite3")
def test_sqlite(tmp_path):
    database, backup = tmp_path / "jobs.db", tmp_path / "backup.db"
    store = filled(str(database))
    with used(str(database)):
        subprocess.run(["sqlite3", database, ".timeout 10000", f".backup {backup}"], check=True)
    submit(store, "later")
    # As a machine that went down leaves it: the write-ahead log is there still, with what came later.
    files = [Path(f"{database}{suffix}") for suffix in ("", "-wal", "-shm")]
    left = [file.read_bytes() for file in files]
    store.close()
    for file, content in zip(files, left, strict=True):
        file.write_bytes(content)
    for file in files[1:]:
        file.unlink()
    shutil.copy(backup, database)
    check(str(database))


@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="needs pg_dump")
def test_postgresql(postgres, tmp_path):
    url = postgres.new_database()
    target = url.replace("+psycopg", "")
    store = filled(url)
    dump = tmp_path / "jobs.dump"
    with used(url):
        command = ["pg_dump", "--format", "custom", "--table", "pipefill_*", "--file", str(dump), target]
        subprocess.run(command, check=True)
    submit(store, "later")
    store.close()
    subprocess.run(["pg_restore", "--clean", "--if-exists", "--dbname", target, str(dump)], check=True)
    check(url)
    empty = postgres.new_database()  # after the loss of the server
    done = subprocess.run(
        ["pg_restore", "--clean", "--if-exists", "--dbname", empty.replace("+psycopg", ""), str(dump)], check=False
    )
    assert done.returncode == 0
    check(empty)
