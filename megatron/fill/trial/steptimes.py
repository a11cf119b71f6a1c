"""Measures the steps of a plain side task alone: the duration and the peak memory of each kind."""

from __future__ import annotations

import math
import shutil
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from megatron.fill.device.meter import meter
from megatron.fill.errors import TaskError
from megatron.fill.linux.files import write_text
from megatron.fill.profiles import Configuration, JobProfile, MeasuredJob, NodeProfile
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.untrusted import to_json

STEP_TIMES = "steps.json"  # in the job's folder
SECONDS = 3.0  # duration of the measured steps in all


@dataclass(frozen=True, slots=True)
class KindTimes:
    """The steps of one kind (``SideTask.next_node``)."""

    kind: int
    count: int  # number of steps
    p50_ns: int
    p99_ns: int
    longest_ns: int
    first_ns: int  # duration of the first step, which may include one-time work
    peak_bytes: int  # peak memory of the task during any step

    @classmethod
    def of(cls, kind: int, measured: list[tuple[int, int]]) -> KindTimes:
        """Return the times of one kind, from each step's duration in ns and peak memory in bytes, in order."""
        times = sorted(duration_ns for duration_ns, _ in measured)
        p50_ns, p99_ns = (nearest_rank(times, share) for share in (0.5, 0.99))
        peak_bytes = max(size for _, size in measured)
        return cls(kind, len(times), p50_ns, p99_ns, times[-1], measured[0][0], peak_bytes)


def nearest_rank[T](ordered: Sequence[T], share: float) -> T:
    """Return the quantile by nearest rank: the least value that at least this share (above 0) does not exceed."""
    return ordered[math.ceil(share * len(ordered)) - 1]


def measure_steps(task: SideTask, context: TaskContext, args: dict[str, Any]) -> tuple[MeasuredJob, list[KindTimes]]:
    """Run a task for ``SECONDS`` of steps, or to its end; return its profile, without a device, and its times by kind.

    The profile has one node per kind of step, with the kind's median duration.  Its work is the measured rate times the
    nodes' total duration; so the rate is right, but the profile does not contain the frequencies of the kinds.

    Raises:
        TaskError: the task ended without having done any work.
    """
    scratch = context.directory / "profiling"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    machine = TaskMachine(task, replace(context, directory=scratch, measuring=True))
    meters = meter(context.device)
    measured: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    work, spent_ns = 0.0, 0
    try:
        machine.create(args)
        machine.init()
        machine.start()
        while spent_ns < SECONDS * 1e9:
            kind = task.next_node
            meters.start()
            start_ns = time.monotonic_ns()
            try:
                work += machine.run_next_step()
            except StopIteration:
                break
            _, peak_bytes = meters.stop()
            duration_ns = time.monotonic_ns() - start_ns
            measured[kind].append((duration_ns, peak_bytes))
            spent_ns += duration_ns
        machine.pause()
    finally:
        machine.stop()
        shutil.rmtree(scratch, ignore_errors=True)
    if not work:
        raise TaskError(f"it did no work in {sum(map(len, measured.values()))} steps; expected some to measure")
    kinds = [KindTimes.of(kind, measured[kind]) for kind in sorted(measured)]
    return MeasuredJob((_profile(kinds, work / spent_ns),), task.context.total_work), kinds


def _profile(kinds: list[KindTimes], work_per_ns: float) -> JobProfile:
    by_kind = {one.kind: (one.p50_ns, one.peak_bytes) for one in kinds}
    nodes = [NodeProfile(f"step of kind {kind}", *by_kind.get(kind, (0, 0))) for kind in range(max(by_kind) + 1)]
    duration_ns = sum(node.duration_ns for node in nodes)
    return JobProfile(Configuration(), tuple(nodes), work_per_ns * duration_ns)


def write_step_times(directory: Path, kinds: list[KindTimes]) -> None:
    write_text(directory / STEP_TIMES, to_json([asdict(one) for one in kinds]) + "\n")
