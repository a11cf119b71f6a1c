"""A training over three nodes that lose the database, each other, their agents: what becomes of its jobs."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from megatron.fill.store import Job, JobStore
from megatron.fill.store.sql import SqlStore
from megatron.fill.types import JobState
from tests.e2e.network import DATABASE, TRAINING, Network
from tests.e2e.training import (
    ENDLESS,
    ROOT,
    SCRIPT,
    Trained,
    iterations_in,
    processes,
    settings,
    warm_python,
    write_jobs,
)
from tests.e2e.warm import REST
from tests.support.postgres import PrivatePostgres
from tests.support.waiting import until

NODES = 3
_MODEL = (
    "--pipeline-model-parallel-size 3 --num-layers 6 --hidden-size 64 --num-attention-heads 4 --seq-length 32 "
    "--max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 6 --lr 1e-3 --lr-decay-style constant "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 255 --eval-iters 0 --eval-interval 100000 "
    "--log-interval 1 --tensorboard-log-interval 1 --exit-signal-handler"
)
_REST_MS = 100  # after each iteration, in which agents and workers start
_PORT = "29500"
_LONG = 0.05  # part of the jobs that take about as long as the lease, or longer
_STILL_S = 300.0  # after so long without a job's end, the rest is lost
_SUCCESSES = """
    CREATE TABLE successes (job bigint, attempt bigint);
    CREATE FUNCTION note_success() RETURNS trigger LANGUAGE plpgsql AS
        $$ BEGIN INSERT INTO successes VALUES (new.id, new.attempt); RETURN new; END $$;
    CREATE TRIGGER successes AFTER UPDATE ON pipefill_jobs FOR EACH ROW
        WHEN (new.state = 'SUCCEEDED') EXECUTE FUNCTION note_success();
"""


@dataclass
class Survived:
    """What became of a training and its jobs.

    Attributes:
        lost: number of jobs that did not succeed, or without having done each step.
        twice: number of jobs that the store heard succeed more than once.
        again: number of jobs that were at their last step more than once, since the store did not hear of it.
        overlapped: number of jobs that two workers had at the same time.
        attempts: number of attempts at all jobs.
        main_failures: number of ranks that ended by themselves.
        losses_compared: number of iterations whose losses are those of a training without jobs and cuts; 0 if not.
        cuts: number of cuts by kind.
    """

    jobs: int
    lost: int
    twice: int
    again: int
    overlapped: int
    attempts: int
    main_failures: int
    iterations: int
    losses_compared: int
    seconds: float
    cuts: Counter[str] = field(default_factory=Counter)


class Ranks:
    """A training, one rank on each node."""

    def __init__(self, network: Network, folder: Path, flags: str) -> None:
        self.output: list[str] = []
        self._processes = []
        logs = ["--tensorboard-dir", str(folder / "tensorboard"), "--train-iters", str(ENDLESS)]
        for node in network.nodes:
            # The local rank is the core that the rank takes; these nodes share the cores of one machine.
            placed = {"RANK": node, "LOCAL_RANK": node, "GROUP_RANK": node, "WORLD_SIZE": NODES, "LOCAL_WORLD_SIZE": 1}
            environment = os.environ | {name: str(value) for name, value in placed.items()}
            environment |= {"MASTER_ADDR": network.address(0), "MASTER_PORT": _PORT, "GLOO_SOCKET_IFNAME": TRAINING}
            environment |= {"OMP_NUM_THREADS": "1", "PIPEFILL_CPU_BACKEND": "1", REST: str(_REST_MS)}
            process = subprocess.Popen(
                [*network.on(node), sys.executable, *warm_python(), SCRIPT, *f"{_MODEL} {flags}".split(), *logs],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=environment,
            )
            assert process.stdout is not None
            threading.Thread(target=self.output.extend, args=(process.stdout,), daemon=True).start()
            self._processes.append(process)

    @property
    def ended(self) -> int:
        """The number of ranks that have ended."""
        return sum(process.poll() is not None for process in self._processes)

    @property
    def iterations(self) -> int:
        return iterations_in(self.output)

    def end(self, seconds: float) -> int:
        """Ask the ranks to end, which they do after their iteration; return the number of those that failed."""
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        return self.wait(seconds)

    def wait(self, seconds: float) -> int:
        """Wait for the ranks' end; return the number of those that failed, or had to be killed."""
        end_s, failed = time.monotonic() + seconds, 0
        for process in self._processes:
            try:
                failed += process.wait(max(0.0, end_s - time.monotonic())) != 0
            except subprocess.TimeoutExpired:
                failed += 1
        self.kill()
        return failed

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


