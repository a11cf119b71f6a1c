"""The control page: one rank's shared word that says whether its side tasks may run, and the operator's way to it.

One page of an anonymous memory file, like the gate, and not a file in the run folder: that could be cut short, or lie
on a server that stops answering, and either would take the training down with it.  The rank makes the page and writes
down where it is (``RUN/control/NODE/rank3.json``: a process and a descriptor); an operator's command on the same node
opens it through ``/proc``.  The rank and the workers only read; a change is one store and one wake-up.  No lock.

Layout, in 64-bit words of the machine's byte order::

    0  the futex word (low 32 bits): 4 x generation + state; the generation grows with every change
    1  magic and version    2  rank    3  its process    4  its agent's process, 0 before that has started
    5  the last word that the agent has acted on
    6  when the agent's process started, in ticks since boot: another one may get its number
    7  1 once the jobs of all ranks have settled
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
from enum import IntEnum
from pathlib import Path
from typing import Protocol

from megatron.fill import untrusted
from megatron.fill.errors import ControlError
from megatron.fill.folders import CONTROL
from megatron.fill.linux import futex, memfd
from megatron.fill.linux.files import write_text
from megatron.fill.linux.tree import read_process

_PAGE_BYTES = 4096
_LOOK_AGAIN_NS = 1_000_000_000
_MAGIC = 0x50434F4E_00000001
_WORD, _VERSION, _RANK, _PID, _AGENT, _ACKNOWLEDGED, _AGENT_BORN, _SETTLED = range(8)
_NAME = "control"


class RunState(IntEnum):
    """What the operator wants of the side tasks.  In the odd states no step may start: one bit tells."""

    RUNNING = 0
    PAUSED = 1  # nothing runs; it goes on with the first bubble after RUNNING
    DRAINING = 2  # jobs that run go on to their end, no other is begun
    KILLED = 3  # workers are ended at once, and their jobs go back to the queue


class RunSwitch(Protocol):
    """Whether steps may start."""

    @property
    def running(self) -> bool: ...


class RankSwitch(RunSwitch, Protocol):
    """The switch as a rank sees it, which also learns from it whether the jobs have settled."""

    @property
    def settled(self) -> bool: ...


class AlwaysRunning:
    """The switch where nobody can pause: without a control page."""

    running = settled = True


class ControlReader:
    """A page as a worker sees it, over the descriptor that its agent passed on.

    Raises:
        ControlError: the descriptor is not a control page of this version.
    """

    def __init__(self, fd: int) -> None:
        self._attach(fd, writable=False)

    def _attach(self, fd: int, writable: bool) -> None:
        try:
            page, self._address = memfd.map_page(fd, _PAGE_BYTES, writable=writable)
        except OSError as error:
            raise ControlError(f"descriptor {fd} cannot be mapped as a control page: {error}") from error
        self._words, self._word = page.cast("Q"), page.cast("I")
        if self._words[_VERSION] != _MAGIC:
            raise ControlError(
                f"descriptor {fd} is not a control page: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}"
            )

    @property
    def running(self) -> bool:
        """Whether steps may start.  Costs a tenth of a microsecond, so that every step can ask."""
        return not self._word[0] & 1

    @property
    def settled(self) -> bool:
        """Whether the first job of every rank has done a step, as the agents say."""
        return bool(self._words[_SETTLED])

    @property
    def word(self) -> int:
        """Generation and state together: it differs after every change."""
        return self._word[0]

    @property
    def state(self) -> RunState:
        return RunState(self._word[0] & 3)

    def wait(self, word: int) -> None:
        """Sleep in the kernel while the word is still ``word``, at most for a second; a signal ends it too."""
        futex.wait(self._address, word, _LOOK_AGAIN_NS)  # whoever maps the page may move its waiters elsewhere


class ControlPage(ControlReader):
    """A page as the rank that made it, its agent and the operator's command see it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._attach(fd, writable=True)
        self._wake = futex.Waker(self._address, futex.ALL)  # never by the rank

    @classmethod
    def create(cls, rank: int) -> ControlPage:
        """A new page of the calling process, RUNNING."""
        fd = memfd.create(_NAME, _PAGE_BYTES)
        os.pwrite(fd, struct.pack("=4Q", 0, _MAGIC, rank, os.getpid()), 0)
        return cls(fd)

    def reader_fd(self) -> int:
        """A new descriptor of the page through which nothing can be written."""
        return memfd.reader_fd(self.fd)

    def change(self, state: RunState) -> None:
        """Say what is wanted from now on; whoever sleeps on the page wakes."""
        generation = (self._word[0] >> 2) + 1
        self._word[0] = (4 * generation + state) & 0xFFFFFFFF
        self._wake()

    @property
    def rank(self) -> int:
        return self._words[_RANK]

    @property
    def pid(self) -> int:
        """The rank's process."""
        return self._words[_PID]

    @property
    def agent(self) -> int:
        """The process of the rank's agent; 0 before it has started."""
        return self._words[_AGENT]

    @property
    def agent_lives(self) -> bool:
        """Whether that process is there, and not another one that got its number."""
        return bool(self.agent) and _born(self.agent) == self._words[_AGENT_BORN]

    @property
    def acknowledged(self) -> bool:
        """Whether the agent has acted on the last change."""
        return self._words[_ACKNOWLEDGED] == self.word

    @property
    def silent(self) -> bool:
        """Whether the agent lives and has not acted on the last change."""
        return not self.acknowledged and self.agent_lives

    def acknowledge(self, word: int) -> None:
        """The calling agent has acted on ``word``."""
        if self.agent != os.getpid():
            self._words[_AGENT_BORN] = _born(os.getpid()) or 0
            self._words[_AGENT] = os.getpid()
        self._words[_ACKNOWLEDGED] = word

    def settle(self) -> None:
        """The first job of every rank has done a step."""
        self._words[_SETTLED] = 1

    def announce(self, run_dir: Path, board_fd: int | None = None) -> Path:
        """Write down where the page is, for the operator; to be removed when the rank is done.

        Args:
            board_fd: the rank's board, whose pulse tells whether anything moves.

        Raises:
            OSError: it cannot be written.
        """
        path = run_dir / CONTROL / os.uname().nodename / f"rank{self.rank}.json"
        write_text(path, json.dumps({"pid": self.pid, "fd": self.fd, "board": board_fd}) + "\n")
        return path


