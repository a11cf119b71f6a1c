"""Honest small fakes of the edges to the world; the contract tests hold them to the same behaviour as the real ones."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.pages.gate import GateReader, OpenBubble
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sandbox.config import Sandbox
from megatron.fill.work import Work
from megatron.fill.worker.pacing import StepPages
from megatron.fill.worker.spec import WorkerSpec


class FakeGate:
    """A gate within one process: both ends in one object, over a condition variable."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._bubble: OpenBubble | None = None
        self._seq = 0
        self._starts: dict[int, int] = {}
        self._closed: dict[int, int] = {}
        self._ended = False
        self.braked = False

    def open(self, deadline_ns: int, free_bytes: int, ends_ns: Sequence[int] = (), steps_ns: Sequence[int] = ()) -> int:
        with self._changed:
            self._seq += 1
            self._bubble = OpenBubble(
                self._seq, time.monotonic_ns(), deadline_ns, free_bytes, False, tuple(ends_ns), tuple(steps_ns)
            )
            self._starts[self._seq] = self._bubble.opened_ns
            self._changed.notify_all()
            return self._seq

    def close(self, now_ns: int) -> None:
        with self._changed:
            if self._bubble is not None:
                self._closed[self._bubble.seq] = now_ns
                self._bubble = None
                self._changed.notify_all()

    def brake(self, on: bool) -> None:
        self.braked = on

    def end(self) -> None:
        self.close(time.monotonic_ns())
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait(self, after_seq: int) -> OpenBubble | None:
        with self._changed:
            if self._ended:
                return None
            if self._bubble is None or self._bubble.seq <= after_seq:
                self._changed.wait()
            bubble = self._bubble
            return bubble if bubble is not None and bubble.seq > after_seq else None

    def is_open(self, seq: int) -> bool:
        return self._bubble is not None and self._bubble.seq == seq

    def wait_change(self, seq: int, timeout_ns: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self.is_open(seq), timeout_ns / 1e9)

    def closed_ns(self, seq: int) -> int | None:
        return self._closed.get(seq)

    def over_since(self, seq: int, until_ns: int) -> list[tuple[int, int]]:
        starts = self._starts
        return [(n, end - starts[n]) for n, end in self._closed.items() if n > seq and starts[n] <= end <= until_ns]

    @property
    def ended(self) -> bool:
        return self._ended


def shared_pages(gate: GateReader, *, tail: bool = False) -> tuple[StepPages, CycleBoardReader]:
    """A worker's shared memory: real pages around a gate, and a board that shows nothing yet."""
    board = CycleBoard()
    reader = board.reader_fd()
    pages = StepPages(gate, StepLog(create_log()), None if tail else Baton(Baton.create()))
    found = pages, CycleBoardReader(reader)
    os.close(reader)
    return found


def worker_spec(directory: Path | str, work: Work, name: str = "job", **values: Any) -> WorkerSpec:
    """A worker's specification without pages."""
    return WorkerSpec(name, str(directory), -1, -1, -1, -1, Sandbox(), work, **values)
