"""The agent of one rank: takes jobs from the store, runs each in a worker and watches the worker until it has ended.

The rank's warden starts the agent, so the workers are in the rank's session: Linux honours their idle priority against
the rank only within one session (autogroups).  The agent is the workers' parent: no process of theirs outlives it, and
the kernel ends it when the warden dies.  It never talks to the rank; both read the gate.

It has two *seats*: the resident job gets every bubble first, the tail job gets the time that the resident job cannot
use.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.fill import wings
from megatron.fill.agent.admission import refusal
from megatron.fill.agent.claims import Claims, not_yet_submitted, note_submitted
from megatron.fill.agent.context import AgentContext
from megatron.fill.agent.ending import NotStarted
from megatron.fill.agent.ledger import AttemptLedger
from megatron.fill.agent.logfile import turn_over
from megatron.fill.agent.memory import DeviceMemory
from megatron.fill.agent.mover import Mover
from megatron.fill.agent.ranking import Ranking, Resident
from megatron.fill.agent.run import JobRun
from megatron.fill.agent.settling import Settling
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.agent.watch import Judge
from megatron.fill.agent.workers import WorkerPool
from megatron.fill.device.cpu import CpuDevice
from megatron.fill.device.cuda import CudaDevice
from megatron.fill.device.meter import fingerprint
from megatron.fill.device.mps import MpsDaemon
from megatron.fill.errors import FillError
from megatron.fill.linux import host
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlPage, RunState
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.lastword import LastWord
from megatron.fill.pages.watcher import watch_control
from megatron.fill.records.agent import AgentFile
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.status import Cause
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import Claim, DeviceEntry, Job

logger = logging.getLogger("pipefill.agent")

_SHRINK_S = 1.0  # time limit for giving memory back, once the worker's step has ended
_RESIDENT_LOOKS_S, _TAIL_LOOKS_S = 1.0, 5.0  # time between two looks of an empty seat for a job
_LOOK_AGAIN_S = 5.0  # even if the queue has not changed: leases expire, and devices become busy or free
_REST_S = 0.2  # between two looks whether a rest is over
_SETTLE_S = 0.5  # time between two looks whether jobs have settled
_SHOW_S = 10.0  # time between two records of the running jobs, and of the reasons why others wait


def show_or_log(show: Callable[[], object]) -> None:
    """Call ``show``, and log an exception of it instead of raising it."""
    said = "what its jobs did, why others wait, or metrics cannot be shown now"
    try:
        show()
    except (OSError, FillError) as error:  # the disk is full, say
        logger.warning("%s: %s", said, error)
    except Exception:
        logger.exception(said)


@dataclass(eq=False, repr=False)
class Seat:
    """Serves one job after the other, in a thread of its own; any thread may read the properties."""

    context: AgentContext
    pool: WorkerPool
    judge: Judge
    beside: Seat | None = None  # the resident seat, if this is the tail seat
    idle: Callable[[], object] = lambda: None  # called when there is no job for this seat

    def __post_init__(self) -> None:
        self.attempt: JobRun | None = None  # None without a job
        self._has_stepped = False  # a job that has ended has done a step
        self._seen: object = None  # state of store, cycle and resident job at the latest look
        self._looked_s = 0.0

    def __str__(self) -> str:
        return "tail job" if self.beside is not None else "resident job"

    @property
    def resident(self) -> Resident | None:
        """The present job and its folder from its first step until its worker ends, otherwise None.

        Before, it is unknown what it leaves to a tail job, whose set-up would delay it.
        """
        run = self.attempt
        return None if run is None else run.resident

    @property
    def stepped(self) -> bool | None:
        """True once any job of this seat has done a step; until then False with a job here, None without."""
        run = self.attempt
        if self._has_stepped or (run is not None and run.stepped):
            return True
        return None if run is None else False

    def serve(self) -> bool:
        """Run the next job, and return True; False if there is none for this seat."""
        context, (neighbour, serves) = self.context, self._neighbour
        if context.control.state is not RunState.RUNNING or (self.beside is not None and not serves):
            return False
        if context.device.name != "cpu" and context.board.read() is None:
            return False  # before the first iterations, the memory that the training leaves at its peak is unknown
        claim = context.claims.ask(lambda store: self._claim(store, neighbour))
        if claim is None:
            self.idle()
            return False
        self.attempt = JobRun(context, self.pool, self.judge, claim, neighbour)
        context.claims.look_again()
        try:
            self.attempt.run()
        finally:
            self._has_stepped = bool(self.stepped)
            self.attempt = None
            context.claims.look_again()
        return True

    def rest(self, seconds: float) -> None:
        """Wait for ``seconds``, at most until the training is over or the resident job next to this seat changes."""
        end_s, neighbour = time.monotonic() + seconds, self._neighbour
        while not self.context.over and self._neighbour == neighbour and time.monotonic() < end_s:
            time.sleep(_REST_S)

    @property
    def _neighbour(self) -> tuple[Resident | None, bool]:
        """The resident job next to this seat, and True if it serves bubbles."""
        neighbour = None if self.beside is None else self.beside.resident
        return neighbour, neighbour is not None and self.context.baton.held

    def may_run(self, job: Job) -> bool:
        """True if the job may run here and there is memory for it now."""
        try:
            self.context.limits(job)
        except NotStarted:
            return False
        return not refusal(job.work, self.context.spec.allow)

    def _claim(self, store: JobStore, neighbour: Resident | None) -> Claim | None:
        """Claim the best job that is free; after a look without any, not before something changes."""
        context, now_s = self.context, time.monotonic()
        seen = store.stamp(), context.board.version, neighbour
        if seen == self._seen and now_s - self._looked_s < _LOOK_AGAIN_S:
            return None
        store.recover()
        wanted, quota = context.ranking.wanted(store, neighbour), context.spec.quota
        self._seen, self._looked_s = None if wanted else seen, now_s
        most = None if quota is None else quota.jobs
        return store.claim(context.claims.owner, wanted, context.spec.lease_s, context.name, most) if wanted else None


class Agent:
    """Runs jobs in the bubbles of one rank until the training is over.

    It has threads for each seat, for claims, control page and records, and until jobs have settled.

    Args:
        guard: pid of the warden or keeper that started it.
        dead: pids of the agents that served this rank before and died; the jobs that they held are given back.
    """

    def __init__(self, spec: AgentSpec, guard: int, dead: list[int]) -> None:
        self.context = context = self._context(spec, guard, dead)
        self.pool = WorkerPool(context)
        judge = Judge()
        self.resident = Seat(context, self.pool, judge, idle=self._look_elsewhere)
        self.tail = Seat(context, self.pool, judge, beside=self.resident)
        self.mover = Mover(spec.run_dir, context.ranking, self.resident.may_run)

    def _context(self, spec: AgentSpec, guard: int, dead: list[int]) -> AgentContext:
        name, run_dir = f"rank {spec.rank} of {spec.run_dir} on {os.uname().nodename}", Path(spec.run_dir)
        mps = MpsDaemon.existing(Path(spec.mps_pipe)) if spec.mps_pipe is not None else None
        on_cpu = spec.device == "cpu"
        device = CpuDevice() if on_cpu else CudaDevice(spec.device, mps, spec.device_uuid, rank=spec.parent)
        # A worker gives memory back between two steps, and a step may run beyond its bubble for the grace period.
        memory = DeviceMemory(device, spec.margin_bytes, _SHRINK_S + spec.grace_ns / 1e9)
        board, control = CycleBoardReader(spec.board_fd), ControlPage(spec.control_fd)
        last_word = LastWord(spec.left_fd)
        if dead:
            last_word.succeed()
        # An agent that replaces a dead one must not submit jobs again that have finished in the meantime.
        submit = not_yet_submitted(run_dir, spec.store, spec.submit)
        claims = Claims(
            spec.store,
            f"{name}, pid {os.getpid()}",
            submit or (None if dead else []),
            self.describe,
            spec.lease_s,
            [f"{name}, pid {pid}" for pid in dead],
            submitted=lambda: note_submitted(run_dir, spec.store, spec.submit),
        )
        return AgentContext(
            spec=spec,
            name=name,
            gate=SharedGateReader(spec.gate_fd),
            board=board,
            control=control,
            control_fd=control.reader_fd(),
            baton=Baton(Baton.create()),
            device=device,
            memory=memory,
            claims=claims,
            ranking=Ranking(parse_policy(spec.policy), name, fingerprint(spec.device), board, memory, spec.quota),
            ledger=AttemptLedger(AgentFile(Path(spec.records), spec.rank, len(dead)), last_word),
            guard=guard,
            attendants=tuple(one for module in wings.modules("agent") for one in module.attendants(spec, control)),
        )

    def describe(self) -> DeviceEntry:
        """Return the store's entry for this device."""
        context = self.context
        cycle, run = context.board.read(), self.resident.attempt
        paused = context.control.state is not RunState.RUNNING  # the device takes no job until an unknown time
        return DeviceEntry(
            name=context.name,
            run=context.spec.run_dir,
            busy_until_s=math.inf if paused else None if run is None else run.done_at_s,
            job="" if run is None else run.job.name,
            cycle=None if cycle is None else asdict(cycle),
            refuses=context.ranking.misfits.refused,
        )

    def run(self) -> None:
        """Serve until the training is over."""
        context = self.context
        context.claims.start()
        watch_control(context.control, self._control_changed)
        threading.Thread(target=self._show, name="records", daemon=True).start()
        threading.Thread(target=self._settle, name="settling", daemon=True).start()
        seats = self.resident, self.tail
        threads = [threading.Thread(target=self._serve, args=(seat,), name=str(seat)) for seat in seats]
        for thread in threads:
            thread.start()
        self.pool.stand_by()
        for thread in threads:
            thread.join()
        self.pool.stand_down()
        if context.over is Cause.WARDEN_DIED:
            logger.error("its warden died: no job runs on this rank until the training starts again")
        elif context.over is Cause.KEEPER_DIED:
            logger.error("its keeper died: no job runs on this device until a training starts")
        try:  # before the store is notified: the rank does not wait long for the agent's end
            context.ledger.write()
        except OSError as error:
            logger.warning("what its jobs did cannot be written, and is left to the rank: %s", error)
        context.claims.stop()

    def _control_changed(self, state: RunState) -> None:
        """Handle a new state of the control page; after a kill, return once the seats have ended all workers.

        It has no time limit: an agent that gave up would never acknowledge a kill that succeeds later.
        """
        logger.info("%s", state.name)
        if state is RunState.KILLED:
            self.pool.stand_down()
        while state is self.context.control.state is RunState.KILLED and self.pool.working:
            time.sleep(0.02)

    def _look_elsewhere(self) -> None:
        """Ask for the tail job of another rank, if this rank has no job at all."""
        if self.tail.attempt is None:
            self.context.claims.ask(self.mover.look)

    def _serve(self, seat: Seat) -> None:
        while not self.context.over:
            try:
                served = seat.serve()
            except Exception:  # an error in one seat must not stop the other
                logger.exception("%s failed", seat)
                served = False
            if served:
                show_or_log(self.context.ledger.write)
            else:
                seat.rest(_RESIDENT_LOOKS_S if seat is self.resident else _TAIL_LOOKS_S)

    def _settle(self) -> None:
        context, spec = self.context, self.context.spec
        settling = Settling(Path(spec.records), spec.rank, spec.ranks, self._stepped, context.control)
        failed = False
        while not context.over:
            try:
                if settling.look():
                    return
            except OSError as error:
                if not failed:
                    logger.warning("whether the jobs of all ranks have settled cannot be told now: %s", error)
                failed = True
            time.sleep(_SETTLE_S)

    def _stepped(self) -> bool | None:
        return False if self.context.board.read() is None else self.resident.stepped  # no cycle: in the warm-up

    def _show(self) -> None:
        """Periodically record the running jobs, and the reasons why others wait."""
        shows = [self.context.ledger.write, self._show_reasons, turn_over]
        shows += [attendant.keep for attendant in self.context.attendants]
        while not self.context.over:
            self.resident.rest(_SHOW_S)
            for show in shows:
                show_or_log(show)

    def _show_reasons(self) -> None:
        """Say why jobs wait. After ``pipefill pause`` and ``kill`` they keep what they ended with."""
        if self.context.control.state is RunState.RUNNING:
            self.context.claims.ask(self.context.ranking.explain)


def main() -> None:
    spec_path, guard, dead = sys.argv[1:]
    spec = AgentSpec.from_json(Path(spec_path).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    agent = Agent(spec, int(guard), [int(pid) for pid in dead.split(",") if pid])

    signal.signal(signal.SIGTERM, lambda *_: agent.context.orphaned.set())
    host.ignore_notices()  # workers inherit this: USR1 must not end them before they handle it
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training; the agent ends with it
    host.use_every_core()  # only the workers belong on the rank's own core
    host.adopt_orphans()
    host.die_with_parent(int(guard), signal.SIGTERM)
    agent.run()
    sys.exit(agent.context.dismissed)


if __name__ == "__main__":
    main()
