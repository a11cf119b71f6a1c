"""The base of all attacks: their targets, and their outcomes."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.kind import FaultKind
from tests.chaos.programs import agent_program, warden_program
from tests.chaos.targets import NOTHING, Targets

_PACKAGE = "megatron.fill."


class Refused(Exception):
    """The attempt failed for another reason than the kernel's refusal."""


class NoTargetError(Exception):
    """There is no target, so nothing was tried: the outcome tells nothing about the sandbox."""


@dataclass(frozen=True, slots=True)
class Attack:
    """An attack.

    Attributes:
        commit: commits it.  It raises OSError or Refused if it was refused, and NoTargetError if it was not tried; it
            returns what went through in a few words, ``""`` where there is nothing to see at once.
        lasts_s: time for which the job continues afterwards, so that effects can be seen.
    """

    kind: FaultKind
    commit: Callable[[Ground], str]
    lasts_s: float = 0.0


class Ground:
    """The surroundings of an attack.

    Args:
        directory: the job's own folder.
        folder: folder of the chaos run with its store and its run folders.  A process with an argument in there belongs
            to the run; no other process may be touched.
        machine_network: inode of the network namespace that must not be touched.
        targets: targets that the run has told its attackers, since they may not see them.
        private: True in the world of a control, in which nothing belongs to the machine.
    """

    def __init__(
        self,
        directory: Path,
        folder: Path,
        machine_network: int,
        targets: Targets = NOTHING,
        private: bool = False,
    ) -> None:
        self.directory = directory
        self.folder = folder
        self.machine_network = machine_network
        self.targets = targets
        self.private = private

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.directory.parents[1]

    def others_files(self) -> list[Path]:
        """The known files of the run outside of the job's own folder."""
        return [path for path in map(Path, self.targets.files) if not path.is_relative_to(self.directory)]

    def ranks(self) -> list[int]:
        """The pids of the ranks: as seen here, or else as they are outside.

        Where they are hidden, the init of the job's process namespace is added: it holds the job for its agent.

        Raises:
            NoTargetError: none is visible, and no pid is known.
        """
        return self._found(lambda words: "--fill-store" in words, self.targets.ranks, "rank")

    def agents(self) -> list[int]:
        """The pids of agents and wardens of the run; as ``ranks``.

        Raises:
            NoTargetError: as there.
        """
        programs = {agent_program(), warden_program()}
        return self._found(lambda words: not programs.isdisjoint(words), self.targets.agents, "agent")

    def everyone(self) -> list[int]:
        """The pids of ranks, agents and wardens; as ``ranks``.

        Raises:
            NoTargetError: as there.
        """
        return list(dict.fromkeys([*self.ranks(), *self.agents()]))

    def outsiders(self) -> list[int]:
        """The same without the job's own init, about which a job may be told.

        Raises:
            NoTargetError: as there.
        """
        init = 1 if self._has_init() else None
        return [pid for pid in self.everyone() if pid != init]

    def _found(self, wanted: Callable[[list[str]], bool], told: Sequence[int], what: str) -> list[int]:
        pids = [pid for pid, words in _commands() if wanted(words) and self._ours(words)]
        if pids:
            return pids
        # Ask the kernel anyway.  A pid that exists in this namespace is another process.
        pids = [pid for pid in told if self._is_elsewhere(pid)]
        if not pids:
            raise NoTargetError(f"no {what} of the run is in sight, and no number of one is known")
        return [*pids, 1] if self._has_init() else pids

    def _is_elsewhere(self, pid: int) -> bool:
        same = os.stat("/proc/self/ns/pid").st_ino == self.targets.namespace
        return same or not os.path.exists(f"/proc/{pid}")

    def _ours(self, words: list[str]) -> bool:
        return any(word.startswith(str(self.folder) + os.sep) for word in words)

    def _has_init(self) -> bool:
        words = dict(_commands()).get(1, [])
        return any(word.startswith(_PACKAGE) for word in words) or self._ours(words)

    def own_init(self) -> bool:
        """True if process 1 belongs to this run: the process namespace is the job's own."""
        return self.private or self._has_init()

    def own_network(self) -> bool:
        """True if this is another network than the machine's."""
        return self.private or os.stat("/proc/self/ns/net").st_ino != self.machine_network


def _commands() -> Iterable[tuple[int, list[str]]]:
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    yield int(entry), file.read().decode("utf-8", "replace").split("\0")
            except OSError:
                continue


def try_all(ways: Iterable[tuple[str, Callable[[], object]]]) -> str:
    """Try one way after the other, and return those that went through.

    Raises:
        Refused: all that were tried were refused.
        NoTargetError: none could be tried.
    """
    through, refused, missed = [], "", "there was no way"
    for name, way in ways:
        try:
            way()
            through.append(name)
        except (OSError, Refused) as error:
            refused = f"{name}: {error}"
        except NoTargetError as error:
            missed = f"{name}: {error}"
    if through:
        return ", ".join(through)
    if refused:
        raise Refused(refused)
    raise NoTargetError(missed)


def threads(pid: int) -> list[int]:
    """The threads of a process; only the first where the others are hidden."""
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return [pid]


def in_child(deed: Callable[[], object], within_s: float = 2.0) -> None:
    """Try something in a child, since it would damage this process.

    Raises:
        OSError: the attempt raised it.
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
    """Run something in a thread that the task does not wait for."""
    thread = threading.Thread(target=deed, daemon=True)
    thread.start()
    return thread
