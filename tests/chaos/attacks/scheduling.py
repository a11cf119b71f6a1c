"""Attacks on the training's share of the cores: priorities, affinity, work outside of bubbles."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from megatron.fill.linux.libc import libc
from tests.chaos import memfiles
from tests.chaos.attacks.base import Attack, Ground, Refused, beside, own_session, threads, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack, fatal

_BUSY_S, _LONG_S = 3.0, 6.0
_BUSY_PROCESSES = 4
_MIB = 1 << 20
_WAKES = 2000


def _burn(seconds: float) -> None:
    """Keep a core busy without the interpreter's lock."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        hashlib.pbkdf2_hmac("sha256", b"x", b"y", 20_000)


def _copy(seconds: float, size: int) -> None:
    """Copy memory as fast as possible without the interpreter's lock."""
    one, other = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ctypes.memmove(one, other, size)


def _real_time(policy: int) -> None:
    os.sched_setscheduler(0, policy, os.sched_param(1))


def _deadline() -> None:
    """Ask for SCHED_DEADLINE with nine tenths of a core."""
    given = struct.pack("=IIQiIQQQ", 48, 6, 0, 0, 0, 90_000_000, 100_000_000, 100_000_000)
    syscall("sched_setattr", 0, given, 0)


def _nicer() -> None:
    os.setpriority(os.PRIO_PROCESS, 0, -20)
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _rise(then: Callable[[], None]) -> str:
    found = try_all(
        [
            ("SCHED_FIFO", lambda: _real_time(os.SCHED_FIFO)),
            ("SCHED_RR", lambda: _real_time(os.SCHED_RR)),
            ("SCHED_DEADLINE", _deadline),
            ("nice", _nicer),
        ]
    )
    then()
    return found


def _fifo_step(ground: Ground) -> str:
    return _rise(lambda: _burn(_BUSY_S))


def _fifo_thread(ground: Ground) -> str:
    """Run a thread at real-time priority that continues between bubbles."""
    found: list[str] = []
    why: list[Exception] = []

    def run() -> None:
        try:
            found.append(_rise(lambda: None))
        except (OSError, Refused) as error:
            why.append(error)
            return
        _burn(_BUSY_S)

    thread = beside(run)
    while thread.is_alive() and not found:
        time.sleep(0.005)
    if why:
        raise why[0]
    return found[0]


def _leave_idle(ground: Ground) -> str:
    """Change from the idle class to the ordinary one, and continue between bubbles."""
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    beside(lambda: _burn(_BUSY_S))
    return "SCHED_OTHER"


def _of_each(ground: Ground, what: Callable[[int], object]) -> str:
    """Apply ``what`` to every thread of the ranks."""
    found = [thread for pid in ground.ranks() for thread in threads(pid)]
    return try_all((f"thread {thread}", partial(what, thread)) for thread in found)


def _write_proc(ground: Ground, name: str, text: str) -> str:
    return try_all((f"{pid}/{name}", partial(Path(f"/proc/{pid}/{name}").write_text, text)) for pid in ground.ranks())


def _affinity(thread: int) -> None:
    os.sched_setaffinity(thread, {max(os.sched_getaffinity(thread))})


def _setsid_busy(ground: Ground) -> str:
    """Start busy processes in sessions of their own: autogroups give each as much as the training."""
    for _ in range(_BUSY_PROCESSES):
        if os.fork() == 0:
            try:
                own_session()
                _burn(_LONG_S)
            finally:
                os._exit(0)
    return ""


def _burn_thread(ground: Ground) -> str:
    beside(lambda: _burn(_LONG_S))
    return ""


def _copy_thread(ground: Ground) -> str:
    beside(lambda: _copy(_LONG_S, 32 * _MIB))
    return ""


def _copy_step(ground: Ground) -> str:
    _copy(0.1, 32 * _MIB)
    return ""


def _thrash_step(ground: Ground) -> str:
    """Touch every cache line of much more memory than the caches hold."""
    memory = memoryview(bytearray(64 * _MIB))
    end_s = time.monotonic() + 0.2
    while time.monotonic() < end_s:
        memory[::64].tobytes()
    return ""


def _sleeper(ground: Ground) -> str:
    """Sleep for ever, past the bubble's end."""
    time.sleep(1.0)
    return _sleeper(ground) if ground.directory.exists() else ""


