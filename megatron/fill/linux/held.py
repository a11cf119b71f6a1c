"""The host memory that one worker holds, also what no process has mapped and what the kernel holds on its behalf."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.linux.tree import read

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system's are
_INODE_BYTES = 1024  # what a file in memory takes, and its names and attributes: the kernel's own measure of them
_THREAD_BYTES = 32 << 10  # a stack in the kernel, and what it knows of a thread
# A job needs some of each, which are free; what is more is charged the most that one can hold.
_FREE_FDS, _FD_BYTES = 1024, 8 << 10
_FREE_SOCKETS, _SOCKET_BYTES = 64, 416 << 10  # both buffers of the default size, which a job cannot change
_FREE_PIPES, _PIPE_BYTES = 64, 64 << 10  # nor this one
_WATCH_BYTES = 192  # one descriptor in one epoll instance
_MOST_LINKS = 8192  # descriptors that are looked at one by one; the watch has to come to an end
_SHARED = ("/memfd:", "/dev/zero", "/SYSV")  # memory that is shared by descriptor or descent, and no file system's


@dataclass(frozen=True, slots=True)
class Held:
    """What a worker's processes hold, in bytes.

    Attributes:
        private: anonymous memory, resident or swapped out; a page that processes share since a fork counts in each.
        mapped: shared memory that is mapped, in each process that has it.
        files: files in memory, mapped or not.
        kernel: page tables, stacks of threads, descriptors, buffers.
    """

    private: int
    mapped: int
    files: int
    kernel: int

    @property
    def likely_bytes(self) -> int:
        """What is mapped being the files."""
        return self.private + max(self.mapped, self.files) + self.kernel

    @property
    def most_bytes(self) -> int:
        """What is mapped being other than the files."""
        return self.private + self.mapped + self.files + self.kernel


def private_bytes(pid: int, proc: str = "/proc") -> int:
    """What one process has, resident or swapped out, that is no file's on a disk; 0 once it is gone."""
    status = _numbers(f"{proc}/{pid}/status")
    return 1024 * sum(status.get(name, 0) for name in (b"RssAnon", b"RssShmem", b"VmSwap"))


