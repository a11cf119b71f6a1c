"""The record of one agent's attempts: those that have ended, and the progress of those that run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from megatron.fill.pages.lastword import MOST_BYTES, LastWord
from megatron.fill.records import AgentFile, attempts_text
from megatron.fill.types import JobRecord, WorkerRecord

type Record = tuple[JobRecord, WorkerRecord]


class AttemptLedger:
    """Writes the agent's records; for any thread.  A record that cannot be written now is kept and written later.

    Args:
        last_word: page on which records that cannot be written are left for the rank.
    """

    def __init__(self, file: AgentFile, last_word: LastWord) -> None:
        self._file = file
        self._last_word = last_word
        self._behind = False
        self._ended: list[Record] = []  # not in the file yet
        self._running: list[Callable[[], Record | None]] = []
        self._lock = threading.Lock()

    @contextmanager
    def running(self, so_far: Callable[[], Record | None]) -> Iterator[None]:
        """Include an attempt in what is written, as long as this context is open.

        Args:
            so_far: returns its present record, None before it has begun; called by any thread.
        """
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
        """Write all records; the latest write is all that is left of an agent that is killed.

        Raises:
            OSError: they cannot be written now.
        """
        with self._lock:
            running = [record for so_far in self._running if (record := so_far()) is not None]
            try:
                while self._ended:
                    self._file.add(*self._ended[0])
                    self._ended.pop(0)
                self._file.show(running)
            except OSError:
                self._file.note(behind=True)
                self._behind = True
                # Each time: it may be killed before the next.
                self._last_word.leave(attempts_text([*self._ended, *running], MOST_BYTES))
                raise
            if self._behind:
                self._file.note(behind=False)
                self._behind = False
                self._last_word.clear()
