"""Does every job finish exactly once while agents are killed, and how many claims a second does the store take?

Per database (SQLite, and a private PostgreSQL with fsync on): agents are processes that claim jobs with short leases,
send heartbeats, and finish them, while this process kills agents at random (SIGKILL) and starts others, and stops some
(SIGSTOP) for longer than their lease, so that they come back to jobs that are no longer theirs.

What happened is recorded apart from the store: an agent appends a line to a file of its own before it calls
``finish`` and another after ``finish`` returned True.  A job has *finished once* if the store has it as SUCCEEDED and
there is one line of the second kind, for the attempt that the store names.  An agent can be killed between the commit
and its second line: then there is none, and the job counts as finished once if there is a line of the first kind for
the attempt that the store names; ``unrecorded`` says how many those are.  *Twice* are jobs with more than one line of
the second kind, or with one for another attempt than the store's; *lost* are jobs that never got to SUCCEEDED.
``errors`` are calls that gave up because the database stayed locked: an agent that is stopped inside a transaction
holds up the others.

Claims per second are measured before that, without kills: how long the agents take to claim all jobs.

    python scripts/benchmarks/bench_store.py --json docs/benchmarks/store.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from megatron.fill.errors import StoreError
from megatron.fill.status import Status
from megatron.fill.store import Claim, JobStore, NewJob, Progress, Standing, open_store
from megatron.fill.types import JobState
from megatron.fill.work import Work

# Forked from a server that has the modules and nothing open: SQLite's connections do not survive a fork.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["__main__", "megatron.fill.store.sql"])
_LIMIT_S = 75.0  # for one database
_UNFINISHED = [JobState.QUEUED, JobState.RUNNING]


def claim_all(url: str, start: Any, claimed: Any) -> None:
    """An agent of the first part: claim until there is nothing left."""
    store = open_store(url)
    start.wait()
    ids = [job.id for job in store.list([JobState.QUEUED])]
    count = 0
    while claim := store.claim(f"agent-{os.getpid()}", ids, 600):
        ids = ids[ids.index(claim.job.id) + 1 :]
        count += 1
    store.close()
    with claimed.get_lock():
        claimed.value += count


def measure_claims(url: str, jobs: int, agents: int) -> float:
    """Claims per second of all agents together."""
    store = open_store(url)
    store.submit([NewJob(f"job-{number}", Work("bench:Job")) for number in range(jobs)])
    start, claimed = _PROCESSES.Barrier(agents + 1), _PROCESSES.Value("i", 0)
    processes = [_PROCESSES.Process(target=claim_all, args=(url, start, claimed)) for _ in range(agents)]
    for process in processes:
        process.start()
    start.wait()
    begun = time.monotonic()
    for process in processes:
        process.join()
    seconds = time.monotonic() - begun
    assert claimed.value == jobs == len(store.list([JobState.RUNNING])), claimed.value
    store.close()
    return jobs / seconds


def agent(url: str, record: Path, lease_s: float, seed: int) -> None:
    """An agent of the second part: claim, work for a moment, finish; until it is killed or all is done."""
    rng = random.Random(seed)
    store = open_store(url)
    owner = f"agent-{seed}"
    lines = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while jobs := store.list(_UNFINISHED):
        wanted = [job.id for job in jobs]
        try:
            while claim := store.claim(owner, wanted, lease_s, device=owner):
                wanted = wanted[wanted.index(claim.job.id) + 1 :]
                work(store, claim, lines, lease_s, rng)
        except StoreError:  # locked for longer than a call waits: the claimed job comes back by its lease
            os.write(lines, b"error 0 0\n")
        time.sleep(rng.uniform(0.02, 0.1))
    store.close()


def work(store: JobStore, claim: Claim, lines: int, lease_s: float, rng: random.Random) -> None:
    for step in range(rng.randrange(4)):
        time.sleep(rng.uniform(0, 0.01))
        if store.heartbeat(claim, Progress(float(step), 4.0), lease_s) is Standing.LOST:
            return
    if rng.random() < 0.05:  # as when the main job ends
        store.release(claim, Status(JobState.QUEUED, detail="given back"), Progress(), {})
        return
    os.write(lines, f"intent {claim.job.id} {claim.attempt}\n".encode())
    if store.finish(claim, Status(JobState.SUCCEEDED), Progress(4.0, 4.0), {}):
        os.write(lines, f"done {claim.job.id} {claim.attempt}\n".encode())


class Fleet:
    """The agents that run at a time; one that ends by a signal is followed by another."""

    def __init__(self, url: str, folder: Path, agents: int, lease_s: float, rng: random.Random) -> None:
        self._url, self._folder, self._lease_s, self._rng = url, folder, lease_s, rng
        self._started = 0
        self._asleep: list[tuple[float, BaseProcess]] = []
        self._all: list[BaseProcess] = []
        self.kills = self.stops = 0
        self._agents = [self._start() for _ in range(agents)]

    def _start(self) -> BaseProcess:
        self._started += 1
        record = self._folder / f"agent-{self._started}"
        process = _PROCESSES.Process(target=agent, args=(self._url, record, self._lease_s, self._started))
        process.start()
        self._all.append(process)
        return process

    def disturb(self) -> None:
        """Kill one agent, or stop one for longer than its lease."""
        place = self._rng.randrange(len(self._agents))
        victim = self._agents[place]
        if self._rng.random() < 0.25 and len(self._asleep) < 3:
            self._signal(victim, signal.SIGSTOP)
            self._asleep.append((time.monotonic() + 1.5 * self._lease_s, victim))
            self.stops += 1
        else:
            self._signal(victim, signal.SIGKILL)
            victim.join()
            self.kills += 1
        self._agents[place] = self._start()

    def wake(self, all_of_them: bool = False) -> None:
        """Let those go on whose time has come."""
        due = [entry for entry in self._asleep if all_of_them or entry[0] <= time.monotonic()]
        for entry in due:
            self._asleep.remove(entry)
            self._signal(entry[1], signal.SIGCONT)

    def end(self) -> int:
        """Wait for all of them; they end by themselves when every job is done.  How many failed by themselves."""
        self.wake(all_of_them=True)
        for process in self._all:
            process.join(10)
            process.kill()
            process.join()
        return sum(process.exitcode not in (0, -signal.SIGKILL) for process in self._all)

    @staticmethod
    def _signal(process: BaseProcess, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            assert process.pid is not None
            os.kill(process.pid, number)


def run_with_kills(url: str, jobs: int, agents: int, lease_s: float, folder: Path, seed: int) -> dict[str, int]:
    """The second part; what became of the jobs."""
    rng = random.Random(seed)
    store = open_store(url)
    store.submit([NewJob(f"job-{number}", Work("bench:Job")) for number in range(jobs)])
    fleet = Fleet(url, folder, agents, lease_s, rng)
    until = time.monotonic() + _LIMIT_S
    while time.monotonic() < until and store.list(_UNFINISHED, limit=1):
        time.sleep(rng.uniform(0.05, 0.15))
        fleet.disturb()
        fleet.wake()
    failed = fleet.end()
    counts = judge(store, folder)
    store.close()
    return counts | {"kills": fleet.kills, "stops": fleet.stops, "failed_agents": failed}


def judge(store: JobStore, folder: Path) -> dict[str, int]:
    intents: dict[int, list[int]] = defaultdict(list)
    done: dict[int, list[int]] = defaultdict(list)
    counts = dict.fromkeys(("finished_once", "lost", "twice", "unrecorded", "claimed_again", "errors"), 0)
    for record in folder.iterdir():
        for line in record.read_text().splitlines():
            kind, job_id, attempt = line.split()
            if kind == "error":
                counts["errors"] += 1
            else:
                (intents if kind == "intent" else done)[int(job_id)].append(int(attempt))
    for job in store.list():
        counts["claimed_again"] += job.attempt > 1
        if any(attempt != job.attempt for attempt in done[job.id]) or len(done[job.id]) > 1:
            counts["twice"] += 1
        elif job.state is not JobState.SUCCEEDED:
            counts["lost"] += 1
        elif done[job.id] or job.attempt in intents[job.id]:
            counts["finished_once"] += 1
            counts["unrecorded"] += not done[job.id]
    return counts


@contextlib.contextmanager
def databases() -> Iterator[dict[str, list[str]]]:
    """Two new databases of each kind."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from tests.support.postgres import PrivatePostgres

    with tempfile.TemporaryDirectory() as folder, PrivatePostgres(durable=True) as postgres:
        yield {
            "sqlite": [f"sqlite:///{folder}/{name}.db" for name in ("claims", "kills")],
            "postgresql": [postgres.new_database() for _ in range(2)],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--lease-s", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    summary: dict[str, float] = {"jobs": options.jobs, "agents": options.agents}
    with databases() as urls:
        for name, (claims_url, kills_url) in urls.items():
            figures: dict[str, float] = {}
            figures["claims_per_s"] = round(measure_claims(claims_url, options.jobs, options.agents), 1)
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                figures |= run_with_kills(
                    kills_url, options.jobs, options.agents, options.lease_s, Path(folder), options.seed
                )
            figures["seconds_with_kills"] = round(time.monotonic() - begun, 1)
            print(f"{name:>10}: " + ", ".join(f"{key} {value}" for key, value in figures.items()), flush=True)
            summary |= {f"{name}_{key}": value for key, value in figures.items()}
    if options.json:
        command = " ".join(["python scripts/benchmarks/bench_store.py", *sys.argv[1:]])
        text = json.dumps({"command": command, "summary": summary}, indent=2)
        Path(options.json).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