class _Cuts:
    """Cuts nodes off, restarts the database and kills agents, one after the other.

    Args:
        lease_s: lease of the jobs.
        longest_s: longest time that a node is cut off.
    """

    def __init__(
        self, network: Network, server: PrivatePostgres, folder: Path, lease_s: float, longest_s: float, seed: int
    ) -> None:
        self.network = network
        self.server = server
        self.folder = folder
        self.lease_s = lease_s
        self.longest_s = longest_s
        self.draw = random.Random(seed)
        self.counts: Counter[str] = Counter()

    def next(self) -> None:
        """Do the next one; afterwards all is as before."""
        kind = self.draw.choice(
            ("database", "database beyond the lease", "ranks", "database and ranks", "restart", "crash", "agent")
        )
        self.counts[kind] += 1
        if kind == "agent":
            agents = list(processes("fill.agent.agent", str(self.folder)))
            if agents:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self.draw.choice(agents), signal.SIGKILL)
        elif kind in ("restart", "crash"):
            self.server.stop(signal.SIGINT if kind == "restart" else signal.SIGQUIT)
            time.sleep(self.draw.uniform(0, self.longest_s / 2))
            self.server.start()
        else:
            self._cut(kind)

    def _cut(self, kind: str) -> None:
        networks = {"ranks": (TRAINING,), "database and ranks": (DATABASE, TRAINING)}.get(kind, (DATABASE,))
        beyond = kind != "database" and DATABASE in networks
        first, last = (1.1 * self.lease_s, self.longest_s) if beyond else (0.1 * self.lease_s, 0.8 * self.lease_s)
        nodes = self.draw.sample(self.network.nodes, self.draw.randint(1, NODES))
        try:
            for node in nodes:
                for name in networks:
                    self.network.cut(node, name)
            time.sleep(self.draw.uniform(first, last))
        finally:
            self.network.mend()


def survive(folder: Path, jobs: int, longest_s: float = 60.0, compared: int = 100, seed: int = 0) -> Survived:
    """Train on three nodes with so many jobs, through cuts and restarts, until all jobs have finished.

    Args:
        longest_s: longest time that a node is cut off; twice the lease of the jobs.
        compared: number of iterations whose losses are compared with those of a training without jobs and cuts.
    """
    lease_s = longest_s / 2
    with Network(NODES) as network:
        address, within = network.server
        with PrivatePostgres(durable=True, address=address, within=within) as server:
            url = server.new_database()
            store = SqlStore(url, patience_s=longest_s)
            with psycopg.connect(url.replace("+psycopg", "")) as connection:
                connection.execute(_SUCCESSES)
            flags = write_jobs(folder, *_jobs(jobs, lease_s, random.Random(seed)))
            flags += f" --fill-store {server.over_network(url)} --fill-checkpoint-seconds 1"
            flags += f" {settings(warmup_iterations=3, lease_seconds=lease_s)}"
            began_s = time.monotonic()
            cuts = _Cuts(network, server, folder, lease_s, longest_s, seed)
            ranks = Ranks(network, folder, flags)
            try:
                failures = _train(ranks, cuts, store, jobs)
            finally:
                ranks.kill()
            seconds = time.monotonic() - began_s
            with psycopg.connect(url.replace("+psycopg", "")) as connection:
                heard = Counter(job for (job,) in connection.execute("SELECT job FROM successes"))
            found = store.list()
            store.close()
        same = _same_losses(network, folder, compared)
    notes = [_notes(job) for job in found]
    return Survived(
        jobs=len(found),
        lost=jobs - sum(_whole(job, its) for job, its in zip(found, notes, strict=True)),
        twice=sum(times > 1 for times in heard.values()),
        again=sum(_ends(job, its) > 1 for job, its in zip(found, notes, strict=True)),
        overlapped=sum(map(_overlap, notes)),
        attempts=sum(job.attempt for job in found),
        main_failures=failures,
        iterations=ranks.iterations,
        losses_compared=same,
        seconds=round(seconds, 1),
        cuts=cuts.counts,
    )


