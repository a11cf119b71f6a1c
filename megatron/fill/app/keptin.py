"""What this run's jobs are kept in on this node, settled before the training starts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.agent.admission import JobUser, find_user
from megatron.fill.agent.walls import find_walls
from megatron.fill.config import FillSettings
from megatron.fill.device.emulated import why_not
from megatron.fill.errors import ConfigError
from megatron.fill.sandbox import Bind, Layer, parse_bind
from megatron.fill.sandbox.view import may_enter


@dataclass(frozen=True, slots=True)
class KeptIn:
    """The walls around this run's jobs.

    Attributes:
        user: whom the jobs run as; None for the training's user.
        namespaces: as ``Cage`` has them.
        layers: every wall, and what it lacks here.
    """

    user: JobUser | None = None
    namespaces: tuple[str, ...] = ()
    binds: tuple[Bind, ...] = ()
    layers: tuple[Layer, ...] = ()

    @property
    def seen(self) -> bool:
        """Whether jobs are another user who sees the machine's files as they are."""
        return self.user is not None and "mount" not in self.namespaces


def check_flags(settings: FillSettings) -> None:
    """What can be wrong with the flags is said before anything is started.

    Raises:
        ConfigError: a flag names what is not there.
    """
    if settings.user is not None:
        find_user(settings.user)
    for text in settings.bind:
        parse_bind(text)


def check_emulation(how: str, on_cpu: bool) -> None:
    """Whether a device that does not preempt can be emulated here.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    why = why_not() if on_cpu else "the training is on a GPU, which does not preempt anyway"
    if why:
        raise ConfigError(f"--fill-emulate {how}: {why}")


def keep_in(settings: FillSettings, mps: bool, modules: Sequence[str] = ()) -> KeptIn:
    """Find out what this machine gives, and say what it lacks.

    Args:
        mps: the ranks use an MPS daemon.
        modules: folders where the jobs' own modules are looked for.

    Raises:
        ConfigError: as ``check_flags``, or ``--fill-strict`` and a wall is missing.
    """
    binds = tuple(parse_bind(text) for text in settings.bind)
    user, walls = find_walls(settings.user, mps, settings.network, [Path(settings.report or "runs")])
    lacking = "; ".join(f"{layer.name}: {layer.lacks}" for layer in walls.lacking)
    if lacking and settings.strict:
        raise ConfigError(f"--fill-strict: this machine cannot keep jobs in as well as it should: {lacking}")
    if lacking:
        _say(f"jobs are kept in less well here (pipefill doctor says more): {lacking}")
    for folder in modules:
        if user is not None and not may_enter(Path(folder), user.uid, user.gid):
            _say(f"jobs run as {user.name}, who may not enter {folder}: a module there is not found (chmod o+rx helps)")
    return KeptIn(user, walls.namespaces, binds, walls.layers)


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"PipeFill: {text}", flush=True)
