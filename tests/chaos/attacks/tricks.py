"""Attacks on the sandbox itself: namespaces by other calls, descriptors, signals that the kernel sends."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
import resource
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.attacks.base import Attack, Ground, NoTargetError, beside, in_child, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack

_BUSY_S = 3.0
_F_SETOWN, _F_SETSIG = 8, 10
_NEW = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000, "cgroup": 0x2000000}
_IOPRIO_REAL_TIME = 1 << 13


def _owned(ground: Ground) -> str:
    """Make another process the owner of a socket, so that events there send it signals."""

    def own(pid: int) -> None:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fcntl.fcntl(ours, _F_SETOWN, pid)
            if fcntl.fcntl(ours, fcntl.F_GETOWN) != pid:
                raise ProcessLookupError(3, "it is not the owner")
            fcntl.fcntl(ours, _F_SETSIG, int(signal.SIGKILL))
            fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC | os.O_NONBLOCK)
            theirs.send(b"x")

    return try_all((f"news to {pid}", partial(own, pid)) for pid in ground.outsiders())


def _by_descriptor(ground: Ground) -> str:
    """Open descriptors of processes."""

    def use(pid: int) -> None:
        os.close(os.pidfd_open(pid))

    return try_all((f"of {pid}", partial(use, pid)) for pid in ground.outsiders())


def _ask_about(ground: Ground) -> str:
    """Query others' sessions, priorities, cores, limits, clocks."""
    ways: list[tuple[str, Callable[[], object]]] = []
    for pid in ground.outsiders():
        ways += [
            (f"session of {pid}", partial(os.getsid, pid)),
            (f"priority of {pid}", partial(os.getpriority, os.PRIO_PROCESS, pid)),
            (f"cores of {pid}", partial(os.sched_getaffinity, pid)),
            (f"limits of {pid}", partial(resource.prlimit, pid, resource.RLIMIT_NOFILE)),
            (f"clock of {pid}", partial(time.clock_gettime, (~pid << 3) | 2)),
            (f"locks of {pid}", partial(syscall, "get_robust_list", pid, bytes(8), bytes(8))),
        ]
    return try_all(ways)


def _clone(ground: Ground) -> str:
    """Create namespaces by clone and clone3, which filters may treat differently from unshare."""

    def by_clone(flag: int) -> None:
        number = 56 if os.uname().machine == "x86_64" else 220
        pid = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), ctypes.c_long(flag | 17), 0, 0, 0, 0)
        if pid == 0:
            os._exit(0)
        if pid < 0:
            raise OSError(ctypes.get_errno(), "clone")
        os.waitpid(pid, 0)

    def by_clone3(flag: int) -> None:
        arguments = struct.pack("=8Q", flag, 0, 0, 0, 17, 0, 0, 0)
        pid = syscall("clone3", arguments, 64)
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)

    return try_all(
        (f"{name} by {way.__name__}", partial(way, flag))
        for name, flag in _NEW.items()
        for way in (by_clone, by_clone3)
    )


def _new_mounts(ground: Ground) -> str:
    """Mount by the calls since Linux 5.2."""

    def tree() -> None:
        os.close(syscall("open_tree", -100, b"/proc", 1))

    def fresh() -> None:
        os.close(syscall("fsopen", b"proc", 0))

    def change() -> None:
        attributes = struct.pack("=4Q", 0, 1, 0, 0)  # clear: read-only
        syscall("mount_setattr", -100, b"/proc", 0, attributes, len(attributes))

    return try_all([("open_tree", tree), ("fsopen", fresh), ("mount_setattr", change)])


def _handle(ground: Ground) -> str:
    """Ask for the handle of a file, by which it could be opened from anywhere."""

    def name() -> None:
        handle, mount = ctypes.create_string_buffer(struct.pack("=Ii", 128, 0), 136), ctypes.create_string_buffer(8)
        syscall("name_to_handle_at", -100, os.fsencode(ground.directory), handle, mount, 0)

    return try_all([("name_to_handle_at", name)])


def _calls(ground: Ground) -> str:
    """Make more privileged calls, with arguments that fail anyway."""

    def unless(allowed: int, name: str, *arguments: int | bytes | None) -> None:
        try:
            syscall(name, *arguments)
        except OSError as error:
            if error.errno != allowed:
                raise

    return try_all(
        [
            ("fanotify", lambda: os.close(syscall("fanotify_init", 0, 0))),
            ("swapon", partial(unless, 2, "swapon", b"/no/such/swap", 0)),
            ("acct", partial(unless, 2, "acct", b"/no/such/file")),
            ("syslog", partial(syscall, "syslog", 10, None, 0)),
            ("delete_module", partial(unless, 2, "delete_module", b"no_such_module", 0)),
            ("quotactl", partial(unless, 2, "quotactl", 0x800002, b"/no/such/disk", 0, None)),
            ("migrate_pages", partial(syscall, "migrate_pages", 0, 0, None, None)),
        ]
    )


