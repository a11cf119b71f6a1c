"""Attacks on the kernel: calls that a job does not need, namespaces, cgroups, devices, clocks."""

from __future__ import annotations

import os
import resource
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

from tests.chaos.attacks import cgroups
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, Refused, in_child, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack, fatal

_NEW = {"mount": 0x20000, "uts": 0x4000000, "ipc": 0x8000000, "user": 0x10000000, "pid": 0x20000000, "net": 0x40000000}


def _powers(ground: Ground) -> str:
    """The privileges of this process, as the kernel reports them."""
    found = powers(Path("/proc/self/status").read_text(encoding="ascii"))
    if not found:
        raise Refused("it is nobody in particular, without capabilities")
    return found


def powers(status: str) -> str:
    """The privileges in a ``/proc/PID/status`` that a job must not have; ``""`` if there are none."""
    found = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    wrong = []
    if found["Uid"].split()[0] == "0":
        wrong.append("it is root")
    wrong += [f"{name} {found[name]}" for name in ("CapEff", "CapPrm", "CapAmb") if int(found[name], 16)]
    if found["NoNewPrivs"].strip() != "1":
        wrong.append("it may gain privileges")
    if found.get("Seccomp", "0").strip() != "2":
        wrong.append("there is no filter of system calls")
    return ", ".join(wrong)


def _unshare(ground: Ground) -> str:
    return try_all(
        (f"{name} namespace", partial(in_child, partial(syscall, "unshare", flag))) for name, flag in _NEW.items()
    )


def _setns(ground: Ground) -> str:
    """Enter a rank's namespaces."""

    def enter(pid: int, name: str) -> None:
        fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY | os.O_CLOEXEC)
        in_child(lambda: syscall("setns", fd, 0))

    return try_all(
        (f"{name} of {pid}", partial(enter, pid, name))
        for pid in ground.ranks()
        for name in ("mnt", "pid", "net", "ipc", "cgroup")
    )


def _mount(ground: Ground) -> str:
    """Mount an unknown type of file system: EPERM if mounting is forbidden, ENODEV if it would be allowed."""

    def probe() -> None:
        try:
            syscall("mount", b"none", str(ground.directory).encode(), b"no-such-file-system", 0, None)
        except OSError as error:
            if error.errno != 19:
                raise

    def private() -> None:
        syscall("unshare", _NEW["mount"])
        probe()

    def pivot() -> None:
        syscall("unshare", _NEW["mount"])
        syscall("pivot_root", b"/", b"/")

    return try_all(
        [
            ("mount", partial(in_child, probe)),
            ("mount in a namespace", partial(in_child, private)),
            ("pivot_root", partial(in_child, pivot)),
        ]
    )


def _chroot(ground: Ground) -> str:
    return try_all([("chroot", lambda: in_child(lambda: os.chroot(ground.directory)))])


def _closing(name: str, *arguments: int | bytes | None) -> None:
    os.close(syscall(name, *arguments))


def _perf(ground: Ground) -> str:
    """Count a process's cycles, and its time on a core, which can be counted on every machine."""
    counters = {
        name: struct.pack("=IIQ", kind, 112, 0).ljust(112, b"\0") for name, kind in (("cycles", 0), ("time", 1))
    }
    pids = [0]
    with suppress(NoTargetError):
        pids += ground.ranks()
    return try_all(
        (f"{name} of {pid}", partial(_closing, "perf_event_open", counter, pid, -1, -1, 0))
        for pid in pids
        for name, counter in counters.items()
    )


def _bpf(ground: Ground) -> str:
    array = struct.pack("=IIII", 2, 4, 4, 1).ljust(72, b"\0")
    return try_all([("a map", partial(_closing, "bpf", 0, array, 72))])


def _keys(ground: Ground) -> str:
    return try_all(
        [
            ("add_key", lambda: syscall("add_key", b"user", b"pipefill-chaos", b"x", 1, -2)),
            ("session keyring", lambda: syscall("keyctl", 0, -3, 0)),
        ]
    )


def _io_uring(ground: Ground) -> str:
    return try_all([("io_uring", partial(_closing, "io_uring_setup", 4, bytes(120)))])


def _userfaultfd(ground: Ground) -> str:
    return try_all((f"flags {flags}", partial(_closing, "userfaultfd", flags)) for flags in (0o2000000, 0o2000001))


def _odd_calls(ground: Ground) -> str:
    """Make harmless, rare calls that only query, and change nothing."""
    ways = [("personality", partial(syscall, "personality", 0xFFFFFFFF))]
    if os.uname().machine == "x86_64":
        ways.append(("modify_ldt", partial(syscall, "modify_ldt", 0, bytes(16), 16)))
    return try_all(ways)


