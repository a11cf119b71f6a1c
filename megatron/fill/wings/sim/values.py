"""Inputs and outcomes of a simulation.  Times are seconds from the start (``_s``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from megatron.fill.planner.held import MARGIN_BYTES, RESERVE_NS, held_cycle, room_bytes
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import find_plan
from megatron.fill.profiles import BubbleCycle, JobProfile
from megatron.fill.types import JobState


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices with the same bubble cycle."""

    name: str  # unique name in a scenario, such as ``llm/stage 3``
    count: int  # number of devices: data-parallel times tensor-parallel ranks of a stage
    cycle: BubbleCycle  # an iteration of the main job there, with the bubbles' durations and free memory

    def __post_init__(self) -> None:
        if self.count < 1 or self.cycle.period_ns < 1:
            raise ValueError(f"group {self.name!r}: expected devices and a period above 0 ns; got {self}")


@dataclass(frozen=True, slots=True)
class MainJobRun:
    """A main job that occupies devices for a while."""

    name: str
    groups: tuple[DeviceGroup, ...]
    start_s: float = 0.0
    end_s: float = inf  # time of its end; infinity for the whole simulation


@dataclass(frozen=True, slots=True)
class FillKind:
    """A kind of fill job, with its profiles on the devices of the scenario."""

    name: str
    unit: str  # unit of its work, such as ``samples``
    profiles: tuple[JobProfile, ...]  # the planner's profiles, one per configuration in which it can run
    alone_rate: float  # work per second on an otherwise idle device, in the best configuration there
    memory_bytes: int | None = None  # memory that its jobs ask for, and get; None for no particular amount

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError(f"kind {self.name!r} has no profile; expected one for at least one configuration")
        if not 0 < self.alone_rate < inf:
            raise ValueError(f"kind {self.name!r}: alone_rate is {self.alone_rate}; expected a number above 0")

    def plan(self, cycle: BubbleCycle, reserve_ns: int) -> ExecutionPlan | None:
        """Return its jobs' best plan in a cycle; None if no configuration fits, or if they ask for more memory."""
        most_bytes = room_bytes(cycle, 0)
        if self.memory_bytes is not None and self.memory_bytes > most_bytes:
            return None
        return find_plan(held_cycle(cycle, most_bytes, self.memory_bytes), self.profiles, reserve_ns)


@dataclass(frozen=True, slots=True)
class SimJob:
    """A fill job."""

    id: int  # unique number; orders jobs that arrived together and have equal scores
    name: str
    kind: str  # name of a ``FillKind``
    arrival_s: float
    work: float  # total work, in the kind's unit
    deadline_s: float | None = None  # time by which it should succeed, or None
    user: str = ""
    priority: int = 0
    after: tuple[int, ...] = ()  # ids of the jobs that have to succeed before it begins

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < inf:
            raise ValueError(f"job {self.name!r}: arrival_s is {self.arrival_s}; expected a number from 0 on")
        if not 0 < self.work < inf:
            raise ValueError(f"job {self.name!r}: work is {self.work}; expected a number above 0")
        if self.deadline_s is not None and not -inf < self.deadline_s < inf:
            raise ValueError(f"job {self.name!r}: deadline_s is {self.deadline_s}; expected a number or None")


@dataclass(frozen=True, slots=True)
class RuntimeModel:
    """The runtime's overheads and losses relative to a plan."""

    reserve_ns: int = RESERVE_NS  # time in each bubble for waking up and pausing
    margin_bytes: int = MARGIN_BYTES  # part of the main job's free memory that is left for its growth
    harvest: float = 1.0  # share of a plan's work that is really done: bubbles end early, estimates are cautious
    # Speed of a step in a bubble relative to its speed alone: cold caches, kernels that ramp up. Plans are made with
    # these longer steps.
    step_efficiency: float = 1.0
    start_s: float = 0.5  # time from a claim to the first step
    # Seconds between checkpoints; a job that loses its device resumes from its last checkpoint.
    checkpoint_s: float = 300.0
    tail: bool = True  # True if a second job may use the time that the resident one leaves


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of devices.  A failure stops the device's main job, which restarts after ``restart_s``."""

    mtbf_s: float = inf  # mean time between the failures of one device, exponentially distributed; infinity for never
    restart_s: float = 600.0  # time until the main job resumes
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Scenario:
    main_jobs: tuple[MainJobRun, ...]
    kinds: tuple[FillKind, ...]
    jobs: tuple[SimJob, ...]
    duration_s: float
    policy: str = "priority"
    runtime: RuntimeModel = field(default_factory=RuntimeModel)
    failures: Failures = field(default_factory=Failures)

    def __post_init__(self) -> None:
        if not 0 < self.duration_s < inf:
            raise ValueError(f"duration_s is {self.duration_s}; expected a number above 0")
        groups = [group.name for run in self.main_jobs for group in run.groups]
        for what, names in (
            ("group", groups),
            ("kind", [kind.name for kind in self.kinds]),
            ("job id", [job.id for job in self.jobs]),
        ):
            if len(set(names)) < len(names):
                twice = next(name for name, times in Counter(names).items() if times > 1)
                raise ValueError(f"{what} {twice!r} is there twice; expected each of them once")
        kinds, ids = {kind.name for kind in self.kinds}, {job.id for job in self.jobs}
        for job in self.jobs:
            if job.kind not in kinds:
                raise ValueError(f"job {job.name!r}: kind is {job.kind!r}; expected one of {', '.join(sorted(kinds))}")
            for first in job.after:
                if first not in ids:
                    raise ValueError(f"job {job.name!r}: after has {first}; expected ids of jobs")


@dataclass(slots=True)
class JobOutcome:
    """The outcome of one job, so far."""

    id: int
    state: JobState = JobState.QUEUED  # at the end SUCCEEDED, RUNNING, QUEUED, or FAILED if it fits no device's bubbles
    started_s: float | None = None  # time of the first claim, or None
    ended_s: float | None = None  # time of success, or None
    work_done: float = 0.0  # saved work, which no failure can undo; of a job that still runs at the end, all
    device_s: float = 0.0  # seconds in a seat, over all attempts
    attempts: int = 0  # number of claims


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """The use of the time of a group's devices, in device seconds."""

    name: str
    count: int
    main_s: float  # time in which the main job ran, including its bubbles
    bubble_s: float  # bubbles within ``main_s``
    down_s: float  # time in which the main job was down after a failure
    # Time within ``main_s`` in which a resident or tail job had the seat.
    resident_s: float
    tail_s: float
    alone_s: float  # time of the fill work done there on such a device alone: GPUs' worth times seconds


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """The outcome of a simulation."""

    jobs: tuple[JobOutcome, ...]  # outcomes in the order of the scenario
    groups: tuple[GroupOutcome, ...]
    duration_s: float
    events: int  # number of events handled
    failures: int  # number of failures of devices during a main job
    wall_s: float  # duration of the simulation itself
