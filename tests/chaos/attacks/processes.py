"""Attacks on the training's processes: signals, debuggers, memory, descriptors, limits."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from megatron.fill.linux.libc import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, libc
from tests.chaos import memfiles
from tests.chaos.attacks.base import (
    Attack,
    Ground,
    NoTargetError,
    Refused,
    in_child,
    own_session,
    threads,
    try_all,
)
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack, fatal

_ATTACH, _SEIZE, _DETACH = 16, 0x4206, 17
_CPU_S = 1
_FOREVER_S = 60.0
_OWN = ctypes.create_string_buffer(8)


def _prlimit(ground: Ground) -> str:
    """Set a limit of one second of CPU time for the rank, at which the kernel ends it."""
    return try_all(
        (f"RLIMIT_CPU of {pid}", partial(resource.prlimit, pid, resource.RLIMIT_CPU, (_CPU_S, _CPU_S)))
        for pid in ground.ranks()
    )


def _ptrace(ground: Ground) -> str:
    def grip(request: int, pid: int) -> None:
        syscall("ptrace", request, pid, 0, 0)
        if request == _ATTACH:
            os.waitpid(pid, 0)
        syscall("ptrace", _DETACH, pid, 0, 0)

    pids = ground.everyone()
    return try_all(
        (f"request {request:#x} to {pid}", partial(grip, request, pid)) for pid in pids for request in (_ATTACH, _SEIZE)
    )


class _Span(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _writable(pid: int) -> int:
    """The address of writable memory of a process; where that is hidden, an address of this process."""
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8") as file:
            return next(int(line.split("-")[0], 16) for line in file if " rw-p " in line)
    except (OSError, StopIteration):
        return ctypes.addressof(_OWN)


def _vm_write(ground: Ground) -> str:
    """Write to the rank's memory the bytes that are there already."""

    def change(pid: int) -> None:
        kept = ctypes.create_string_buffer(8)
        here, there = _Span(ctypes.addressof(kept), 8), _Span(_writable(pid), 8)
        for name in ("process_vm_readv", "process_vm_writev"):
            syscall(name, pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0)

    return try_all((f"into {pid}", partial(change, pid)) for pid in ground.ranks())


def _proc_files(ground: Ground) -> str:
    """Open the files in /proc of a rank: memory, environment, descriptors and others."""

    def open_it(pid: int, name: str, flags: int) -> None:
        os.close(os.open(f"/proc/{pid}/{name}", flags | os.O_CLOEXEC))

    names = [
        ("mem", os.O_RDWR),
        ("environ", os.O_RDONLY),
        ("maps", os.O_RDONLY),
        ("root", os.O_RDONLY),
        ("cwd", os.O_RDONLY),
        ("fd/1", os.O_WRONLY),
        ("clear_refs", os.O_WRONLY),
        ("stack", os.O_RDONLY),
    ]
    return try_all(
        (f"{pid}/{name}", partial(open_it, pid, name, flags)) for pid in ground.ranks() for name, flags in names
    )


def _take_descriptor(ground: Ground) -> str:
    def take(pid: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            os.close(syscall("pidfd_getfd", pidfd, 1, 0))
        finally:
            os.close(pidfd)

    return try_all((f"of {pid}", partial(take, pid)) for pid in ground.everyone())


def _move_memory(ground: Ground) -> str:
    """Make calls that take the pid of another process: move pages, page out, compare files."""
    ways: list[tuple[str, Callable[[], object]]] = []
    for pid in ground.ranks():
        ways += [
            (f"kcmp {pid}", partial(syscall, "kcmp", pid, os.getpid(), 0, 0, 0)),
            (f"move_pages {pid}", partial(syscall, "move_pages", pid, 0, None, None, None, 0)),
            (f"process_madvise {pid}", partial(_madvise, pid)),
        ]
    return try_all(ways)


def _madvise(pid: int) -> None:
    span = _Span(_writable(pid), 4096)
    pidfd = os.pidfd_open(pid)
    try:
        syscall("process_madvise", pidfd, ctypes.addressof(span), 1, 21, 0)  # MADV_PAGEOUT
    finally:
        os.close(pidfd)


def _signals(pids: list[int], *numbers: signal.Signals) -> str:
    def queue(pid: int, number: int) -> None:
        info = (ctypes.c_char * 128)()
        ctypes.cast(info, ctypes.POINTER(ctypes.c_int))[0] = number
        ctypes.cast(info, ctypes.POINTER(ctypes.c_int))[2] = -1  # SI_QUEUE
        syscall("rt_sigqueueinfo", pid, number, info)

    def by_descriptor(pid: int, number: int) -> None:
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.Signals(number))
        finally:
            os.close(pidfd)

    def by_thread(pid: int, number: int) -> None:
        syscall("tgkill", pid, pid, number)

    ways = (os.kill, os.killpg, queue, by_descriptor, by_thread)
    return try_all(
        (f"{way.__name__} {number.name} to {pid}", partial(way, pid, number))
        for pid in pids
        for number in numbers
        for way in ways
    )


