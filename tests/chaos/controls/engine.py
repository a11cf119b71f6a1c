"""The runs of controls: each attack without the layers that stop it, and again behind all layers.

The attack must succeed in the first and be refused in the second.
"""

from __future__ import annotations

import json
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.fill.linux import safefile
from tests.chaos.attacks import cgroups
from tests.chaos.attacks.base import Attack
from tests.chaos.controls.control import Control
from tests.chaos.controls.walls import KERNEL, Wall
from tests.chaos.controls.world import PLACE, World, confine, enter, settle

_AT_ONCE = 4
_LONGEST_S = 30.0  # of one world
_PROOF_S, _LOOK_S, _LAST_S = 2.0, 0.02, 0.3
_READ_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Tried:
    """The outcome of an attack in a world of its own.

    Attributes:
        word: ``done``, ``refused``, ``no target``, ``died`` (its process ended within it), ``stays`` (it did not
            return), or ``error`` (the attack itself, or its world, is faulty).
        detail: the attack's own message.
        proof: evidence from outside; empty if there is none.
    """

    word: str
    detail: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Controlled:
    """The result of a control.

    Attributes:
        walls: layers that were left out.
        without: outcome of the attack without them.
        behind: outcome of the attack behind all layers of the kernel; None where those are not what stops it.
        wrong: reason why the control does not count; empty if it does.
    """

    kind: str
    walls: tuple[Wall, ...]
    without: Tried | None
    behind: Tried | None
    wrong: str

    @property
    def impossible(self) -> bool:
        """True if there can be no control: the attack is not run, and does not count."""
        return self.without is None

    @property
    def broken(self) -> bool:
        """True if the attack got through all of its layers."""
        return self.behind is not None and self.behind.word == "done"


def run_controls(attacks: Mapping[str, Attack], controls: Mapping[str, Control]) -> list[Controlled]:
    """Run the controls of these attacks, four at a time.

    Args:
        controls: the control of each attack, by name.
    """
    found = _run_once(attacks, controls)
    # On a busy machine an effect may come too late to be seen.  An attack that got through is not tried again.
    late = {one.kind for one in found if one.wrong and one.without is not None and not one.broken}
    again = _run_once({name: attack for name, attack in attacks.items() if name in late}, controls)
    second = {one.kind: one for one in again}
    return [second.get(one.kind, one) for one in found]


def _run_once(attacks: Mapping[str, Attack], controls: Mapping[str, Control]) -> list[Controlled]:
    runs: list[tuple[str, Collection[Wall]]] = []
    for name, attack in attacks.items():
        if not controls[name].impossible:
            runs.append((name, controls[name].walls))
            if attack.kind.refused and set(controls[name].walls) <= set(KERNEL):
                runs.append((name, ()))
    tried = dict(zip(((name, bool(walls)) for name, walls in runs), _in_worlds(attacks, controls, runs), strict=True))
    return [
        _judged(attack, controls[name], tried.get((name, True)), tried.get((name, False)))
        for name, attack in attacks.items()
    ]


def _judged(attack: Attack, control: Control, without: Tried | None, behind: Tried | None) -> Controlled:
    wrong = ""
    if without is None:
        wrong = control.impossible
    elif without.word not in control.ends or (control.proof is not None and not without.proof):
        wrong = f"without its walls it should have been {' or '.join(control.ends)}: {without.word} {without.detail}"
        wrong += "" if without.word not in control.ends else "; nothing is seen of it"
    elif behind is not None and behind.word != "refused":
        wrong = f"behind all walls it should have been refused: {behind.word} {behind.detail}"
    return Controlled(attack.kind.name, control.walls, without, behind, wrong)


