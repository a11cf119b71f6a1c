"""Side tasks beside a training without PipeFill's runtime: what bench_main.py compares with.

A task in each rank's own session, on the rank's core, in one of these ways:

* no gate: step after step, whenever a block is one with filling; between its steps the task is at idle priority, so
  on the emulated device this costs less than on a GPU, whose host would launch the next step at once;
* a gate alone: step after step from a bubble's start to its end, without any prediction;
* as FreeRide drives them (arXiv 2409.06941, and its artifact, github.com/jiashu-z/freeride): the rank announces a
  bubble when it begins, with an end that was profiled before; a manager looks for new bubbles every 10 ms and tells the
  task, which looks for that every 5 ms; a step begins only if its profiled time, rounded up to 10 ms and times 1.2, is
  left, and 5 ms of sleep follow it; the manager stops the task when the bubble was to have ended.

Where this is not FreeRide, it is to FreeRide's advantage: shared memory stands for its remote procedure calls, and the
manager of each rank takes no time from the main job.  Each bubble's profiled length is its shortest of the last five
iterations of the warm-up; the artifact has the shortest of each kind in one iteration.
"""

from __future__ import annotations

import json
import os
import runpy
import statistics
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.device.emulated import Emulation, Launches
from megatron.fill.linux import host
from megatron.fill.pages.gate import SharedGate, SharedGateReader
from megatron.fill.rank import spec
from megatron.fill.rank.listener import RankListener
from megatron.fill.records import last_segment
from megatron.fill.types import BubbleKind
from scripts.benchmarks.sidetasks import started, tasks_of
from scripts.benchmarks.trainings import (
    ROOT,
    Blocks,
    p99_slowdown,
    slowdown_of,
    train,
)

MANAGER_POLL_S, TASK_POLL_S = 0.010, 0.005
_STEP_NS = 10_000_000  # steps' profiled times are rounded up to multiples of it
PROFILED_ITERATIONS, PROFILED_STEPS = 5, 50
FAR_NS = 10**15


class When(StrEnum):
    """When the task beside a rank runs steps, in the blocks with filling."""

    ALWAYS = "always"
    BUBBLES = "bubbles"
    FREERIDE = "freeride"


@dataclass(frozen=True, slots=True)
class Way:
    """How the task beside a rank runs.

    Attributes:
        emulation: None for the idle class on the CPU as it is.
        step_ms: see ``tasks_of``.
    """

    emulation: str | None
    when: When
    step_ms: float | None = None


def beside(folder: Path, name: str, way: Way, blocks: Blocks) -> dict[str, Any]:
    """Train with a task beside each rank; what it cost and brought.

    Raises:
        RuntimeError: the training failed, or no step ran.
    """
    run_dir, log = folder / f"{name}-run", folder / f"{name}-steps"
    asked = {"way": asdict(way), "blocks": asdict(blocks), "log": str(log)}
    train(folder, name, blocks, [__file__, json.dumps(asked)], "--fill-report", str(run_dir))
    records = list(last_segment(run_dir).records())
    inside = np.zeros(2)
    bubbles_ns = 0
    for record in records:
        steps = np.fromfile(f"{log}{record.info.rank}", dtype=np.int64).reshape(-1, 3)
        on = [bubble for bubble in record.bubbles if blocks.fills(bubble.iteration)]
        bubbles_ns += sum(bubble.duration_ns for bubble in on)
        inside += sum((inside_ns(steps, bubble.start_ns, bubble.end_ns) for bubble in on), np.zeros(2))
    if not inside[0]:
        raise RuntimeError(f"{name}: no step ran in a bubble; see {folder / name}.log")
    iterations = blocks.mark(records[0].iterations)
    return {
        "slowdown": slowdown_of(iterations),
        "p99_slowdown": p99_slowdown(iterations),
        "harvest_ratio": inside[0] / bubbles_ns,
        "device_harvest": inside[1] / bubbles_ns,
    }


def inside_ns(steps: np.ndarray, start_ns: int, end_ns: int) -> np.ndarray:
    """The time of steps that is inside of a bubble, and how much of it they had the device, which is even over a step.

    Args:
        steps: [n, 3]: when each began and ended, and its CPU time.
    """
    overlap = (np.minimum(steps[:, 1], end_ns) - np.maximum(steps[:, 0], start_ns)).clip(min=0)
    return np.array([overlap.sum(), (overlap * (steps[:, 2] / (steps[:, 1] - steps[:, 0]))).sum()])


