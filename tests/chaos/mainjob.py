"""The training of a chaos run: a series of equal trainings, each compared with one without jobs."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.fill.errors import FillError
from tests.chaos.clock import JumpingClock
from tests.chaos.training import RESTED, ChaosTraining

# Iterations at either end of a training in which the driver leaves agents and store alone.
_WARM, _NEAR_END = 15, 20 if RESTED else 60
LEAST = 90 + _NEAR_END  # iterations of a training, or hardly a fault would find the time
_LOOK_S = 0.2
_MOST_FAILURES = 3
_FLAGS = shlex.split(
    "--fill-settings '{warmup_iterations: 3, grace_ms: 300, max_overruns: 2, max_output_mib: 4, lease_seconds: 6, "
    "trace_iterations: 1}' --fill-checkpoint-seconds 0.5 "
    "--fill-max-slowdown 0"  # filling must continue, or there would be no jobs to inject faults into
)


class GivenUpError(FillError):
    """Too many trainings failed to continue; the findings until then are kept."""


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """A training under faults that has ended.

    Attributes:
        start_ns, end_ns: beginning and end, in CLOCK_MONOTONIC.
        failure: reason why it failed; ``""`` if it did not.
        differing: iterations whose losses differ from the reference.
    """

    run_dir: Path
    start_ns: int
    end_ns: int
    failure: str
    differing: tuple[int, ...]


class RepeatedTraining:
    """Trains again and again while ``tick`` is called.

    Args:
        folder: for logs and losses.
        disk: for run folders and the job store.
        iterations: iterations of each training.
        say: prints a line for the user.
    """

    def __init__(
        self,
        script: Path,
        folder: Path,
        disk: Path,
        clock: JumpingClock,
        iterations: int,
        say: Callable[[str], None],
    ) -> None:
        self.script = script
        self.folder = folder
        self.disk = disk
        self.clock = clock
        self.iterations = iterations
        self.say = say
        self.segments: list[TrainingRun] = []
        self.reference: dict[int, float] = {}
        self.training: ChaosTraining | None = None
        self._start_ns = 0

    @property
    def mark(self) -> str:
        """The environment variable, as ``NAME=VALUE``, that only processes of these trainings have."""
        return f"PYTHONPATH={self.clock.python_path}"

    @property
    def run_dir(self) -> Path:
        """The run folder of the current training, or of the next one."""
        return self.disk / f"run-{len(self.segments)}"

    def refer(self) -> None:
        """Train without jobs, as the reference.

        Raises:
            FillError: that training failed.
        """
        self.say(f"reference: {self.iterations} iterations without jobs")
        self.training = self._start(self.folder / "reference", [])
        while self.training.running():
            time.sleep(_LOOK_S)
        failure = self.training.failure()
        if failure:
            raise FillError(f"the training does not even run without jobs: {failure}")
        self.reference = self.training.losses()
        self.training = None

    def tick(self) -> None:
        """Judge a training that has ended, and start the next one.

        Raises:
            FillError: the first training failed before its first iteration.
            GivenUpError: three trainings have failed.
        """
        if self.training is not None and self.training.running():
            return
        self._close()
        number = len(self.segments)
        self.say(f"training {number + 1}: {self.iterations} iterations under faults")
        self._start_ns = time.monotonic_ns()
        self.training = self._start(self.folder / f"training-{number}", self.flags(self.run_dir))

    def flags(self, run_dir: Path) -> list[str]:
        """The flags of a training under faults."""
        marks = f"{self.folder / 'marks'}:rw"  # jobs note their actions there
        return [
            *_FLAGS,
            "--fill-report",
            str(run_dir),
            "--fill-store",
            str(self.disk / "jobs.db"),
            "--fill-bind",
            marks,
        ]

    @property
    def iteration(self) -> int:
        """The last completed iteration of the current training; 0 without one."""
        return self.training.iteration if self.training is not None else 0

    def settled(self) -> bool:
        """True if a training is well under way, and not about to end."""
        return self.training is not None and _WARM <= self.training.iteration < self.iterations - _NEAR_END

    def finish(self) -> None:
        """Wait until the current training has ended."""
        if self.training is not None:
            while self.training.running():
                time.sleep(_LOOK_S)
            self._close()

    def cut_off(self) -> None:
        """Kill the current training; its iterations are compared, and its end does not count as a failure."""
        if self.training is not None:
            with contextlib.suppress(GivenUpError):
                self._close(cut_off=self.training.running())

    def abandon(self) -> None:
        """Kill the current training."""
        if self.training is not None:
            self.training.end()

    def _start(self, folder: Path, flags: list[str]) -> ChaosTraining:
        return ChaosTraining(self.script, folder, self.iterations, flags, self.clock.python_path)

    def _close(self, cut_off: bool = False) -> None:
        training, self.training = self.training, None
        if training is None:
            return
        training.end()
        failure, losses = "" if cut_off else training.failure(), training.losses()
        if failure and not losses and not self.segments:
            raise FillError(f"the training does not run: {failure}")
        expected = [number for number in self.reference if number in losses or not (failure or cut_off)]
        differing = tuple(number for number in expected if losses.get(number) != self.reference[number])
        self.segments.append(TrainingRun(self.run_dir, self._start_ns, time.monotonic_ns(), failure, differing))
        end = "cut off" if cut_off else failure or "ended well"
        self.say(f"training {len(self.segments)}: {end}; {len(differing)} losses differ")
        if failure and sum(bool(segment.failure) for segment in self.segments) >= _MOST_FAILURES:
            raise GivenUpError(f"given up: {_MOST_FAILURES} trainings failed, the last one since {failure}")
