"""Attacks on writable files in ``/proc``: those of the job, its threads, its children, and others."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial

from tests.chaos.attacks.base import Attack, Ground, in_child, try_all
from tests.chaos.attacks.calls import syscall
from tests.chaos.kind import attack

_NEW_USER = 0x10000000
_STANDING = {  # settings of a process in the kernel: scheduling, OOM killing, core dumps
    "oom_score_adj": "0",
    "oom_adj": "15",
    "autogroup": "19",
    "timerslack_ns": "1000000000",
    "coredump_filter": "0xff",
    "clear_refs": "1",
    "sched": "0",
    "comm": "nobody",
}
_ODD = ("loginuid", "timens_offsets", "attr/current", "attr/exec", "make-it-fail", "fail-nth", "projid_map")


def write(path: str, text: str) -> None:
    """Write to an existing file.

    Raises:
        OSError: the kernel refused it.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def _own(name: str, text: str, ground: Ground) -> str:
    """Write to a file of this process, by each of its paths."""
    folders = ("/proc/self", "/proc/thread-self", f"/proc/{os.getpid()}")
    return try_all((folder, partial(write, f"{folder}/{name}", text)) for folder in folders)


def _each(names: dict[str, str], folders: list[str]) -> str:
    return try_all(
        (f"{folder}/{name}", partial(write, f"{folder}/{name}", text))
        for folder in folders
        for name, text in names.items()
    )


def _threads(ground: Ground) -> str:
    """Write to the files of a second thread."""
    over = threading.Event()
    thread = threading.Thread(target=over.wait, args=(5.0,), daemon=True)
    thread.start()
    try:
        return _each(_STANDING, [f"/proc/self/task/{thread.native_id}"])
    finally:
        over.set()


def _child(ground: Ground) -> str:
    """Write to the files of a child, which has the same user."""
    pid = os.fork()
    if pid == 0:
        time.sleep(5.0)
        os._exit(0)
    try:
        return _each(_STANDING, [f"/proc/{pid}"])
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _others(pids: Callable[[Ground], list[int]], ground: Ground) -> str:
    return _each(_STANDING, [f"/proc/{pid}" for pid in pids(ground)])


def _memory(ground: Ground) -> str:
    """Write to its own memory as a file, which ignores the protection of pages."""

    def change(path: str) -> None:
        kept = bytearray(b"kept")
        address = ctypes.addressof((ctypes.c_char * len(kept)).from_buffer(kept))
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            os.pwrite(fd, b"lost", address)
        finally:
            os.close(fd)

    return try_all((path, partial(change, path)) for path in ("/proc/self/mem", "/proc/thread-self/mem"))


def _id_maps(ground: Ground) -> str:
    """Become root in a user namespace."""
    user = os.getuid()

    def become_root() -> None:
        syscall("unshare", _NEW_USER)
        write("/proc/self/setgroups", "deny")
        write("/proc/self/uid_map", f"0 {user} 1")

    return try_all([("root of a user namespace", lambda: in_child(become_root))])


def _odd(ground: Ground) -> str:
    return try_all((name, partial(write, f"/proc/self/{name}", "0")) for name in _ODD)


def _unmounted(ground: Ground) -> str:
    """Write to the same files past the read-only mount: by descriptors of folders, and through links."""
    text = b"19"

    def by(path: str, name: str) -> None:
        folder = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fd = os.open(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=folder)
        finally:
            os.close(folder)
        try:
            os.write(fd, text)
        finally:
            os.close(fd)

    def link() -> None:
        path = ground.directory / "link-to-proc"
        path.symlink_to("/proc/self/autogroup")
        try:
            write(str(path), "19")
        finally:
            path.unlink()

    return try_all(
        [
            ("by a folder", partial(by, "/proc/self", "autogroup")),
            ("by the root", partial(by, "/proc/self/root", "proc/self/autogroup")),
            ("by its own folder", partial(by, "/proc/self/cwd", "../../../../../../proc/self/autogroup")),
            ("by a link", link),
        ]
    )


def _kept_open(ground: Ground) -> str:
    """Write through descriptors that the parent has left open."""

    def use(entry: str) -> None:
        name = os.readlink(f"/proc/self/fd/{entry}")
        if not name.startswith("/proc/") or name.endswith("/clear_refs"):  # a job may reset its own peak
            raise FileNotFoundError(name)
        os.write(int(entry), b"0")

    return try_all((entry, partial(use, entry)) for entry in os.listdir("/proc/self/fd"))


def _tables() -> Iterator[Attack]:
    refused = partial(attack, refused=True)
    for name, text in _STANDING.items():
        said = name.replace("_", "-")
        yield Attack(refused(f"own-{said}", f"writes {text} to its own {name}"), partial(_own, name, text), 1.0)
    yield Attack(refused("own-threads", "writes all these of a thread"), _threads)
    yield Attack(refused("own-child", "writes all these of a child"), _child)
    yield Attack(refused("own-memory", "writes to its memory as a file"), _memory)
    yield Attack(refused("own-id-maps", "writes uid_map of a user namespace"), _id_maps)
    yield Attack(refused("own-odd", "writes loginuid, attr/current, timens_offsets and others"), _odd)
    yield Attack(refused("own-past-mount", "writes its autogroup by folders and links"), _unmounted, 1.0)
    yield Attack(refused("own-kept-open", "writes through descriptors of /proc that were left open"), _kept_open)
    yield Attack(refused("standing-rank", "writes all these of the ranks"), partial(_others, lambda g: g.ranks()), 1.0)
    yield Attack(
        refused("standing-agent", "writes all these of agents and wardens"), partial(_others, lambda g: g.agents())
    )
    yield Attack(
        refused("standing-init", "writes all these of process 1 of its namespace"), partial(_others, lambda g: [1])
    )


ATTACKS = tuple(_tables())
