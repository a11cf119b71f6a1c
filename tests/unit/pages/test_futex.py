"""What a job can do with futex(2) to who waits on a page that it maps, read-only or not, and who wakes them."""

from __future__ import annotations

import ctypes
import functools
import threading
import time
from collections.abc import Callable

import pytest

from megatron.fill.linux import futex, memfd
from megatron.fill.pages.baton import Baton, TailGate
from megatron.fill.pages.control import ControlPage, ControlReader, RunState
from megatron.fill.pages.gate import MOST_WOKEN, SharedGate, SharedGateReader
from megatron.fill.pages.watcher import watch_control
from tests.support.waiting import until

_WAKE, _REQUEUE = 1, 3
_LONG_NS = 10**12
libc = ctypes.CDLL(None, use_errno=True)
pytestmark = pytest.mark.usefixtures("own_pages")


class Attacker:
    """A job's own, read-only view of a page, and a word of its own."""

    def __init__(self, fd: int) -> None:
        _, self.theirs = memfd.map_page(fd, 4096, writable=False)
        self.own = memfd.map_page(memfd.create("own", 4096), 4096, writable=True)[1]

    def wake(self) -> int:
        """How many were woken."""
        return self._call(_WAKE, futex.ALL, self.theirs, self.own)

    def move(self) -> int:
        """How many were moved to a word of its own, where nobody wakes them."""
        return self._call(_REQUEUE, 0, self.theirs, self.own)

    def move_back(self) -> int:
        return self._call(_REQUEUE, 0, self.own, self.theirs)

    def _call(self, operation: int, woken: int, source: int, target: int) -> int:
        at, to, most = ctypes.c_void_p(source), ctypes.c_void_p(target), ctypes.c_void_p(futex.ALL)
        return int(libc.syscall(futex._NUMBER, at, operation, woken, most, to, 0))


def test_a_watcher_that_was_moved_away_acts_on_the_next_change_all_the_same():
    page, heard = ControlPage.create(0), list[RunState]()
    job = Attacker(page.reader_fd())
    watch_control(page, heard.append)
    until(lambda: page.acknowledged)
    until(job.move)  # asleep by then, and taken away
    page.change(RunState.KILLED)
    until(lambda: page.acknowledged, 30)
    assert heard == [RunState.RUNNING, RunState.KILLED]


def test_a_storm_of_wakes_is_no_change():
    page, heard = ControlPage.create(0), list[RunState]()
    job = Attacker(page.reader_fd())
    watch_control(page, heard.append)
    for _ in range(5):
        until(job.wake)
    assert heard == [RunState.RUNNING]


@pytest.mark.parametrize("wait", ["bubble", "end", "page"])
def test_whoever_was_moved_away_looks_again(wait):
    """Each wait of a worker, and of its agent: they come back, though nobody can wake them any more."""
    gate, page = SharedGate(), ControlPage.create(0)
    reader, control = SharedGateReader(gate.reader_fd()), ControlReader(page.reader_fd())
    seq = gate.open(_LONG_NS, 0)
    waits: dict[str, tuple[SharedGate | ControlPage, Callable[[], object]]] = {
        "bubble": (gate, lambda: reader.wait(seq)),
        "end": (gate, lambda: reader.wait_change(seq, _LONG_NS)),
        "page": (page, lambda: control.wait(page.word)),
    }
    whose, sleep = waits[wait]
    job = Attacker(whose.reader_fd())
    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    until(job.move)
    thread.join(30)
    assert not thread.is_alive()


def test_a_job_s_own_waiters_cost_the_rank_no_more_than_a_few_wakes():
    gate = SharedGate()
    job = Attacker(gate.reader_fd())
    wait, asleep = functools.partial(futex.wait, job.theirs, gate._word[0], _LONG_NS), list[int]()
    threads = [threading.Thread(target=wait, daemon=True) for _ in range(40)]
    for thread in threads:
        thread.start()

    def all_asleep() -> bool:
        asleep.append(job.move())
        return sum(asleep) == len(threads)

    until(all_asleep)
    assert job.move_back() == len(threads)
    gate._wake()  # as an opening or a closing does
    assert job.wake() == len(threads) - MOST_WOKEN


def test_a_worker_that_is_woken_for_nothing_naps(naps):
    gate = SharedGate()
    reader, job = SharedGateReader(gate.reader_fd()), Attacker(gate.reader_fd())

    def wait() -> None:
        while not naps:  # on a busy machine one wait may be over before it is woken
            reader.wait(0)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: job.wake() >= 0 and naps)
    thread.join(30)
    assert set(naps) == {futex.NAP_S}
    count = len(naps)
    gate.open(_LONG_NS, 0)
    assert reader.wait(0) is not None
    assert len(naps) == count  # a bubble that is open is not slept over


@pytest.mark.parametrize("lie", ["another word", "another bubble"])
def test_the_other_job_cannot_keep_a_tail_job_busy_through_the_baton(naps, lie):
    gate, fd = SharedGate(), Baton.create()
    tail, other = TailGate(gate.reader_fd(), Baton(fd)), Baton(fd)
    other.hold()
    for number in range(1, 4):
        if lie == "another word":
            other._word[0] = 7  # no wait on it sleeps
        else:
            other.pass_on(number)  # of a bubble that never was
        assert tail.wait(0) is None
    assert naps == [futex.NAP_S] * 3


@pytest.fixture
def naps(monkeypatch) -> list[float]:
    taken: list[float] = []
    nap = time.sleep
    monkeypatch.setattr(
        time, "sleep", lambda seconds: taken.append(seconds) if seconds == futex.NAP_S else nap(seconds)
    )
    return taken
