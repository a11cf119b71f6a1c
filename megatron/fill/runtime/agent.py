"""One rank's agent: takes jobs from the store, runs each in a worker, and sees to its end.

The rank starts it, and its workers are thereby in the rank's session: only there does Linux honour their idle
priority against the rank (autogroups).  It is the workers' parent: nothing they start outlives it, and the kernel ends
it when the rank dies.  It never talks to the rank; both look at the gate.

It has two *seats*: the resident job gets every bubble first, the tail job what the resident one cannot use.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from megatron.fill.board import CycleBoardReader
from megatron.fill.device import host
from megatron.fill.device.meter import fingerprint
from megatron.fill.gate import SharedGateReader
from megatron.fill.planner.cycles import cycle_to_dict
from megatron.fill.records import write_agent
from megatron.fill.runtime.baton import Baton
from megatron.fill.runtime.choice import Choice
from megatron.fill.runtime.keeper import Keeper
from megatron.fill.runtime.seat import Seat
from megatron.fill.store.port import Device, NewJob
from megatron.fill.types import JobRecord, WorkerRecord

logger = logging.getLogger("pipefill.agent")

_RESIDENT_LOOKS_S, _TAIL_LOOKS_S = 1.0, 5.0  # how often an empty seat looks for a job


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What the rank tells its agent.

    Attributes:
        store: the URL of the job store.
        submit: jobs to put into it.
        policy: which job is next, as ``parse_policy`` reads it.
        lease_s: how long the store keeps a job for an agent that is silent.
        checkpoint_s: how often resumable jobs are saved.
    """

    run_dir: str
    rank: int
    parent: int
    gate_fd: int
    board_fd: int
    device: str
    cpus: list[int]
    store: str
    submit: list[NewJob]
    policy: str
    lease_s: float
    checkpoint_s: float
    grace_ns: int
    max_overruns: int
    max_output_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSpec:
        data = json.loads(text)
        return cls(**data | {"submit": [NewJob(**job) for job in data["submit"]]})


class Agent:
    """Runs jobs in the bubbles of one rank until the main job is over."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.run_dir = Path(spec.run_dir)
        self.name = f"rank {spec.rank} of {spec.run_dir} on {os.uname().nodename}"
        self.gate = SharedGateReader(spec.gate_fd)
        self.board = CycleBoardReader(spec.board_fd)
        self.baton_fd = Baton.create()
        self.baton = Baton(self.baton_fd)
        self.orphaned = False  # the rank died
        self.crashes: dict[int, int] = {}  # by job: how often its worker died in a row here
        self.jobs: list[JobRecord] = []
        self.workers: list[WorkerRecord] = []
        owner = f"{self.name}, pid {os.getpid()}"
        self.keeper = Keeper(spec.store, owner, spec.submit, self.describe, spec.lease_s)
        self.choice = Choice(spec.policy, self.name, fingerprint(spec.device), self.board)
        self.seats = [Seat(self, tail=False), Seat(self, tail=True)]
        self._processes: set[int] = set()
        self._lock = threading.Lock()

    @property
    def over(self) -> bool:
        return self.orphaned or self.gate.ended

    def describe(self) -> Device:
        """This device as the store should know it."""
        resident = self.seats[0]
        cycle = self.board.read()
        return Device(
            name=self.name,
            run=self.spec.run_dir,
            busy_until_s=resident.busy_until_s,
            job=resident.job_name,
            cycle=None if cycle is None else cycle_to_dict(cycle),
        )

    def run(self) -> None:
        """Serve until the main job is over."""
        self.keeper.start()
        threads = [threading.Thread(target=self._serve, args=(seat,), name=str(seat)) for seat in self.seats]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.keeper.stop()
        self._write()

    def _serve(self, seat: Seat) -> None:
        while not self.over:
            try:
                served = seat.serve()
            except Exception:  # one seat's trouble is not the other's
                logger.exception("%s failed", seat)
                served = False
            if served:
                self._write()
            else:
                self._pause(_TAIL_LOOKS_S if seat.tail else _RESIDENT_LOOKS_S)

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self.over and time.monotonic() < end_s:
            time.sleep(0.2)

    def keep_record(self, job: JobRecord, worker: WorkerRecord) -> None:
        with self._lock:
            self.jobs.append(job)
            self.workers.append(worker)

    def _write(self) -> None:
        with self._lock:
            write_agent(self.run_dir / "agents" / f"agent{self.spec.rank}.json", self.workers, self.jobs)

    def start_worker(self, spec_path: Path, log_fd: int) -> subprocess.Popen[bytes]:
        with self._lock:
            worker = subprocess.Popen(
                [sys.executable, "-m", "megatron.fill.runtime.worker", str(spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(self.spec.gate_fd, self.spec.board_fd, self.baton_fd, log_fd),
                process_group=0,  # not a new session: that would be a new autogroup
                env=_worker_environment(),
            )
            self._processes.add(worker.pid)
            return worker

    def forget_worker(self, pid: int) -> None:
        """End what a worker left that slipped out of its process group and came to us."""
        with self._lock:
            self._processes.discard(pid)
            for child in psutil.Process().children():
                if child.pid not in self._processes:
                    for process in [*_descendants(child), child]:
                        with contextlib.suppress(psutil.Error):
                            process.kill()
                            process.wait(1)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=True)
    return []


WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # Memory that a step freed is kept for the next one: to get it from the kernel page by page takes bubble time.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}


def _worker_environment() -> dict[str, str]:
    """The agent's environment less what belongs to the main job, with one thread per library on the rank's core."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith("TORCHELASTIC_")
    }
    return environment | WORKER_ENVIRONMENT


def main() -> None:
    spec = AgentSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    agent = Agent(spec)

    def on_term(number: int, frame: Any) -> None:
        agent.orphaned = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main job; its end ends us
    host.use_every_core()  # only the workers belong on the rank's own
    host.adopt_orphans()
    host.die_with_parent(spec.parent, signal.SIGTERM)
    agent.run()


if __name__ == "__main__":
    main()
