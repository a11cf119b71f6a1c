"""Measures the nodes of a job in each of its configurations, in bubbles (PipeFill, section 4.2)."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from megatron.fill.device.meter import Meter
from megatron.fill.errors import TaskError
from megatron.fill.folders import PROFILE
from megatron.fill.linux.files import write_text
from megatron.fill.profiles import Configuration, JobProfile, MeasuredJob, NodeProfile
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.untrusted import to_json
from megatron.fill.worker.pacing import TakesTurn, at_once

logger = logging.getLogger("pipefill.profile")

_PASSES = 4  # number of passes over a job's nodes in each configuration; the first one warms up


class MeasuringMachine(TaskMachine):
    """A task's machine that measures every node that it runs, and finishes after ``_PASSES`` passes over all nodes."""

    def __init__(self, task: NodeTask, context: TaskContext, meter: Meter) -> None:
        super().__init__(task, context)
        self.nodes = task
        self.meter = meter
        self.exhausted = False  # the task itself has finished
        self._passes = 0
        self._times: list[list[tuple[int, int]]] = []

    def begin(self, configuration: Configuration) -> None:
        self.nodes.configure(configuration)
        self._passes, self._times = 0, []

    def run_next_step(self) -> float:
        node = self.nodes.next_node
        if node == 0 and self._passes == _PASSES:
            raise StopIteration
        self.meter.start()
        try:
            super().run_next_step()
        except StopIteration:
            self.exhausted = True
            raise
        measured = self.meter.stop()
        if node == 0:
            self._passes += 1
        if node >= len(self._times):
            self._times.append([])
        self._times[node].append(measured)
        return 0.0  # work done while measuring does not count

    def profile(self, configuration: Configuration) -> JobProfile:
        """Return the profile measured since ``begin``.

        Raises:
            TaskError: the task ended before its first iteration did.
        """
        names = self.nodes.node_names()
        if len(self._times) != len(names):
            raise TaskError(
                f"{configuration}: the data ended after {len(self._times)} of the {len(names)} nodes of the first "
                "iteration; expected at least one whole iteration to measure"
            )
        nodes = []
        for name, times in zip(names, self._times, strict=True):
            warm = times[1:] or times
            peak_bytes = max(memory for _, memory in times)
            nodes.append(NodeProfile(name, int(median(duration for duration, _ in warm)), peak_bytes))
        return JobProfile(configuration, tuple(nodes), self.nodes.iteration_work())


@dataclass(eq=False, repr=False)
class Profiler:
    """Measures one job."""

    # Makes a new machine for the job; needed again once a task's data is used up
    make: Callable[[TaskContext], MeasuringMachine]
    run: Callable[[MeasuringMachine], bool]  # runs a machine in bubbles; returns False if the training ended first
    context: TaskContext
    args: dict[str, Any]
    turn: TakesTurn = at_once  # context manager in which the device is used

    def __post_init__(self) -> None:
        self.split = ""  # description of the job's split into nodes, for users
        self.total_work: float | None = None  # total work of the job; None if unknown

    def measure(self) -> list[JobProfile] | None:
        """Return the job's profile in every configuration that runs; None if the training ended first.

        Raises:
            TaskError: it runs in no configuration.
        """
        scratch = self.context.directory / "profiling"
        try:
            return self._measure(scratch)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def _measure(self, scratch: Path) -> list[JobProfile] | None:
        machine = self._new(scratch)
        profiles, failures = [], []
        started = False
        for configuration in machine.nodes.configurations():
            if machine.exhausted:
                machine.stop()
                machine, started = self._new(scratch), False
            try:
                with self.turn(f"preparing {configuration}"):
                    machine.begin(configuration)
                    if not started:
                        machine.init()
                        started = True
                    machine.meter.forget()
                if not self.run(machine):
                    machine.stop()
                    return None
                profiles.append(machine.profile(configuration))
                self.split, self.total_work = machine.nodes.split, machine.nodes.context.total_work
                logger.info("measured %s: %.1f ms an iteration", configuration, profiles[-1].duration_ns / 1e6)
            except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when memory is short
                failures.append(f"{configuration}: {' '.join(str(error).split())[:160]}")
                logger.warning("cannot run as %s", failures[-1])
                machine.stop()
                machine, started = self._new(scratch), False
        machine.stop()
        if not profiles:
            raise TaskError(f"it runs in no configuration: {'; '.join(failures)}")
        return profiles

    def _new(self, scratch: Path) -> MeasuringMachine:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        machine = self.make(replace(self.context, directory=scratch, measuring=True, total_work=None, result={}))
        machine.create(self.args)
        return machine


def write_profile(directory: Path, profiles: list[JobProfile], profiler: Profiler, device: str) -> None:
    """Write a job's profile to its folder, from where the agent copies it to the store."""
    measured = MeasuredJob(tuple(profiles), profiler.total_work, profiler.split, device)
    write_text(directory / PROFILE, to_json(measured.to_dict()) + "\n")
