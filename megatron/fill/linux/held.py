"""The host memory that a worker holds, including memory that no process has mapped and memory in the kernel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from dataclasses import dataclass

from megatron.fill.linux.proc import names_in, numbers, read

_BLOCK_BYTES = 512  # unit of st_blocks on every file system
_INODE_BYTES = 1024  # a file in memory with its names and attributes, as the kernel itself counts it
_THREAD_BYTES = 32 << 10  # a thread's stack and data in the kernel
# Some of each are free, since a job needs them; any more are counted with the most memory that each can hold.
_FREE_FDS, _FD_BYTES = 1024, 8 << 10
_FREE_SOCKETS, _SOCKET_BYTES = 64, 416 << 10  # both buffers at the default size, which a job cannot change
_FREE_PIPES, _PIPE_BYTES = 64, 64 << 10  # a job cannot change this size either
_WATCH_BYTES = 192  # one descriptor in one epoll instance
_MOST_LINKS = 8192  # greatest number of descriptors that are resolved one by one, so that a count ends in time
_SHARED = ("/memfd:", "/dev/zero", "/SYSV")  # memory that processes share without a file system


@dataclass(frozen=True, slots=True)
class Held:
    """The memory of a worker's processes, in bytes."""

    private: int  # anonymous memory, resident or swapped out; a page shared since a fork counts in each process
    mapped: int  # mapped shared memory, counted in each process that maps it
    files: int  # files in memory, mapped or not
    kernel: int  # page tables, stacks of threads, descriptors, buffers

    @property
    def likely_bytes(self) -> int:
        """The total if the mapped memory is that of the files."""
        return self.private + max(self.mapped, self.files) + self.kernel

    @property
    def most_bytes(self) -> int:
        """The total if the mapped memory is other than that of the files."""
        return self.private + self.mapped + self.files + self.kernel


def private_bytes(pid: int, proc: str = "/proc") -> int:
    """A process's memory, resident or swapped out, without that of files on disk; 0 once the process is gone."""
    status = numbers(f"{proc}/{pid}/status")
    return 1024 * sum(status.get(name, 0) for name in ("RssAnon", "RssShmem", "VmSwap"))


class HeldMemory:
    """A counter of a worker's memory.

    Args:
        pid: a process of the worker, before the job begins in it.  The places that show the worker's own file system in
            memory and its own network are kept from then on, since a job can make its processes unreadable.
    """

    def __init__(self, pid: int) -> None:
        self._memory_fd: int | None = None  # the worker's own file system in memory: its ``/tmp`` and ``/dev/shm``
        with contextlib.suppress(OSError):
            place = f"/proc/{pid}/root/dev/shm"
            if os.stat(place).st_dev != os.stat("/dev/shm").st_dev:
                self._memory_fd = os.open(place, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._sockets = ""  # counts those of the worker's own network
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/ns/net").st_ino != os.stat("/proc/self/ns/net").st_ino:
                self._sockets = f"/proc/{pid}/net/sockstat"
        self._kept_files: tuple[int, ...] = ()  # inodes of the files in memory that were counted last

    def count(self, pids: Collection[int]) -> Held:
        """Count the memory of these processes; takes a few file reads for each."""
        private = mapped = kernel = descriptors = watches = 0
        sizes: dict[int, int] = {}
        sockets: set[str] = set()
        pipes: set[str] = set()
        for pid in pids:
            status = numbers(f"/proc/{pid}/status")
            private += 1024 * sum(status.get(name, 0) for name in ("RssAnon", "VmSwap", "HugetlbPages"))
            mapped += 1024 * status.get("RssShmem", 0)
            kernel += 1024 * status.get("VmPTE", 0) + _THREAD_BYTES * status.get("Threads", 0)
            folder = f"/proc/{pid}/fd"
            entries = [f"{folder}/{name}" for name in names_in(folder)]
            polls = 0
            for entry in entries[: max(0, _MOST_LINKS - descriptors)]:
                with contextlib.suppress(OSError):  # it was closed just now, or is not readable
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
        """The memory of these processes with every page counted once; None if the kernel does not report it.

        Slow: the kernel walks the page tables.  ``held`` is what ``count`` has returned for them just before.
        """
        private = mapped = 0
        for pid in pids:
            found = numbers(f"/proc/{pid}/smaps_rollup")
            if not found:
                return None
            private += 1024 * (found.get("Pss_Anon", 0) + found.get("SwapPss", 0))
            mapped += 1024 * found.get("Pss_Shmem", 0)
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
        """The number of sockets in the worker's own network, also those being passed in another; 0 if it has none."""
        for line in read(self._sockets).splitlines() if self._sockets else ():
            if line.startswith(b"sockets: used "):
                return int(line.split()[2])
        return 0

    def _shared_bytes(self, pid: int) -> int:
        """The shared memory that a process maps and that is not in a counted file, as its share of each page (Pss)."""
        total, counts = 0, False
        shared = _SHARED if self._memory_fd is not None else (*_SHARED, "/dev/shm/")
        for line in read(f"/proc/{pid}/smaps").splitlines():
            name, _, value = line.partition(b":")
            if b" " in name:  # first line of a mapping: addresses, permissions, offset, device, inode, path
                fields = line.decode(errors="replace").split(maxsplit=5)
                path = fields[5] if len(fields) > 5 else ""
                counts = path.startswith(shared) and int(fields[4]) not in self._kept_files
            elif counts and name == b"Pss":
                total += 1024 * int(value.split()[0])
        return total


def _beyond(count: int, free: int, bytes_each: int) -> int:
    return max(0, count - free) * bytes_each
