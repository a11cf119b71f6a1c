"""Devices of a recorded main job: with its recorded bubbles, or with its passes in another schedule."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.fill.errors import ConfigError, FillError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import explain
from megatron.fill.pipeline.bubbles import bubble_cycle, peak_activations
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Schedule, ScheduleError
from megatron.fill.pipeline.schedules import NAMES, make_schedule, megatrons
from megatron.fill.pipeline.timeline import simulate
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.records.segment import last_segment
from megatron.fill.report.schema import Cycles, RankCycle
from megatron.fill.types import RankRecord
from megatron.fill.wings.mainjob.order import order_of
from megatron.fill.wings.sim.recorded.busy import RecordedMainJob
from megatron.fill.wings.sim.values import DeviceGroup

logger = logging.getLogger("pipefill.simulate")

_NOT_MEASURED = sys.maxsize  # bytes
_MOST_MS = 1e9  # ten days


@dataclass(frozen=True, slots=True)
class Reschedule:
    """Another schedule for the recorded passes, on the same number of stages; None keeps the recorded value."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    schedule: str | None = None  # as in ``Parallel``; an interleaved one only if the recorded one is
    microbatches: int | None = None
    group_size: int | None = None  # group size of an interleaved schedule
    # Share of a backward pass for the weights' gradients, which Megatron's passes do not show; needed by schedules that
    # split the pass.
    weight_share: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < self.weight_share < 1:
            raise ValueError(f"weight_share is {self.weight_share}; expected more than 0 and less than 1")
        if self.microbatches is not None and self.microbatches < 1:
            raise ValueError(f"microbatches is {self.microbatches}; expected at least 1")


def recorded_groups(path: str | Path, gpus: int | None = None) -> tuple[DeviceGroup, ...]:
    """Return the devices of a recorded run, replicated by data parallelism.

    Each rank's bubbles have their mean durations, as its iteration has: medians would leave out what few long bubbles
    add to the mean iteration.  They are the same on all its replicas; the longer gradient reduction of a larger
    data-parallel group is not modelled.

    Args:
        path: a ``report.json``, or the ``bubbles.json`` of ``--fill-profile-only``.
        gpus: number of GPUs; None for the recorded number.

    Raises:
        ConfigError: the file is invalid; the error names the file, the field and the expected content.
    """
    ranks = _recorded_ranks(path)
    replicas = _replicas(path, ranks, gpus)
    groups = []
    for rank in ranks:
        if rank.iteration_ms is None or not 0 < rank.iteration_ms <= _MOST_MS:
            raise ConfigError(
                f"{path}: rank {rank.rank}: iteration_ms is {rank.iteration_ms}; expected the time of an iteration"
            )
        period_ns = round(rank.iteration_ms * 1e6)
        slots = tuple(
            BubbleSlot(one.kind, round(one.mean_ms * 1e6), one.free_bytes or _NOT_MEASURED) for one in rank.training
        )
        groups.append(DeviceGroup(f"rank {rank.rank}", replicas, BubbleCycle(period_ns, slots)))
    return tuple(groups)


def rescheduled_groups(path: str | Path, gpus: int | None, change: Reschedule) -> tuple[DeviceGroup, ...]:
    """Return the devices of a recorded run if it used another schedule: one group for each stage.

    Passes keep their median durations (of iterations without filling, if any), and the bubbles follow from them.  Free
    memory is the smallest that the stage had in any bubble; schedules that keep more activations leave less, which is
    logged as a warning.  Arguments and errors are those of ``recorded_groups``; the run's records must lie beside the
    report.
    """
    path = Path(path)
    ranks = _recorded_ranks(path)
    replicas = _replicas(path, ranks, gpus)
    try:
        records, recorded = read_pipeline(path.parent)
        new = _changed(recorded, change)
        costs = _costs(records, recorded, change.weight_share)
        timeline = simulate(new, costs, _rendezvous(records))
    except ScheduleError as error:
        raise ConfigError(f"{path}: reschedule: {change.schedule or new.name}: {error.problem}") from error
    except (FillError, ValueError) as error:
        raise ConfigError(f"{path}: reschedule: {error}") from error
    if any(after > before for after, before in zip(peak_activations(new), peak_activations(recorded), strict=True)):
        logger.warning("%s: %s keeps more activations than were recorded; free memory is too high", path, new.name)
    per_stage = replicas * len(ranks) // new.stages
    groups = []
    for stage in range(new.stages):
        free = [one.free_bytes or _NOT_MEASURED for rank in ranks if rank.stage == stage for one in rank.training]
        cycle = bubble_cycle(timeline, stage, min(free, default=_NOT_MEASURED))
        groups.append(DeviceGroup(f"stage {stage}", per_stage, cycle))
    return tuple(groups)


