"""The emulated device that does not preempt: what a step is while it is in flight, and what it is not afterwards."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.fill.pages.gate import OpenBubble, SharedGate, SharedGateReader
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.work import Work
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.pacing import StepDevice, StepPages
from scripts.benchmarks.emulated import BREATHER_NS, EmulatedWorker, Emulation, Launches, Turns, breathe, why_not
from tests.support.fakes import worker_spec
from tests.support.waiting import until

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


def classes_during_a_step(how: Emulation) -> list[int]:
    """The scheduling classes of a process at idle priority: in a step, and after it."""
    read, write = os.pipe()

    def work() -> None:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        launches = Launches(how)
        for _ in range(3):
            launches.launch()
            os.write(write, bytes([os.sched_getscheduler(0)]))
            launches.land()
            os.write(write, bytes([os.sched_getscheduler(0)]))

    os.waitpid(fork(work), 0)
    os.close(write)
    with open(read, "rb") as file:
        return list(file.read())


@needs_real_time
@pytest.mark.parametrize("how", Emulation)
def test_a_step_cannot_be_interrupted_from_its_launch_to_its_end(how):
    assert classes_during_a_step(how) == 3 * [os.SCHED_FIFO, os.SCHED_IDLE]


@needs_real_time
def test_while_a_step_runs_the_main_job_has_every_second_turn():
    turns = Turns(spins=True)
    worker = fork(lambda: time.sleep(FOR_EVER_S))  # it takes no core: only what it is counts here
    server = fork(lambda: turns.serve(worker, [], lambda: not os.path.exists(f"/proc/{worker}"), lambda: True))
    try:
        until(lambda: os.sched_getscheduler(server) == os.SCHED_FIFO)
        for _ in range(3):
            turns.begin()
            until(lambda: state(worker) == "T")
            until(lambda: state(worker) == "S")
            turns.end()
            assert turns.count % 2 == 0
            until(lambda: state(worker) == "S")
        turns.begin()  # it dies in the middle of a step
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.waitpid(server, 0)


@needs_real_time
def test_a_main_job_that_waits_freely_needs_no_turn_until_its_bubble_is_over():
    read, write = os.pipe()
    gate = SharedGate()
    reader = SharedGateReader(gate.reader_fd())
    turns, seq = Turns(spins=False), gate.open(1 << 62, 0)
    worker = fork(lambda: time.sleep(FOR_EVER_S))
    asked = count()

    def waits() -> bool:
        if next(asked) == 20:
            os.write(write, b"x")
        return not reader.shut

    server = fork(lambda: turns.serve(worker, [], lambda: not os.path.exists(f"/proc/{worker}"), waits))
    try:
        turns.begin()
        assert os.read(read, 1) == b"x"  # twenty turns later
        assert state(worker) == "S"
        assert reader.is_open(seq)
        gate.close(1)
        until(lambda: state(worker) == "T")
        turns.end()
    finally:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
        os.waitpid(server, 0)


@pytest.mark.parametrize("error", [None, StopIteration, ValueError])
def test_every_step_is_launched_and_lands_however_it_ends(error):
    said: list[str] = []

    def step() -> float:
        said.append("step")
        if error is not None:
            raise error
        return 1.0

    machine: Any = SimpleNamespace(
        task=SimpleNamespace(next_node=0, idle=False), run_next_step=step, start=lambda: None, pause=lambda: None
    )
    gate: Any = SimpleNamespace(is_open=lambda seq: not said, closed_ns=lambda seq: None)
    device = StepDevice(launch=lambda: said.append("launch"), land=lambda: said.append("land"))
    loop = StepLoop(machine, StepPages(gate, StepLog(create_log())), lambda: False, device)
    bubble = OpenBubble(1, 0, 1 << 62, 1 << 40)
    if error is ValueError:
        with pytest.raises(ValueError):  # noqa: PT011
            loop.fill(bubble)
    else:
        assert loop.fill(bubble) is (error is StopIteration)
    assert said == ["launch", "step", "land"]


@needs_real_time
def test_a_job_may_take_the_core_and_what_it_starts_may_not(inside):
    found = inside.run(
        """
take = (0, os.SCHED_FIFO, os.sched_param(1))
again = "import os; os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))"
status = dict(line.split(":\\t", 1) for line in open("/proc/self/status").read().splitlines() if ":\\t" in line)
print(json.dumps({
    "taken": attempt(os.sched_setscheduler, *take),
    "given back": attempt(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0)),
    "starts": subprocess.run([sys.executable, "-c", again], stderr=-3).returncode,
    "powers": [status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")], "root": attempt(os.setuid, 0),
}))""",
        become="from scripts.benchmarks.emulated import keep_the_class; keep_the_class()",
        without=("system calls",),
    )
    none, nice = f"{0:016x}", f"{1 << 23:016x}"
    assert found["powers"] == [none, nice, nice, none]
    assert (found["taken"], found["given back"], found["root"]) == ("done", "done", "PermissionError")
    assert found["starts"] == 1


@pytest.mark.parametrize(("deadline_ns", "waited"), [(0, [(7, BREATHER_NS)]), (1 << 62, [])])
def test_beyond_the_deadline_the_main_job_gets_a_moment_after_each_step(deadline_ns, waited):
    said: list[tuple[int, int]] = []
    bubble = OpenBubble(7, 0, deadline_ns, 1 << 40)
    gate: Any = SimpleNamespace(current=lambda: bubble, wait_change=lambda *given: said.append(given))
    breathe(gate)
    gate.current = lambda: None
    breathe(gate)
    assert said == waited


def test_only_a_cpu_is_emulated(tmp_path):
    with pytest.raises(SystemExit, match="the device is cuda:0"):
        EmulatedWorker(Emulation.SLICES, worker_spec(tmp_path, Work("m:C"), device="cuda:0"), 0, None)  # type: ignore[arg-type]