def _threads(ground: Ground) -> str:
    def stop(pid: int, thread: int) -> None:
        syscall("tgkill", pid, thread, signal.SIGSTOP)

    found = [(pid, thread) for pid in ground.ranks() for thread in threads(pid)]
    return try_all((f"thread {thread} of {pid}", partial(stop, pid, thread)) for pid, thread in found)


def _everybody(ground: Ground) -> str:
    """Send SIGKILL to all processes of the job's namespace; from a child, as kill(-1) spares the caller."""
    if not ground.own_init():
        raise NoTargetError("this is the machine's process namespace")
    in_child(lambda: os.kill(-1, signal.SIGKILL))
    return "others than this process were killed"


def _init(ground: Ground) -> str:
    """End or stop the first process of the namespace."""
    if not ground.own_init():
        raise NoTargetError("process 1 is the machine's")
    numbers = (signal.SIGSTOP, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGKILL)
    return try_all((number.name, partial(os.kill, 1, number)) for number in numbers)


def _stop_group(ground: Ground) -> str:
    os.killpg(0, signal.SIGSTOP)
    return ""


def _exit_main_thread(ground: Ground) -> str:
    """End the main thread; another one keeps the process."""
    threading.Thread(target=time.sleep, args=(_FOREVER_S,)).start()
    syscall("exit", 0)
    return ""


def _exec_away(ground: Ground) -> str:
    os.execv("/bin/sleep", ["sleep", "3"])


def _forget_parent(ground: Ground) -> str:
    """Undo the settings that end this job with its parent, and leave a process behind."""
    libc.prctl(PR_SET_PDEATHSIG, 0, 0, 0, 0)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    _stay()
    return ""


def _double_fork(ground: Ground) -> str:
    for _ in range(4):
        _stay()
    return ""


def _stay() -> None:
    """Start a daemon that sleeps."""
    if os.fork() == 0:
        try:
            own_session()
            if os.fork() == 0:
                time.sleep(_FOREVER_S)
        finally:
            os._exit(0)


def _pass_descriptors(ground: Ground) -> str:
    """Pass the descriptors of the shared pages through a socket to a child that outlives the step."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        try:
            got = socket.recv_fds(theirs, 1, 64)
            time.sleep(2.0 if got else 0.0)
        finally:
            os._exit(0)
    found = [fd for fds in memfiles.descriptors("").values() for fd in fds]
    with ours, theirs:
        socket.send_fds(ours, [b"x"], found[:64])
    if not found:
        raise Refused("no page has a descriptor here")
    return f"{len(found)} descriptors"


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    stop, cont, kill = signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL
    yield Attack(refused("prlimit-rank", "a second of CPU time as the rank's limit (prlimit)"), _prlimit, 2.0)
    yield Attack(refused("ptrace-rank", "attaches to ranks and agents as a debugger"), _ptrace)
    yield Attack(refused("vm-write-rank", "writes into the ranks' memory (process_vm_writev)"), _vm_write)
    yield Attack(refused("proc-files-rank", "opens /proc/PID/mem, environ, maps, root, fd of the ranks"), _proc_files)
    yield Attack(refused("pidfd-getfd", "takes a descriptor of ranks and agents"), _take_descriptor)
    yield Attack(refused("move-memory-rank", "kcmp, move_pages, process_madvise on the ranks"), _move_memory)
    yield Attack(
        refused("signal-rank", "SIGSTOP, SIGCONT, SIGKILL to the ranks, in five ways"),
        lambda ground: _signals(ground.ranks(), stop, cont, kill),
    )
    yield Attack(
        refused("signal-agents", "SIGKILL to agents and wardens, in five ways"),
        lambda ground: _signals(ground.agents(), kill),
    )
    yield Attack(
        refused("stop-agents", "SIGSTOP to agents and wardens, in five ways"),
        lambda ground: _signals(ground.agents(), stop),
    )
    yield Attack(refused("stop-threads", "SIGSTOP to each thread of the ranks"), _threads)
    yield Attack(fatal("kill-everybody", "SIGKILL to every process (kill -1)", "SIGKILL"), _everybody)
    yield Attack(refused("kill-init", "signals to process 1, where that is the job's own"), _init)
    yield Attack(attack("stop-group", "SIGSTOP to its whole process group"), _stop_group)
    yield Attack(
        fatal("exit-main-thread", "the main thread ends, another one goes on", "after its bubble|exited|killed"),
        _exit_main_thread,
    )
    yield Attack(fatal("exec-away", "the worker becomes another program"), _exec_away)
    yield Attack(attack("forget-parent", "undoes what ends it with its parent"), _forget_parent)
    yield Attack(attack("double-fork", "daemons in sessions of their own that stay"), _double_fork, 1.0)
    yield Attack(refused("pass-descriptors", "passes the shared pages to a child that stays"), _pass_descriptors)


ATTACKS = tuple(_tables())
