"""The driver's longer actions: operators' commands, other trainings, damaged stores."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron.fill.errors import ControlError, FillError
from megatron.fill.pages.control import RunState
from megatron.fill.pages.find import find_pages
from tests.chaos import marks, processes
from tests.chaos.attacks import command
from tests.chaos.deed import Deed
from tests.chaos.injector import Injector
from tests.chaos.mainjob import GivenUpError, RepeatedTraining
from tests.chaos.meminfo import FreeMemory
from tests.chaos.submitting import Submitter
from tests.chaos.training import ChaosTraining

_STOPPED_S, _GONE_S, _LONG_S, _SHORT_S = 5.0, 15.0, 20.0, 3.0
_READY_S, _HEARD_S = 40.0, 90.0
_PAUSED_S, _MOST_CPU_S = 3.0, 0.3
_SECOND_ITERATIONS, _SECOND_S = 80, 180.0
_GROWN_S = 12.0
_MARGIN, _EATEN = 1024 << 20, 100 << 20
_HOSTILE = "\x1b[2J\x1b]0;owned\x07\r\nfake 1 SUCCEEDED\u202e\x00"
_HOLD_STEPS = 8_000


class Outside:
    """Commits the kinds of ``attacks.outside``.

    Args:
        memory: the machine's free memory as the training sees it.
        folder: folder of the chaos run.
    """

    def __init__(
        self, main: RepeatedTraining, injector: Injector, submitter: Submitter, memory: FreeMemory, folder: Path
    ) -> None:
        self.main, self.injector, self.submitter = main, injector, submitter
        self.memory, self.folder = memory, folder

    def commit(self, kind: str) -> Deed | None:
        """Commit a fault of this kind; return None if it was not seen to happen."""
        deeds: dict[str, Callable[[], str | None]] = {
            "stop-both": self._stop_both,
            "stop-both-end": self._stop_both_end,
            "store-away-long": lambda: self._replaced(None, _LONG_S),
            "store-truncated": lambda: self._replaced("truncated", _SHORT_S),
            "store-future": lambda: self._replaced("future", _SHORT_S),
            "store-damaged": lambda: self._commands(lambda at: command.store_faults(self.injector.database, at)),
            "yaml-bomb": lambda: self._commands(command.bomb_faults),
            "hostile-name": self._hostile_name,
            "operator": self._operator,
            "paused-daemons": self._paused_daemons,
            "second-run": lambda: self._second(self.main.run_dir),
            "second-training": lambda: self._second(self.main.disk / "second"),
            "grow-shrink": lambda: self._grow("Shrinking"),
            "grow-stop": lambda: self._grow("MemoryHolder"),
        }
        start_ns = time.monotonic_ns()
        try:
            wrong = deeds[kind]()
        except GivenUpError:
            raise
        except FillError as error:  # a store or a page is missing: the finding of this kind
            wrong = str(error)
        return None if wrong is None else Deed(kind, start_ns, time.monotonic_ns(), wrong=wrong)

    def _pair(self) -> list[int]:
        """The pids of a rank's warden and agent; empty if no agent runs."""
        agents = processes.agents(self.main.run_dir)
        if not agents:
            return []
        agent = agents[min(agents)]
        return [processes.parent(agent), agent]

    def _stop_both(self) -> str | None:
        pair = self._pair()
        if not pair or not _stopped(pair):
            return None
        before = self.main.iteration
        self._wait(_STOPPED_S)
        advanced = self.main.iteration > before
        for pid in pair:
            processes.send(pid, signal.SIGCONT)
        return "" if advanced else "the training stood still"

    def _stop_both_end(self) -> str | None:
        pair, segments = self._pair(), len(self.main.segments)
        if not pair or not _stopped(pair):
            return None
        while len(self.main.segments) == segments:
            self._wait(0.5)
        gone = self.injector.until(lambda: not any(map(processes.alive, pair)), _GONE_S)
        left = [pid for pid in pair if processes.alive(pid)]
        for pid in left:
            processes.send(pid, signal.SIGKILL)
        return "" if gone else f"{len(left)} of warden and agent were left, stopped, after the training's end"

    def _replaced(self, how: str | None, seconds: float) -> str:
        """Put a damaged file in the store's place, or none, for ``seconds``."""
        with self.injector.store_away():
            if how is not None:
                away = self.injector.database.parent / "away" / self.injector.database.name
                command.damage(away, self.injector.database, how)
            time.sleep(seconds)  # no tick: it would need the store
        return ""

    def _commands(self, faults: Callable[[Path], list[str]]) -> str:
        folder = self.folder / "commands"
        folder.mkdir()
        try:
            folder.chmod(0o755)
            return "; ".join(faults(folder))
        finally:
            command.clear(folder)

    def _hostile_name(self) -> str:
        """Write a job name that the store would refuse directly into its file."""
        submitted = self.submitter.honest()
        with contextlib.closing(sqlite3.connect(self.injector.database, timeout=10.0)) as database, database:
            database.execute(
                "UPDATE pipefill_jobs SET name = ?, user = ? WHERE id = ?",
                (f"{_HOSTILE}{submitted.id}", f"chaos{_HOSTILE}", submitted.id),
            )
        self.injector.until(lambda: self.submitter.store.get(submitted.id).state.finished, _READY_S)
        store = str(self.injector.database)
        said = [
            command.pipefill(*words, "--store", store) for words in (["list", "--all"], ["show", str(submitted.id)])
        ]
        found = [text for one in said for text in command.controls(one.output + one.errors)]
        return "; ".join([*(one.fault for one in said if one.fault), *(f"a command printed {one}" for one in found)])

    def _operator(self) -> str | None:
        training, wrong = self.main.training, []
        try:
            for word in ("status", "pause", "resume", "kill", "resume"):
                said = command.pipefill(word, str(self.main.run_dir))
                # Agents have the lowest priority: on a busy machine one may take longer than the command waits.
                late = said.code == 1 and not said.errors and self.injector.until(self._heard, _HEARD_S)
                if said.code != 0 and not late:
                    wrong.append(f"{word}: {said.code} {' '.join((said.output + said.errors).split())[:200]}")
        except ControlError as error:
            wrong.append(str(error))
        if wrong and self.injector.until(lambda: training is None or not training.running(), _GONE_S):
            return None  # the training was about to end: it is tried in the next one
        return "; ".join(wrong)

    def _heard(self) -> bool:
        return not any(page.silent for page in find_pages(self.main.run_dir))

    def _paused_daemons(self) -> str | None:
        submitted = self.submitter.command("burn_long")
        if not self.injector.until(lambda: bool(marks.read(submitted.notes, marks.Note.FAULT)), _READY_S):
            return None
        self._wait(1.0)
        with self._paused():
            self._wait(0.7)
            below = processes.below(processes.agents(self.main.run_dir).values())
            tree = processes.at_work_in(Path(self.submitter.store.get(submitted.id).directory), below)
            before = processes.cpu_s(tree)
            self._wait(_PAUSED_S)
            used_s = processes.cpu_s(tree) - before
        return "" if used_s < _MOST_CPU_S else f"it had {used_s:.1f} s of CPU in {_PAUSED_S:g} s while paused"

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        pages = find_pages(self.main.run_dir)
        for page in pages:
            page.change(RunState.PAUSED)
        try:
            yield
        finally:
            for page in pages:
                page.change(RunState.RUNNING)
                os.close(page.fd)

    def _second(self, run_dir: Path) -> str | None:
        """Start a second training.  In the first one's run folder it must be refused; in its own it must end well."""
        for _ in range(3):
            self.submitter.honest()
        folder = self.folder / f"second-{time.monotonic_ns()}"
        flags = self.main.flags(run_dir)
        second = ChaosTraining(self.main.script, folder, _SECOND_ITERATIONS, flags, self.main.clock.python_path)
        try:
            if not self.injector.until(lambda: not second.running(), _SECOND_S):
                return "the second training did not end"
        finally:
            second.end()
        if run_dir == self.main.run_dir:
            return "" if second.refused() else "the second training was not refused"
        if second.refused():
            return ""
        losses = second.losses()
        differ = sum(losses.get(number) != self.main.reference[number] for number in range(1, _SECOND_ITERATIONS + 1))
        return second.failure() or (f"{differ} losses of the second training differ" if differ else "")

    def _grow(self, task: str) -> str | None:
        """Show little free memory for some seconds, and check that the job releases its memory or is stopped."""
        submitted = self.submitter.task(f"tests.chaos.holder:{task}", _HOLD_STEPS)
        if not self.injector.until(lambda: bool(marks.read(submitted.notes, marks.Note.READY)), _READY_S):
            return None
        self._wait(1.5)  # a checkpoint has been written

        def answered() -> bool:
            if task == "Shrinking":
                return bool(marks.read(submitted.notes, marks.Note.HELD))
            with contextlib.suppress(FillError):
                return str(self.submitter.store.get(submitted.id).state) == "QUEUED"
            return False

        self.memory.show(_MARGIN - _EATEN)
        try:
            heard = self.injector.until(answered, _GROWN_S)
        finally:
            self.memory.restore()
        job = self.submitter.store.get(submitted.id)
        if not heard:
            return f"the task was not asked to give memory back; it is {job.state}: {job.reason or 'no reason'}"
        if task == "Shrinking":
            return "" if job.attempt == 1 else f"it gave memory back, and was stopped all the same: {job.reason}"
        again = self.injector.until(lambda: bool(marks.read(submitted.notes, marks.Note.HELD)), _READY_S)
        return "" if again else f"it did not go on from a checkpoint; it is {job.state}: {job.reason or 'no reason'}"

    def _wait(self, seconds: float) -> None:
        self.injector.until(lambda: False, seconds)


def _stopped(pids: list[int]) -> bool:
    """Stop all of these; return False if one had ended."""
    return [processes.send(pid, signal.SIGSTOP) for pid in pids] == [True] * len(pids)
