"""The control page: one rank's shared word with the state of its jobs (running, paused, ...), set by the operator.

It is one page of an anonymous memory file, like the gate, and not a file in the run folder: such a file could be
truncated, or lie on a server that stops answering, and either would take the training down.  The rank notes its process
and descriptor in ``RUN/control/NODE/rank3.json``; an operator's command on the same node opens the page through
``/proc``.  The rank and the workers only read; a change is one store and one wake-up, without a lock.

Layout, in 64-bit words of the machine's byte order::

    0  the futex word (low 32 bits): 4 x generation + state; the generation grows with every change
    1  magic and version    2  rank    3  the rank's pid    4  the agent's pid, 0 before the agent has started
    5  the last word that the agent has acted on
    6  the start time of the agent's process, in ticks since boot: its pid may be reused
    7  1 once the jobs of all ranks have settled
    8  1 once the rank has asked for the figures of the run
    9  the figures (``Figures``), each a 64-bit float, NaN if it is not known
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import struct
from array import array
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from megatron.fill import untrusted
from megatron.fill.errors import ControlError
from megatron.fill.folders import CONTROL
from megatron.fill.linux import futex, memfd
from megatron.fill.linux.files import write_text
from megatron.fill.linux.tree import read_process
from megatron.fill.pages.gate import LOOK_AGAIN_NS

_PAGE_BYTES = 4096
_MAGIC = 0x50434F4E_00000001
_WORD, _VERSION, _RANK, _PID, _AGENT, _ACKNOWLEDGED, _AGENT_BORN, _SETTLED, _ASKED, _FIGURES = range(10)
NAME = "control"


class RunState(IntEnum):
    """The state that the operator wants the jobs in.  No step may start in the odd states, so one bit is enough."""

    RUNNING = 0
    PAUSED = 1  # no job runs; jobs resume in the first bubble after RUNNING
    DRAINING = 2  # running jobs continue to their end, no other is started
    KILLED = 3  # workers are killed at once, and their jobs go back to the queue


class Figures(NamedTuple):
    """Figures of all ranks since the start of the training, for Megatron's own writers; NaN if not known.

    Attributes:
        slowdown, slowdown_low, slowdown_high: slowdown of the training by filling, with its 95% interval; 0.01 is 1%.
    """

    bubble_share: float
    harvest_ratio: float
    slowdown: float
    slowdown_low: float
    slowdown_high: float
    jobs_done: float


class RunSwitch(Protocol):
    """A switch for the jobs: True for ``running`` if steps may start, for ``settled`` once the jobs have settled."""

    @property
    def running(self) -> bool: ...

    @property
    def settled(self) -> bool: ...


class AlwaysRunning:
    """The switch of a run without a control page, which cannot be paused."""

    running = settled = True


class ControlReader:
    """A worker's view of the control page; ControlError if the descriptor is not a control page of this version."""

    def __init__(self, fd: int, *, writable: bool = False) -> None:
        try:
            page, self._address = memfd.map_page(fd, _PAGE_BYTES, writable=writable)
        except OSError as error:
            raise ControlError(f"descriptor {fd} cannot be mapped as a control page: {error}") from error
        self._words, self._word, self._floats = page.cast("Q"), page.cast("I"), page.cast("d")
        if self._words[_VERSION] != _MAGIC:
            raise ControlError(
                f"descriptor {fd} is not a control page: found {self._words[_VERSION]:#x}, expected {_MAGIC:#x}"
            )

    @property
    def running(self) -> bool:
        """True if steps may start.  Reading it takes a tenth of a microsecond, so every step can."""
        return not self._word[0] & 1

    @property
    def settled(self) -> bool:
        """True once the first job of every rank has done a step, as the agents report."""
        return bool(self._words[_SETTLED])

    @property
    def word(self) -> int:
        """Generation and state together, different after every change."""
        return self._word[0]

    @property
    def state(self) -> RunState:
        return RunState(self._word[0] & 3)

    def wait(self, word: int) -> None:
        """Sleep in the kernel until the word is not ``word`` or a signal comes, for at most a second."""
        futex.wait(self._address, word, LOOK_AGAIN_NS)  # a timeout: another process that maps the page may requeue us


