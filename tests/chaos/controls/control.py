"""The control of an attack, as data: the layers that are left out, and the evidence that the attack succeeds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from tests.chaos.controls.walls import Wall
from tests.chaos.controls.world import World


@dataclass(frozen=True, slots=True)
class Control:
    """The control of one attack.

    Attributes:
        walls: layers that are left out: all of those that would each stop it.
        ends: outcomes that count as success; see ``engine.Tried``.
        proof: returns evidence that is seen from outside the job; empty while there is none.  None where the kernel's
            answer to the attack is enough.
        prepared: prepares the world for this attack.
        within_s: longest time that the attack may take.
        impossible: reason why there can be no control; the attack is not counted then.
    """

    walls: tuple[Wall, ...]
    ends: tuple[str, ...] = ("done",)
    proof: Callable[[World], str] | None = None
    prepared: Callable[[World], AbstractContextManager[object]] = lambda world: nullcontext()
    within_s: float = 20.0
    impossible: str = ""


def like(walls: tuple[Wall, ...] | Wall, *names: str, **how: Any) -> dict[str, Control]:
    """Return the same control for all of these attacks."""
    return dict.fromkeys(names, Control((walls,) if isinstance(walls, Wall) else walls, **how))