def _born(pid: int) -> int | None:
    """When a process started, in ticks since boot; None if it has ended."""
    process = read_process(pid)
    return process.started if process is not None and process.alive else None


def find_pages(run_dir: Path) -> list[ControlPage]:
    """The pages of the ranks of a run that are alive on this node, by rank.

    Raises:
        ControlError: there is no such run folder, nothing of it can be found on this node, or it is another user's.
    """
    if not run_dir.is_dir():
        raise ControlError(f"{run_dir}: no such folder; expected the run folder that the training printed")
    node = os.uname().nodename
    pages = [page for path in notes(run_dir) if (page := _open(path)) is not None]
    if not pages:
        others = sorted(path.name for path in (run_dir / CONTROL).glob("*") if path.name != node)
        elsewhere = f"; it has ranks on {', '.join(others)}, and each node has to be told" if others else ""
        unknown = "".join(f"; {what}" for what in damaged_notes(run_dir))
        raise ControlError(f"{run_dir}: none of its ranks runs on this node, {node}{elsewhere}{unknown}")
    return sorted(pages, key=lambda page: page.rank)


def damaged_notes(run_dir: Path) -> list[str]:
    """Of each rank that did not tell legibly where its page is: a line that says so.  Nobody can say how it is."""
    damaged = []
    for path in notes(run_dir):
        try:
            _read_note(path)
        except PermissionError:  # said where it is opened
            continue
        except (OSError, ValueError) as error:
            reason = error.strerror or error if isinstance(error, OSError) else error
            damaged.append(f"{path} is damaged ({reason}), so whether that rank runs, and in which state, is not known")
    return damaged


def notes(run_dir: Path) -> list[Path]:
    """Where the ranks of a run on this node wrote down where their pages are; those that are done took theirs away."""
    return sorted((run_dir / CONTROL / os.uname().nodename).glob("rank*.json"))


def _read_note(path: Path) -> tuple[int, int] | None:
    """The process and the descriptor that a rank wrote down; None if it has just taken its note away.

    Raises:
        OSError: it cannot be read, or is not a plain file.
        ValueError: it is none.
    """
    try:
        where = untrusted.read_json(path)
    except FileNotFoundError:
        return None
    pid, number = (where.get("pid"), where.get("fd")) if isinstance(where, dict) else (None, None)
    if not (type(pid) is int and type(number) is int and min(pid, number) >= 0):
        raise ValueError("expected a process and a descriptor")
    return pid, number


def _open(path: Path) -> ControlPage | None:
    """The page that a rank wrote down; None if that rank is gone, or its note is damaged."""
    try:
        where = _read_note(path)
        if where is None:
            return None
        pid, number = where
        link = f"/proc/{pid}/fd/{number}"
        # Another process may have the number by now, and to open its pipe or terminal could do harm.
        if not os.readlink(link).startswith(f"/memfd:pipefill-{_NAME}"):
            return None
        fd = os.open(link, os.O_RDWR | os.O_CLOEXEC)
    except PermissionError as error:
        raise ControlError(f"{path}: its rank belongs to another user; only that user may control it") from error
    except (OSError, ValueError):
        return None
    with contextlib.suppress(ControlError):
        page = ControlPage(fd)
        if page.pid == pid and path.name == f"rank{page.rank}.json":
            return page
    os.close(fd)
    return None
