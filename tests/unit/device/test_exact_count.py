"""A worker whose processes share memory: it is stopped while each page is counted once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from megatron.fill.device.cpu import HostLimiter
from megatron.fill.device.port import Limits
from megatron.fill.linux import tree
from megatron.fill.linux.cgroup import CgroupHome
from megatron.fill.linux.held import Held, HeldMemory
from tests.support.waiting import until

MIB = 2**20
SHARES = """
import os, time
held = bytearray(32 << 20)
for _ in range(6):
    if not os.fork():
        break
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    """Seven processes that hold 32 MiB together, which count in each."""
    worker = subprocess.Popen([sys.executable, "-c", SHARES], stdout=subprocess.PIPE, process_group=0)
    assert worker.stdout is not None
    for _ in range(7):
        worker.stdout.readline()
    yield worker
    os.killpg(worker.pid, signal.SIGKILL)
    worker.communicate()


def limiter_of(worker: subprocess.Popen[bytes], cap: int) -> HostLimiter:
    limiter = HostLimiter(Limits(memory_bytes=cap, processes=100), "exact", CgroupHome(None, frozenset(), "a test"))
    limiter.adopt(worker.pid)
    return limiter


def states(pid: int) -> set[str]:
    found = [tree.read_process(one) for one in (pid, *tree.descendants(pid))]
    return {one.state for one in found if one is not None}


def test_it_is_stopped_while_it_is_counted(worker):
    limiter = limiter_of(worker, 128 * MIB)
    assert limiter.look() == ""
    assert 32 * MIB < limiter.held_bytes < 128 * MIB
    until(lambda: states(worker.pid) == {"T"}, 10)
    limiter.close()


def test_a_count_holds_until_the_cap_could_have_been_passed(worker, monkeypatch):
    limiter = limiter_of(worker, 128 * MIB)
    counts: list[Held] = []
    exact = HeldMemory.exact_bytes

    def counted(memory: HeldMemory, pids: list[int], held: Held) -> int | None:
        counts.append(held)
        return exact(memory, pids, held)

    monkeypatch.setattr(HeldMemory, "exact_bytes", counted)
    monkeypatch.setattr("megatron.fill.device.cpu.time.monotonic", lambda: 100.0)
    assert [limiter.look(), limiter.look()] == ["", ""]
    assert len(counts) == 1
    monkeypatch.setattr("megatron.fill.device.cpu.time.monotonic", lambda: 101.0)
    limiter.look()
    assert len(counts) == 2
    limiter.close()


def test_beyond_the_cap_it_must_end(worker):
    limiter = limiter_of(worker, 16 * MIB)
    assert limiter.look().startswith("over its cap of 16 MiB: ")
    limiter.close()
