"""Deaths of a training, one after the other: what its jobs lose by them, and how soon they fill again."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tests.e2e.training import Running, processes, settings, write_jobs
from tests.support.waiting import until

_WARMUP = 3
_JOBS = [{"name": name, "task": "tasks:Timed"} for name in ("first", "second")]


@dataclass(frozen=True)
class Death:
    """A death of the training, and its next start.

    Attributes:
        kind: what was killed: one ``rank``, or all processes, as with a ``node``.
        lost_steps: steps that the job which lost most does again.
        lost_s: time from the first step that it does again to its last one before the death.
        pause_s: longest time between two of these steps, in which no bubble was filled, as in a probe of the brake.
        filling_after_s: time from the first iteration whose bubbles are predicted until both jobs are at work.
    """

    kind: str
    lost_steps: int
    lost_s: float
    pause_s: float
    filling_after_s: float


def kill(running: Running) -> None:
    """All that belongs to it at once, as with a node that is lost: nobody can save anything or say a word."""
    pids = {running.process.pid, *running.ranks(), *processes(str(running.folder))}
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    running.process.wait(240)


class Fate(NamedTuple):
    """A death that is to come; ``after_s`` is the least time since the one before it, in seconds."""

    kind: str
    after_s: float = 0.0


def in_turn(count: int) -> list[Fate]:
    """Return that many deaths, of all processes and of a rank in turn."""
    return [Fate("rank" if number % 2 else "node") for number in range(count)]


def traced(trace: Path, speed: float) -> list[Fate]:
    """Return the deaths of a training on all nodes of an availability trace of spot machines.

    Args:
        trace: lines ``MILLISECONDS,add,NODE`` and ``MILLISECONDS,remove,NODE`` in the order of time, as in the folder
            ``traces`` of the repository uclasystem/bamboo.  The training's two ranks stand for half of the nodes each,
            as they come: it dies whenever nodes are removed, of a rank, or whole if they are of both halves.
        speed: seconds of the trace in one of the benchmark.

    Raises:
        ValueError: a line is something else; the message says which.
    """
    removed: dict[int, set[int]] = {}
    nodes: dict[str, int] = {}
    for number, line in enumerate(trace.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        match line.split(","):
            case [at_ms, "add", node] if at_ms.isdigit():
                nodes.setdefault(node, len(nodes) % 2)
            case [at_ms, "remove", node] if at_ms.isdigit() and node in nodes:
                removed.setdefault(int(at_ms), set()).add(nodes[node])
            case _:
                raise ValueError(f"{trace}, line {number}: {line!r}; expected MILLISECONDS,add,NODE or a later remove")
    moments = sorted(removed)
    return [
        Fate("node" if len(removed[moment]) > 1 else "rank", (moment - before) / 1000 / speed)
        for before, moment in zip([*moments[:1], *moments], moments, strict=False)
    ]


def die(folder: Path, fates: Sequence[Fate], checkpoint_s: float = 1.0, seed: int = 0) -> list[Death]:
    """Let a training with two jobs die so, each time at a random moment after both are at work, and start it again."""
    draw, found = random.Random(seed), []
    flags = f"{write_jobs(folder, *_JOBS)} --fill-checkpoint-seconds {checkpoint_s}"
    flags += f" {settings(warmup_iterations=_WARMUP, lease_seconds=2)}"
    kind, died_ns, before = "", 0, [array("q")]
    for fate in [*fates, None]:
        running = Running(folder, flags)
        try:
            ready_ns = _fills(running, died_ns)
            if kind:
                found.append(_death(kind, before, _steps(running), died_ns, ready_ns))
            if fate is None:
                running.end()
                break
            kind, earliest_s = fate.kind, died_ns / 1e9 + fate.after_s
            time.sleep(max(draw.uniform(0, 3 * checkpoint_s), earliest_s - time.monotonic()))
            if kind == "rank":
                os.kill(draw.choice(running.ranks()), signal.SIGKILL)
                running.process.wait(240)
                until(lambda: not processes(str(folder)))
            else:
                kill(running)
            died_ns, before = time.monotonic_ns(), _steps(running)
        finally:
            running.process.kill()
    return found


def _fills(running: Running, died_ns: int) -> int:
    """Wait until both jobs have done a step since then; return when bubbles could first be predicted."""
    running.wait(lambda: running.iterations >= _WARMUP)
    ready_ns = time.monotonic_ns()
    running.wait(lambda: all(times and times[-1] > died_ns for times in _steps(running)))
    return ready_ns


def _steps(running: Running) -> list[array[int]]:
    """The times of the steps of each job that count, in ns of CLOCK_MONOTONIC."""
    found = []
    for job in _JOBS:
        directory, times = running.job(job["name"]).directory, array("q")
        with contextlib.suppress(FileNotFoundError):
            data = (Path(directory) / "steps").read_bytes() if directory else b""
            times.frombytes(data[: len(data) // times.itemsize * times.itemsize])
        found.append(times)
    return found


def _death(kind: str, before: list[array[int]], after: list[array[int]], died_ns: int, ready_ns: int) -> Death:
    lost: list[list[int]] = []
    filling_ns = []
    for old, new in zip(before, after, strict=True):
        kept = sum(at_ns < died_ns for at_ns in new)
        lost.append(old[kept:].tolist())
        filling_ns.append(new[kept] - ready_ns)
    most = max(lost, key=lambda times: times[-1] - times[0] if times else 0)
    pauses_ns = [after_ns - before_ns for before_ns, after_ns in pairwise(most)]
    return Death(kind, len(most), sum(pauses_ns) / 1e9, max(pauses_ns, default=0) / 1e9, max(0, *filling_ns) / 1e9)
