"""One rank's agent: takes jobs from the run's queue, runs each in a worker, and sees to its end.

The rank starts it, and its workers are thereby in the rank's session: only there does Linux honour their idle
priority against the rank (autogroups).  It is the workers' parent: nothing they start outlives it, and the kernel ends
it when the rank dies.  It never talks to the rank; both look at the gate.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from megatron.fill.device import host
from megatron.fill.gate import SharedGateReader
from megatron.fill.records import write_agent
from megatron.fill.runtime.enforcer import Enforcer
from megatron.fill.runtime.output import BoundedOutput
from megatron.fill.runtime.queue import ClaimQueue
from megatron.fill.runtime.spec import Outcome, WorkerSpec
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.sidetask.base import RESULT
from megatron.fill.types import JobRecord, JobState, WorkerRecord

logger = logging.getLogger("pipefill.agent")

_TICK_S = 0.2
_STOP_S = 10.0  # how long a worker may take to save and stop after the main job's end
_READ_BYTES = 64 * 1024
_READS_PER_TICK = 32  # bounds what a job that floods its output costs the machine: 10 MiB/s


@dataclass(frozen=True, slots=True)
class AgentJob:
    """A job as the agent needs it."""

    name: str
    what: str
    task: str | None = None
    command: list[str] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class AgentSpec:
    """What the rank tells its agent."""

    run_dir: str
    rank: int
    parent: int
    gate_fd: int
    device: str
    cpus: list[int]
    jobs: list[AgentJob]
    search: list[str]
    grace_ns: int
    max_overruns: int
    max_output_bytes: int

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> AgentSpec:
        data = json.loads(text)
        return cls(**data | {"jobs": [AgentJob(**job) for job in data["jobs"]]})


class Agent:
    """Runs the jobs of one rank, one after the other."""

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        self.run_dir = Path(spec.run_dir)
        self.gate = SharedGateReader(spec.gate_fd)
        self.queue = ClaimQueue(self.run_dir, [job.name for job in spec.jobs])
        self.jobs: list[JobRecord] = []
        self.workers: list[WorkerRecord] = []
        self.orphaned = False  # the rank died

    @property
    def over(self) -> bool:
        return self.orphaned or self.gate.ended

    def run(self) -> None:
        """Take and run jobs until there are none, or the main job is over."""
        by_name = {job.name: job for job in self.spec.jobs}
        # The first claims are spread over the ranks in order, so that the same jobs file runs the same way each time.
        first = self.spec.rank % len(self.spec.jobs)
        while not self.over:
            name = self.queue.claim(f"rank {self.spec.rank}", first)
            if name is None:
                break
            first = 0
            self._run_job(by_name[name])
            self._write()
        self._write()

    def _write(self) -> None:
        write_agent(self.run_dir / "agents" / f"agent{self.spec.rank}.json", self.workers, self.jobs)

    def _run_job(self, job: AgentJob) -> None:
        directory = self.queue.directory(job.name)
        Outcome.discard(directory)
        (directory / RESULT).unlink(missing_ok=True)
        log_fd = create_log()
        log = StepLog(log_fd)
        logger.info("job %s: starting", job.name)
        worker = self._start_worker(job, directory, log_fd)
        os.close(log_fd)
        run = _JobRun(self, job, worker, log, BoundedOutput(directory / "output.log"))
        verdict = run.watch()
        record = run.record(verdict, directory)
        logger.info("job %s: %s %s", job.name, record.state, record.reason)
        self.jobs.append(record)
        self.workers.append(log.record(job.name, self.spec.rank))

    def _start_worker(self, job: AgentJob, directory: Path, log_fd: int) -> subprocess.Popen[bytes]:
        spec = WorkerSpec(
            name=job.name,
            directory=str(directory.resolve()),
            gate_fd=self.spec.gate_fd,
            log_fd=log_fd,
            parent=os.getpid(),
            device=self.spec.device,
            cpus=self.spec.cpus,
            task=job.task,
            command=job.command,
            args=job.args,
            memory_bytes=job.memory_bytes,
            search=self.spec.search,
        )
        spec_path = directory / "spec.json"
        spec_path.write_text(spec.to_json(), encoding="utf-8")
        return subprocess.Popen(
            [sys.executable, "-m", "megatron.fill.runtime.worker", str(spec_path)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(self.spec.gate_fd, log_fd),
            process_group=0,  # not a new session: that would be a new autogroup
            env=_worker_environment(),
        )


class _JobRun:
    """One worker from its start to its end."""

    def __init__(
        self, agent: Agent, job: AgentJob, worker: subprocess.Popen[bytes], log: StepLog, output: BoundedOutput
    ) -> None:
        spec = agent.spec
        self.agent = agent
        self.job = job
        self.worker = worker
        self.log = log
        self.output = output
        yields = spec.device == "cpu"
        self.enforcer = Enforcer(worker.pid, agent.gate, log, spec.grace_ns, spec.max_overruns, yields)

    def watch(self) -> str | None:
        """Wait for the worker's end, and bring it about where needed; the reason why it was killed, if it was."""
        assert self.worker.stdout is not None
        pipe = self.worker.stdout.fileno()
        os.set_blocking(pipe, False)
        exit_fd = os.pidfd_open(self.worker.pid)
        verdict = None
        deadline: float | None = None
        with selectors.DefaultSelector() as selector:
            selector.register(exit_fd, selectors.EVENT_READ)
            selector.register(pipe, selectors.EVENT_READ)
            reads, tick = 0, time.monotonic()
            while self.worker.poll() is None:
                for key, _ in selector.select(_TICK_S):
                    if key.fd == pipe:
                        reads += 1
                        if not self._pump(pipe) or reads >= _READS_PER_TICK:
                            selector.unregister(pipe)
                now = time.monotonic()
                if now - tick < _TICK_S:
                    continue
                if reads >= _READS_PER_TICK and pipe not in selector.get_map():
                    selector.register(pipe, selectors.EVENT_READ)
                reads, tick = 0, now
                if verdict is None:
                    verdict, deadline = self._judge(now, deadline)
                    if verdict is not None:
                        self._kill()
        os.close(exit_fd)
        self._end_group()
        while self._pump(pipe) and self.output.total_bytes < self.agent.spec.max_output_bytes:
            pass
        self.output.close()
        self.worker.stdout.close()
        return verdict

    def _judge(self, now: float, deadline: float | None) -> tuple[str | None, float | None]:
        if self.agent.over:
            if deadline is None:
                self.enforcer.release()
                self.worker.terminate()
                return None, now + _STOP_S
            if now > deadline:
                return f"{self.log.phase.callback} did not return within {_STOP_S:g} s of the main job's end", deadline
            return None, deadline
        self.enforcer.check()
        limit = self.agent.spec.max_output_bytes
        if self.output.total_bytes > limit:
            return f"printed more than {limit / 2**20:g} MiB; output.log has the beginning and the end", deadline
        return self.enforcer.verdict, deadline

    def _pump(self, pipe: int) -> bool:
        """Move some output to its file; False at its end, or when there is none now."""
        try:
            data = os.read(pipe, _READ_BYTES)
        except BlockingIOError:
            return False
        self.output.write(data)
        return bool(data)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        self.worker.wait()

    def _end_group(self) -> None:
        """End what the worker left: its process group, and whatever slipped out of it and came to us."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.worker.pid, signal.SIGKILL)
        for child in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                child.kill()
                child.wait(1)

    def record(self, verdict: str | None, directory: Path) -> JobRecord:
        outcome = Outcome.read(directory)
        if verdict is not None or outcome is None:
            result = outcome.result if outcome else _read_result(directory)
            unit = outcome.unit if outcome else "seconds" if self.job.command else "steps"
            outcome = Outcome(JobState.FAILED, verdict or self._death(), unit, result=result)
        return JobRecord(
            name=self.job.name,
            what=self.job.what,
            state=outcome.state,
            reason=outcome.reason,
            work_done=self.log.work_done,
            unit=outcome.unit,
            rank=self.agent.spec.rank,
            steps=self.log.step_count,
            harvested_s=self.log.harvested_ns / 1e9,
            total_work=outcome.total_work,
            result=outcome.result,
            directory=str(directory),
        )

    def _death(self) -> str:
        code = self.worker.returncode
        where = self.log.phase.callback
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the worker was killed by {signal.Signals(-code).name} {'in ' * where.endswith(')')}{where}"
        return f"the worker exited with status {code} {'in ' * where.endswith(')')}{where}"


def _read_result(directory: Path) -> dict[str, Any]:
    try:
        return json.loads((directory / RESULT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _worker_environment() -> dict[str, str]:
    """The agent's environment less what belongs to the main job, with one thread per library on the rank's core."""
    ours = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {
        name: value for name, value in os.environ.items() if name not in ours and not name.startswith("TORCHELASTIC_")
    }
    return environment | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def main() -> None:
    spec = AgentSpec.from_json(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s rank {spec.rank} %(message)s")
    agent = Agent(spec)

    def on_term(number: int, frame: object) -> None:
        agent.orphaned = True

    signal.signal(signal.SIGTERM, on_term)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main job; its end ends us
    host.use_every_core()  # only the workers belong on the rank's own
    host.adopt_orphans()
    host.die_with_parent(spec.parent, signal.SIGTERM)
    agent.run()


if __name__ == "__main__":
    main()
