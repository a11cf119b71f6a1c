"""One suite over the CPU's limiter, with and without control groups, and the fake."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from megatron.fill.device.cpu import CpuDevice
from megatron.fill.device.port import Limiter, Limits, WorkerDevice
from megatron.fill.linux.cgroup import CgroupHome, find_home
from megatron.fill.linux.tree import MARK
from tests.support.fake_device import FakeDevice, FakeMachine

MIB = 2**20
_PR_SET_CHILD_SUBREAPER = 36
_PRELUDE = """
import ctypes, mmap, os, signal, sys, time
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # a worker adopts its orphans
def ready():
    print("ready", flush=True)
    os.close(1)
def hold(mib):
    block = mmap.mmap(-1, mib << 20)
    for page in range(0, mib << 20, 4096):
        block[page] = 1
    return block
"""
_PROGRAMS = {
    "quiet": "ready(); time.sleep(60)",
    "hog": "ready(); time.sleep(0.2); block = hold(96); time.sleep(60)",
    "hogs": """
        for _ in range(2):
            if not os.fork():
                block = hold(48)
                time.sleep(60)
        ready(); time.sleep(60)
    """,
    "bomb": """
        ready()
        def burst(depth):
            for _ in range(3):
                if not os.fork():
                    os.setsid()
                    burst(depth + 1) if depth < 3 else time.sleep(60)
            time.sleep(60)
        burst(0)
    """,
    "hopper": """
        if not os.fork():
            for _ in range(400):  # it must end by itself, should it not be caught
                os.setsid()
                if os.fork():
                    os._exit(0)
                time.sleep(0.002)
            os._exit(0)
        time.sleep(0.1); ready(); time.sleep(60)
    """,
    "deaf": "[signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15, 18, 20)]; ready(); time.sleep(60)",
    "deserter": """
        if not os.fork():
            os.setsid()
            if not os.fork():
                os.setsid()
                time.sleep(60)
            os._exit(0)
        os.wait(); ready(); time.sleep(0.3)
    """,
}


class Host:
    """Real processes."""

    def __init__(self, home: CgroupHome) -> None:
        self.device: WorkerDevice = CpuDevice(home)
        self.workers: list[subprocess.Popen[bytes]] = []

    def start(self, limiter: Limiter, program: str) -> int:
        worker = subprocess.Popen(
            [sys.executable, "-c", _PRELUDE + textwrap.dedent(_PROGRAMS[program])],
            stdout=subprocess.PIPE,
            process_group=0,
            env=os.environ | limiter.environment,
        )
        limiter.adopt(worker.pid)
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"ready\n"
        self.workers.append(worker)
        return worker.pid

    def go_on(self) -> None:
        """What the watch does after a look, which may have stopped the worker."""
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGCONT)

    def left(self, limiter: Limiter) -> int:
        """How many processes of the worker are alive, counted by their mark."""
        mark = limiter.environment[MARK]
        return sum(_has_mark(process, mark) for process in psutil.process_iter())

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
            worker.communicate()


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark
    except psutil.Error:
        return False


class Pretended:
    """The fake's processes, which do what the real programs do."""

    def __init__(self) -> None:
        self.machine = FakeMachine()
        self.device: WorkerDevice = FakeDevice(self.machine)
        self.pid = 0

    def start(self, limiter: Limiter, program: str) -> int:
        self.pid = pid = self.machine.start(96 * MIB if program == "hog" else MIB)
        limiter.adopt(pid)
        forks = {"hogs": 2, "bomb": 100, "hopper": 1, "deserter": 1}.get(program, 0)
        for _ in range(forks):
            self.machine.fork(pid, 48 * MIB if program == "hogs" else 0)
        if program == "deserter":
            self.machine.end(pid)
        return pid

    def go_on(self) -> None:
        pass

    def left(self, limiter: Limiter) -> int:
        return len(self.machine.of(self.pid))

    def close(self) -> None:
        pass


