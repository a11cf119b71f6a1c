"""The layers of a job's sandbox by name, and how a control leaves one out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from enum import StrEnum
from types import ModuleType
from typing import Any

from megatron.fill.sandbox import enter, process


class Wall(StrEnum):
    """A layer of isolation around a job."""

    # The kernel's: a control builds them as a worker does, but for those that are left out.
    PROCESSES = "process namespace"
    FILES = "mount namespace"
    IPC = "IPC namespace"
    CGROUP = "cgroup namespace"
    NETWORK = "network namespace"
    USER = "another user"
    CALLS = "filter of system calls"
    RULES = "Landlock"
    PROC = "read-only /proc"
    RUN = "hidden run folder"
    POWERS = "no capabilities"
    PRIVILEGES = "no new privileges"
    HIDING = "hidden memory of the first process"
    LIMITS = "resource limits"
    PAGES = "read-only pages"
    DESCRIPTORS = "closed descriptors"
    # PipeFill's own: a control has none of them.
    STOP = "stop between bubbles"
    TIME = "time-out of a step"
    MEMORY = "memory cap"
    TASKS = "cap on processes"
    OUTPUT = "cap on output"
    READER = "careful reader"
    START = "start behind the walls"
    PACE = "steps only in bubbles"
    CARE = "agent that looks after it"
    QUOTA = "quota of the disk"


KERNEL = (
    *(Wall.PROCESSES, Wall.FILES, Wall.IPC, Wall.CGROUP, Wall.NETWORK, Wall.USER, Wall.CALLS, Wall.RULES),
    *(Wall.PROC, Wall.RUN, Wall.POWERS, Wall.PRIVILEGES, Wall.HIDING, Wall.LIMITS, Wall.PAGES, Wall.DESCRIPTORS),
)
NAMESPACES = {
    "pid": Wall.PROCESSES,
    "mount": Wall.FILES,
    "ipc": Wall.IPC,
    "cgroup": Wall.CGROUP,
    "net": Wall.NETWORK,
}
# Layers that ``Sandbox.without`` can name, by those names.
CAGE = {"system calls": Wall.CALLS, "landlock": Wall.RULES, "proc": Wall.PROC, "run folder": Wall.RUN}
# Functions that set up each other layer: module, name, and a replacement that does nothing.
_STEPS: dict[Wall, tuple[tuple[ModuleType, str, Callable[..., Any]], ...]] = {
    Wall.USER: ((enter, "become", lambda *given, **named: None),),
    Wall.POWERS: ((enter, "bar_powers", lambda: None), (enter, "give_up_powers", lambda *given: "")),
    Wall.PRIVILEGES: ((enter, "forgo_privileges", lambda: ""),),
    Wall.HIDING: ((process, "hide_memory", lambda hidden: None),),
}


def leave_out(walls: Collection[Wall]) -> None:
    """Build none of these layers from now on; for a process that ends after its control.

    Raises:
        AttributeError: a step was renamed, so its layer would be built anyway.
    """
    for wall in walls:
        for module, name, nothing in _STEPS.get(wall, ()):
            getattr(module, name)
            setattr(module, name, nothing)
