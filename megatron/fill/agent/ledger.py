"""The record of one agent's attempts: those that have ended, and the progress of those that run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron.fill.pages.lastword import MOST_BYTES, LastWord
from megatron.fill.records.agent import AgentFile, attempts_text
from megatron.fill.types import JobRecord, WorkerRecord

type Record = tuple[JobRecord, WorkerRecord]


@dataclass(eq=False, repr=False)
class AttemptLedger:
    """Writes the agent's records; for any thread.  A record that cannot be written now is kept for later."""

    file: AgentFile
    last_word: LastWord  # page on which records that cannot be written are left for the rank

    def __post_init__(self) -> None:
        self._ended: list[Record] = []  # not in the file yet
        self._running: list[Callable[[], Record | None]] = []
        self._lock = threading.Lock()

    @contextmanager
    def running(self, so_far: Callable[[], Record | None]) -> Iterator[None]:
        """Include an attempt as long as this context is open; ``so_far`` returns its record, for any thread."""
        with self._lock:
            self._running.append(so_far)
        try:
            yield
        finally:
            with self._lock:
                self._running.remove(so_far)

    def keep(self, job: JobRecord, worker: WorkerRecord) -> None:
        """Add the record of an attempt that has ended."""
        with self._lock:
            self._ended.append((job, worker))

    def write(self) -> None:
        """Write all records, all that is left of an agent that is killed; OSError if they cannot be written now."""
        with self._lock:
            running = [record for so_far in self._running if (record := so_far()) is not None]
            try:
                while self._ended:
                    self.file.add(*self._ended[0])
                    self._ended.pop(0)
                self.file.show(running)
            except OSError:
                self.file.note(behind=True)
                # Each time: it may be killed before the next.
                self.last_word.leave(attempts_text([*self._ended, *running], MOST_BYTES))
                raise
            self.file.note(behind=False)
            self.last_word.clear()
