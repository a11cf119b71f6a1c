"""A seat sees a job through: what it tells the store, and that nothing is left whatever is raised."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.agent import run as run_module
from megatron.fill.agent.agent import Agent, Seat
from megatron.fill.agent.enforcer import _LOOK_S, Enforcer
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.ranking import Resident
from megatron.fill.agent.run import JobRun
from megatron.fill.agent.watch import JobWorker, Judge, StopRequests
from megatron.fill.agent.workers import WorkerPool, WorkerProcess
from megatron.fill.device import cpu
from megatron.fill.device.cpu import CpuDevice, HostLimiter
from megatron.fill.linux import cgroup
from megatron.fill.linux.cgroup import find_home
from megatron.fill.linux.tree import OWN, children
from megatron.fill.pages.control import RunState
from megatron.fill.records.agent import read_agent
from megatron.fill.status import Cause
from megatron.fill.types import JobState
from tests.support.memory_store import MemoryStore
from tests.support.posts import Post, post
from tests.support.waiting import until

LONG = {"task": None, "command": ["sleep", "600"]}
SHORT = {"task": None, "command": ["true"]}


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Iterator[Post]:
    # What pytest keeps of a log are tracebacks, with all that they refer to.
    monkeypatch.setattr(logging.getLogger("pipefill.agent"), "disabled", True)
    # A killed worker dies by itself, but at its low priority, so on a busy machine not within the agent's second.
    monkeypatch.setattr(cpu, "_KILL_S", 120)
    monkeypatch.setattr(cgroup, "_REMOVE_S", 120)
    with post(tmp_path) as made:
        yield made


def left(bench: Post) -> dict[str, Any]:
    """All that an attempt holds while it runs."""
    gc.collect()
    home = find_home().path
    context = bench.context
    return {
        "descriptors": [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")],
        "children": sorted(children(os.getpid())),
        "own": sorted(OWN),
        "workers": bench.pool.working,
        "claims": list(context.claims._held),
        "shares": list(context.memory.shares),
        "running": list(bench.ledger._running),
        "groups": [] if home is None else sorted(home.glob(f"*{os.getpid()}-*")),
        "held": context.baton.held,
    }


def serve(bench: Post, monkeypatch: pytest.MonkeyPatch) -> None:
    """Serve one job; nobody stands by afterwards."""
    monkeypatch.setattr(WorkerPool, "stand_by", lambda self: None)
    bench.gate.open(1 << 62, 0)
    bench.context.claims.ask(lambda store: None)
    before = left(bench)
    assert bench.seat().serve()
    assert left(bench) == before


def test_a_job_that_is_done_is_told_written_down_and_gone(bench, monkeypatch):
    job = bench.submit(**SHORT)
    serve(bench, monkeypatch)
    told = bench.store.get(job.id)
    assert (told.state, told.reason, told.directory) == (JobState.SUCCEEDED, "", str(bench.folder / "jobs" / "pi-1"))
    bench.ledger.write()
    [(record, _)] = read_agent(bench.folder / "agent3.jsonl")
    assert (record.name, record.state, record.rank) == ("pi", JobState.SUCCEEDED, 3)
    assert not bench.seat().serve()  # there is no other


def test_a_failure_is_counted_in_what_the_store_hears(bench, monkeypatch):
    job = bench.submit(task=None, command=("false",), retries=2)
    serve(bench, monkeypatch)
    told = bench.store.get(job.id)
    assert (told.state, told.progress.failures) == (JobState.QUEUED, 1)
    assert told.reason.endswith("; retry 1 of 2")


def test_an_empty_tail_seat_looks_again_once_the_job_beside_it_serves(bench):
    job = bench.submit(**LONG)
    resident: Any = SimpleNamespace(resident=None)
    tail = Seat(bench.context, bench.pool, bench.judge, beside=resident)
    for change in (lambda: setattr(resident, "resident", Resident(job, bench.folder)), bench.context.baton.hold):
        resting = threading.Thread(target=tail.rest, args=(600.0,))
        resting.start()
        time.sleep(0.05)
        assert resting.is_alive()
        change()
        resting.join(60)
        assert not resting.is_alive()


def test_a_job_has_a_tail_beside_it_only_once_it_has_done_a_step(bench):
    bench.submit(**LONG)
    seat = bench.seat()
    serving = threading.Thread(target=seat.serve)
    serving.start()
    until(lambda: bench.pool.working)
    assert seat.resident is None

    def stepped() -> bool:
        bench.gate.open(1 << 62, 0)
        time.sleep(0.02)
        bench.gate.close(time.monotonic_ns())  # the end of a command's step
        return seat.resident is not None

    until(stepped)
    bench.gate.end()
    serving.join(60)
    assert seat.resident is None


def test_a_command_runs_in_bubbles_only(bench):
    job = bench.submit(task=None, command=["sh", "-c", "while :; do echo >> ticks; sleep 0.01; done"])
    ticks = bench.folder / "jobs" / f"pi-{job.id}" / "ticks"
    seat = bench.seat()
    serving = threading.Thread(target=seat.serve)
    serving.start()
    try:
        until(lambda: seat.attempt is not None and seat.attempt._worker is not None)
        until(lambda: seat.attempt._worker.log.serving_ns)
        time.sleep(5 * _LOOK_S)
        assert not ticks.exists()
        bench.gate.open(1 << 62, 0)
        until(lambda: ticks.exists() and ticks.stat().st_size > 3)
        bench.gate.close(time.monotonic_ns())
        until(lambda: not seat.attempt._worker.log.step_seq)
        time.sleep(_LOOK_S)
        before = ticks.stat().st_size
        time.sleep(5 * _LOOK_S)
        assert ticks.stat().st_size == before
    finally:
        bench.gate.end()
        serving.join(60)


def test_a_job_whose_sandbox_is_not_ready_at_the_end_goes_back_at_once(bench, monkeypatch):
    def late(self: WorkerProcess, within_s: float) -> None:
        time.sleep(within_s)
        raise TimeoutError

    monkeypatch.setattr(WorkerProcess, "sandbox_report", late)
    job, seat = bench.submit(**LONG), bench.seat()
    serving = threading.Thread(target=seat.serve)
    serving.start()
    until(lambda: bench.pool.working)
    bench.gate.end()
    serving.join(30)  # not as long as a sandbox may take
    assert not serving.is_alive()
    told = bench.store.get(job.id)
    assert (told.state, told.status.cause) == (JobState.QUEUED, Cause.TRAINING_ENDED)
    assert told.reason == "the main job ended first"


def test_an_empty_seat_rests_as_long_as_it_is_told_or_until_the_end(bench):
    seat = bench.seat()
    begun_s = time.monotonic()
    seat.rest(0.1)
    assert time.monotonic() - begun_s >= 0.1
    bench.gate.end()
    seat.rest(3600.0)


def test_an_empty_seat_reads_the_jobs_only_when_others_wait(bench, monkeypatch):
    seat, sound = bench.seat(), MemoryStore.list
    lists: list[int] = []

    def counted(*args: Any) -> Any:
        lists.append(1)
        return sound(*args)

    monkeypatch.setattr(MemoryStore, "list", counted)
    bench.submit(memory_bytes=1 << 60)
    assert seat.serve()  # too little memory: not here again
    lists.clear()
    assert [seat.serve() for _ in range(3)] == [False] * 3
    assert len(lists) == 1
    bench.submit("another", memory_bytes=1 << 60)
    assert seat.serve()
    assert not seat.serve()
    lists.clear()
    seat._looked_s -= 60
    assert not seat.serve()
    assert lists


def broken(*args: object, **more: object) -> None:
    raise KeyError("of ours")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (WorkerProcess, "__init__"),
        (CpuDevice, "limiter"),
        (HostLimiter, "adopt"),
        (WorkerProcess, "give"),
        (WorkerProcess, "begin"),
        (run_module, "create_log"),
        (run_module, "StepLog"),
        (run_module, "BoundedOutput"),
        (run_module, "write_spec"),
        (run_module, "JobWorker"),
    ],
)
def test_what_is_raised_at_the_start_means_not_started_and_leaves_nothing(bench, monkeypatch, where, what):
    job = bench.submit(**LONG)
    monkeypatch.setattr(where, what, broken)
    serve(bench, monkeypatch)
    told = bench.store.get(job.id)
    assert (told.state, told.reason) == (JobState.QUEUED, "it could not be started: KeyError: 'of ours'")
    assert bench.context.ranking.misfits.refused == (job.id,)  # not here again


def test_what_is_raised_when_the_next_worker_is_made_ready_means_not_started(bench, monkeypatch):
    job = bench.submit(**LONG)
    bench.gate.open(1 << 62, 0)
    bench.context.claims.ask(lambda store: None)
    monkeypatch.setattr(WorkerPool, "stand_by", broken)
    before = left(bench)
    assert bench.seat().serve()
    assert left(bench) == before
    assert bench.store.get(job.id).reason.startswith("it could not be started: KeyError")


def test_a_disk_that_is_full_is_no_fault_of_the_job(bench, monkeypatch):
    job = bench.submit(**LONG)
    (bench.folder / "output" / "pi-1.log").mkdir(parents=True)
    (bench.folder / "output" / "pi-1.0.log").touch()
    serve(bench, monkeypatch)
    told = bench.store.get(job.id)
    assert told.state is JobState.QUEUED
    assert told.reason.startswith("it could not be started: ")


@pytest.mark.parametrize(
    ("where", "what"),
    [
        (run_module, "Overtime"),
        (Enforcer, "check"),
        (Enforcer, "look"),
        (HostLimiter, "look"),
        (JobRun, "_forecast"),
        (JobWorker, "_pump"),
        (JobWorker, "outcome"),
    ],
)
def test_what_is_raised_while_a_job_runs_puts_it_back_and_leaves_nothing(bench, monkeypatch, where, what):
    job = bench.submit(**(SHORT if what == "outcome" else LONG | {"command": ["sh", "-c", "echo up; sleep 600"]}))
    monkeypatch.setattr(where, what, broken)
    serve(bench, monkeypatch)
    told = bench.store.get(job.id)
    assert told.state is JobState.QUEUED
    assert told.reason == "its agent failed: KeyError: 'of ours'; it is tried again"


@pytest.mark.parametrize(("where", "what"), [(Judge, "verdict"), (AttemptLedger, "keep")])
def test_what_is_raised_at_the_end_loses_no_job(bench, monkeypatch, where, what):
    job = bench.submit(**SHORT)
    monkeypatch.setattr(where, what, broken)
    serve(bench, monkeypatch)
    assert bench.store.get(job.id).state is (JobState.QUEUED if where is Judge else JobState.SUCCEEDED)


def test_a_watcher_that_breaks_after_the_start_puts_the_job_back(bench, monkeypatch):
    job, looks = bench.submit(**LONG), []
    sound = StopRequests.look

    def look(self: StopRequests) -> Any:
        looks.append(1)
        return broken() if bench.context.memory.shares else sound(self)

    monkeypatch.setattr(StopRequests, "look", look)
    serve(bench, monkeypatch)
    assert len(looks) > 1
    assert bench.store.get(job.id).reason.startswith("its agent failed: KeyError")


def test_a_job_that_may_not_run_here_has_failed(monkeypatch, tmp_path):
    with post(tmp_path, allow=["other:*"]) as bench:
        job = bench.submit()
        assert bench.seat().serve()
        told = bench.store.get(job.id)
        assert (told.state, told.reason) == (
            JobState.FAILED,
            "m:C is not allowed here; the setting allow has other:*",
        )


def test_a_job_for_which_there_is_too_little_memory_waits(bench):
    job = bench.submit(memory_bytes=1 << 60)
    assert bench.seat().serve()
    told = bench.store.get(job.id)
    assert told.state is JobState.QUEUED
    assert told.reason.startswith("too little memory: it asks for ")


def test_nothing_is_taken_while_filling_is_off_nor_by_a_tail_without_a_resident_job(bench):
    job = bench.submit(**SHORT)
    bench.control.change(RunState.PAUSED)
    assert not bench.seat().serve()
    bench.control.change(RunState.RUNNING)
    tail = Seat(bench.context, bench.pool, bench.judge, beside=bench.seat())
    assert not tail.serve()
    assert bench.store.get(job.id).state is JobState.QUEUED
    assert (str(tail), tail.attempt, tail.resident) == ("tail job", None, None)


def test_a_folder_that_cannot_be_made_is_said(bench, monkeypatch):
    job = bench.submit(**LONG)
    (bench.folder / "jobs").touch()
    serve(bench, monkeypatch)
    assert bench.store.get(job.id).reason == "it could not be started: it has no folder; the agent's log says why"
    assert Path(bench.folder / "jobs").is_file()


def test_a_record_that_cannot_be_written_is_no_fault_of_the_seat(caplog):
    def full() -> None:
        context.over = Cause.STOPPED
        raise OSError("the disk is full")

    context = SimpleNamespace(over=None, ledger=SimpleNamespace(write=full))
    its: Any = SimpleNamespace(context=context)
    seat: Any = SimpleNamespace(serve=lambda: True)
    Agent._serve(its, seat)
    [said] = caplog.records
    assert "the disk is full" in said.message
    assert said.exc_info is None
