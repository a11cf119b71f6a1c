"""What an imperative task may call."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill import ImperativeTask, TaskContext


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
