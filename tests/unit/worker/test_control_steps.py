"""A pause, as the processes of side tasks see it: over a real gate and a real control page."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from megatron.fill.device.port import Limits
from megatron.fill.linux import host
from megatron.fill.pages.control import ControlPage, ControlReader, RunState
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.status import Cause, Then
from megatron.fill.work import Work
from megatron.fill.worker.command import CommandRun
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import StepPages
from megatron.fill.worker.spec import Outcome
from megatron.fill.worker.worker import start_sandboxed
from tests.support.waiting import until

FAR_NS = 10**18


class Spinning(SideTask):
    """Steps of 0.2 ms that tell when they started."""

    def __init__(self, out: int) -> None:
        self.out = out

    def run_next_step(self) -> float:
        start_ns = time.monotonic_ns()
        os.write(self.out, struct.pack("q", start_ns))
        while time.monotonic_ns() < start_ns + 200_000:
            pass
        return 1.0


def test_no_step_starts_after_a_pause_and_the_next_bubble_after_resume_goes_on(child):
    gate, page, log_fd = SharedGate(), ControlPage.create(0), create_log()
    log = StepLog(log_fd)

    def work(out: int) -> None:
        machine = TaskMachine(Spinning(out), TaskContext("t", Path("/")))
        machine.create({})
        machine.init()
        control = ControlReader(page.reader_fd())
        pages = StepPages(SharedGateReader(gate.reader_fd()), StepLog(log_fd), control=control)
        StepLoop(machine, pages, lambda: False).run()

    worker = child(work)
    pauses = []
    for _ in range(20):
        gate.open(FAR_NS, 0)
        steps = log.step_count
        until(lambda: log.step_count > steps + 3)  # noqa: B023
        page.change(RunState.PAUSED)
        paused_ns = time.monotonic_ns()  # the word is stored: whoever reads it from now on sees it
        until(lambda: log.step_seq == 0)
        gate.close(time.monotonic_ns())
        gate.open(FAR_NS, 0)  # it leaves this one alone
        time.sleep(0.002)
        gate.close(time.monotonic_ns())
        pauses.append((paused_ns, time.monotonic_ns()))
        page.change(RunState.RUNNING)
    gate.end()
    starts = [start for (start,) in struct.iter_unpack("q", worker.read())]
    for begin, end in pauses:
        # One may have looked at the page just before, and begun just after.
        assert sum(begin < start < end for start in starts) <= 1
    assert starts[-1] > pauses[-2][1]


def command_spec(folder: Path, script: str) -> Any:
    """Of a command in a sandbox without namespaces, so that its number is the same everywhere."""
    return SimpleNamespace(
        work=Work(command=("sh", "-c", script)),
        directory=str(folder),
        cpus=[],
        env={},
        device="cpu",
        limits=Limits(files=1 << 14),  # it inherits what all the tests before have left open
        sandbox=Sandbox(directory=str(folder)),
    )


@pytest.fixture
def start(tmp_path, child, monkeypatch) -> Iterator[Callable[..., tuple[SharedGate, ControlPage, StepLog]]]:
    """Starts the worker of a command, which writes its outcome to a file; returns the pages that it has."""
    # At idle priority a busy machine may leave the command waiting for longer than a test does.
    monkeypatch.setattr("megatron.fill.linux.host.yield_to_main_job", lambda cpus: None)
    gate, page, log = SharedGate(), ControlPage.create(0), StepLog(create_log())
    agent, channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent.send(b"x")  # it may begin

    def starts(script: str, stopping: Callable[[], bool] = lambda: False) -> tuple[SharedGate, ControlPage, StepLog]:
        spec = command_spec(tmp_path, script)

        def work(_: int) -> None:
            host.adopt_orphans()
            reader, control = SharedGateReader(gate.reader_fd()), ControlReader(page.reader_fd())
            begin = partial(start_sandboxed, spec, channel)
            outcome = CommandRun(spec, begin, StepPages(reader, log), control, stopping).run()
            (tmp_path / "outcome.new").write_text(repr(outcome))
            os.replace(tmp_path / "outcome.new", tmp_path / "outcome")

        child(work)
        return gate, page, log

    yield starts
    agent.close()


@pytest.mark.parametrize(
    ("told", "outcome"),
    [
        (True, Outcome(Cause.STOPPED, then=Then.COMMAND_RESTARTS, unit="seconds")),
        (False, Outcome(Cause.FAILED, "the command was ended by SIGTERM; see its output", unit="seconds")),
    ],
)
def test_a_command_that_a_batch_system_ends_with_everything_else_has_not_failed(tmp_path, start, told, outcome):
    told_fd = os.memfd_create("told")
    gate, _, _ = start("echo $$ > begun; mv begun running; while :; do :; done", lambda: os.fstat(told_fd).st_size > 0)
    gate.open(FAR_NS, 0)
    until((tmp_path / "running").exists)
    os.kill(int((tmp_path / "running").read_text()), signal.SIGTERM)
    if told:  # a little later, as it happens
        time.sleep(0.1)
        os.write(told_fd, b"x")
    until((tmp_path / "outcome").exists)
    assert (tmp_path / "outcome").read_text() == repr(outcome)


def test_a_command_is_stopped_while_its_bubble_is_still_open(tmp_path, start):
    gate, page, log = start("echo $$ > scratch; mv scratch pid; while :; do echo >> ticks; done")
    gate.open(FAR_NS, 0)
    until((tmp_path / "pid").exists)
    assert log.serving_ns  # since when it waits for bubbles is told of a command too
    command = psutil.Process(int((tmp_path / "pid").read_text()))

    def ticks() -> int:
        return (tmp_path / "ticks").stat().st_size if (tmp_path / "ticks").exists() else 0

    for _ in range(3):
        before = ticks()
        until(lambda: ticks() > before)  # noqa: B023
        page.change(RunState.PAUSED)
        until(lambda: command.status() == psutil.STATUS_STOPPED)
        gate.close(time.monotonic_ns())
        gate.open(FAR_NS, 0)
        time.sleep(0.005)
        assert command.status() == psutil.STATUS_STOPPED
        page.change(RunState.RUNNING)
        gate.close(time.monotonic_ns())
        gate.open(FAR_NS, 0)
    gate.end()


def test_a_command_goes_on_in_a_later_stretch_of_its_bubble(start):
    gate, _, log = start("while :; do :; done")
    until(lambda: log.serving_ns)
    opened_ns = time.monotonic_ns()
    ends_ns = tuple(opened_ns + ms * 1_000_000 for ms in (600, 620, 640, 660, 1500, 1600, 1700, 1800))
    gate.open(opened_ns + 500_000_000, 0, ends_ns, (0, 0, 0, 0, 10**8, 0, 0, 0))  # one end of eight at 660 to 1,500 ms
    until(lambda: log.step_count == 2)
    gate.close(time.monotonic_ns())
    until(lambda: log.record("c", 0).uses)
    record = log.record("c", 0)
    (first, second), [use] = record.steps, record.uses
    ms = [(at_ns - opened_ns) / 1e6 for at_ns in (*first, *second)]
    assert ms[1] >= 499
    assert ms[2] >= 660
    assert ms[3] >= 1499
    assert use.steps == 2
    assert use.harvested_ns == sum(end_ns - start_ns for start_ns, end_ns in record.steps)
    assert use.held_ns >= ms[2] - ms[1] - 100
    assert not use.overrun_ns
    gate.end()
