"""The emulated device that does not preempt: what a step is while it is in flight, and what it is not afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.app.keptin import check_emulation
from megatron.fill.device.emulated import Emulation, Executor, LaunchPage, why_not
from megatron.fill.errors import ConfigError
from megatron.fill.gate import OpenBubble
from megatron.fill.runtime.loop import StepLoop
from megatron.fill.runtime.steplog import StepLog, create_log
from tests.unit.children import until

needs_real_time = pytest.mark.skipif(bool(why_not()), reason="real-time priorities are refused here")
FOR_EVER_S = 600


def fork(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def state(pid: int) -> str:
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0]


@needs_real_time
@pytest.mark.parametrize("how", Emulation)
def test_a_step_cannot_be_interrupted_from_its_launch_to_its_end(how):
    page = LaunchPage()
    worker = fork(lambda: time.sleep(FOR_EVER_S))  # it takes no core: only what it is counts here
    os.sched_setscheduler(worker, os.SCHED_IDLE, os.sched_param(0))
    executor = fork(lambda: Executor(page, worker, [], how).serve(lambda: not os.path.exists(f"/proc/{worker}")))
    try:
        until(lambda: os.sched_getscheduler(executor) == os.SCHED_FIFO)
        for _ in range(3):
            page.launch()
            until(lambda: os.sched_getscheduler(worker) == os.SCHED_FIFO)
            if how is Emulation.SLICES:  # the main job's turn comes, and goes
                until(lambda: state(worker) == "T")
                until(lambda: state(worker) == "S")
            page.land()
            until(lambda: os.sched_getscheduler(worker) == os.SCHED_IDLE)
            assert page.count % 2 == 0
            until(lambda: state(worker) == "S")
        page.launch()  # it dies in the middle of a step
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.waitpid(executor, 0)


def test_what_is_said_twice_counts_once():
    page = LaunchPage()
    page.land()
    assert page.count == 0
    page.launch()
    page.launch()
    assert page.count == 1
    page.land()
    page.land()
    assert page.count == 2


@pytest.mark.parametrize("error", [None, StopIteration, ValueError])
def test_every_step_is_launched_and_lands_however_it_ends(error):
    said: list[str] = []

    def step() -> float:
        said.append("step")
        if error is not None:
            raise error
        return 1.0

    machine: Any = SimpleNamespace(
        task=SimpleNamespace(next_node=0), run_next_step=step, start=lambda: None, pause=lambda: None
    )
    gate: Any = SimpleNamespace(is_open=lambda seq: not said, closed_ns=lambda seq: None)
    loop = StepLoop(machine, gate, StepLog(create_log()), lambda: False)
    loop.launch, loop.land = lambda: said.append("launch"), lambda: said.append("land")
    bubble = OpenBubble(1, 0, 1 << 62, 1 << 40)
    if error is ValueError:
        with pytest.raises(ValueError):  # noqa: PT011
            loop.fill(bubble)
    else:
        assert loop.fill(bubble) is (error is StopIteration)
    assert said == ["launch", "step", "land"]


def test_it_is_refused_where_it_cannot_be(monkeypatch):
    with pytest.raises(ConfigError, match="--fill-emulate slices: the training is on a GPU"):
        check_emulation("slices", on_cpu=False)
    monkeypatch.setattr("megatron.fill.app.keptin.why_not", lambda: "real-time priorities are refused here")
    with pytest.raises(ConfigError, match="--fill-emulate completion: real-time priorities are refused"):
        check_emulation("completion", on_cpu=True)
