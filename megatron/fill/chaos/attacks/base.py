"""What every attack stands on: whom it may reach, and how it tells what came of it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.chaos.kind import FaultKind

_PACKAGE = "megatron.fill."
_AGENT, _WARDEN = (f"{_PACKAGE}runtime.{name}" for name in ("agent", "warden"))


class Refused(Exception):
    """It could not be done: nothing to do it to is in reach."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        commit: tries it.  It raises OSError or Refused where it was refused, and returns what went through in a few
            words; ``""`` where there is nothing to be seen at once.
        lasts_s: for how long the job goes on afterwards, so that there is something to be seen.
    """

    kind: FaultKind
    commit: Callable[[Ground], str]
    lasts_s: float = 0.0


class Ground:
    """Where an attack stands.

    Args:
        directory: the job's own folder.
        folder: of the chaos run, in which its store and its run folders are: whatever has an argument in there is
            a process of that run, and nothing else is to be touched.
        machine_network: the inode of the network namespace that is not to be touched.
    """

    def __init__(self, directory: Path, folder: Path, machine_network: int) -> None:
        self.directory = directory
        self.folder = folder
        self.machine_network = machine_network

    def ranks(self) -> list[int]:
        """The training's processes; where none can be seen from here, the first of the job's own process namespace.

        That one is not the job's either: it holds the job for its agent.

        Raises:
            Refused: there is neither.
        """
        try:
            return self._found(lambda words: "--fill-store" in words, "rank")
        except Refused:
            if not self.own_init():
                raise
            return [1]

    def agents(self) -> list[int]:
        """Agents and wardens of the run.

        Raises:
            Refused: none can be seen.
        """
        return self._found(lambda words: _AGENT in words or _WARDEN in words, "agent")

    def everyone(self) -> list[int]:
        """Ranks, agents and wardens, as far as they can be seen; see ``ranks``.

        Raises:
            Refused: as there.
        """
        with contextlib.suppress(Refused):
            return [*self.ranks(), *self.agents()]
        return self.ranks()

    def _found(self, wanted: Callable[[list[str]], bool], what: str) -> list[int]:
        pids = [pid for pid, words in _commands() if wanted(words) and self._ours(words)]
        if not pids:
            raise Refused(f"no {what} of the run is in sight")
        return pids

    def _ours(self, words: list[str]) -> bool:
        return any(word.startswith(str(self.folder) + os.sep) for word in words)

    def own_init(self) -> bool:
        """Whether process 1 is one of this run's: this is a process namespace of its own."""
        words = dict(_commands()).get(1, [])
        return any(word.startswith(_PACKAGE) for word in words) or self._ours(words)

    def own_network(self) -> bool:
        """Whether this is another network than the machine's."""
        return os.stat("/proc/self/ns/net").st_ino != self.machine_network


def _commands() -> Iterable[tuple[int, list[str]]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    yield int(entry), file.read().decode("utf-8", "replace").split("\0")
            except OSError:
                continue


def try_all(ways: Iterable[tuple[str, Callable[[], object]]]) -> str:
    """Try one way after the other; those that went through.

    Raises:
        Refused: all were refused.
    """
    through, why = [], "there was no way"
    for name, way in ways:
        try:
            way()
            through.append(name)
        except (OSError, Refused) as error:
            why = f"{name}: {error}"
    if not through:
        raise Refused(why)
    return ", ".join(through)


def in_child(deed: Callable[[], object], within_s: float = 2.0) -> None:
    """Try something in a process of its own, which would spoil this one.

    Raises:
        OSError: as the deed did.
    """
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            deed()
        except Refused:
            code = 254
        except OSError as error:
            code = error.errno or 255
        except BaseException:
            code = 255
        finally:
            os._exit(code)
    ender = threading.Timer(within_s, os.kill, (pid, 9))
    ender.start()
    _, status = os.waitpid(pid, 0)
    ender.cancel()
    code = os.waitstatus_to_exitcode(status)
    if code:
        raise OSError(max(code, 0), os.strerror(code) if code > 0 else f"ended by signal {-code}")


def own_session() -> None:
    """Leave the training's session, where that is not refused."""
    with contextlib.suppress(OSError):
        os.setsid()


def beside(deed: Callable[[], object]) -> threading.Thread:
    """Do something in a thread that the task does not wait for."""
    thread = threading.Thread(target=deed, daemon=True)
    thread.start()
    return thread
