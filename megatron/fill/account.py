"""The account of a rank's time: what its main thread did, from the start of the process on.

The patches bracket what a rank does (passes, waits, saves), and each bracket's own time, without the brackets inside
it, is added to its name.  Nothing is worked out as a remainder: time in no bracket is ``UNNAMED``.

The account is the host's.  On CUDA, where the host runs ahead of the device, it says where the host waited.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident

UNNAMED = "unnamed"
START = "start-up"
HOST = "host"  # Megatron's own code in an iteration, between passes and waits
LOOP = "training loop"  # its code between iterations
EVALUATION = "evaluation"
EVALUATION_WAIT = "evaluation wait"
# The training's own computation.  All other names but UNNAMED are idle time of its device.
COMPUTE = frozenset({"forward", "backward", "gradients", "optimizer", EVALUATION})
LONG_NS = 1_000_000  # a stretch from this length on is long


@dataclass(frozen=True, slots=True)
class Spent:
    """The time of one name, in ns."""

    ns: int  # all of it
    long_ns: int = 0  # the part in stretches of ``LONG_NS`` or longer
    count: int = 0  # number of stretches


class Account:
    """Own times of nested brackets.  Only the thread that made it may enter and leave; any may take a snapshot."""

    def __init__(self, clock: Callable[[], int] = time.monotonic_ns) -> None:
        self.clock = clock
        self.timers: Callable[[], Mapping[str, float]] = dict  # seconds of each of Megatron's own timers, if it has any
        self.without_core: Callable[[], int] = lambda: 0  # ns for which its thread was ready and had no core
        self.begin(clock())

    def begin(self, start_ns: int) -> None:
        """Begin anew: until the first ``settle``, time in no bracket is the start-up."""
        self.thread = get_ident()  # the one that may enter and leave
        self.settled = False  # True once the start-up is over
        self._without_core_ns = 0  # when the start-up was over
        self._start_ns = self._since_ns = start_ns
        # By name: all ns, those in long stretches, the number of stretches.  The stack has the same lists.
        self._spent: dict[str, list[int]] = {START: [0, 0, 0], UNNAMED: [0, 0, 0]}
        self._stack = [self._spent[START]]
        self._whole = 0  # depth of a bracket that counts as a whole; 0 for none

    def settle(self) -> None:
        """End the start-up: a bracket of it that goes on, such as the training loop's, is ``LOOP`` from now on."""
        if not self.settled:
            self._without_core_ns = self.without_core()
            self.settled = True
            self._cut(self._stack[self._whole or -1])
            start, loop = self._spent[START], self._spent.setdefault(LOOP, [0, 0, 0])
            self._stack[:] = [self._spent[UNNAMED], *(loop if spent is start else spent for spent in self._stack[1:])]

    @property
    def host_late_ns(self) -> int:
        """The ns since the start-up for which the thread was ready and had no core.  For any thread."""
        return self.without_core() - self._without_core_ns if self.settled else 0

    def enter(self, name: str, *, whole: bool = False) -> int:
        """Begin a bracket and return its depth, for ``leave``; of a ``whole`` one the brackets inside are parts."""
        stack = self._stack
        depth = len(stack)
        spent = self._spent.get(name)
        if spent is None:
            spent = self._spent[name] = [0, 0, 0]
        if not self._whole:
            self._cut(stack[-1])
            if whole:
                self._whole = depth
        stack.append(spent)
        return depth

    def leave(self, depth: int) -> None:
        """End the bracket of this depth, and all that are left inside it."""
        stack, whole = self._stack, self._whole
        if not whole:
            self._cut(stack[-1])
        elif depth <= whole:
            self._cut(stack[whole])
            self._whole = 0
        del stack[depth:]

    @contextmanager
    def within(self, name: str, *, whole: bool = False) -> Iterator[None]:
        """Bracket a block."""
        depth = self.enter(name, whole=whole)
        try:
            yield
        finally:
            self.leave(depth)

    def _cut(self, spent: list[int]) -> None:
        """Add the time since the last cut to a bracket's."""
        now_ns = self.clock()
        taken_ns = now_ns - self._since_ns
        spent[0] += taken_ns  # first, and _since_ns last: see snapshot
        spent[2] += 1
        if taken_ns >= LONG_NS:
            spent[1] += taken_ns
        self._since_ns = now_ns

    def snapshot(self) -> dict[str, Spent]:
        """Return the time by name, which adds up to that from the start until now."""
        while True:  # until no cut came in between: the sum is then the time until the last cut
            spent = {name: tuple(values) for name, values in list(self._spent.items())}
            running, since_ns = self._stack[self._whole or -1], self._since_ns
            if sum(values[0] for values in spent.values()) == since_ns - self._start_ns:
                break
            time.sleep(0)
        running_ns = max(0, self.clock() - since_ns)
        name = next(name for name, values in list(self._spent.items()) if values is running)
        ns, long_ns, count = spent.get(name, (0, 0, 0))
        spent[name] = (ns + running_ns, long_ns + (running_ns if running_ns >= LONG_NS else 0), count + 1)
        return {name: Spent(*values) for name, values in spent.items() if values[2]}
