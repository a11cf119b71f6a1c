"""A step that runs on after its bubble: stopped after its grace, rationed to bubbles, and ended if it hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.enforcer import Enforcer, Overtime, _Core
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.pages.steplog import StepLog, WorkerPhase, create_log
from megatron.fill.status import Cause
from megatron.fill.types import BubbleUse
from tests.support.waiting import until

GRACE_NS = 30_000_000
pytestmark = pytest.mark.usefixtures("own_pages")


class Bench:
    """A worker that is a mere process; the test speaks for it in the step log."""

    def __init__(self) -> None:
        self.worker = subprocess.Popen(["sleep", "600"], process_group=0)
        while self.state != "S":
            time.sleep(0.001)
        self.gate = SharedGate()
        self.log = StepLog(create_log())
        gate = SharedGateReader(self.gate.reader_fd())
        idle = Overtime(lambda: 0.0, gate, 1)
        self.enforcer = Enforcer(self.worker.pid, gate, self.log, GRACE_NS, 2, idle, hung_ns=100_000_000)

    def begin_step(self, phase: WorkerPhase = WorkerPhase.STEP) -> int:
        """A bubble opens, the worker begins a step in it, and the bubble ends."""
        self.rest()
        seq = self.gate.open(time.monotonic_ns() + 1_000_000, 0)
        self.log.step_seq = seq
        self.log.phase = phase
        self.gate.close(time.monotonic_ns())
        return seq

    def rest(self) -> None:
        """Wait until the worker sleeps, and sample it: what it waited for a core until then is not a step's."""
        while self.state not in "ST":
            time.sleep(0.001)
        self.enforcer._core = self.enforcer._sample()

    def end_step(self, seq: int) -> None:
        self.log.step_ended(0, 1, 1.0, False)
        self.log.leave_bubble(BubbleUse(seq, 0, 1, 0, 1), False)
        self.log.phase = WorkerPhase.ASLEEP

    @property
    def state(self) -> str:
        return Path(f"/proc/{self.worker.pid}/stat").read_text().rpartition(")")[2].split()[0]

    @property
    def stopped(self) -> bool:
        return self.state == "T"

    def check_until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end_s
            time.sleep(min(0.01, self.enforcer.check()))

    def close(self) -> None:
        self.enforcer.release()
        self.gate.end()
        self.worker.kill()
        self.worker.wait()


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_a_step_within_its_bubble_is_left_alone(bench):
    seq = bench.gate.open(time.monotonic_ns() + 10**9, 0)
    bench.log.step_seq = seq
    time.sleep(0.1)
    bench.enforcer.check()
    assert not bench.stopped
    bench.end_step(seq)
    bench.gate.close(time.monotonic_ns())
    time.sleep(0.1)
    bench.enforcer.check()
    assert not bench.stopped
    assert bench.enforcer.ending is None


def test_a_step_that_hangs_is_stopped_and_then_ended_without_another_bubble(bench):
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    bench.check_until(lambda: bench.enforcer.ending)
    assert bench.enforcer.ending.detail.startswith("run_next_step() hung: it went on for ")


def test_a_command_that_runs_on_has_no_callback_to_blame(bench):
    bench.enforcer.waits = False
    bench.begin_step()
    bench.check_until(lambda: bench.enforcer.ending)
    assert bench.enforcer.ending.detail.startswith("the command hung: it went on for ")


@pytest.mark.parametrize(
    ("phases", "callbacks"),
    [
        ((WorkerPhase.STEP, WorkerPhase.STEP), "run_next_step()"),
        ((WorkerPhase.PAUSE, WorkerPhase.PAUSE), "pause()"),
        ((WorkerPhase.START, WorkerPhase.PAUSE), "start(), pause()"),
    ],
)
def test_what_ends_in_a_later_bubble_has_offended_and_is_named_when_it_is_over(bench, phases, callbacks):
    for phase in phases:
        assert bench.enforcer.ending is None
        step = bench.begin_step(phase)
        bench.check_until(lambda: bench.stopped)
        later = bench.gate.open(time.monotonic_ns() + 10**9, 0)
        while bench.stopped:
            time.sleep(0.001)
        bench.end_step(step)
        bench.gate.close(time.monotonic_ns())
        bench.check_until(lambda: not bench.enforcer._rationing.is_alive())
        assert later > step
    assert bench.enforcer.violations == 2
    assert bench.enforcer.ending.detail == (
        f"{callbacks} ran on after its bubble by more than 0.03 s (grace_ms) 2 times (max_overruns)"
    )


