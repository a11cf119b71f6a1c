"""The control of an attack, as data: the walls that are left out, and how it is seen that the attack succeeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tests.chaos.controls.walls import Wall
from tests.chaos.controls.world import World


@dataclass(frozen=True, slots=True)
class Control:
    """One attack's.

    Attributes:
        walls: what is left out: one, or all of those that would stop it where there are several.
        ends: how it may end then; see ``engine.Tried``.
        proof: what is seen of it from outside the job; empty while there is nothing.  None where the kernel's answer
            to the attack says all.
        prepared: the world as it has to be for this attack.
        within_s: how long the attack may take.
        impossible: why there can be no control; the attack is not counted then.
    """

    walls: tuple[Wall, ...]
    ends: tuple[str, ...] = ("done",)
    proof: Callable[[World], str] | None = None
    prepared: Callable[[World], AbstractContextManager[object]] = lambda world: nullcontext()
    within_s: float = 20.0
    impossible: str = ""


def like(walls: tuple[Wall, ...] | Wall, *names: str, **how: Any) -> dict[str, Control]:
    """The same control for all of these attacks."""
    return dict.fromkeys(names, Control((walls,) if isinstance(walls, Wall) else walls, **how))