def _beating_hang(ground: Ground) -> str:
    """Hang in a step, while the step log reports that steps end."""
    log = memfiles.step_log()

    def beat() -> None:
        while True:
            log.step_ended(time.monotonic_ns(), time.monotonic_ns(), 0.0, False)
            time.sleep(0.01)

    beside(beat)
    while True:
        _burn(60.0)


def _futex_storm(ground: Ground) -> str:
    """Wake all processes that sleep on the shared pages, all the time."""

    def wake() -> None:
        end_s = time.monotonic() + _BUSY_S
        addresses = [
            int(line.split("-")[0], 16)
            for line in Path("/proc/self/maps").read_text().splitlines()
            if "/memfd:pipefill" in line
        ]
        while time.monotonic() < end_s:
            for address in addresses:
                libc.syscall(
                    ctypes.c_long(202 if os.uname().machine == "x86_64" else 98),
                    ctypes.c_void_p(address),
                    1,
                    1 << 30,
                    None,
                    None,
                    0,
                )
            time.sleep(0.0002)

    beside(wake)
    return ""


def _timer_storm(ground: Ground) -> str:
    """Send this process thousands of timer signals a second."""
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)

    def end() -> None:
        time.sleep(_BUSY_S)
        signal.setitimer(signal.ITIMER_REAL, 0.0)

    beside(end)
    return ""


def _signal_storm(ground: Ground) -> str:
    """Send this process the signal that the agent uses, thousands of times."""

    def storm() -> None:
        for _ in range(_WAKES):
            os.kill(os.getpid(), signal.SIGUSR1)

    beside(storm)
    return ""


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    either = partial(attack, either=True)
    yield Attack(refused("fifo-step", "a step at real-time priority", either=True), _fifo_step)
    yield Attack(refused("fifo-thread", "a busy thread at real-time priority", either=True), _fifo_thread, 4.0)
    yield Attack(refused("leave-idle", "out of the idle class, and busy", either=True), _leave_idle, 4.0)
    yield Attack(
        refused("nice-rank", "nice 19 for the ranks"),
        lambda g: _of_each(g, lambda t: os.setpriority(os.PRIO_PROCESS, t, 19)),
        2.0,
    )
    yield Attack(
        refused("idle-rank", "the idle class for the ranks"),
        lambda g: _of_each(g, lambda t: os.sched_setscheduler(t, os.SCHED_IDLE, os.sched_param(0))),
        2.0,
    )
    yield Attack(refused("affinity-rank", "all ranks on one core"), lambda g: _of_each(g, _affinity), 2.0)
    yield Attack(
        refused("ionice-rank", "idle I/O for the ranks"),
        lambda g: _of_each(g, lambda t: syscall("ioprio_set", 1, t, 3 << 13)),
    )
    yield Attack(
        refused("oom-rank", "the ranks first to die when memory ends"),
        lambda g: _write_proc(g, "oom_score_adj", "1000"),
    )
    yield Attack(
        refused("slack-rank", "a second of timer slack for the ranks"),
        lambda g: _write_proc(g, "timerslack_ns", "1000000000"),
        2.0,
    )
    yield Attack(
        refused("autogroup-rank", "nice 19 for the ranks' session"), lambda g: _write_proc(g, "autogroup", "19"), 2.0
    )
    yield Attack(either("setsid-busy", "four busy processes in sessions of their own"), _setsid_busy, 7.0)
    yield Attack(either("burn-thread", "a thread that is busy between bubbles too"), _burn_thread, 7.0)
    yield Attack(either("copy-thread", "a thread that takes the memory's bandwidth between bubbles"), _copy_thread, 7.0)
    yield Attack(either("copy-step", "steps that take the memory's bandwidth"), _copy_step)
    yield Attack(either("thrash-step", "steps that take the caches"), _thrash_step)
    yield Attack(fatal("sleeper", "a step that sleeps on, for ever"), _sleeper)
    yield Attack(fatal("beating-hang", "a step that hangs while the step log says that it does not"), _beating_hang)
    yield Attack(either("futex-storm", "wakes all who sleep on the shared pages"), _futex_storm, 3.0)
    yield Attack(either("timer-storm", "ten thousand timer signals a second to itself"), _timer_storm, 3.0)
    yield Attack(either("signal-storm", "thousands of SIGUSR1 to itself"), _signal_storm, 1.0)


ATTACKS = tuple(_tables())