def test_what_runs_on_into_a_long_bubble_goes_on_there_and_is_not_hung(bench):
    seq = bench.begin_step()
    bench.gate.open_alone(time.monotonic_ns() + 60 * 10**9)
    bench.check_until(lambda: bench.enforcer._rationing)
    until(lambda: not bench.stopped)
    end_s = time.monotonic() + 0.3
    bench.check_until(lambda: time.monotonic() > end_s)
    assert not bench.stopped
    assert bench.enforcer.ending is None
    bench.end_step(seq)
    bench.enforcer._rationing.join(60)  # although the bubble is still open
    assert not bench.enforcer._rationing.is_alive()
    assert not bench.stopped
    assert bench.enforcer.ending is None


def test_a_step_that_only_waits_for_the_core_is_not_to_blame(bench, monkeypatch):
    monkeypatch.setattr(Enforcer, "_sample", lambda self: _Core(10**9))  # ready, and never on a core
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    end_s = time.monotonic() + 0.4
    while time.monotonic() < end_s:
        bench.enforcer.check()
        time.sleep(0.01)
    assert bench.enforcer.ending is None


def test_of_a_step_that_sleeps_now_what_it_waited_for_a_core_does_not_count(bench, monkeypatch):
    """As a step does that was starved, and is found at the moment in which it waits for a page or a lock."""
    start_ns = time.monotonic_ns()

    def sample(_: Enforcer) -> _Core:
        waited_ns = time.monotonic_ns() - start_ns
        return _Core(10**9, waited_ns, sleeps=True)

    monkeypatch.setattr(Enforcer, "_sample", sample)
    bench.enforcer.check()
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    bench.gate.open(time.monotonic_ns() + 10**9, 0)
    time.sleep(0.1)
    bench.gate.close(time.monotonic_ns())
    end_s = time.monotonic() + 0.3
    while time.monotonic() < end_s:
        bench.enforcer.check()
        time.sleep(0.01)
    assert bench.enforcer.ending is None
    assert bench.enforcer._opportunity_ns < GRACE_NS


