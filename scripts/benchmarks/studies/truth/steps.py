"""Times of a job's steps in a real run: each one's time on the core, and the cost of an interruption.

On the CPU, the main job takes the core back from a step in flight at the end of its bubble, and the step resumes in
the rank's next waits.  Each time, its data have left the caches in the meantime, and the scheduler gives it the core
with a delay, so some time passes without progress.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from megatron.fill.types import Bubble, WorkerRecord

_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Times of a job's steps in a real run.

    Attributes:
        steps_ns: time on the core of each step; the steps are replayed in this order, cyclically.
        iterations: main job's iteration in which each step began, ascending: the steps nearest to the present iteration
            are replayed, since slowdowns are temporary.  Empty to replay all steps.
        wakes_ns: delays from the gate's opening to the first step of a sleeping worker; replayed in the same way.
        gap_ns: time between two steps.
        resume_ns: time without progress in every wait in which a step in flight resumes.
        work: mean work of a step, in the job's unit.
        profile_ns: profiled duration of each node of a job with nodes, whose steps are replayed as these nodes, one
            after the other.  Empty for a job whose steps are all alike.
    """

    steps_ns: tuple[int, ...]
    wakes_ns: tuple[int, ...] = (0,)
    gap_ns: int = 0
    resume_ns: int = 0
    work: float = 1.0
    iterations: tuple[int, ...] = ()
    profile_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.iterations and len(self.iterations) != len(self.steps_ns):
            raise ValueError(f"{len(self.iterations)} iterations for {len(self.steps_ns)} steps; expected one for each")
        if not self.steps_ns or min(self.steps_ns) <= 0:
            raise ValueError("expected steps, each longer than 0 ns")
        if self.profile_ns and (self.iterations or len(self.steps_ns) % len(self.profile_ns)):
            raise ValueError(
                f"{len(self.steps_ns)} steps of a job with {len(self.profile_ns)} nodes; expected whole iterations of"
                " the job, and none of the main job's"
            )
        times = (self.gap_ns, self.resume_ns, *self.wakes_ns)
        if not self.wakes_ns or min(times) < 0:
            raise ValueError(f"expected times to wake up, to resume and between steps, none negative; got {times[:7]}")


@dataclass(frozen=True, slots=True)
class _Step:
    """A recorded step: its first iteration, its time in its first bubble and in each later wait in which it resumed."""

    iteration: int
    first_ns: int
    later_ns: tuple[int, ...]

    def length_ns(self, resume_ns: float) -> float:
        return self.first_ns + sum(max(0, wait_ns - resume_ns) for wait_ns in self.later_ns)


def step_times(worker: WorkerRecord, bubbles: Sequence[Bubble], chosen: set[int] | None = None) -> StepTimes:
    """Derive the times of a worker's steps from its record.

    Args:
        bubbles: all bubbles of its rank, in order.
        chosen: iterations whose steps and wake-ups count; None for all.

    Raises:
        ValueError: no recorded step began in a bubble of these iterations.
    """
    starts = [bubble.start_ns for bubble in bubbles]
    steps, gaps = [], []
    last_end_ns = 0
    for start_ns, end_ns in worker.steps:
        at = bisect_right(starts, start_ns) - 1
        if at >= 0 and start_ns < bubbles[at].end_ns and (chosen is None or bubbles[at].iteration in chosen):
            spent = [
                min(end_ns, bubble.end_ns) - max(start_ns, bubble.start_ns)
                for bubble in bubbles[at : bisect_right(starts, end_ns)]
            ]
            if sum(spent) > 0:
                steps.append(_Step(bubbles[at].iteration, spent[0], tuple(spent[1:])))
                if bubbles[at].start_ns < last_end_ns < start_ns:
                    gaps.append(start_ns - last_end_ns)
        last_end_ns = end_ns
    if not steps:
        raise ValueError(f"job {worker.job!r}: none of its {len(worker.steps)} recorded steps began in these bubbles")
    resume_ns = _resume_ns(steps)
    return StepTimes(
        steps_ns=tuple(max(1, round(step.length_ns(resume_ns))) for step in steps),
        wakes_ns=_wakes(worker, bubbles, chosen),
        gap_ns=sorted(gaps)[len(gaps) // 2] if gaps else 0,
        resume_ns=resume_ns,
        work=worker.work_done / max(1, worker.steps_done),
        iterations=tuple(step.iteration for step in steps),
    )


def _resume_ns(steps: Sequence[_Step]) -> int:
    """The cost of an interruption for which interrupted steps have their expected length.

    The end of a bubble is more likely to interrupt a longer step, so interrupted steps are E[L^2] / E[L] long on
    average, where L is the length of any step (the inspection paradox).  Their time beyond that is the cost of their
    interruptions, at most a whole step each.
    """
    whole = [step.first_ns for step in steps if not step.later_ns]
    caught = [step for step in steps if step.later_ns]
    if not whole or not caught:
        return 0
    mean_ns = fmean(whole)
    expected_ns = fmean(length_ns**2 for length_ns in whole) / mean_ns
    low, high = 0.0, mean_ns
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if fmean(step.length_ns(middle) for step in caught) > expected_ns:
            low = middle
        else:
            high = middle
    return round(low)


def _wakes(worker: WorkerRecord, bubbles: Sequence[Bubble], chosen: set[int] | None) -> tuple[int, ...]:
    """Delays from the gate's opening to the first step of a sleeping worker; (0,) if it never slept."""
    by_seq = {bubble.seq: bubble for bubble in bubbles if bubble.seq}
    ends = [end_ns for _, end_ns in worker.steps]
    wakes = []
    for use in worker.uses:
        bubble = by_seq.get(use.seq)
        if bubble is None or use.latency_ns < 0 or not (chosen is None or bubble.iteration in chosen):
            continue
        begin_ns = bubble.start_ns + use.latency_ns
        before = bisect_right(ends, begin_ns)
        known = worker.steps and worker.steps[0][0] <= begin_ns
        if known and (before == 0 or ends[before - 1] < bubble.start_ns):
            wakes.append(use.latency_ns)
    return tuple(wakes) or (0,)