class Telling(RankListener):
    """A rank's listener that tells the task beside the rank of bubbles or of blocks.

    Args:
        told: open while a block is one with filling, in bubbles only, or, for FreeRide, from a bubble's start on, with
            its profiled end.
    """

    def __init__(self, told: SharedGate, way: Way, blocks: Blocks, *others: Any, **settings: Any) -> None:
        super().__init__(*others, **settings)
        self._told, self._way, self._alternation = told, way, blocks
        self._training_iteration = 0
        self._place: tuple[BubbleKind, int] | None = None  # in the cycle, of the latest bubble
        self._opened_ns = 0
        self._shortest_ns: dict[tuple[BubbleKind, int], int] = {}

    def iteration_started(self, iteration: int, now_ns: int, watched: bool | None = None) -> None:
        super().iteration_started(iteration, now_ns, watched)
        self._training_iteration = iteration
        if self._way.when is When.ALWAYS:
            if self._alternation.fills(iteration) and not self._alternation.fills(iteration - 1):
                self._told.open(now_ns + FAR_NS, 0)
            elif not self._alternation.fills(iteration):
                self._told.close(now_ns)

    def bubble_opened(self, kind: BubbleKind, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        super().bubble_opened(kind, index, now_ns, free_bytes)
        self._place, self._opened_ns = (kind, index), now_ns
        if self._way.when is When.ALWAYS or not self._alternation.fills(self._training_iteration):
            return
        expected_ns = FAR_NS if self._way.when is When.BUBBLES else self._shortest_ns.get(self._place, 0)
        if expected_ns:
            self._told.open(now_ns + expected_ns, 0)

    def bubble_closed(self, now_ns: int) -> None:
        if self._way.when is When.BUBBLES:
            self._told.close(now_ns)
        super().bubble_closed(now_ns)
        if self._place is not None and 0 <= self._alternation.warmup - self._training_iteration < PROFILED_ITERATIONS:
            shortest_ns = self._shortest_ns.get(self._place, FAR_NS)
            self._shortest_ns[self._place] = min(now_ns - self._opened_ns, shortest_ns)


def rank_with_task(asked: dict[str, Any], script: Sequence[str]) -> None:
    """One rank of a training, with a task in a process beside it, in its session."""
    way = Way(**asked["way"] | {"when": When(asked["way"]["when"])})
    blocks, rank = Blocks(**asked["blocks"]), int(os.environ["LOCAL_RANK"])
    core = sorted(os.sched_getaffinity(0))[rank]
    told, running = SharedGate(), SharedGate()
    gate = SharedGateReader((running if way.when is When.FREERIDE else told).reader_fd())
    launches = None if way.emulation is None else Launches(Emulation(way.emulation))
    read_fd, ready_fd = os.pipe()
    task = child(partial(run_task, rank, core, way, gate, launches, Path(f"{asked['log']}{rank}"), ready_fd))
    os.close(ready_fd)
    if not os.read(read_fd, 1):
        raise RuntimeError(f"the task beside rank {rank} ended before the training began")
    if way.when is When.FREERIDE:
        child(partial(manage, SharedGateReader(told.reader_fd()), running, core))
    if launches is not None and launches.turns is not None:
        child(
            partial(launches.turns.serve, task, [core], lambda: False, lambda: not gate.shut)
        )  # it ends with the rank
    spec.RankListener = partial(Telling, told, way, blocks)  # type: ignore[misc,assignment]
    sys.argv = [str(ROOT / "pretrain_gpt.py"), *script]
    runpy.run_path(sys.argv[0], run_name="__main__")


def child(work: Callable[[], None]) -> int:
    """A process that does this and ends with its parent; its id."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        host.die_with_parent(parent)
        work()
        os._exit(0)
    return pid


def manage(told: SharedGateReader, running: SharedGate, core: int) -> None:
    """FreeRide's manager: start the task when a bubble has begun, and pause it when the bubble was to have ended."""
    host.yield_to_main_job([core])
    seq, end_ns = 0, 0
    while True:
        now_ns = time.monotonic_ns()
        if now_ns > end_ns:
            running.close(now_ns)
            bubble = told.current(seq)
            if bubble is not None and bubble.deadline_ns > now_ns:
                seq, end_ns = bubble.seq, bubble.deadline_ns
                running.open(end_ns, 0)
        time.sleep(MANAGER_POLL_S)


def run_task(
    rank: int, core: int, way: Way, gate: SharedGateReader, launches: Launches | None, log: Path, ready_fd: int
) -> None:
    """Run a task's steps for ever, and write down when each began and ended, and its CPU time."""
    path, args = tasks_of(way.step_ms)[rank]
    with started(path, args, core, idle=True) as task, log.open("wb", buffering=0) as steps:

        def step() -> None:
            if launches is not None:
                launches.launch()
            start_ns, used_ns = time.monotonic_ns(), time.process_time_ns()
            task.run_next_step()
            times = struct.pack("qqq", start_ns, time.monotonic_ns(), time.process_time_ns() - used_ns)
            if launches is not None:
                launches.land()
            steps.write(times)

        reserve_ns = reserved_ns(round(profiled_ns(task.run_next_step)))
        os.write(ready_fd, b"1")
        if way.when is When.FREERIDE:
            step_as_freeride(step, gate, reserve_ns)
        seq = 0
        while True:
            block = gate.wait(seq)
            while block is not None and gate.is_open(block.seq):
                seq = block.seq
                step()


def profiled_ns(step: Callable[[], object]) -> float:
    """The median CPU time of a step."""
    times = []
    for _ in range(PROFILED_STEPS):
        before_ns = time.process_time_ns()
        step()
        times.append(time.process_time_ns() - before_ns)
    return statistics.median(times)


def reserved_ns(median_ns: int) -> int:
    """Time that must be left of a bubble for a step to begin."""
    return -(-median_ns // _STEP_NS) * _STEP_NS * 12 // 10


def step_as_freeride(step: Callable[[], None], gate: SharedGateReader, reserve_ns: int) -> None:
    """FreeRide's loop around the steps of an iterative task."""
    while True:
        bubble = gate.current()
        if bubble is not None:
            left_ns = bubble.deadline_ns - time.monotonic_ns()
            if left_ns > reserve_ns:
                step()
            else:
                time.sleep(max(0, left_ns) / 1e9)
        time.sleep(TASK_POLL_S)


if __name__ == "__main__":
    rank_with_task(json.loads(sys.argv[1]), sys.argv[2:])
