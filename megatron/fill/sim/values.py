"""What a simulation is given and what it finds: frozen values.  Times are seconds from the start (``_s``)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import inf

from megatron.fill.planner.held import MARGIN_BYTES, RESERVE_NS
from megatron.fill.profiles import BubbleCycle, JobProfile
from megatron.fill.types import JobState


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices that are alike: they have the same bubble cycle.

    Attributes:
        name: unique in a scenario, such as ``llm/stage 3``.
        count: how many there are: data-parallel times tensor-parallel ranks of a stage.
        cycle: one iteration of the main job there, with the bubbles' durations and free memory.
    """

    name: str
    count: int
    cycle: BubbleCycle

    def __post_init__(self) -> None:
        if self.count < 1 or self.cycle.period_ns < 1:
            raise ValueError(f"group {self.name!r}: expected devices and a period above 0 ns; got {self}")


@dataclass(frozen=True, slots=True)
class MainJobRun:
    """A main job that occupies devices for a while.

    Attributes:
        end_s: when it is over; infinity for the whole simulation.
    """

    name: str
    groups: tuple[DeviceGroup, ...]
    start_s: float = 0.0
    end_s: float = inf

    def __post_init__(self) -> None:
        if not 0 <= self.start_s < self.end_s:
            raise ValueError(
                f"main job {self.name!r}: from {self.start_s} to {self.end_s} s; expected 0 <= start < end"
            )


@dataclass(frozen=True, slots=True)
class FillKind:
    """A kind of fill job, and what is known of it on the devices of the scenario.

    Attributes:
        unit: of its work, such as ``samples``.
        profiles: one per configuration in which it can run, as the planner takes them.
        alone_rate: work per second of a device that has nothing else to do, in the best configuration there.
        source: where the profile comes from: measured or published, and by whom.
    """

    name: str
    unit: str
    profiles: tuple[JobProfile, ...]
    alone_rate: float
    source: str = ""

    def __post_init__(self) -> None:
        if not self.profiles:
            raise ValueError(f"kind {self.name!r} has no profile; expected one for at least one configuration")
        if not 0 < self.alone_rate < inf:
            raise ValueError(f"kind {self.name!r}: alone_rate is {self.alone_rate}; expected a number above 0")


@dataclass(frozen=True, slots=True)
class SimJob:
    """A fill job.

    Attributes:
        id: unique; equal ones in a policy's eyes come in this order if they arrived together.
        kind: the name of a ``FillKind``.
        work: how much there is to do, in the kind's unit.
        deadline_s: None for whenever.
    """

    id: int
    name: str
    kind: str
    arrival_s: float
    work: float
    deadline_s: float | None = None
    user: str = ""
    priority: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.arrival_s < inf:
            raise ValueError(f"job {self.name!r}: arrival_s is {self.arrival_s}; expected a number from 0 on")
        if not 0 < self.work < inf:
            raise ValueError(f"job {self.name!r}: work is {self.work}; expected a number above 0")
        if self.deadline_s is not None and not -inf < self.deadline_s < inf:
            raise ValueError(f"job {self.name!r}: deadline_s is {self.deadline_s}; expected a number or None")


@dataclass(frozen=True, slots=True)
class RuntimeModel:
    """What the runtime makes of a plan.

    Attributes:
        reserve_ns: of each bubble, for waking up and pausing.
        margin_bytes: of what the main job leaves free at its peak, for it to grow into.
        harvest: the share of a plan's work that is really done: bubbles end early, estimates are cautious.
        step_efficiency: the speed of a step in a bubble over its speed alone: cold caches, kernels that ramp up.  Plans
            are made with steps as long as that makes them.
        start_s: from a claim to the first step.
        checkpoint_s: how often a job is saved; a job that loses its device goes on from its last checkpoint.
        tail: whether a second job may use what the resident one leaves.
    """

    reserve_ns: int = RESERVE_NS
    margin_bytes: int = MARGIN_BYTES
    harvest: float = 1.0
    step_efficiency: float = 1.0
    start_s: float = 0.5
    checkpoint_s: float = 300.0
    tail: bool = True

    def __post_init__(self) -> None:
        least = min(self.reserve_ns, self.margin_bytes, self.start_s)
        shares = 0 < self.harvest <= 1 and 0 < self.step_efficiency <= 1
        if not (least >= 0 and shares and self.start_s < inf and self.checkpoint_s > 0):
            raise ValueError(
                "expected reserve_ns, margin_bytes and start_s of at least 0, harvest and step_efficiency above 0 and"
                f" up to 1, checkpoint_s above 0; got {self}"
            )


@dataclass(frozen=True, slots=True)
class Failures:
    """Devices that fail.  A failure stops the device's main job, which starts again after a while.

    Attributes:
        mtbf_s: mean time between the failures of one device, exponentially distributed; infinity for never.
        restart_s: until the main job goes on.
    """

    mtbf_s: float = inf
    restart_s: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.mtbf_s > 0 and 0 <= self.restart_s < inf and self.seed >= 0):
            raise ValueError(f"expected mtbf_s above 0, restart_s and seed of at least 0; got {self}")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A whole simulation.

    Attributes:
        symmetric: devices of a group are told apart only where they differ; False follows each of them by itself, to
            check the former.
    """

    main_jobs: tuple[MainJobRun, ...]
    kinds: tuple[FillKind, ...]
    jobs: tuple[SimJob, ...]
    duration_s: float
    policy: str = "priority"
    runtime: RuntimeModel = field(default_factory=RuntimeModel)
    failures: Failures = field(default_factory=Failures)
    symmetric: bool = True

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
        kinds = {kind.name for kind in self.kinds}
        for job in self.jobs:
            if job.kind not in kinds:
                raise ValueError(f"job {job.name!r}: kind is {job.kind!r}; expected one of {', '.join(sorted(kinds))}")


@dataclass(frozen=True, slots=True)
class JobOutcome:
    """How one job fared.

    Attributes:
        state: SUCCEEDED, RUNNING or QUEUED at the end, FAILED if it fits no bubble of any device.
        started_s: when it was first claimed; None for never.
        ended_s: when it succeeded; None if it did not.
        work_done: what counts: of a job that lost its device, what it had saved.
        device_s: seconds in a seat, over all attempts.
        attempts: how often it was claimed.
    """

    id: int
    state: JobState
    started_s: float | None
    ended_s: float | None
    work_done: float
    device_s: float
    attempts: int


@dataclass(frozen=True, slots=True)
class GroupOutcome:
    """What became of the time of a group's devices, in device seconds.

    Attributes:
        main_s: the main job ran (its bubbles included).
        bubble_s: of ``main_s``, bubbles.
        down_s: the main job was down after a failure.
        resident_s, tail_s: of ``main_s``, a resident or a tail job had the seat.
        alone_s: what the fill work done there would have taken on such a device alone: GPUs' worth times seconds.
    """

    name: str
    count: int
    main_s: float
    bubble_s: float
    down_s: float
    resident_s: float
    tail_s: float
    alone_s: float


@dataclass(frozen=True, slots=True)
class SimOutcome:
    """What a simulation found.

    Attributes:
        jobs: in the order of the scenario.
        events: that were handled.
        failures: of devices, during a main job.
        wall_s: how long the simulation itself took.
    """

    jobs: tuple[JobOutcome, ...]
    groups: tuple[GroupOutcome, ...]
    duration_s: float
    events: int
    failures: int
    wall_s: float
