"""The optimizer's state goes away after a step, is back before anything reads it, and the decision is kept."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from megatron.fill.planner.offload import weigh_offload
from pipefill_patches.offload import OffloadedOptimizer


class Tensor:
    is_cuda = True
    nbytes = 1 << 20


class Inner:
    def __init__(self) -> None:
        self.param_groups = [{"params": [Tensor()]}]
        self.state = {"p": {"exp_avg": Tensor(), "step": 3}}


class Optimizer:
    """What the patch needs of a MegatronOptimizer; knows where its state is, and who moved it."""

    def __init__(self) -> None:
        self.optimizer, self.on_device = Inner(), True
        self.movers: set[str] = set()

    def step(self) -> str:
        assert self.on_device
        return "stepped"

    def state_dict(self) -> str:
        assert self.on_device
        return "state"

    def offload_to_cpu(self) -> None:
        self.on_device = False
        self.movers.add(threading.current_thread().name)

    def restore_from_cpu(self) -> None:
        self.on_device = True
        self.movers.add(threading.current_thread().name)


def test_state_is_away_between_steps_and_back_when_needed():
    optimizer = Optimizer()
    told: list[tuple[Any, ...]] = []

    def pays(*weighed: Any) -> bool:
        told.append(weighed)
        return True

    offloaded = OffloadedOptimizer(optimizer, pays)
    for _ in range(30):
        assert optimizer.step() == "stepped"
        assert offloaded._moving is not None
        offloaded._moving.result()
        assert not optimizer.on_device
        offloaded.on_last_backward()
    assert optimizer.state_dict() == "state"
    assert optimizer.on_device
    assert threading.current_thread().name not in optimizer.movers
    assert [weighed[0] for weighed in told] == [2 << 20]  # asked once, with what is in the device's memory


def test_state_stays_once_it_does_not_pay(monkeypatch):
    optimizer = Optimizer()
    OffloadedOptimizer(optimizer, lambda *weighed: False)
    for _ in range(10):
        optimizer.step()
    assert optimizer.on_device
    monkeypatch.setattr(optimizer, "offload_to_cpu", pytest.fail)
    optimizer.step()


def test_a_failed_copy_is_not_swallowed(monkeypatch):
    optimizer = Optimizer()
    OffloadedOptimizer(optimizer, lambda *weighed: True)
    monkeypatch.setattr(optimizer, "restore_from_cpu", lambda: 1 / 0)
    optimizer.step()
    with pytest.raises(ZeroDivisionError):
        optimizer.step()


@pytest.mark.parametrize(
    ("gained", "free", "lost", "on", "why"),
    [
        (0, 1 << 30, 0, False, "nothing to gain"),
        (1 << 30, 1 << 30, 5, True, "1024 MiB for 0.50% of an iteration"),
        (1 << 30, 1 << 30, 20, False, "2.00% of an iteration: more than 1% is too slow"),
        (1 << 20, 1 << 30, 0, False, "1024 MiB are free without it"),
    ],
)
def test_memory_is_weighed_against_time(gained, free, lost, on, why):
    pays, reason = weigh_offload(gained, free, lost, 1000)
    assert pays is on
    assert why in reason