@pytest.fixture(params=["processes", "cgroup", "fake"])
def world(request: pytest.FixtureRequest) -> Iterator[Host | Pretended]:
    if request.param == "fake":
        yield Pretended()
        return
    home = find_home() if request.param == "cgroup" else CgroupHome(None, why="switched off")
    if request.param == "cgroup" and home.path is None:
        pytest.skip(f"no control groups: {home.why}")
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # as an agent is
    host = Host(home)
    yield host
    host.close()
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


@pytest.fixture
def limiter_for(world: Host | Pretended, request: pytest.FixtureRequest) -> Iterator[Callable[..., Limiter]]:
    made: list[Limiter] = []

    def make(**limits: int) -> Limiter:
        made.append(world.device.limiter(Limits(**limits), f"test-{os.getpid()}-{len(made)}-{id(made)}"))
        return made[-1]

    yield make
    for limiter in made:
        limiter.kill()
        limiter.close()


def look_until(world: Host | Pretended, limiter: Limiter, seconds: float = 60) -> str:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        reason = limiter.look()
        if reason:
            return reason
        world.go_on()
        time.sleep(0.02)
    return ""


def test_a_quiet_worker_is_let_be_and_ends_when_killed(world, limiter_for):
    limiter = limiter_for(memory_bytes=256 * MIB, processes=8)
    world.start(limiter, "quiet")
    assert limiter.look() == ""
    assert 0 < limiter.held_bytes < 256 * MIB
    assert limiter.peak_bytes >= limiter.held_bytes
    assert limiter.explain() == ""
    limiter.kill()
    assert world.left(limiter) == 0
    assert limiter.held_bytes == 0
    limiter.kill()  # once more does no harm


def test_memory_that_malloc_does_not_know_of_counts(world, limiter_for):
    limiter = limiter_for(memory_bytes=64 * MIB)
    world.start(limiter, "hog")
    assert look_until(world, limiter).startswith("over its cap of 64 MiB")
    assert limiter.peak_bytes > 64 * MIB


def test_the_cap_is_over_all_processes_of_a_worker(world, limiter_for):
    limiter = limiter_for(memory_bytes=80 * MIB)
    world.start(limiter, "hogs")
    assert look_until(world, limiter).startswith("over its cap of 80 MiB")
    limiter.kill()
    assert world.left(limiter) == 0


def test_without_a_cap_memory_is_only_counted(world, limiter_for):
    limiter = limiter_for()
    world.start(limiter, "hog")
    assert look_until(world, limiter, 0.5) == ""


def test_too_many_processes_are_seen_and_all_of_them_end(world, limiter_for):
    limiter = limiter_for(processes=40)
    world.start(limiter, "bomb")
    assert look_until(world, limiter).startswith("over its limit of 40 processes and threads")
    began_s = time.monotonic()
    limiter.kill()
    assert time.monotonic() - began_s < 10  # a second, on a machine that is not busy
    assert world.left(limiter) == 0


@pytest.mark.parametrize("program", ["deaf", "hopper"])
def test_who_ignores_signals_or_runs_from_them_ends_within_a_second(world, limiter_for, program):
    limiter = limiter_for(processes=1000)
    world.start(limiter, program)
    assert limiter.look() == ""
    began_s = time.monotonic()
    limiter.kill()
    assert time.monotonic() - began_s < 10  # a second, on a machine that is not busy
    assert world.left(limiter) == 0


def test_what_outlives_the_worker_is_found(world, limiter_for):
    limiter = limiter_for()
    world.start(limiter, "deserter")
    for worker in getattr(world, "workers", []):
        worker.wait()
    assert world.left(limiter) == 1
    limiter.kill()
    assert world.left(limiter) == 0


def test_a_limiter_whose_worker_never_started_can_be_closed(world, limiter_for):
    limiter = limiter_for()
    limiter.kill()
    limiter.close()


def test_two_workers_do_not_touch_each_other(world, limiter_for):
    one, other = limiter_for(), limiter_for()
    world.start(one, "deserter")
    first = one
    world.start(other, "quiet")
    first.kill()
    assert world.left(other) == 1


def test_the_device_knows_its_free_memory(world):
    assert world.device.free_bytes() > 0
    assert world.device.worker_name == "cpu"
