"""The side tasks of a chaos run: an honest one, and one that commits a fault of any kind.  Free of torch."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

from megatron.fill.sidetask.base import SideTask
from tests.chaos import memfiles
from tests.chaos.marks import Note, mark

_STEP_S = 0.0005
GOOD_STEPS = 3  # before a fault in a step
_STOPS, _SCRIBBLES = 1, 5  # per job; each stop is a violation, and some are forgiven
_CHECKPOINTS = ("checkpoint.pt", "checkpoint-previous.pt")
_FORKS, _FORKED_S = 300, 60
_LEAKS, _LEAKED = 20_000, 100  # in all, and in one step
_FILE_BYTES = 4096  # the limit of a job whose checkpoints are larger


def work() -> None:
    end_s = time.thread_time() + _STEP_S
    while time.thread_time() < end_s:
        pass


class Honest(SideTask):
    """Counts to ``steps`` and no further, over any number of attempts."""

    def create(self, marks: str, steps: int) -> None:
        self.marks, self.steps, self.done = Path(marks), steps, 0
        self.context.total_work = float(steps)

    def run_next_step(self) -> float | None:
        if self.done >= self.steps:
            raise StopIteration
        work()
        self.done += 1
        if self.done == GOOD_STEPS:
            mark(self.marks, Note.READY)
        return 1.0

    def state_dict(self) -> dict[str, Any] | None:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


class Raising(Honest):
    """Raises in the callback ``where``."""

    def create(self, marks: str, steps: int, where: str = "create") -> None:
        super().create(marks, steps)
        self.where = where
        self._maybe("create")

    def init(self) -> None:
        self._maybe("init")

    def start(self) -> None:
        self._maybe("start")

    def run_next_step(self) -> float | None:
        if self.done >= GOOD_STEPS:
            self._maybe("run_next_step")
            if self.where == "stop":
                raise StopIteration
        if self.where == "load_state_dict" and (self.context.directory / _CHECKPOINTS[0]).exists():
            os.kill(os.getpid(), signal.SIGKILL)  # the next attempt has a checkpoint to load
        work()
        self.done += 1
        return 1.0

    def pause(self) -> None:
        self._maybe("pause")

    def stop(self) -> None:
        self._maybe("stop")

    def state_dict(self) -> dict[str, Any] | None:
        self._maybe("state_dict")
        return super().state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._maybe("load_state_dict")

    def _maybe(self, callback: str) -> None:
        if callback == self.where:
            mark(self.marks, Note.FAULT)
            raise ValueError("made to fail")


class Fault(Honest):
    """After three good steps, each further one commits the fault ``kind``, until the fault or the work ends it."""

    def create(self, marks: str, steps: int, kind: str = "nonsense") -> None:
        super().create(marks, steps)
        self.faults = 0
        self.commit: Callable[[], Any] = getattr(self, "_" + kind.replace("-", "_"))
        self.keeps = kind in _RESUMABLE
        self.padding = "x" * (2 * _FILE_BYTES if kind == "file-limit" else 0)
        self.attacks = memfiles.attacks("gate", "cycle")
        self.hoard: list[Any] = []

    def run_next_step(self) -> float | None:
        if self.done < GOOD_STEPS:
            return super().run_next_step()
        instead = self.commit()
        return super().run_next_step() if instead is None else instead

    def state_dict(self) -> dict[str, Any] | None:
        if self.padding:
            self._mark()
        return {"done": self.done, "padding": self.padding} if self.keeps else None

    def _mark(self) -> None:
        self.faults += 1
        mark(self.marks, Note.FAULT)

    def _mark_once(self) -> None:
        if not self.faults:
            self._mark()

    def _sys_exit(self) -> None:
        self._mark()
        sys.exit(3)

    def _nonsense(self) -> str:
        self._mark()
        return "a lot"

    def _os_exit(self) -> None:
        self._mark()
        os._exit(4)

    def _sigkill_self(self) -> None:
        self._mark()
        os.kill(os.getpid(), signal.SIGKILL)

    def _sigsegv(self) -> None:
        self._mark()
        ctypes.string_at(0)

    def _sigstop_self(self) -> None:
        if self.faults < _STOPS:
            self._mark()
            os.kill(os.getpid(), signal.SIGSTOP)

    def _hang(self) -> None:
        self._mark()
        while True:
            time.sleep(3600)

    def _hang_gil(self) -> None:
        self._mark()
        native = ctypes.PyDLL(None)  # keeps the GIL, so that no Python signal handler runs either
        while True:
            native.pause()

    def _deaf_loop(self) -> None:
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        self._mark()
        while True:
            pass

    def _memory_hog(self) -> None:
        self._mark_once()
        self.hoard.append(bytearray(4 << 20))

    def _fork_bomb(self) -> None:
        self._mark_once()
        if self.done >= _FORKS:
            raise RuntimeError(f"forked {_FORKS} times")
        if os.fork() == 0:
            try:
                with contextlib.suppress(OSError):
                    os.setsid()
                if os.fork() == 0:
                    time.sleep(_FORKED_S)
            finally:  # a copy of this worker must not go on as one
                os._exit(0)

    def _descriptor_leak(self) -> None:
        self._mark_once()
        self.hoard += [os.open("/dev/null", os.O_RDONLY) for _ in range(_LEAKED)]
        if len(self.hoard) >= _LEAKS:
            raise RuntimeError(f"leaked {_LEAKS} descriptors")

    def _output_flood(self) -> None:
        self._mark_once()
        os.write(1, b"x" * (1 << 20))

    def _file_limit(self) -> float | None:
        """Do steps without work until a checkpoint was tried."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (_FILE_BYTES, _FILE_BYTES))
        return None if self.faults else self._wait()

    def _checkpoint_newest(self) -> float | None:
        return self._damage(_CHECKPOINTS[:1])

    def _checkpoint_both(self) -> float | None:
        return self._damage(_CHECKPOINTS)

    def _damage(self, names: tuple[str, ...]) -> float | None:
        """Once there are two checkpoints, damage those named and die; the next attempt must cope with them."""
        directory = self.context.directory
        if list(directory.glob("*.corrupt")):
            return None
        if all((directory / name).exists() for name in _CHECKPOINTS):
            self._mark()
            for name in names:
                with (directory / name).open("r+b") as file:
                    file.write(b"\xff" * 8)
            os.kill(os.getpid(), signal.SIGKILL)
        return self._wait()

    def _wait(self) -> float:
        """A step without work."""
        work()
        return 0.0

    def _gate_write(self) -> None:
        for name, attack in self.attacks:
            self._mark()
            try:
                attack()
            except OSError:
                return  # refused; the next step tries the next way
            raise AssertionError(f"a worker could {name}")

    def _gate_close(self) -> None:
        if not self.faults:
            self._mark()
            for fd in chain.from_iterable(memfiles.descriptors("gate", "cycle", "baton", "steps").values()):
                os.close(fd)

    def _baton_scribble(self) -> None:
        self._scribble("baton")

    def _log_scribble(self) -> None:
        self._scribble("steps")

    def _scribble(self, name: str) -> None:
        if self.faults >= _SCRIBBLES:
            raise ValueError("made to fail")
        self._mark()
        memfiles.scribble(name)


_RESUMABLE = ("file-limit", "checkpoint-newest", "checkpoint-both")
