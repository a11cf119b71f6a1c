"""A step loop's environment in virtual time: the core, the gate, the task and the step log.

The clock jumps, the gate opens with the given bubbles, and a step takes as long as a recorded step of the task.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.fill.pages.gate import OpenBubble
from megatron.fill.types import Bubble, BubbleUse, Lack
from scripts.benchmarks.studies.truth.steps import StepTimes

_NEAR = 32  # steps, as in the runtime's estimate of a step


@dataclass(slots=True)
class Replayed:
    """The work of a job in the bubbles of one rank.

    Attributes:
        uses: one entry per bubble in which it ran a step.
        work_done: work of all steps.
    """

    uses: list[BubbleUse] = field(default_factory=list)
    work_done: float = 0.0


class Core:
    """Virtual time, and the times at which the rank leaves its core to the worker.

    Args:
        preemptive: True if a step loses the core at the end of its bubble, as on the CPU; False if it runs to its end
            and the rank waits for it, as for kernels on a GPU.
    """

    def __init__(self, bubbles: Sequence[Bubble], preemptive: bool = True) -> None:
        self.bubbles = bubbles
        self.preemptive = preemptive
        self._starts = [bubble.start_ns for bubble in bubbles]
        self.now_ns = 0

    @property
    def over(self) -> bool:
        """True if the last bubble has ended."""
        return not self.bubbles or self.now_ns >= self.bubbles[-1].end_ns

    def at(self, time_ns: int) -> Bubble | None:
        """The bubble at this time, or None."""
        place = bisect_right(self._starts, time_ns) - 1
        return self.bubbles[place] if place >= 0 and time_ns < self.bubbles[place].end_ns else None

    def spend(self, duration_ns: int, resume_ns: int = 0) -> None:
        """Run for ``duration_ns`` on the core, and skip the time while the rank has it; stop after the last bubble.

        Args:
            resume_ns: time lost at the start of each wait in which the step resumes.
        """
        if not self.preemptive:
            self.now_ns = min(self.now_ns + duration_ns, max(self.now_ns, self.bubbles[-1].end_ns))
            return
        for place in range(max(0, bisect_right(self._starts, self.now_ns) - 1), len(self.bubbles)):
            bubble = self.bubbles[place]
            begin_ns = max(self.now_ns, bubble.start_ns + resume_ns * (self.now_ns < bubble.start_ns))
            if begin_ns + duration_ns <= bubble.end_ns:
                self.now_ns = begin_ns + duration_ns
                return
            duration_ns -= max(0, bubble.end_ns - begin_ns)
        self.now_ns = self.bubbles[-1].end_ns


class VirtualGate:
    """The worker's end of a gate (GateReader) whose bubbles are all known in advance."""

    def __init__(self, core: Core, told: Mapping[int, OpenBubble], wakes_ns: Iterator[int]) -> None:
        self._core = core
        self._opened = [bubble for bubble in core.bubbles if bubble.seq]
        self._by_seq = {bubble.seq: bubble for bubble in self._opened}
        self._ends = [bubble.end_ns for bubble in self._opened]
        self._told = told
        self._wakes_ns = wakes_ns

    def wait(self, after_seq: int) -> OpenBubble | None:
        core = self._core
        place = bisect_right(self._ends, core.now_ns)
        while place < len(self._opened) and self._opened[place].seq <= after_seq:
            place += 1
        if place == len(self._opened):
            core.now_ns = max(core.now_ns, core.bubbles[-1].end_ns)
            return None
        bubble = self._opened[place]
        if core.now_ns < bubble.start_ns:
            core.now_ns = bubble.start_ns + next(self._wakes_ns)
            if core.now_ns >= bubble.end_ns:  # too late: the loop looks again
                return None
        return self._told[bubble.seq]

    def is_open(self, seq: int) -> bool:
        return self._core.now_ns < self._by_seq[seq].end_ns

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        core = self._core
        core.now_ns = max(core.now_ns, min(core.now_ns + timeout_ns, self._by_seq[seq].end_ns))

    def closed_ns(self, seq: int) -> int | None:
        return None if self.is_open(seq) else self._by_seq[seq].end_ns

    @property
    def ended(self) -> bool:
        return self._core.over


class VirtualMachine:
    """A task whose steps have the given durations (TaskMachine)."""

    idle = False  # the record contains only steps

    def __init__(self, core: Core, times: StepTimes) -> None:
        self.task = self
        self._core = core
        self._times = times
        self._played = 0

    @property
    def next_node(self) -> int:
        return self._played % max(1, len(self._times.profile_ns))

    def start(self) -> None:
        pass

    def pause(self) -> None:
        pass

    def run_next_step(self) -> float:
        steps_ns, iterations = self._times.steps_ns, self._times.iterations
        first, count = 0, len(steps_ns)
        bubble = self._core.at(self._core.now_ns)
        if iterations and bubble is not None:
            middle = bisect_left(iterations, bubble.iteration) + bisect_right(iterations, bubble.iteration)
            first = max(0, min(middle // 2 - _NEAR // 2, count - _NEAR))
            count = min(_NEAR, count)
        self._core.spend(steps_ns[first + self._played % count], self._times.resume_ns)
        self._played += 1
        return self._times.work


class VirtualLog:
    """A step log (StepLog) that keeps its entries and lets the time between two steps pass."""

    partial_work = 0.0

    def __init__(self, core: Core, gap_ns: int, done: Replayed) -> None:
        self._core = core
        self._gap_ns = gap_ns
        self._done = done
        self.phase: object = None

    def enter_bubble(self, seq: int) -> None:
        pass

    def step_ended(self, start_ns: int, end_ns: int, work: float, alone: bool, partial_work: float = 0.0) -> None:
        self._done.work_done += work
        self._core.now_ns += self._gap_ns

    def leave_bubble(self, use: BubbleUse, alone: bool) -> None:
        self._done.uses.append(use)

    def skip_bubble(self, seq: int, now_ns: int, lack: Lack, alone: bool) -> None:
        pass
