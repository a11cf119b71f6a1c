"""One rank's agent: takes jobs from the store, runs each in a worker, and sees to its end.

The rank's warden starts it, and its workers are thereby in the rank's session: only there does Linux honour their
idle priority against the rank (autogroups).  It is the workers' parent: nothing they start outlives it, and the kernel
ends it when the warden dies.  It never talks to the rank; both look at the gate.

It has two *seats*: the resident job gets every bubble first, the tail job what the resident one cannot use.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.fill.board import CycleBoardReader
from megatron.fill.control import ControlPage, RunState
from megatron.fill.device import MpsDaemon, Sharing, host, open_device
from megatron.fill.device.emulated import Emulation
from megatron.fill.device.meter import fingerprint
from megatron.fill.device.pressure import NoRoom
from megatron.fill.gate import SharedGateReader
from megatron.fill.planner.cycles import cycle_to_dict
from megatron.fill.profiles import BubbleCycle
from megatron.fill.records import AgentFile
from megatron.fill.runtime import reap
from megatron.fill.runtime.baton import Baton
from megatron.fill.runtime.choice import Choice
from megatron.fill.runtime.controlled import ControlWatcher
from megatron.fill.runtime.guest import Guest, environment
from megatron.fill.runtime.holder import Holder
from megatron.fill.runtime.keeper import Keeper
from megatron.fill.runtime.mover import Mover
from megatron.fill.runtime.room import worker_cap
from megatron.fill.runtime.seat import Seat
from megatron.fill.runtime.submitted import not_yet_submitted, note_submitted
from megatron.fill.runtime.verdict import Judge
from megatron.fill.sandbox.cage import Bind
from megatron.fill.store.port import Device, Job, NewJob
from megatron.fill.types import JobRecord, WorkerRecord

logger = logging.getLogger("pipefill.agent")

_KILL_S = 1.5  # how long a kill may take
_RESIDENT_LOOKS_S, _TAIL_LOOKS_S = 1.0, 5.0  # how often an empty seat looks for a job
_SHOW_S = 10.0  # how often what runs is written down
AHEAD = ("numpy",)  # what most tasks import, and what costs little memory


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What the rank tells its agent.

    Attributes:
        records: the folder for its records.
        mps_pipe: of the MPS daemon that the rank uses; None without MPS.
        parent: the rank's pid; the warden is the agent's.
        store: the URL of the job store.
        submit: jobs to put into it.
        guest: whom the jobs run as; None for us.
        namespaces: those that this machine gives for keeping jobs in, as ``Cage`` has them.
        binds: places that jobs may use besides their own folders.
        network: jobs share the machine's network.
        allow: the jobs that may run, as ``guest.refusal`` reads it.
        device_uuid: of the GPU; None on the CPU.
        margin_bytes: device memory that the jobs leave free beyond the main job's peak.
        emulate: how the CPU is to behave as a device that does not preempt; None for as it is.
        policy: which job is next, as ``parse_policy`` reads it.
        lease_s: how long the store keeps a job for an agent that is silent.
        checkpoint_s: how often resumable jobs are saved.
    """

    run_dir: str
    records: str
    rank: int
    parent: int
    gate_fd: int
    board_fd: int
    control_fd: int
    device: str
    device_uuid: str | None
    cpus: list[int]
    emulate: Emulation | None
    store: str
    submit: list[NewJob]
    policy: str
    lease_s: float
    checkpoint_s: float
    grace_ns: int
    max_overruns: int
    max_output_bytes: int
    guest: Guest | None
    namespaces: tuple[str, ...]
    binds: tuple[Bind, ...]
    network: bool
    allow: list[str]
    margin_bytes: int
    processes: int
    files: int
    sharing: Sharing
    mps_pipe: str | None
    sm_percentage: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSpec:
        data = json.loads(text)
        typed = {
            "submit": [NewJob(**job) for job in data["submit"]],
            "sharing": Sharing(data["sharing"]),
            "emulate": None if data["emulate"] is None else Emulation(data["emulate"]),
            "guest": None if data["guest"] is None else Guest(**data["guest"]),
            "namespaces": tuple(data["namespaces"]),
            "binds": tuple(Bind(**bind) for bind in data["binds"]),
        }
        return cls(**data | typed)