def _in_worlds(
    attacks: Mapping[str, Attack], controls: Mapping[str, Control], runs: Sequence[tuple[str, Collection[Wall]]]
) -> list[Tried]:
    """Run each in a world of its own; return the outcomes in the same order."""
    found: dict[int, Tried] = {}
    waiting = list(enumerate(runs))
    at_work: dict[int, _Attempt] = {}
    while waiting or at_work:
        while waiting and len(at_work) < _AT_ONCE:
            number, (name, walls) = waiting.pop(0)
            attempt = _Attempt(attacks[name], controls[name], walls)
            at_work[attempt.read_fd] = attempt
            attempt.number = number
        soonest_s = min(one.end_s for one in at_work.values()) - time.monotonic()
        ready, _, _ = select.select(list(at_work), [], [], max(0.0, soonest_s))
        late = [fd for fd, one in at_work.items() if time.monotonic() > one.end_s]
        for fd in {*ready, *late}:
            attempt = at_work[fd]
            if fd not in late and attempt.more():
                continue
            found[attempt.number] = attempt.finish()
            del at_work[fd]
    return [found[number] for number in range(len(runs))]


class _Attempt:
    """A world, as seen by the process that created it."""

    def __init__(self, attack: Attack, control: Control, walls: Collection[Wall]) -> None:
        self.number = 0
        self.folder = Path(tempfile.mkdtemp(prefix="pipefill-control-"))
        self.end_s = time.monotonic() + _LONGEST_S
        self.read_fd, write_fd = os.pipe()
        self._told = b""
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(self.read_fd)
                _make_world(self.folder, attack, control, walls, write_fd)
            finally:
                os._exit(0)
        os.close(write_fd)

    def more(self) -> bool:
        """Read from the world; return True if there may be more."""
        data = os.read(self.read_fd, _READ_BYTES)
        self._told += data
        return bool(data) and b"\n" not in data

    def finish(self) -> Tried:
        """End the world, remove its files, and return the outcome."""
        os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        os.close(self.read_fd)
        cgroups.sweep(PLACE / self.folder.name)
        with suppress(OSError):
            safefile.remove_tree(self.folder)  # an attack may have made it very deep
        try:
            return Tried(*json.loads(self._told.partition(b"\n")[0]))
        except ValueError:
            return Tried("error", "its world ended without a word")


def _make_world(folder: Path, attack: Attack, control: Control, walls: Collection[Wall], tell: int) -> None:
    """Run the process above the world, which ends with the first process of the world."""
    try:
        enter()
    except OSError as error:
        _say(tell, Tried("error", f"no world of its own can be made: {error.strerror}"))
        return
    pid = os.fork()
    if pid == 0:
        try:
            _say(tell, _try(settle(folder), attack, control, walls))
        except BaseException as error:
            _say(tell, Tried("error", f"{type(error).__name__}: {error}"))
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def _say(tell: int, tried: Tried) -> None:
    os.write(tell, json.dumps([tried.word, tried.detail, tried.proof]).encode()[: _READ_BYTES - 1] + b"\n")


def _try(world: World, attack: Attack, control: Control, walls: Collection[Wall]) -> Tried:
    """Run the attack, as the world's first process, and observe its effect."""
    read_fd, write_fd = os.pipe()
    with control.prepared(world):
        sandboxed = confine(world, attack, walls, write_fd)
        os.close(write_fd)
        world.init, world.job = sandboxed.init, sandboxed.pid
        if control.proof is not None and (seen := control.proof(world)):
            return Tried("error", f"before the attack there is: {seen}")
        sandboxed.begin()
        ready, _, _ = select.select([read_fd], [], [], control.within_s)
        data = os.read(read_fd, _READ_BYTES) if ready else None
        if data is None:
            word, detail = "stays", f"it went on for {control.within_s:g} s"
        elif data:
            word, detail = json.loads(data)
        elif _until(lambda: "" if (code := sandboxed.poll()) is None else str(code), _LAST_S):
            word, detail = "died", f"its process ended with {sandboxed.poll()}"
        else:
            word, detail = "stays", "it is another program"
        world.text = detail
        proof = _until(partial(control.proof, world)) if control.proof is not None and walls else ""
    return Tried(word, detail[:500], proof[:500])


def _until(look: Callable[[], str], within_s: float = _PROOF_S) -> str:
    end_s = time.monotonic() + within_s
    while not (found := look()) and time.monotonic() < end_s:
        time.sleep(_LOOK_S)
    return found
