"""Runs controls: each attack without its walls, where it must succeed, and behind all of them, where it must not."""

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
    """What came of an attack in a world of its own.

    Attributes:
        word: ``done``, ``refused``, ``no target``, ``died`` (its process ended within it), ``stays`` (it did not
            return), or ``error`` (the attack itself, or its world, is faulty).
        detail: in its own words.
        proof: what else was seen of it, from outside; empty if nothing was.
    """

    word: str
    detail: str = ""
    proof: str = ""


@dataclass(frozen=True, slots=True)
class Controlled:
    """One control.

    Attributes:
        walls: those that were left out.
        without: what came of the attack then.
        behind: what came of it behind all walls of the kernel's; None where they are not what stops it.
        wrong: why it does not count; empty if it does.
    """

    kind: str
    walls: tuple[Wall, ...]
    without: Tried | None
    behind: Tried | None
    wrong: str

    @property
    def impossible(self) -> bool:
        """Whether there can be no control: the attack is not run, and counts for nothing."""
        return self.without is None

    @property
    def broken(self) -> bool:
        """Whether the attack got through all of its walls."""
        return self.behind is not None and self.behind.word == "done"


def run_controls(attacks: Mapping[str, Attack], controls: Mapping[str, Control]) -> list[Controlled]:
    """The controls of these attacks, some at a time.

    Args:
        controls: by name; each attack has one.
    """
    found = _run_once(attacks, controls)
    # On a busy machine something may have come too late to be seen.  What got through its walls once has done so.
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
    """Each in a world of its own, in the order given."""
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
    """One world, as the process sees it that made it."""

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
        """Read what it tells; whether there may be more."""
        data = os.read(self.read_fd, _READ_BYTES)
        self._told += data
        return bool(data) and b"\n" not in data

    def finish(self) -> Tried:
        """End it, remove what it made, and return what came of it."""
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
    """The process above the world: it ends with its first process."""
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
    """In the world's first process: let the attack go, and look what comes of it."""
    read_fd, write_fd = os.pipe()
    with control.prepared(world):
        jail = confine(world, attack, walls, write_fd)
        os.close(write_fd)
        world.init, world.job = jail.init, jail.pid
        if control.proof is not None and (seen := control.proof(world)):
            return Tried("error", f"before the attack there is: {seen}")
        jail.let_go()
        ready, _, _ = select.select([read_fd], [], [], control.within_s)
        data = os.read(read_fd, _READ_BYTES) if ready else None
        if data is None:
            word, detail = "stays", f"it went on for {control.within_s:g} s"
        elif data:
            word, detail = json.loads(data)
        elif _until(lambda: "" if (code := jail.poll()) is None else str(code), _LAST_S):
            word, detail = "died", f"its process ended with {jail.poll()}"
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