def _machine(ground: Ground) -> str:
    """Make calls for the machine's owner, with arguments that always fail, but with another error than EPERM."""
    now_s = time.time()

    def unless(allowed: int, name: str, *arguments: int | bytes | None) -> None:
        """Make a call that must fail; the error ``allowed`` means that the rights were there."""
        try:
            syscall(name, *arguments)
        except OSError as error:
            if error.errno != allowed:
                raise

    return try_all(
        [
            ("reboot", partial(unless, 22, "reboot", 0, 0, 0, None)),  # no magic number: EINVAL
            ("swapoff", partial(unless, 2, "swapoff", b"/no/such/swap")),
            ("finit_module", partial(unless, 9, "finit_module", -1, b"", 0)),
            ("kexec_load", partial(unless, 22, "kexec_load", 0, 17, None, 0xFFFF)),
            ("clock_settime", lambda: time.clock_settime(time.CLOCK_REALTIME, now_s + time.time() - now_s)),
            ("sethostname", lambda: _hostname()),
        ]
    )


def _hostname() -> None:
    name = os.uname().nodename.encode()
    syscall("sethostname", name, len(name))


def _proc_sys(ground: Ground) -> str:
    """Open the kernel's settings for writing; nothing is written."""
    names = (
        "sys/kernel/core_pattern",
        "sys/vm/overcommit_memory",
        "sys/kernel/sched_autogroup_enabled",
        "sys/kernel/pid_max",
        "sysrq-trigger",
        "sys/kernel/ns_last_pid",
    )
    return try_all((name, partial(_open_only, f"/proc/{name}", os.O_WRONLY)) for name in names)


def _open_only(path: str, flags: int) -> None:
    os.close(os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK))


def _devices(ground: Ground) -> str:
    """Open the machine's disks and memory; nothing is read or written."""
    names = [f"/dev/{name}" for name in os.listdir("/dev") if stat.S_ISBLK(os.stat(f"/dev/{name}").st_mode)]
    return try_all((name, partial(_open_only, name, os.O_RDONLY)) for name in [*names, "/dev/mem", "/dev/kmsg"])


def _mknod(ground: Ground) -> str:
    def make() -> None:
        path = ground.directory / "node"
        os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 3))  # as /dev/null
        path.unlink()

    return try_all([("a device", make)])


def _file_handle(ground: Ground) -> str:
    """Open a file by its handle, past all folders that hide it."""
    handle = struct.pack("=IiQ", 8, 1, 2).ljust(24, b"\0")  # the root of the disk

    def take() -> None:
        fd = os.open(ground.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.close(syscall("open_by_handle_at", fd, handle, 0))
        except OSError as error:
            if error.errno != 116:  # ESTALE: the file does not exist, but the right does
                raise
        finally:
            os.close(fd)

    return try_all([("open_by_handle_at", take)])


def _limits(ground: Ground) -> str:
    """Raise the job's own limits again."""

    def lift(which: int) -> None:
        _, hard = resource.getrlimit(which)
        more = hard if hard == resource.RLIM_INFINITY else hard + 1  # where there is no limit, it need not be raised
        try:
            resource.setrlimit(which, (more, more))
        except ValueError as error:  # what Python makes of EPERM
            raise PermissionError(str(error)) from error

    names = ("RLIMIT_DATA", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_CORE")
    return try_all((name, partial(lift, getattr(resource, name))) for name in names)


def _core_dump(ground: Ground) -> str:
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_CORE, (64 << 20, 64 << 20))
    os.abort()


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    yield Attack(refused("powers", "is root, has capabilities, or no filter of system calls"), _powers)
    yield Attack(
        refused("cgroup-kill-rank", "moves the ranks into a cgroup of its own, and kills that"), cgroups.kill, 2
    )
    yield Attack(refused("cgroup-freeze-rank", "the same, and freezes it for some seconds"), cgroups.freeze, 2)
    yield Attack(refused("cgroup-freeze-self", "freezes a cgroup that it is in", either=True), cgroups.freeze_self)
    yield Attack(refused("unshare", "namespaces of its own"), _unshare)
    yield Attack(refused("setns-rank", "enters the ranks' namespaces"), _setns)
    yield Attack(refused("mount", "mount and pivot_root"), _mount)
    yield Attack(refused("chroot", "chroot"), _chroot)
    yield Attack(refused("userfaultfd", "userfaultfd"), _userfaultfd)
    yield Attack(refused("bpf", "a BPF map"), _bpf)
    yield Attack(refused("perf-event", "counts its own and the ranks' events"), _perf)
    yield Attack(refused("keyring", "the kernel's keyrings"), _keys)
    yield Attack(refused("io-uring", "io_uring"), _io_uring)
    yield Attack(refused("odd-calls", "personality and modify_ldt"), _odd_calls)
    yield Attack(refused("machine", "reboot, swapoff, modules, kexec, clock, host name, in vain"), _machine)
    yield Attack(refused("proc-sys", "opens the kernel's settings for writing"), _proc_sys)
    yield Attack(refused("devices", "opens disks and the machine's memory"), _devices)
    yield Attack(refused("mknod", "makes a device file"), _mknod)
    yield Attack(refused("file-handle", "opens a file by its number"), _file_handle)
    yield Attack(refused("lift-limits", "raises its own limits"), _limits)
    yield Attack(fatal("core-dump", "dies with a core file as large as may be", "SIGABRT"), _core_dump)


ATTACKS = tuple(_tables())
