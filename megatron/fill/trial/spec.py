"""Specs of the processes that try jobs, sent to their standard input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.fill.spec import Spec

NOTE = "PipeFill: "  # beginning of lines in their output that are notes on the sandbox


@dataclass(frozen=True, slots=True)
class CheckSpec(Spec):
    """Jobs to be checked.

    Attributes:
        parent: pid of the process that asks.
        folder: new folder, in which the jobs' own folder is made.
        search: folders to import from.
        settings: values of ``FillSettings``, by field.
        groups: per environment (``env``) the ``jobs`` that have it, each with ``task``, ``args`` and ``command``.
    """

    parent: int
    folder: str
    search: list[str]
    groups: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StandInSpec(Spec):
    """A stand-in for a training that only waits.

    Attributes:
        run_dir: its run folder, a new one.
        store: the URL of the job store that it serves.
        search: folders that its jobs are imported from.
        bubble_s: duration of the bubble in each iteration.
        period_s: duration of an iteration.
        settings: values of ``FillSettings``, by field.
    """

    run_dir: str
    store: str
    search: list[str]
    device: str
    bubble_s: float
    period_s: float
    settings: dict[str, Any] = field(default_factory=dict)
