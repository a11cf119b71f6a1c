"""A node task in a worker: measured if it has no profile, planned, and planned again when the bubbles change."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.fill.device.meter import resident_bytes
from megatron.fill.errors import PlanError, StaleProfile
from megatron.fill.folders import PLAN
from megatron.fill.linux.files import write_text
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.steplog import WorkerPhase
from megatron.fill.planner.held import RESERVE_NS, held_cycle, room_bytes
from megatron.fill.planner.plan import ExecutionPlan, drifted
from megatron.fill.planner.search import best_plan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, JobProfile
from megatron.fill.sidetask.nodes import NodeTask
from megatron.fill.worker.loop import StepLoop
from megatron.fill.worker.profiler import MeasuringMachine, measure_nodes, write_profile
from megatron.fill.worker.spec import WorkerSpec

logger = logging.getLogger("pipefill.plan")

_LOOK_AGAIN_S = 0.5  # between two looks for the first cycle of a run
_WORTH_CHANGING = 1.2  # least ratio of work per cycle for changing the configuration, which splits the model again


@dataclass(eq=False, repr=False)
class NodeRun:
    """Chooses the configuration of one node task, and changes it when the bubbles change."""

    spec: WorkerSpec
    task: NodeTask  # not created yet
    profiles: tuple[JobProfile, ...] | None  # its profiles, one per configuration; None to measure them
    loop: StepLoop  # will run the task
    board: CycleBoardReader

    def __post_init__(self) -> None:
        self.directory = Path(self.spec.directory)
        self.plan: ExecutionPlan  # this and its cycle are there from ``choose`` on
        self._cycle: BubbleCycle
        self._version = 0
        self._wanted: ExecutionPlan | None = None

    def choose(self) -> bool:
        """Measure the job if need be, and plan it; False if the training ended first.  Called before ``create``.

        Raises:
            PlanError: no node list of any configuration fits the bubbles.
            TaskError: it cannot be measured.
        """
        if self.profiles is None:
            logger.info("no profile of this job on this device yet: measuring it")
            self.profiles = self._measure()
            if self.profiles is None:
                return False
        cycle = self._wait_for_cycle()
        if cycle is None:
            return False
        self._cycle = cycle
        self.plan = best_plan(self._held(cycle), self.profiles, RESERVE_NS)
        return True

    def configure(self) -> None:
        """Configure the task as planned.  Called between ``create`` (and ``load_state_dict``) and ``init``."""
        self._take(self.plan)

    def begin(self) -> None:
        """Give the loop the profile of the initialised task; StaleProfile if it has other nodes."""
        profile = self._profile()
        names = self.task.node_names()
        if names != tuple(node.name for node in profile.nodes):
            raise StaleProfile(f"its profile has {len(profile.nodes)} nodes and the task {len(names)}, or other ones")
        self.loop.expect(profile)
        work = f"{self.plan.work_per_cycle:g} {self.task.unit} a cycle"
        logger.info("%s; planned as %s: %s", self.task.split, profile.configuration, work)

    def follow(self) -> None:
        """Between bubbles, plan again if they have changed; between iterations, change the configuration."""
        if self._wanted is not None and self.task.next_node == 0:
            plan, self._wanted = self._wanted, None
            self.loop.hold_at_start = False
            with self.loop.turn("another configuration"):
                self._take(plan)
            self.begin()
        if self.spec.tail or self.board.version == self._version or self._wanted is not None:
            return
        self._version = self.board.version
        cycle = self._read_cycle()
        if cycle is None or not drifted(self._cycle, cycle):
            return
        self._cycle = cycle
        self._replan(self._held(cycle))

    def _replan(self, cycle: BubbleCycle) -> None:
        try:
            best = best_plan(cycle, self.profiles or (), RESERVE_NS)
        except PlanError as error:  # steps that still fit continue, since no better plan is known
            logger.warning("the bubbles have changed, and nothing fits them as measured: %s", error)
            return
        try:
            present = best_plan(cycle, [self._profile()], RESERVE_NS)
        except PlanError:
            present = None
        if present is not None and best.work_per_cycle < _WORTH_CHANGING * present.work_per_cycle:
            logger.info("the bubbles have changed; %s stays", present.configuration)
            self._write(present)
            return
        logger.info("the bubbles have changed: from %s to %s", self._profile().configuration, best.configuration)
        self._wanted = best
        self.loop.hold_at_start = True

    def _profile(self) -> JobProfile:
        return next(one for one in self.profiles or () if one.configuration == self.plan.configuration)

    def _take(self, plan: ExecutionPlan) -> None:
        self.task.configure(plan.configuration)
        self._write(plan)

    def _write(self, plan: ExecutionPlan) -> None:
        self.plan = plan
        write_text(self.directory / PLAN, json.dumps(plan.to_dict()) + "\n")
        write_text(self.directory / "plan.txt", f"{plan}\n")

    def _measure(self) -> tuple[JobProfile, ...] | None:
        def run(machine: MeasuringMachine) -> bool:
            return replace(self.loop, machine=machine).run()

        context = replace(self.spec.context(), aside=self.task.context.aside)
        measured = measure_nodes(self.spec.work, context, run, self.loop.turn, self.loop.machine.enter)
        if measured is None:
            return None
        write_profile(context, measured)
        return measured.profiles

    def _wait_for_cycle(self) -> BubbleCycle | None:
        """Wait for the cycle, which appears on the board some iterations before bubbles are filled; None at the end."""
        while not (self.loop.gate.ended or self.loop.stopping()):
            self._version = self.board.version
            cycle = self._read_cycle()
            if cycle is not None:
                return cycle
            self.loop.log.phase = WorkerPhase.ASLEEP
            time.sleep(_LOOK_AGAIN_S)
        return None

    def _held(self, cycle: BubbleCycle) -> BubbleCycle:
        """Return the cycle with this worker's memory cap."""
        cap_bytes = self.spec.limits.memory_bytes
        if self.spec.cycle is None and cap_bytes is not None:
            return held_cycle(cycle, cap_bytes)
        # Without a cap, the cycle was unknown when the job was claimed.  A given cycle has the margin subtracted.
        margin_bytes = self.spec.margin_bytes if self.spec.cycle is None else 0
        return held_cycle(cycle, room_bytes(cycle, margin_bytes), cap_bytes)

    def _read_cycle(self) -> BubbleCycle | None:
        if self.spec.cycle is not None:
            return self.spec.cycle
        cycle = self.board.read()
        if cycle is None or self.spec.device != "cpu":
            return cycle
        # Free memory does not include what this process holds already, but a node's memory does.
        held = resident_bytes()
        slots = [BubbleSlot(slot.kind, slot.duration_ns, slot.free_bytes + held) for slot in cycle.slots]
        return BubbleCycle(cycle.period_ns, tuple(slots))