class HeldMemory:
    """Counts one worker's memory, again and again.

    Args:
        pid: a process of it, which has not begun: what shows its own file system in memory and its own network is
            kept from then on, since a job can close its processes to us.
        proc: for tests.
    """

    def __init__(self, pid: int, proc: str = "/proc") -> None:
        self._proc = proc
        self._memory_fd = _own_memory_files(pid, proc)
        self._sockets = f"{proc}/{pid}/net/sockstat" if _has_own_network(pid, proc) else ""
        self._kept_files: tuple[int, ...] = ()  # inodes of the files in memory that were counted last

    def count(self, pids: Collection[int]) -> Held:
        """What these processes hold now; a few file reads for each."""
        private = mapped = kernel = descriptors = watches = 0
        sizes: dict[int, int] = {}
        sockets: set[str] = set()
        pipes: set[str] = set()
        for pid in pids:
            status = _numbers(f"{self._proc}/{pid}/status")
            private += 1024 * sum(status.get(name, 0) for name in (b"RssAnon", b"VmSwap", b"HugetlbPages"))
            mapped += 1024 * status.get(b"RssShmem", 0)
            kernel += 1024 * status.get(b"VmPTE", 0) + _THREAD_BYTES * status.get(b"Threads", 0)
            entries = _entries(f"{self._proc}/{pid}/fd")
            polls = 0
            for entry in entries[: max(0, _MOST_LINKS - descriptors)]:
                with contextlib.suppress(OSError):  # it was closed just now, or is not ours to see
                    target = os.readlink(entry)
                    if target.startswith("/memfd:"):
                        found = os.stat(entry)
                        sizes[found.st_ino] = found.st_blocks * _BLOCK_BYTES
                    elif target.startswith("socket:"):
                        sockets.add(target)
                    elif target.startswith("pipe:"):
                        pipes.add(target)
                    polls += target == "anon_inode:[eventpoll]"
            watches += polls * len(entries)
            descriptors += len(entries)
        self._kept_files = tuple(sizes)
        kernel += watches * _WATCH_BYTES + _beyond(descriptors, _FREE_FDS, _FD_BYTES)
        kernel += _beyond(self._own_sockets() or len(sockets), _FREE_SOCKETS, _SOCKET_BYTES)
        kernel += _beyond(len(pipes), _FREE_PIPES, _PIPE_BYTES)
        return Held(private, mapped, sum(sizes.values()) + self._own_files(), kernel)

    def exact_bytes(self, pids: Collection[int], held: Held) -> int | None:
        """What they hold with every page counted once.  Slow: it walks the page tables.

        Args:
            held: what was counted of them just now.

        Returns:
            None where the kernel does not say.
        """
        private = mapped = 0
        for pid in pids:
            found = _numbers(f"{self._proc}/{pid}/smaps_rollup")
            if not found:
                return None
            private += 1024 * (found.get(b"Pss_Anon", 0) + found.get(b"SwapPss", 0))
            mapped += 1024 * found.get(b"Pss_Shmem", 0)
        if mapped and held.files:
            mapped = min(mapped, sum(self._shared_bytes(pid) for pid in pids))
        return private + mapped + held.files + held.kernel

    def close(self) -> None:
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None

    def _own_files(self) -> int:
        if self._memory_fd is None:
            return 0
        found = os.fstatvfs(self._memory_fd)
        return (found.f_blocks - found.f_bfree) * found.f_frsize + (found.f_files - found.f_ffree) * _INODE_BYTES

    def _own_sockets(self) -> int:
        """How many there are in its own network, also those that are on their way in another; 0 without one."""
        for line in read(self._sockets).splitlines() if self._sockets else ():
            if line.startswith(b"sockets: used "):
                return int(line.split()[2])
        return 0

    def _shared_bytes(self, pid: int) -> int:
        """What a process has mapped of shared memory that is none of the counted files, each page once over all."""
        total, counts = 0, False
        shared = _SHARED if self._memory_fd is not None else (*_SHARED, "/dev/shm/")
        for line in read(f"{self._proc}/{pid}/smaps").splitlines():
            name, _, value = line.partition(b":")
            if b" " in name:  # the head of a mapping: where, how, offset, device, inode, path
                fields = line.decode(errors="replace").split(maxsplit=5)
                path = fields[5] if len(fields) > 5 else ""
                counts = path.startswith(shared) and int(fields[4]) not in self._kept_files
            elif counts and name == b"Pss":
                total += 1024 * int(value.split()[0])
        return total


def _own_memory_files(pid: int, proc: str) -> int | None:
    """Its ``/tmp`` and ``/dev/shm``, which are one file system in memory, if it has its own; None if not."""
    with contextlib.suppress(OSError):
        place = f"{proc}/{pid}/root/dev/shm"
        if os.stat(place).st_dev != os.stat("/dev/shm").st_dev:
            return os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    return None


def _has_own_network(pid: int, proc: str) -> bool:
    with contextlib.suppress(OSError):
        return os.stat(f"{proc}/{pid}/ns/net").st_ino != Path(f"{proc}/self/ns/net").stat().st_ino
    return False


def _beyond(count: int, free: int, bytes_each: int) -> int:
    return max(0, count - free) * bytes_each


def _entries(folder: str) -> list[str]:
    try:
        return [f"{folder}/{name}" for name in os.listdir(folder)]
    except OSError:
        return []


def _numbers(path: str) -> dict[bytes, int]:
    """The numbers of a file of names and numbers, in its own units."""
    found = {}
    for line in read(path).splitlines():
        name, _, value = line.partition(b":")
        first = value.split(maxsplit=1)[:1]
        if first and first[0].isdigit():
            found[name] = int(first[0])
    return found
