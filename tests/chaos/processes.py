"""The processes of a chaos run, found by their environment, command line or working folder."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from megatron.fill.linux.proc import stat_fields
from megatron.fill.linux.tree import TICKS_PER_S, read_process
from tests.chaos.programs import agent_program, worker_program


def running(variable: str, folder: Path) -> list[int]:
    """The processes of a chaos run: with this ``NAME=VALUE`` in their environment, or working in or for this folder.

    The latter finds processes whose environment a job has replaced.
    """
    return sorted({*_found("environ", variable), *_within(folder), *_standing_by(folder)} - {os.getpid()})


def _all() -> Iterator[int]:
    """All pids of the machine."""
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _within(folder: Path) -> Iterator[int]:
    """The processes whose working folder is below this one."""
    inside = str(folder) + os.sep
    for pid in _all():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/cwd").startswith(inside):
                yield pid


def _standing_by(folder: Path) -> Iterator[int]:
    """The idle workers of runs in this folder."""
    inside = str(folder) + os.sep
    for pid in _all():
        with contextlib.suppress(OSError):
            line = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes())
            if worker_program() in line and f"\0{inside}" in line:
                yield pid


def _found(file: str, *entries: str) -> list[int]:
    """The processes whose ``/proc/PID/FILE`` has all of these entries."""
    wanted = {entry.encode() for entry in entries}
    found = []
    for pid in _all():
        with contextlib.suppress(OSError):
            if wanted <= set(Path(f"/proc/{pid}/{file}").read_bytes().split(b"\0")):
                found.append(pid)
    return found


def agents(run_dir: Path) -> dict[int, int]:
    """The pids of a run's agents, by rank."""
    found = {}
    for path in (run_dir / "agents").glob("spec*.json"):
        pids = _found("cmdline", agent_program(), str(path))
        if pids:
            found[int(path.stem.removeprefix("spec"))] = pids[0]
    return found


def state(pid: int) -> str:
    """The kernel's letter for a process: ``T`` stopped, ``Z`` dead; empty if it does not exist."""
    process = read_process(pid)
    return "" if process is None else process.state


def alive(pid: int) -> bool:
    """True if the process exists and has not ended."""
    return state(pid) not in ("", "Z")


def parent(pid: int) -> int:
    """The pid of a process's parent; 0 if the process has ended."""
    process = read_process(pid)
    return 0 if process is None else process.parent


def below(tops: Iterable[int]) -> list[int]:
    """All descendants of these processes."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for pid in _all():
        children[parent(pid)].append(pid)
    found, left = [], list(tops)
    while left:
        found += (below_one := children.pop(left.pop(), []))
        left += below_one
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """The CPU time of these processes in seconds; 0 for those that have ended."""
    fields = [stat_fields(f"/proc/{pid}/stat")[13:15] for pid in pids]  # in user mode and in the kernel
    return sum(map(int, itertools.chain.from_iterable(fields))) / TICKS_PER_S


def worker_of(inner: int, folder: int, tops: Iterable[int]) -> int | None:
    """The pid, in this namespace, of the process with the pid ``inner`` in its own; None if there is none.

    Args:
        folder: inode of its working folder; 0 if unknown.
        tops: processes of which one is an ancestor.
    """
    for pid in below(tops):
        with contextlib.suppress(OSError, StopIteration, ValueError):
            lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
            numbers = next(line for line in lines if line.startswith("NSpid:")).split()[1:]
            if int(numbers[-1]) == inner and folder in (0, os.stat(f"/proc/{pid}/cwd").st_ino):
                return pid
    return None


def at_work_in(folder: Path, pids: Iterable[int]) -> list[int]:
    """Those of these processes whose working folder is this one, by inode."""
    found, wanted = [], folder.stat().st_ino
    for pid in pids:
        with contextlib.suppress(OSError):
            if os.stat(f"/proc/{pid}/cwd").st_ino == wanted:
                found.append(pid)
    return found


def maps(pid: int) -> str:
    """The content of ``/proc/PID/maps``; empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
    except OSError:
        return ""


def send(pid: int, number: signal.Signals) -> bool:
    """Signal a process; return False if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def await_end(variable: str, folder: Path, within_s: float) -> None:
    """Wait until no process of the run is left, at most ``within_s``."""
    end_s = time.monotonic() + within_s
    while running(variable, folder) and time.monotonic() < end_s:
        time.sleep(0.1)


def end_all(variable: str, folder: Path, within_s: float = 5.0) -> list[int]:
    """End every process of the run, also those that multiply; return the pids that were found first.

    Args:
        variable: ``NAME=VALUE`` in their environment.
        folder: folder of the chaos run.
    """
    found = running(variable, folder)
    end_s = time.monotonic() + within_s
    left = found
    while left and time.monotonic() < end_s:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in left:
                send(pid, number)
        time.sleep(0.05)
        left = running(variable, folder)
    return found
