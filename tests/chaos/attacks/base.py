"""What every attack stands on: whom it may reach, and how it tells what came of it."""

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
    """It could not be done, for another reason than the kernel's."""


class NoTargetError(Exception):
    """There is nothing to do it to, so that nothing was tried: it says nothing of any wall."""


@dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        commit: tries it.  It raises OSError or Refused where it was refused, NoTargetError where it was not even
            tried, and returns what went through in a few words; ``""`` where there is nothing to be seen at once.
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
        targets: what the run has told its attackers of what they cannot see.
        private: this is a control's world, in which nothing is the machine's.
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
        """The run's folder."""
        return self.directory.parents[1]

    def others_files(self) -> list[Path]:
        """The run's files that it was told of, without those in the job's own folder."""
        return [path for path in map(Path, self.targets.files) if not path.is_relative_to(self.directory)]

    def ranks(self) -> list[int]:
        """The training's processes: those that can be seen, or else by the numbers that they have outside.

        Where those are hidden, so is the first of the job's own process namespace among them: it holds the job for
        its agent.

        Raises:
            NoTargetError: none can be seen, and no number is known.
        """
        return self._found(lambda words: "--fill-store" in words, self.targets.ranks, "rank")

    def agents(self) -> list[int]:
        """Agents and wardens of the run; as ``ranks``.

        Raises:
            NoTargetError: as there.
        """
        programs = {agent_program(), warden_program()}
        return self._found(lambda words: not programs.isdisjoint(words), self.targets.agents, "agent")

    def everyone(self) -> list[int]:
        """Ranks, agents and wardens; as ``ranks``.

        Raises:
            NoTargetError: as there.
        """
        return list(dict.fromkeys([*self.ranks(), *self.agents()]))

    def outsiders(self) -> list[int]:
        """The same without the job's own init: what only tells something of that one gives nothing away.

        Raises:
            NoTargetError: as there.
        """
        init = 1 if self._has_init() else None
        return [pid for pid in self.everyone() if pid != init]

    def _found(self, wanted: Callable[[list[str]], bool], told: Sequence[int], what: str) -> list[int]:
        pids = [pid for pid, words in _commands() if wanted(words) and self._ours(words)]
        if pids:
            return pids
        # The kernel is asked all the same.  A number that this namespace has is not who is meant.
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
        """Whether process 1 is one of this run's: this is a process namespace of its own."""
        return self.private or self._has_init()

    def own_network(self) -> bool:
        """Whether this is another network than the machine's."""
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
    """Try one way after the other; those that went through.

    Raises:
        Refused: of those that were tried, all were refused.
        NoTargetError: there was none to be tried.
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
    """The threads of a process; its first alone where they cannot be seen."""
    try:
        return [int(entry) for entry in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return [pid]


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