def test_the_kernel_tells_how_long_a_process_waited_for_a_core(bench):
    core = min(os.sched_getaffinity(0))
    spin = f"import os; os.sched_setaffinity(0, {{{core}}})\nprint(flush=True)\nwhile True: pass"
    spinners = [
        subprocess.Popen([sys.executable, "-c", spin], process_group=0, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for one in spinners:
            assert one.stdout is not None
            one.stdout.readline()
        bench.enforcer.pid = spinners[0].pid
        until(lambda: bench.enforcer._sample().waited_ns > 50_000_000)
    finally:
        bench.enforcer.pid = bench.worker.pid
        for one in spinners:
            one.kill()
            one.wait()


def test_a_step_that_the_main_job_starves_is_not_to_blame_whatever_the_kernel_has_noted_of_its_waiting(bench):
    """A real one: an idle-class spinner on the core of a busy main job."""
    core = min(os.sched_getaffinity(0))
    busy = subprocess.Popen([sys.executable, "-c", f"import os; os.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
    idle = f"import os; os.sched_setaffinity(0, {{{core}}}); os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
    spinner = subprocess.Popen([sys.executable, "-c", f"{idle}\nwhile True: pass"], process_group=0)
    try:
        time.sleep(0.3)
        gate, idle = bench.enforcer.gate, bench.enforcer.overtime
        bench.enforcer = Enforcer(spinner.pid, gate, bench.log, GRACE_NS, 2, idle)
        bench.begin_step()
        end_s = time.monotonic() + 0.6
        while time.monotonic() < end_s:
            bench.enforcer.check()
            time.sleep(0.01)
        assert bench.enforcer.ending is None
    finally:
        bench.enforcer.release()
        for process in (busy, spinner):
            process.kill()
            process.wait()


def test_what_a_step_has_of_a_core_counts_against_it(bench):
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"], process_group=0)
    try:
        bench.enforcer.pid = spinner.pid
        bench.enforcer.grace_ns = 300_000_000
        bench.begin_step()
        bench.check_until(lambda: bench.enforcer._opportunity_ns > 1_000_000)
    finally:
        bench.enforcer.release()
        spinner.kill()
        spinner.wait()


def test_a_step_that_hangs_is_ended_although_the_log_says_that_steps_end(bench):
    spinner = subprocess.Popen([sys.executable, "-c", "while True: pass"], process_group=0)
    try:
        bench.enforcer.pid = spinner.pid
        bench.begin_step()

        def ended() -> bool:
            bench.gate.open(time.monotonic_ns() + 10**9, 0)
            time.sleep(0.01)
            bench.gate.close(time.monotonic_ns())
            bench.log.step_ended(0, 1, 1.0, False)
            return bench.enforcer.ending is not None

        bench.check_until(ended)
    finally:
        bench.enforcer.release()
        spinner.kill()
        spinner.wait()


def test_the_kernel_tells_how_long_a_process_had_a_core(bench):
    bench.enforcer.pid = os.getpid()
    core = bench.enforcer._sample()
    assert not core.sleeps  # it is asking
    assert core.ran_ns > 0


def test_release_lets_a_stopped_worker_run(bench):
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    bench.enforcer.release()
    bench.worker.send_signal(signal.SIGTERM)
    assert bench.worker.wait(60) == -signal.SIGTERM


def test_a_command_that_is_stopped_outside_bubbles_stays_so(bench):
    bench.enforcer.waits, off = False, True
    bench.enforcer.off = lambda: off
    os.kill(bench.worker.pid, signal.SIGSTOP)
    until(lambda: bench.stopped)
    bench.enforcer.check()
    off = False  # an operator has paused and resumed
    bench.enforcer.check()
    bench.enforcer.check()
    bench.enforcer.release()
    time.sleep(0.05)
    assert bench.stopped


def test_one_that_is_released_in_a_bubble_is_not_stopped_at_its_end(bench):
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    bench.gate.open(time.monotonic_ns() + 10**9, 0)
    while bench.stopped:
        time.sleep(0.001)
    bench.enforcer.release()
    bench.gate.close(time.monotonic_ns())
    bench.enforcer._rationing.join(60)
    assert not bench.enforcer._rationing.is_alive()
    assert not bench.stopped


def test_the_rationing_of_a_released_worker_ends_without_another_bubble(bench):
    bench.begin_step()
    bench.check_until(lambda: bench.stopped)
    bench.enforcer.release()
    bench.enforcer._rationing.join(60)
    assert not bench.enforcer._rationing.is_alive()
    assert not bench.stopped


def test_nothing_runs_while_filling_is_off(bench):
    off = True
    bench.enforcer.off = lambda: off
    seq = bench.gate.open(time.monotonic_ns() + 10**9, 0)
    bench.enforcer.check()
    assert not bench.stopped  # its bubble is not over
    bench.gate.close(time.monotonic_ns())
    bench.check_until(lambda: bench.stopped)
    os.killpg(bench.worker.pid, signal.SIGCONT)  # by whomever
    bench.check_until(lambda: bench.stopped)
    assert bench.gate.open(0, 0) > seq
    bench.enforcer.check()
    assert bench.stopped
    off = False
    bench.check_until(lambda: not bench.stopped)


def test_one_that_has_used_up_its_overtime_runs_in_bubbles_only(bench):
    account = SimpleNamespace(overdrawn=True, exceeded_s=0.0, look=lambda: None)
    bench.enforcer.overtime = account
    bench.check_until(lambda: bench.stopped)
    for _ in range(3):
        bench.gate.open(time.monotonic_ns() + 10**9, 0)
        while bench.stopped:
            time.sleep(0.001)
        bench.gate.close(time.monotonic_ns())
        bench.check_until(lambda: bench.stopped)
    account.overdrawn = False
    bench.gate.open(time.monotonic_ns() + 10**9, 0)
    while bench.stopped:
        time.sleep(0.001)
    bench.gate.close(time.monotonic_ns())
    bench.check_until(lambda: not bench.enforcer._rationing.is_alive())
    assert not bench.stopped
    account.exceeded_s = 33.0
    assert bench.enforcer.look() == Ending(How.FAIL, Cause.OVERTIME, "33")


_LEADERLESS = """
import ctypes, threading, time
def doze():
    time.sleep(0.1)
    print("up", flush=True)
    while True:
        time.sleep(3600)
threading.Thread(target=doze).start()
ctypes.CDLL(None).pthread_exit(None)
"""


def test_a_worker_whose_first_thread_has_ended_is_seen_all_the_same(bench):
    leaderless = subprocess.Popen([sys.executable, "-c", _LEADERLESS], stdout=subprocess.PIPE, process_group=0)
    try:
        assert leaderless.stdout is not None
        assert leaderless.stdout.readline() == b"up\n"
        bench.enforcer.pid = leaderless.pid
        until(lambda: bench.enforcer._sample().sleeps)  # on a busy machine its second thread may wait for a core here
        bench.begin_step()
        bench.check_until(lambda: bench.enforcer.ending)
        assert "hung" in bench.enforcer.ending.detail
    finally:
        bench.enforcer.release()
        leaderless.kill()
        leaderless.wait()