def _jobs(count: int, lease_s: float, draw: random.Random) -> list[dict]:
    """Return short jobs, of which some take about as long as a lease, at 10 steps a second on a busy machine."""
    steps = [draw.randint(5, 50) if draw.random() > _LONG else int(lease_s * draw.uniform(5, 15)) for _ in range(count)]
    return [
        {"name": f"job-{number}", "task": "tasks:Noted", "args": {"steps": its}} for number, its in enumerate(steps)
    ]


def _train(ranks: Ranks, cuts: _Cuts, store: JobStore, jobs: int) -> int:
    """Train until all jobs have finished; return the number of ranks that failed."""
    done, since_s = 0, time.monotonic()
    while done < jobs and time.monotonic() - since_s < _STILL_S + 10 * cuts.longest_s:
        if ranks.ended:
            print("".join(ranks.output[-40:]), file=sys.stderr)
            return ranks.ended
        if ranks.iterations:
            time.sleep(cuts.draw.uniform(0, 2 * cuts.lease_s))
            cuts.next()
        time.sleep(1.0)
        now_done = sum(job.state.finished for job in store.list())
        if now_done > done:
            done, since_s = now_done, time.monotonic()
            print(f"{done} of {jobs} jobs finished, {dict(cuts.counts)}", file=sys.stderr)
    before = ranks.iterations
    while ranks.iterations < before + 3 and not ranks.ended and time.monotonic() - since_s < 2 * _STILL_S:
        time.sleep(0.5)
    return ranks.ended or ranks.end(_STILL_S)


def _same_losses(network: Network, folder: Path, compared: int) -> int:
    """Return the number of iterations, at most ``compared``, if losses are those of a training without jobs; else 0."""
    if not compared:
        return 0
    mine = Trained("", folder).losses
    count = min(compared, len(mine))
    plain = folder / "plain"
    ranks = Ranks(network, plain, f"--fill-report {plain / 'run'}")
    try:
        until(lambda: ranks.iterations >= count or ranks.ended, _STILL_S + count, every_s=0.1)
        if ranks.ended or ranks.end(_STILL_S):
            raise RuntimeError("".join(ranks.output[-40:]))
    finally:
        ranks.kill()
    theirs = Trained("", plain).losses
    both = sorted(mine.keys() & theirs.keys())
    return len(both) if len(both) >= count and all(mine[one] == theirs[one] for one in both) else 0


def _notes(job: Job) -> list[tuple[str, int, int]]:
    """Return a job's notes: who did a step, when in ns, and which."""
    path = Path(job.directory) / "notes"
    lines = path.read_text().splitlines() if job.directory and path.exists() else []
    return [(who, int(at_ns), int(step)) for who, at_ns, step in map(str.split, lines)]


def _whole(job: Job, notes: list[tuple[str, int, int]]) -> bool:
    """True if the job has succeeded, and each of its steps was done."""
    return job.state is JobState.SUCCEEDED and len({step for _, _, step in notes}) == job.work.args["steps"]


def _ends(job: Job, notes: list[tuple[str, int, int]]) -> int:
    return sum(step == job.work.args["steps"] for _, _, step in notes)


def _overlap(notes: list[tuple[str, int, int]]) -> bool:
    """True if a worker did a step after another one's first that came later."""
    spans: dict[str, tuple[int, int]] = {}
    for who, at_ns, _ in notes:
        first, last = spans.get(who, (at_ns, at_ns))
        spans[who] = min(first, at_ns), max(last, at_ns)
    ordered = sorted(spans.values())
    return any(last > next_first for (_, last), (next_first, _) in itertools.pairwise(ordered))
