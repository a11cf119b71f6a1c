"""Specs of the processes that try jobs, sent to their standard input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.fill.spec import Spec

NOTE = "PipeFill: "  # beginning of lines in their output that are notes on the sandbox


@dataclass(frozen=True, slots=True)
class CheckSpec(Spec):
    """Jobs to be checked."""

    parent: int  # pid of the process that asks
    folder: str  # new folder, in which the jobs' own folder is made
    search: list[str]  # folders to import from
    # per environment (``env``) the ``jobs`` that have it, each with ``task``, ``args`` and ``command``
    groups: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)  # values of ``FillSettings``, by field


@dataclass(frozen=True, slots=True)
class StandInSpec(Spec):
    """A stand-in for a training that only waits."""

    run_dir: str  # its run folder, a new one
    store: str  # the URL of the job store that it serves
    search: list[str]  # folders that its jobs are imported from
    device: str
    bubble_s: float  # duration of the bubble in each iteration
    period_s: float  # duration of an iteration
    settings: dict[str, Any] = field(default_factory=dict)  # values of ``FillSettings``, by field
