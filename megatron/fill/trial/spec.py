"""What the processes are told that try jobs, on their standard input."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron.fill.linux import isolated
from megatron.fill.spec import Spec

NOTE = "PipeFill: "  # what a line begins with in which they say something of the walls


@dataclass(frozen=True, slots=True)
class CheckSpec(Spec):
    """Jobs to be looked at.

    Attributes:
        parent: the pid of who asks.
        folder: a new one, for the jobs' own folder.
        search: folders to import from.
        settings: of the ``--fill-*`` kind, by field.
        groups: per environment (``env``) the ``jobs`` that have it, each with ``task``, ``args`` and ``command``.
    """

    parent: int
    folder: str
    search: list[str]
    groups: list[dict[str, Any]]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StandInSpec(Spec):
    """A main job that only waits.

    Attributes:
        run_dir: its run folder, a new one.
        store: the URL of the job store that it serves.
        search: folders that its jobs are imported from.
        bubble_s: how long each bubble lasts.
        period_s: from the start of one iteration, which has one bubble, to that of the next.
        settings: of the ``--fill-*`` kind, by field.
    """

    run_dir: str
    store: str
    search: list[str]
    device: str
    bubble_s: float
    period_s: float
    settings: dict[str, Any] = field(default_factory=dict)


def program(name: str) -> list[str]:
    """The command line of one of these processes, ``checker`` or ``standin``."""
    return isolated.program(f"megatron.fill.app.{name}")
