"""Harvest and bubble share that a real run has measured, as its report says."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_json
from megatron.fill.given.problems import explain
from megatron.fill.report.timeuse import TimeUse

_NOT_WITH_JOBS = (TimeUse.NO_JOB, TimeUse.NOT_KNOWN)


@dataclass(frozen=True, slots=True)
class Measured:
    """Figures of a run; None where its report does not have them.

    Attributes:
        harvest: share of the fillable time in steps, without the time for which no job was there.
        bubble_share: bubbles' share of all training iterations.
    """

    harvest: float | None
    bubble_share: float | None


class _Total(BaseModel):
    """The part of a report's total that is needed."""

    model_config = ConfigDict(frozen=True)

    bubble_share: float | None = None
    time_use_ns: dict[TimeUse, int] = {}


class _Report(BaseModel):
    """The part of a report that is needed."""

    model_config = ConfigDict(frozen=True)

    total: _Total = _Total()


def measured(path: Path) -> Measured:
    """Return the figures of a ``report.json``.

    Raises:
        ConfigError: the report is invalid, with file and field.
    """
    try:
        total = _Report.model_validate(read_json(path, "a report.json")).total
    except ValidationError as error:
        suffix = "; expected a report.json"
        raise ConfigError(explain(error, _Report, lambda place: (str(path), place), suffix, most=1)) from error
    with_jobs_ns = sum(ns for use, ns in total.time_use_ns.items() if use not in _NOT_WITH_JOBS)
    steps_ns = total.time_use_ns.get(TimeUse.STEPS, 0)
    return Measured(steps_ns / with_jobs_ns if steps_ns > 0 else None, total.bubble_share)