class Agent:
    """Runs jobs in the bubbles of one rank until the main job is over.

    Args:
        dead: the pids of the agents that served this rank before and died: what they held is given back.
    """

    def __init__(self, spec: AgentSpec, dead: list[int]) -> None:
        self.spec = spec
        self.guest = spec.guest
        self.run_dir = Path(spec.run_dir)
        self.name = f"rank {spec.rank} of {spec.run_dir} on {os.uname().nodename}"
        self.gate = SharedGateReader(spec.gate_fd)
        self.board = CycleBoardReader(spec.board_fd)
        mps = MpsDaemon.existing(Path(spec.mps_pipe)) if spec.mps_pipe is not None else None
        self.device = open_device(spec.device, spec.sharing, mps, spec.device_uuid)
        self.control = ControlPage(spec.control_fd)
        self.control_reader_fd = self.control.reader_fd()
        self.baton_fd = Baton.create()
        self.baton = Baton(self.baton_fd)
        self.orphaned = False  # the rank died
        self.judge = Judge()
        owners = [f"{self.name}, pid {pid}" for pid in (os.getpid(), *dead)]
        # An agent that follows a dead one must not submit again what has finished meanwhile.
        submit = not_yet_submitted(self.run_dir, spec.store, spec.submit)
        self.keeper = Keeper(
            spec.store,
            owners[0],
            submit or (None if dead else []),
            self.describe,
            spec.lease_s,
            owners[1:],
            submitted=lambda: note_submitted(self.run_dir, spec.store, spec.submit),
        )
        margin_bytes = spec.margin_bytes + self.device.overhead_bytes
        self.choice = Choice(
            spec.policy, self.name, fingerprint(spec.device), self.board, margin_bytes, self._room_bytes
        )
        self.seats = [Seat(self, tail=False), Seat(self, tail=True)]
        self.mover = Mover(self.name, spec.run_dir, self.choice, self.seats[0].may_run)
        self._record = AgentFile(Path(spec.records), spec.rank, len(dead))
        self._ended: list[tuple[JobRecord, WorkerRecord]] = []  # attempts that are not in it yet
        self._processes: set[int] = set()  # those that have a job
        self._standby: Holder | None = None
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        return self.orphaned or self.gate.ended

    def cap(self, job_bytes: int | None, cycle: BubbleCycle | None) -> int | NoRoom | None:
        """How much memory a worker that asks for so much may hold (``worker_cap``)."""
        others = sum(seat.room.claim_bytes for seat in self.seats if seat.room is not None)
        return worker_cap(job_bytes, self.device, cycle, self.spec.margin_bytes, others)

    def _room_bytes(self, cycle: BubbleCycle) -> int:
        found = self.cap(None, cycle)
        return found if isinstance(found, int) else 0

    def describe(self) -> Device:
        """This device as the store should know it."""
        resident = self.seats[0]
        cycle = self.board.read()
        paused = self.control.state is not RunState.RUNNING  # it takes no job, and nobody knows until when
        return Device(
            name=self.name,
            run=self.spec.run_dir,
            busy_until_s=math.inf if paused else resident.busy_until_s,
            job=resident.job_name,
            cycle=None if cycle is None else cycle_to_dict(cycle),
            refuses=self.choice.refused,
        )

    def run(self) -> None:
        """Serve until the main job is over."""
        self.keeper.start()
        ControlWatcher(self.control, self._control_changed).start()
        threading.Thread(target=self._show, name="records", daemon=True).start()
        threads = [threading.Thread(target=self._serve, args=(seat,), name=str(seat)) for seat in self.seats]
        for thread in threads:
            thread.start()
        self.stand_by()
        for thread in threads:
            thread.join()
        self._stand_down()
        self.keeper.stop()
        self._write()

    def _control_changed(self, state: RunState) -> None:
        """Say so, and of a kill not before it is done: the seats end their workers at their next look."""
        logger.info("%s", state.name)
        if state is RunState.KILLED:
            self._stand_down()
        end_s = time.monotonic() + _KILL_S
        while state is RunState.KILLED and self._processes:
            if time.monotonic() > end_s:
                raise TimeoutError(f"workers {sorted(self._processes)} have not ended")
            time.sleep(0.02)

    def _serve(self, seat: Seat) -> None:
        while not self.over:
            try:
                served = seat.serve()
                if served:
                    self._write()
            except Exception:  # one seat's trouble is not the other's
                logger.exception("%s failed", seat)
                served = False
            if not served:
                self._pause(_TAIL_LOOKS_S if seat.tail else _RESIDENT_LOOKS_S)

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self.over and time.monotonic() < end_s:
            time.sleep(0.2)

    def keep_record(self, job: JobRecord, worker: WorkerRecord) -> None:
        """An attempt has ended."""
        with self._lock:
            self._ended.append((job, worker))

    def _show(self) -> None:
        """Write down what runs, again and again: of an agent that is killed, that is the last word."""
        while not self.over:
            self._pause(_SHOW_S)
            try:
                self._write()
            except Exception:
                logger.exception("what its jobs did cannot be written down now")

    def _write(self) -> None:
        attempts = [seat.attempt for seat in self.seats]
        with self._lock:
            while self._ended:
                self._record.add(*self._ended[0])
                self._ended.pop(0)
            self._record.show([attempt.so_far() for attempt in attempts if attempt is not None])

    def start_worker(self, job: Job) -> Holder:
        """A worker's first process, for this job: the one that stands by, if it will do."""
        task, plain = job.spec["command"] is None, not job.spec.get("env")
        with self._lock:
            # What stands by has imported libraries already, which may read variables then; and it runs at idle
            # priority, where nobody can watch a command.
            holder = self._standby if task and plain else None
            if holder is not None:
                self._standby = None
                if not holder.alive:
                    holder.end()
                    holder = None
            if holder is None:
                holder = self._new_holder(idle=task)
            self._processes.add(holder.pid)
            return holder

    def stand_by(self) -> None:
        """Have the next worker's first process ready."""
        with self._lock:
            if self._standby is None and not self.over and self.control.state is not RunState.KILLED:
                try:
                    self._standby = self._new_holder(idle=True, ahead=AHEAD)
                except OSError as error:  # the next job may be luckier
                    logger.warning("no worker stands by: %s", error)

    def _new_holder(self, *, idle: bool, ahead: Sequence[str] = ()) -> Holder:
        spec = self.spec
        fds = (spec.gate_fd, spec.board_fd, self.control_reader_fd, self.baton_fd)
        started_with = environment(os.environ, {}, self.guest, Path("/"))
        name = f"{os.getpid()}-{next(self._numbers)}"
        return Holder(name, fds, started_with, spec.run_dir, idle=idle, ahead=ahead)

    def _stand_down(self) -> None:
        with self._lock:
            if self._standby is not None:
                self._standby.end()
                self._standby = None

    def forget_worker(self, pid: int) -> None:
        """End what a worker left that slipped out of its process group and came to us."""
        with self._lock:
            self._processes.discard(pid)
            standby = set() if self._standby is None else {self._standby.pid}
            reap.end_descendants(spare=self._processes | standby)


def main() -> None:
    spec_path, warden, dead = sys.argv[1:]
    spec = AgentSpec.from_json(Path(spec_path).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    agent = Agent(spec, [int(pid) for pid in dead.split(",") if pid])

    def on_term(number: int, frame: Any) -> None:
        agent.orphaned = True

    signal.signal(signal.SIGTERM, on_term)
    host.ignore_notices()  # workers inherit this: until they listen to USR1, it is not to end them
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main job; its end ends us
    host.use_every_core()  # only the workers belong on the rank's own
    host.adopt_orphans()
    host.die_with_parent(int(warden), signal.SIGTERM)
    agent.run()


if __name__ == "__main__":
    main()
