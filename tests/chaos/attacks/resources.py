"""Attacks on limited resources of the machine: memory, processes, files, output.  All are small."""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron.fill.linux.libc import last_error, libc
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, beside
from tests.chaos.kind import DISK, MIB, attack, fatal

_SHARED_MEMORY = Path("/dev/shm")
_MOST = 400 * MIB
_INODES, _FORKS, _THREADS = 20_000, 1_500, 400
_FULL = "only a quota of the file system keeps a job from filling its disk; the store on it stops then"
_KEPT_S = 2.0
_HELD: list[object] = []  # until the process ends


def _later(seconds: float, path: Path) -> None:
    """Remove a folder after a while, in a thread."""

    def remove() -> None:
        time.sleep(seconds)
        shutil.rmtree(path, ignore_errors=True)

    beside(remove)


def _memory_files(ground: Ground) -> str:
    """Memory in anonymous files that are written and not mapped, so no address space shows it."""
    fd = os.memfd_create("hoard")

    def write() -> None:
        for _ in range(_MOST // (4 * MIB)):
            os.write(fd, bytes(4 * MIB))
            time.sleep(0.005)

    beside(write)
    return ""


def _shared_memory(ground: Ground) -> str:
    """Fill /dev/shm, up to 400 MiB."""
    place = Path(tempfile.mkdtemp(prefix="pipefill-chaos-", dir=_SHARED_MEMORY))
    try:
        with suppress(OSError), (place / "full").open("wb", buffering=0) as file:
            for _ in range(_MOST // (4 * MIB)):
                file.write(bytes(4 * MIB))
                time.sleep(0.001)
    finally:
        _later(_KEPT_S, place)
    return ""


def _inodes(ground: Ground) -> str:
    place = Path(tempfile.mkdtemp(prefix="pipefill-chaos-", dir=_SHARED_MEMORY))

    def make() -> None:
        with suppress(OSError):
            for number in range(_INODES):
                (place / str(number)).touch()
        time.sleep(_KEPT_S)
        shutil.rmtree(place, ignore_errors=True)

    beside(make)
    return ""


def _fill_disk(ground: Ground) -> str:
    """Fill the disk of the run folder, which is a small one of the chaos run."""
    if shutil.disk_usage(ground.directory).total > 1 << 30:
        raise NoTargetError("it is the machine's disk")
    path = ground.directory / "full"

    def fill() -> None:
        with suppress(OSError), path.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(MIB))
        time.sleep(_KEPT_S)
        path.unlink(missing_ok=True)

    beside(fill)
    return ""


def _processes(ground: Ground) -> str:
    """Start processes that end at once, one after the other, so that pids run out and are used again."""
    end_s = time.monotonic() + 3.0
    for _ in range(_FORKS):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        if time.monotonic() > end_s:
            break
    return ""


def _zombies(ground: Ground) -> str:
    """Children that have ended and are never waited for."""
    for _ in range(600):
        if os.fork() == 0:
            os._exit(0)
    time.sleep(2.0)
    return ""


def _threads(ground: Ground) -> str:
    over = threading.Event()
    threading.stack_size(64 * 1024)
    for _ in range(_THREADS):
        threading.Thread(target=over.wait, args=(10.0,), daemon=True).start()
    time.sleep(3.0)
    raise RuntimeError(f"started {_THREADS} threads")


def _lock_memory(ground: Ground) -> str:
    """Memory that cannot be swapped out, more than the kernel grants every user."""
    held = mmap.mmap(-1, 96 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(held))):
        raise last_error("mlock")
    _HELD.append(held)
    return "96 MiB"


def _huge_line(ground: Ground) -> str:
    """A line of 3 MiB, within the cap on output."""

    def write() -> None:
        for _ in range(48):
            os.write(1, b"x" * 65536)

    beside(write)
    return ""


def _no_output(ground: Ground) -> str:
    """Close standard output, and put the reading end of a pipe in place of standard error."""
    read, write = os.pipe()
    os.dup2(write, 1)
    os.dup2(read, 2)
    os.close(read)
    os.close(write)
    os.close(1)
    return ""


def _escapes(ground: Ground) -> str:
    os.write(1, b"\x1b[2J\x1b]0;owned\x07\x9b31m\r\x00" * 1000 + b"\n")
    return ""


def _pipes(ground: Ground) -> str:
    """Full pipes, which take the kernel's memory."""
    held = []
    with suppress(OSError):
        for _ in range(200):
            read, write = os.pipe()
            held += [read, write]
            os.set_blocking(write, False)
            os.write(write, bytes(65536))
    time.sleep(1.0)
    for fd in held:
        os.close(fd)
    return ""


def _names(ground: Ground) -> str:
    """Files in its own folder with names that a terminal acts on."""
    for number in range(200):
        (ground.directory / f"\x1b[31m\n{number}\u202e").touch()
    return ""


def _tables() -> Iterator[Attack]:
    either = partial(attack, either=True)
    files = either("memory-files", "400 MiB in memory files that are not mapped")
    yield Attack(replace(files, memory_bytes=256 * MIB), _memory_files, 10.0)
    yield Attack(either("shm-full", "400 MiB in /dev/shm, or all of it"), _shared_memory, 3.0)
    yield Attack(either("shm-inodes", "20,000 files in /dev/shm"), _inodes, 3.0)
    disk = either("disk-fill-inside", "fills the disk of the run folder, and leaves it so", needs=DISK)
    yield Attack(replace(disk, open=_FULL), _fill_disk, 3.0)
    yield Attack(either("pid-space", "1,500 processes one after the other"), _processes)
    yield Attack(either("zombies", "600 children that nobody waits for"), _zombies)
    yield Attack(fatal("thread-bomb", "400 threads", "process|thread"), _threads)
    yield Attack(attack("lock-memory", "96 MiB locked into memory", refused=True), _lock_memory)
    yield Attack(attack("huge-line", "a line of 3 MiB"), _huge_line, 1.0)
    yield Attack(attack("no-output", "closes and replaces its output"), _no_output)
    yield Attack(attack("escapes", "terminal escapes in its output"), _escapes)
    yield Attack(either("pipes", "hundreds of full pipes"), _pipes)
    yield Attack(attack("file-names", "files with names of newlines and escapes"), _names)


ATTACKS = tuple(_tables())
