"""Measures the nodes of a job in each of its configurations, in bubbles (PipeFill, section 4.2)."""

from __future__ import annotations

import logging
import shutil
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from statistics import median

from megatron.fill.device.meter import Meter, fingerprint, meter
from megatron.fill.errors import TaskError
from megatron.fill.folders import PROFILE
from megatron.fill.linux.files import write_text
from megatron.fill.profiles import Configuration, JobProfile, MeasuredJob, NodeProfile
from megatron.fill.sidetask.base import TaskContext, TaskState
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.untrusted import to_json
from megatron.fill.work import Work
from megatron.fill.worker.pacing import TakesTurn, at_once

logger = logging.getLogger("pipefill.profile")

_PASSES = 4  # number of passes over a job's nodes in each configuration; the first one warms up


class MeasuringMachine(TaskMachine):
    """A task's machine that measures every node that it runs, and finishes after ``_PASSES`` passes over all nodes."""

    def __init__(self, task: NodeTask, context: TaskContext, meter: Meter) -> None:
        super().__init__(task, context)
        self.nodes = task
        self.meter = meter
        self.exhausted = False  # its task has finished or failed, so another is needed
        self._times: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)  # duration in ns and bytes, by node

    def begin(self, configuration: Configuration) -> None:
        self.nodes.configure(configuration)
        self._times.clear()

    def run_next_step(self) -> float:
        node = self.nodes.next_node
        if node == 0 and len(self._times[0]) == _PASSES:
            raise StopIteration
        self.meter.start()
        try:
            super().run_next_step()
        except StopIteration:
            self.exhausted = True
            raise
        measured = self.meter.stop()
        self._times[node].append(measured)
        return 0.0  # work done while measuring does not count

    def profile(self, configuration: Configuration) -> JobProfile:
        """Return the profile measured since ``begin``; TaskError if the task ended before its first iteration did."""
        names, measured = self.nodes.node_names(), [times for times in self._times.values() if times]
        if len(measured) != len(names):
            raise TaskError(
                f"{configuration}: the data ended after {len(measured)} of the {len(names)} nodes of the first "
                "iteration; expected at least one whole iteration to measure"
            )
        nodes = []
        for name, times in zip(names, measured, strict=True):
            warm = times[1:] or times
            peak_bytes = max(memory for _, memory in times)
            nodes.append(NodeProfile(name, int(median(duration for duration, _ in warm)), peak_bytes))
        return JobProfile(configuration, tuple(nodes), self.nodes.iteration_work())


def run_alone(machine: MeasuringMachine) -> bool:
    """Run the machine to its end, without waiting for bubbles."""
    machine.start()
    try:
        while True:
            machine.run_next_step()
    except StopIteration:
        return True
    finally:
        machine.pause()


def measure_nodes(
    work: Work,
    context: TaskContext,
    run: Callable[[MeasuringMachine], bool] = run_alone,
    turn: TakesTurn = at_once,
    enter: Callable[[], None] = lambda: None,
) -> MeasuredJob | None:
    """Measure a node task in every configuration that runs; None if the training ended first.

    Args:
        run: runs a machine in bubbles; returns False if the training ended first.
        turn: context manager in which the device is used.
        enter: ``TaskMachine.enter`` of the machines.

    Raises:
        TaskError: it runs in no configuration.
    """
    scratch = context.directory / "profiling"
    meters = meter(context.device)

    def new() -> MeasuringMachine:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        task = load_task(work.task or "", work.search)
        assert isinstance(task, NodeTask)
        fresh = replace(context, directory=scratch, measuring=True, total_work=None, result={})
        machine = MeasuringMachine(task, fresh, meters)
        machine.enter = enter
        machine.create(work.args)
        return machine

    measured, profiles, failures = MeasuredJob(()), [], []
    with ExitStack() as after:
        after.callback(shutil.rmtree, scratch, ignore_errors=True)
        machine = new()
        for configuration in machine.nodes.configurations():
            if machine.exhausted:
                machine.stop()
                machine = new()
            try:
                with turn(f"preparing {configuration}"):
                    machine.begin(configuration)
                    if machine.state is TaskState.CREATED:
                        machine.init()
                    machine.meter.forget()
                if not run(machine):
                    machine.stop()
                    return None
                profiles.append(machine.profile(configuration))
                measured = MeasuredJob(tuple(profiles), machine.nodes.context.total_work, machine.nodes.split)
                logger.info("measured %s: %.1f ms an iteration", configuration, profiles[-1].duration_ns / 1e6)
            except (MemoryError, RuntimeError) as error:  # PyTorch raises RuntimeError when memory is short
                failures.append(f"{configuration}: {' '.join(str(error).split())[:160]}")
                logger.warning("cannot run as %s", failures[-1])
                machine.exhausted = True
        machine.stop()
    if not profiles:
        raise TaskError(f"it runs in no configuration: {'; '.join(failures)}")
    return measured


def write_profile(context: TaskContext, measured: MeasuredJob) -> None:
    """Write a job's profile to its folder, from where the agent copies it to the store."""
    known = replace(measured, device=fingerprint(context.device))
    write_text(context.directory / PROFILE, to_json(known.to_dict()) + "\n")
