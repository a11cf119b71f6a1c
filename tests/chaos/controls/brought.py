"""Controls of what a job brings along: its environment in an interpreter that starts before the sandbox."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

from tests.chaos import marks
from tests.chaos.attacks import brought, daemons
from tests.chaos.attacks.base import Attack, Ground, Refused
from tests.chaos.controls import proofs
from tests.chaos.controls.control import Control, like
from tests.chaos.controls.walls import Wall
from tests.chaos.kind import FaultKind

_PATIENCE_S, _LASTS_S = 15.0, 5.0
_LOOK = "import json, os; print(sum(map(len, os.environ.values())))"
_COMMANDS = {"command-daemons": daemons.burn, "command-escape": daemons.escape, "command-continues": daemons.defy}


def _started(kind: FaultKind, ground: Ground) -> str:
    """Start an interpreter and a program with the environment of the job, as if that came before the sandbox.

    Raises:
        Refused: nothing in it took effect.
    """
    notes = ground.directory / "notes"
    marks.prepare(notes)
    env = {"PATH": os.defpath, **brought.bring(kind, ground.directory / "brought", notes)["env"]}
    program = "chrt" if kind.name == "env-path" else sys.executable
    done = subprocess.run(
        [program, "-c", _LOOK], env=env, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
    )
    powers = [one.detail for one in marks.read(notes, marks.Note.THROUGH)]
    if powers:
        return f"its code ran with {powers[0]}"
    if kind.name == "env-interpreter" and done.returncode:
        return f"the interpreter does not start: {done.stderr.strip()[:80]}"
    if kind.name == "env-loader" and "audit interface" in done.stderr:
        return f"the loader obeys: {done.stderr.strip()[:80]}"
    if kind.name == "env-long" and done.stdout.strip().isdigit() and int(done.stdout) > 1_000_000:
        return f"{done.stdout.strip()} bytes of it are there"
    raise Refused(f"nothing of it took effect: {done.stderr.strip()[:200]}")


def _ran(name: str, ground: Ground) -> str:
    notes = ground.directory / "notes"
    marks.prepare(notes)
    if os.fork() == 0:
        try:
            _COMMANDS[name](str(notes), _LASTS_S)
        finally:
            os._exit(0)
    return "it runs"


ATTACKS = {
    kind.name: Attack(kind, partial(_ran, kind.name) if kind.name in _COMMANDS else partial(_started, kind))
    for kind in brought.KINDS
}
CONTROLS: dict[str, Control] = {
    **like(Wall.START, *(name for name in ATTACKS if name.startswith("env-"))),
    **like(Wall.STOP, *_COMMANDS, proof=proofs.busy),
}