def read_pipeline(folder: Path) -> tuple[list[RankRecord], Schedule]:
    """Read the records of one pipeline of a run's last segment, in the order of its stages, and its schedule.

    FillError if the records are missing, damaged, or from several machines, whose clocks differ.
    """
    records_of = last_segment(folder)
    where, found = records_of.folder, list(records_of.records())
    if not found:
        raise FillError(f"{where}: there are no records of ranks; expected those of a run")
    found.sort(key=lambda record: (record.info.stage, record.info.data_parallel_rank, record.info.tensor_parallel_rank))
    stages = found[0].info.stages
    pipeline = [next((one for one in found if one.info.stage == stage), None) for stage in range(stages)]
    records = [record for record in pipeline if record is not None]
    if len(records) < stages:
        raise FillError(f"{where}: has records of {len(records)} stages; expected all {stages}")
    if len({record.info.node for record in records}) > 1:
        raise FillError(f"{where}: the stages ran on several machines, whose clocks differ; expected one")
    key = records[0].schedule
    if key is None:
        raise FillError(f"{where}: no training iteration was recorded")
    if key.schedule not in NAMES:
        raise FillError(f"{where}: its schedule is {key.schedule}; expected one of {', '.join(NAMES)}")
    return records, make_schedule(key.schedule, stages, key.microbatches, key.chunks, key.group_size or None)


def _changed(recorded: Schedule, change: Reschedule) -> Schedule:
    name = change.schedule or recorded.name
    microbatches = change.microbatches or recorded.microbatches
    of_file = Path(name).is_absolute()
    if not of_file and (name == "interleaved") != (recorded.chunks > 1):
        raise ValueError(f"schedule is {name}; expected one with {recorded.chunks} chunks per rank, as recorded")
    own = megatrons(recorded) if name == recorded.name and change.group_size is None else None
    group_size = own[1] if own else change.group_size
    schedule = order_of(name, recorded.stages, microbatches, recorded.chunks, group_size)
    if schedule.placement != recorded.placement:  # a rank's optimizer, reduction and memory are those of its stages
        raise ValueError(f"{name}: its stages are on ranks {schedule.placement}; expected {recorded.placement}")
    return schedule


def _costs(records: Sequence[RankRecord], schedule: Schedule, weight_share: float) -> PipelineCosts:
    job = RecordedMainJob(records, schedule, _rendezvous(records))
    costs = job.costs([sample for sample in job.samples if not sample.filling] or None)
    stages = [replace(stage, weight_ns=round(stage.backward_ns * weight_share)) for stage in costs.stages]
    return replace(costs, stages=tuple(stages))


def _rendezvous(records: Sequence[RankRecord]) -> bool:
    """True if sends wait for their receivers, as with gloo, which transfers on the CPU."""
    return records[0].info.device == "cpu"


def _replicas(path: str | Path, ranks: Sequence[RankCycle], gpus: int | None) -> int:
    """Number of devices per recorded rank."""
    total = len(ranks) if gpus is None else gpus
    if total < 1 or total % len(ranks):
        raise ConfigError(f"{path}: gpus is {total}; expected a multiple of the {len(ranks)} recorded ranks")
    return total // len(ranks)


class _Report(BaseModel):
    cycle: tuple[RankCycle, ...]


def _recorded_ranks(path: str | Path) -> tuple[RankCycle, ...]:
    expected = "a report.json, or the file of --fill-profile-only"
    data = read_json(path, expected)
    if isinstance(data, dict) and data.get("cycle") is not None:
        field, ranks = "cycle", part_of(path, data, _Report, expected).cycle
    else:
        field, ranks = "ranks", tuple(part_of(path, data, Cycles, expected).ranks)
    if not ranks:
        raise ConfigError(f"{path}: {field} is empty; expected at least one rank")
    return ranks


def part_of[M: BaseModel](path: str | Path, data: object, model: type[M], expected: str) -> M:
    """Return the part of a report's content that a model describes; ConfigError, with file and field, without it."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        suffix = f"; expected {expected}"
        raise ConfigError(explain(error, model, lambda place: (str(path), place), suffix, most=1)) from error
