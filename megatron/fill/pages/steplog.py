"""The step log: a worker's counts in shared memory, written after every step.

A worker that is killed loses nothing: its totals, current callback and recent steps are here, and its last message,
which needs no disk.  Only the worker writes the log (the agent writes ``wanted_bytes`` and ``saving``); the rank never
reads it.  Its content is untrusted, since the task runs in the process that writes it.  So an amount that is not finite
or too large is read as 0, and a bubble or step with impossible values is left out.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from enum import IntEnum

from megatron.fill.linux import memfd
from megatron.fill.profiles import is_amount
from megatron.fill.types import BubbleUse, Lack, WorkerRecord
from megatron.fill.untrusted import plain


class WorkerPhase(IntEnum):
    """The callback or state that a worker is in; the agent reports it when the worker dies."""

    STARTING = 0
    CREATE = 1
    INIT = 2
    ASLEEP = 3
    START = 4
    STEP = 5
    PAUSE = 6
    STOP = 7
    LOAD = 8
    SAVE = 9
    STOPPED = 10

    @property
    def callback(self) -> str:
        return _NAMES.get(self, f"{self.name.lower()}()")


_NAMES = {
    WorkerPhase.STARTING: "while starting",
    WorkerPhase.ASLEEP: "between bubbles",
    WorkerPhase.STEP: "run_next_step()",
    WorkerPhase.LOAD: "load_state_dict()",
    WorkerPhase.SAVE: "state_dict()",
    WorkerPhase.STOPPED: "after it had stopped",
}


class Saving(IntEnum):
    """The state of a save that the agent requests before anything else."""

    NONE = 0
    WANTED = 1
    SAVED = 2
    FAILED = 3


_USES, _USE_FIELDS = 65_536, 8
_USE = struct.Struct(f"={_USE_FIELDS}q")
_STEPS = 8_192
_HEADER = 64
_WORD_AT = 8 * (_HEADER + _USES * _USE_FIELDS + _STEPS * 2)
MOST_WORD_BYTES = 1 << 20
_BYTES = _WORD_AT + MOST_WORD_BYTES
_MOST = 1 << 62  # limit of any valid count
_LONGEST_NS = 10**15  # limit of any valid bubble or step: eleven days

_PHASE, _STEP_SEQ, _STEP_COUNT, _FILL_STEPS, _HARVESTED, _USE_COUNT, _ALONE_NS, _READY, _WANTED, _WORD = range(10)
_SERVING, _RESUMABLE, _SAVING, _SINCE, _ALONE_STEPS = range(10, 15)
_WORK, _ALONE_WORK, _BASE_WORK, _TOTAL_WORK, _CHECKPOINT_S, _PARTIAL_WORK = range(16, 22)  # float64
_UNIT = slice(8 * 32, 8 * 40)  # UTF-8 text
_LONGEST = 40  # first of the words with the longest stay in each phase
_TIMED = (  # phases that are one call each
    *(WorkerPhase.CREATE, WorkerPhase.LOAD, WorkerPhase.INIT, WorkerPhase.START, WorkerPhase.PAUSE),
    *(WorkerPhase.SAVE, WorkerPhase.STOP),
)


def create_log() -> int:
    """Create an empty log; return its descriptor.  The worker that gets it cannot shrink it."""
    return memfd.create("steps", _BYTES)


def map_log(fd: int) -> memoryview:
    """Map the log of ``fd`` until the process ends.

    The caller can then close ``fd``, so that a task cannot find it; Python's ``mmap`` would keep a descriptor.
    """
    return memfd.map_page(fd, _BYTES, writable=True)[0]


class _Word:
    """A word of the log, ``at`` that index."""

    def __init__(self, at: int) -> None:
        self._at = at


class _Count(_Word):
    """A word of the log as a whole number; one that is too large is read as 0."""

    def __get__(self, log: StepLog, kind: object = None) -> int:
        return log._count(self._at)

    def __set__(self, log: StepLog, value: int) -> None:
        log._words[self._at] = value


class _Amount(_Word):
    """A word of the log as an amount; one that is not finite or too large is read as 0."""

    def __get__(self, log: StepLog, kind: object = None) -> float:
        return log._amount(self._at)

    def __set__(self, log: StepLog, value: float) -> None:
        log._floats[self._at] = value


class _Known(_Word):
    """A word of the log as an amount, or None as long as it is 0."""

    def __get__(self, log: StepLog, kind: object = None) -> float | None:
        return log._amount(self._at) or None

    def __set__(self, log: StepLog, value: float | None) -> None:
        log._floats[self._at] = value or 0.0


class StepLog:
    """A step log, of a descriptor or mapped already; the worker and the agent both use this class."""

    step_seq = _Count(_STEP_SEQ)  # number of the bubble in which the running step, start or pause began; 0 for none
    step_count = _Count(_STEP_COUNT)  # number of steps so far, those alone included
    alone_steps = _Count(_ALONE_STEPS)
    harvested_ns = _Count(_HARVESTED)
    ready_ns = _Count(_READY)  # CLOCK_MONOTONIC when the worker called ``create``, or had its command; 0 before
    serving_ns = _Count(_SERVING)  # CLOCK_MONOTONIC when the task first waited for a bubble to work in; 0 before
    resumable = _Count(_RESUMABLE)  # 1 if the task implements saving, so that it can resume elsewhere
    whole_work = _Amount(_WORK)  # part of ``work_done`` of iterations that have ended
    partial_work = _Amount(_PARTIAL_WORK)  # part of ``work_done`` of the iteration that has not ended
    base_work = _Amount(_BASE_WORK)  # work of the checkpoint from which this attempt began
    total_work = _Known(_TOTAL_WORK)  # total work of the task; None if the task has not reported it
    checkpoint_s = _Known(_CHECKPOINT_S)  # time of the last save, in seconds since the epoch; None for never

    def __init__(self, page: int | memoryview) -> None:
        view = memoryview(mmap.mmap(page, _BYTES)) if isinstance(page, int) else page[:_BYTES]
        self._unit = view[_UNIT]
        self._words = view.cast("Q")
        self._floats = view.cast("d")
        # Signed, since a latency of -1 stands for "no step".
        self._uses = view[8 * _HEADER : 8 * (_HEADER + _USES * _USE_FIELDS)].cast("q")
        self._steps = view[8 * (_HEADER + _USES * _USE_FIELDS) : _WORD_AT].cast("Q")
        self._word = view[_WORD_AT:]

    @property
    def phase(self) -> WorkerPhase:
        value = self._words[_PHASE]
        return WorkerPhase(value) if value < len(WorkerPhase) else WorkerPhase.STARTING

    @phase.setter
    def phase(self, phase: WorkerPhase) -> None:
        words, now_ns = self._words, time.monotonic_ns()
        at = _LONGEST + self.phase
        words[at] = max(words[at], now_ns - words[_SINCE])
        words[_PHASE], words[_SINCE] = phase, now_ns

    @property
    def longest_ns(self) -> dict[str, int]:
        """The longest duration in ns of each callback that has returned; steps are recorded one by one."""
        taken = {phase.callback: self._count(_LONGEST + phase) for phase in _TIMED}
        return {callback: duration_ns for callback, duration_ns in taken.items() if 0 < duration_ns <= _LONGEST_NS}

    @property
    def work_done(self) -> float:
        """The work so far, that alone included."""
        return self.whole_work + self.partial_work

    @property
    def unit(self) -> str:
        """The unit of the task's work; empty before the task was loaded."""
        return plain(bytes(self._unit).rstrip(b"\0").decode("utf-8", "ignore"))

    @unit.setter
    def unit(self, unit: str) -> None:
        text = unit.encode()[: len(self._unit)]
        self._unit[:] = text.ljust(len(self._unit), b"\0")

    @property
    def saving(self) -> Saving:
        """The state of a save: the agent writes NONE or WANTED, the worker answers SAVED or FAILED."""
        value = self._words[_SAVING]
        return Saving(value) if value < len(Saving) else Saving.FAILED

    @saving.setter
    def saving(self, saving: Saving) -> None:
        self._words[_SAVING] = saving

    @property
    def wanted_bytes(self) -> int | None:
        """The memory in bytes that the task should not exceed from now on, written by the agent; None for no request.

        The worker sets it to None when the task has freed memory, or could not.
        """
        word = self._words[_WANTED]
        return word - 1 if word else None

    @wanted_bytes.setter
    def wanted_bytes(self, size: int | None) -> None:
        self._words[_WANTED] = 0 if size is None else size + 1

    @property
    def device_ns(self) -> int:
        """The time inside steps in which the job had the device: in bubbles, and alone."""
        return self.harvested_ns + self._count(_ALONE_NS)

    def leave_word(self, word: bytes) -> None:
        """Write the worker's last message, the way it ended; at most ``MOST_WORD_BYTES``."""
        self._word[: len(word)] = word
        self._words[_WORD] = len(word)

    @property
    def word(self) -> bytes:
        """The worker's last message; empty before it is written."""
        size = self._words[_WORD]
        return bytes(self._word[:size]) if size <= MOST_WORD_BYTES else b""

    def _count(self, at: int) -> int:
        value = self._words[at]
        return value if value < _MOST else 0

    def _amount(self, at: int) -> float:
        value = self._floats[at]
        return value if is_amount(value) else 0.0

    def step_ended(self, start_ns: int, end_ns: int, work: float, alone: bool, partial_work: float = 0.0) -> None:
        """Record a step.

        Args:
            work: committed work: without a profile that of the step, with one that of an iteration that has ended.
            alone: True if the training stands still.
            partial_work: work so far of the iteration that has not ended.
        """
        words, floats = self._words, self._floats
        count = words[_STEP_COUNT]
        slot = count % _STEPS * 2
        self._steps[slot] = start_ns
        self._steps[slot + 1] = end_ns
        words[_STEP_COUNT] = count + 1
        if alone:
            words[_ALONE_STEPS] += 1
            words[_ALONE_NS] += end_ns - start_ns
            floats[_ALONE_WORK] += work + partial_work - floats[_PARTIAL_WORK]
        else:
            words[_FILL_STEPS] += 1
        floats[_PARTIAL_WORK] = partial_work
        floats[_WORK] += work

    def leave_bubble(self, use: BubbleUse, alone: bool) -> None:
        """Record the use of a bubble, unless the training stands still in it (``alone``)."""
        words = self._words
        words[_STEP_SEQ] = 0
        if alone:
            return
        words[_HARVESTED] += use.harvested_ns
        count = words[_USE_COUNT]
        row = use.seq, use.latency_ns, use.harvested_ns, use.overrun_ns, use.steps, use.left_ns, use.lack, use.held_ns
        _USE.pack_into(self._uses, count % _USES * _USE.size, *row)
        words[_USE_COUNT] = count + 1

    def record(self, job: str, rank: int, most: int = _USES) -> WorkerRecord:
        """Return the valid content of the log for the report, with the ``most`` most recent bubbles and steps."""
        now_ns = time.monotonic_ns()
        given = self._count(_USE_COUNT)
        uses = (BubbleUse(*row) for row in recent(self._uses, _USE_FIELDS, given, most))
        steps = recent(self._steps, 2, self.step_count, most)
        alone_work = self._amount(_ALONE_WORK)
        return WorkerRecord(
            job=job,
            rank=rank,
            steps_done=self._count(_FILL_STEPS),
            work_done=max(0.0, self.work_done - alone_work),
            harvested_ns=self._count(_HARVESTED),
            alone_ns=self._count(_ALONE_NS),
            alone_work=alone_work,
            uses=[use for use in uses if _sensible(use)],
            steps=[(start, end) for start, end in steps if start <= end <= now_ns and end - start <= _LONGEST_NS],
            callbacks=self.longest_ns,
            partial_work=self.partial_work,
            older_uses=max(0, given - min(_USES, most)),
        )


def _sensible(use: BubbleUse) -> bool:
    whole = all(0 <= its < _MOST for its in (use.seq, use.steps, use.left_ns)) and 0 <= use.lack < len(Lack)
    times = (use.harvested_ns, use.overrun_ns, use.latency_ns + 1, use.held_ns)
    return whole and all(0 <= its <= _LONGEST_NS for its in times)


def recent(ring: memoryview, width: int, count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the latest ``most`` of ``count`` rows ever written to a ring buffer in rows of ``width``, oldest first."""
    rows = len(ring) // width
    for row in range(max(0, count - min(rows, most)), count):
        at = row % rows * width
        yield tuple(ring[at : at + width])