def _io_class(ground: Ground) -> str:
    """Put its own disk accesses before all others'."""
    return try_all([("real time", partial(syscall, "ioprio_set", 1, 0, _IOPRIO_REAL_TIME))])


def _child_class(ground: Ground) -> str:
    """Put a child into the ordinary scheduling class, by sched_setattr."""
    ordinary = struct.pack("=IIQiIQQQ", 48, 0, 0, 0, 0, 0, 0, 0)
    return try_all([("a child", lambda: in_child(lambda: syscall("sched_setattr", 0, ordinary, 0)))])


def _session(ground: Ground) -> str:
    """Start a session or a process group of its own, out of reach of a stop and of the training's autogroup."""
    return try_all([("setsid", lambda: in_child(os.setsid)), ("setpgid", lambda: in_child(partial(os.setpgid, 0, 0)))])


def _join(ground: Ground) -> str:
    """Open the process list of the root cgroup, to leave its own with its caps."""
    folders = [Path(path) for path, _ in ground.targets.cgroups]
    if not folders:
        raise NoTargetError("no cgroup is mounted")

    def join(folder: Path) -> None:
        fd = os.open(folder / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, b"")  # opened is enough: nothing is moved
        finally:
            os.close(fd)

    return try_all((str(folder), partial(join, folder)) for folder in folders)


def _abstract(ground: Ground) -> str:
    """Connect to the abstract sockets of others."""

    def send(name: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as one:
            one.settimeout(0.5)
            one.connect("\0" + name[1:])

    names = [name for name in ground.targets.sockets if name.startswith("@")]
    return try_all((name, partial(send, name)) for name in names or ["@pipefill-chaos"])


def _continue_group(ground: Ground) -> str:
    """Continue its own group whenever it is stopped, from busy children."""

    def go_on() -> None:
        end_s = time.monotonic() + _BUSY_S
        while time.monotonic() < end_s:
            with suppress(OSError):
                os.killpg(0, signal.SIGCONT)
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 500)

    for _ in range(2):
        if os.fork() == 0:
            try:
                go_on()
            finally:
                os._exit(0)
    beside(go_on)
    return "its own group is continued"


def _sleeping_steps(ground: Ground) -> str:
    """Start threads whose sleeps all end at the same time, between bubbles."""

    def sleep() -> None:
        end_s = time.monotonic() + _BUSY_S
        while time.monotonic() < end_s:
            time.sleep(0.001 - time.monotonic() % 0.001)
            hashlib.sha256(b"x").digest()

    for _ in range(20):
        beside(sleep)
    return "20 threads wake up together"


def _tables() -> Iterator[Attack]:
    refused, either = partial(attack, refused=True), partial(attack, either=True)
    yield Attack(refused("owner-signals", "a socket whose news are signals to others (F_SETOWN)"), _owned)
    yield Attack(refused("process-descriptors", "pidfd_open of ranks and agents"), _by_descriptor)
    yield Attack(refused("ask-about", "sessions, priorities, cores, limits, clocks of ranks and agents"), _ask_about)
    yield Attack(refused("clone-namespaces", "namespaces by clone and clone3"), _clone)
    yield Attack(refused("new-mounts", "open_tree, fsopen, mount_setattr"), _new_mounts)
    yield Attack(refused("name-to-handle", "the number of a file"), _handle)
    yield Attack(refused("doors", "fanotify, swapon, acct, syslog, modules, quotas, migrate_pages"), _calls)
    yield Attack(refused("io-class", "its own disk accesses at real-time priority"), _io_class)
    yield Attack(refused("child-class", "a child in the ordinary class (sched_setattr)"), _child_class)
    yield Attack(refused("own-session", "a session or a process group of its own"), _session)
    yield Attack(refused("cgroup-join", "opens the lists of processes of outer cgroups to write"), _join)
    yield Attack(refused("abstract-names", "connects to abstract sockets of others by name"), _abstract)
    yield Attack(either("continue-group", "continues its own group whenever it is stopped"), _continue_group, 4.0)
    yield Attack(either("wake-together", "20 threads that wake up a thousand times a second"), _sleeping_steps, 4.0)


ATTACKS = tuple(_tables())