class ControlPage(ControlReader):
    """The control page, writable: for the rank that created it, its agent and the operator's command."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, writable=True)
        self.fd = fd
        self._wake = futex.Waker(self._address, futex.ALL)  # waking all takes long, but the rank never does it

    @classmethod
    def create(cls, rank: int) -> ControlPage:
        """Create the page of ``rank``, owned by the calling process, in the state RUNNING."""
        fd = memfd.create(NAME, _PAGE_BYTES)
        os.pwrite(fd, struct.pack("=4Q", 0, _MAGIC, rank, os.getpid()), 0)
        return cls(fd)

    def reader_fd(self) -> int:
        return memfd.reader_fd(self.fd)

    def change(self, state: RunState) -> None:
        """Set the state and wake every process that sleeps on the page."""
        generation = (self._word[0] >> 2) + 1
        self._word[0] = (4 * generation + state) & 0xFFFFFFFF
        self._wake()

    @property
    def rank(self) -> int:
        return self._words[_RANK]

    @property
    def pid(self) -> int:
        return self._words[_PID]

    @property
    def agent(self) -> int:
        """The pid of the rank's agent; 0 before it has started."""
        return self._words[_AGENT]

    @property
    def agent_lives(self) -> bool:
        """True if the agent's process is alive; its start time distinguishes it from another with the same pid."""
        return bool(self.agent) and _born(self.agent) == self._words[_AGENT_BORN]

    @property
    def acknowledged(self) -> bool:
        """True if the agent has acted on the last change."""
        return self._words[_ACKNOWLEDGED] == self.word

    @property
    def silent(self) -> bool:
        """True if the agent is alive and has not acted on the last change."""
        return not self.acknowledged and self.agent_lives

    def acknowledge(self, word: int) -> None:
        """Record that the calling agent has acted on ``word``."""
        if self.agent != os.getpid():
            self._words[_AGENT_BORN] = _born(os.getpid()) or 0
            self._words[_AGENT] = os.getpid()
        self._words[_ACKNOWLEDGED] = word

    def settle(self) -> None:
        self._words[_SETTLED] = 1

    @property
    def asked(self) -> bool:
        """True if the rank has asked for the figures of the run."""
        return bool(self._words[_ASKED])

    def ask(self) -> dict[str, float]:
        """Ask the agent for the figures of the run, and return those that it has shown and that are known, by name."""
        if not self.asked:
            self.show(Figures(*[math.nan] * len(Figures._fields)))
            self._words[_ASKED] = 1
        shown = self._floats[_FIGURES : _FIGURES + len(Figures._fields)]
        return {name: value for name, value in zip(Figures._fields, shown, strict=True) if not math.isnan(value)}

    def show(self, figures: Figures) -> None:
        self._floats[_FIGURES : _FIGURES + len(figures)] = memoryview(array("d", figures))

    def announce(self, run_dir: Path, board_fd: int | None = None) -> Path:
        """Write the note by which the operator finds the page, and the rank's board; OSError if that fails."""
        path = run_dir / CONTROL / os.uname().nodename / f"rank{self.rank}.json"
        write_text(path, json.dumps({"pid": self.pid, "fd": self.fd, "board": board_fd}) + "\n")
        return path

    def withdraw(self, note: Path) -> None:
        """Remove the note that ``announce`` has written, unless another process has written its own there since."""
        with contextlib.suppress(OSError, ValueError):
            if read_note(note).pid == self.pid:
                note.unlink()


def _born(pid: int) -> int | None:
    """The start time of a process in ticks since boot; None if it has ended."""
    process = read_process(pid)
    return process.started if process is not None and process.alive else None


class Note(NamedTuple):
    """A rank's note: its process, and there the descriptors of its control page and of its board, if it has one."""

    pid: int
    fd: int
    board: int | None


def read_note(path: Path) -> Note:
    """Read the note of a rank, which it removes when it is done: FileNotFoundError then, another OSError if the note
    cannot be read or is not a plain file, ValueError if its content is not a valid note.
    """
    where = untrusted.read_json(path)
    pid, fd, board = map(where.get, ("pid", "fd", "board")) if isinstance(where, dict) else (None, None, None)
    if not (type(pid) is int and type(fd) is int and min(pid, fd) >= 0):
        raise ValueError("expected a process and a descriptor")
    return Note(pid, fd, board if type(board) is int and board >= 0 else None)
