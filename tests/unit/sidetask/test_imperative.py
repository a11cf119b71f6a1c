"""A command that is stopped and continued, and what an imperative task may call."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill import ImperativeTask, TaskContext
from megatron.fill.sidetask.imperative import StoppedCommand


class Held:
    """A process that is stopped a few looks after it was told to."""

    def __init__(self, looks: int) -> None:
        self.looks = looks
        self.signals: list[signal.Signals] = []

    @property
    def state(self) -> str:
        self.looks -= 1
        return "R" if self.looks > 0 else "T"

    def signal(self, number: signal.Signals) -> None:
        self.signals.append(number)

    def poll(self) -> int | None:
        return None

    def wait(self) -> int:
        return 0

    def kill(self) -> None:
        pass


def test_it_is_known_when_a_command_has_stopped():
    held = Held(3)
    command = StoppedCommand(held)
    command.pause()
    command.await_stop(60)
    assert held.signals == [signal.SIGSTOP]
    assert held.looks == 0


def test_one_that_does_not_stop_is_not_waited_for_for_ever():
    held = Held(10**9)
    before = time.monotonic()
    StoppedCommand(held).await_stop(0.01)
    assert time.monotonic() - before >= 0.01


def test_at_most_two_stretches_of_kernels_are_in_flight(monkeypatch):
    torch = pytest.importorskip("torch")
    waited: list[int] = []
    made = iter(range(10))

    def event() -> SimpleNamespace:
        number = next(made)
        return SimpleNamespace(record=lambda: None, synchronize=lambda: waited.append(number))

    monkeypatch.setattr(torch.cuda, "Event", event)
    task = ImperativeTask()
    task.context = TaskContext("test", Path(), device="cuda:0")
    work: list[float] = []
    task.count = work.append
    for done in range(5):
        task.synchronize(done)
        assert waited == list(range(max(0, done - 1)))
    assert work == [1, 2, 3, 4]
