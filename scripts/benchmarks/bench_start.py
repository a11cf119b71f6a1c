"""How long does a worker take from when its job is there until its task is created, and what of that are the walls?

Starts workers as an agent does, in turn: behind the walls that this machine gives and without any namespace or change
of user, each with a first process that stood by and with one that is started for the job.  The task imports numpy, as
most do.  Reports the time until the job is behind its walls, until the task's ``create`` is called, and the CPU time of
the whole worker.

    python scripts/benchmarks/bench_start.py --json docs/benchmarks/start.json
    python scripts/benchmarks/bench_start.py --busy 0.8 --json docs/benchmarks/start-busy.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.agent.admission import default_user, environment
from megatron.fill.agent.workers import AHEAD, WorkerProcess
from megatron.fill.pages.baton import Baton
from megatron.fill.pages.board import CycleBoard
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGate
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.sandbox import Bind, Sandbox, look
from megatron.fill.work import Work
from megatron.fill.worker.spec import WorkerSpec

_TASK = "import numpy\nfrom megatron.fill import SideTask\nclass Nothing(SideTask):\n    pass\n"
_STANDS_BY_S = 30.0  # until a first process has imported what it imports, at the latest
_WITHIN_S = 60.0
_PERIOD_S = 0.1  # of a core's load


@dataclass(frozen=True, slots=True)
class Start:
    """One worker's, in seconds."""

    until_confined_s: float
    until_created_s: float
    cpu_s: float


def start(folder: Path, sandbox: Sandbox, search: Path, standby: bool) -> Start:
    """Start one worker, beforehand or when its job is there, and end it once its task was created."""
    gate, board, control, log_fd = SharedGate(), CycleBoard(), ControlPage.create(0), create_log()
    log, baton_fd = StepLog(log_fd), Baton.create()
    fds = [gate.reader_fd(), board.reader_fd(), control.reader_fd(), baton_fd]
    started_with = environment(os.environ, {}, None, folder)
    gate_fd, board_fd, control_fd, _ = fds
    spec = WorkerSpec(
        name="start",
        directory=str(folder),
        gate_fd=gate_fd,
        board_fd=board_fd,
        control_fd=control_fd,
        baton_fd=baton_fd,
        sandbox=sandbox,
        environment=started_with,
        work=Work("nothing:Nothing", search=(str(search),)),
    )
    path = search / "spec.json"
    path.write_text(spec.to_json(), encoding="utf-8")
    before = _children_cpu_s()
    began_ns = time.monotonic_ns()
    worker = WorkerProcess("bench", fds, started_with, str(folder), idle=True, ahead=AHEAD if standby else ())
    if standby:
        _await_sleep(worker.pid)
        began_ns = time.monotonic_ns()
    worker.give(path, log_fd)
    report = worker.sandbox_report(_WITHIN_S)
    confined_ns = time.monotonic_ns()
    if report is None or report.error:
        raise SystemExit(f"a worker could not be kept in: {report.error if report else 'it ended'}")
    worker.let_go()
    while not log.ready_ns:
        time.sleep(0.0005)
    created_ns = log.ready_ns
    gate.end()
    worker.process.wait()
    for fd in (*fds, log_fd):
        os.close(fd)
    for page in (gate.fd, board.fd, control.fd):
        os.close(page)
    return Start((confined_ns - began_ns) / 1e9, (created_ns - began_ns) / 1e9, _children_cpu_s() - before)


def _await_sleep(pid: int) -> None:
    """Wait until the process stands by: it has used no time for a while."""
    end_s, before = time.monotonic() + _STANDS_BY_S, ""
    while time.monotonic() < end_s and (now := Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii")) != before:
        before = now
        time.sleep(0.5)


@contextlib.contextmanager
def load(share: float) -> Iterator[None]:
    """Keep every core busy for this share of each tenth of a second, at normal priority and in this session."""
    cores = os.sched_getaffinity(0)
    children = [multiprocessing.Process(target=_spin, args=(core, share), daemon=True) for core in cores]
    for child in children:
        child.start()
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.join()


def _spin(core: int, share: float) -> None:
    os.sched_setaffinity(0, [core])
    while True:
        end_s = time.monotonic() + share * _PERIOD_S
        while time.monotonic() < end_s:
            pass
        time.sleep((1 - share) * _PERIOD_S)


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def summary(starts: list[Start]) -> dict[str, Any]:
    """Medians and 95% bootstrap intervals of the median, in milliseconds."""
    rng = np.random.default_rng(0)
    found: dict[str, Any] = {"count": len(starts)}
    for name in ("until_confined_s", "until_created_s", "cpu_s"):
        values = np.array([getattr(one, name) for one in starts]) * 1e3
        medians = np.median(rng.choice(values, (2000, len(values))), axis=1)
        low, high = np.percentile(medians, [2.5, 97.5])
        key = name.removesuffix("_s") + "_ms"
        found[key] = {"median": round(float(np.median(values)), 1), "ci95": [round(low, 1), round(high, 1)],
                      "p99": round(float(np.percentile(values, 99)), 1)}  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=40, metavar="N", help="workers of each kind (default: 40)")
    parser.add_argument("--busy", type=float, default=0.0, metavar="SHARE", help="of every core's time (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs is {options.pairs}: expected at least 1")
    if not 0 <= options.busy < 1:
        parser.error(f"--busy is {options.busy:g}: expected a share of at least 0 and less than 1")
    user = default_user()
    ids = (None, None) if user is None else (user.uid, user.gid)
    support = look(*ids)
    with tempfile.TemporaryDirectory(prefix="pipefill-start-") as base:
        search, folder = Path(base) / "search", Path(base) / "job"
        os.chmod(base, 0o755)
        search.mkdir()
        folder.mkdir()
        (search / "nothing.py").write_text(_TASK, encoding="utf-8")
        if user is not None:
            os.chown(folder, user.uid, user.gid)
        inside = Sandbox(support.namespaces, str(folder), (Bind(str(search)),), user=ids[0], group=ids[1])
        outside = Sandbox((), str(folder))
        ways = {
            "walls, stood by": (inside, True),
            "walls, started anew": (inside, False),
            "no namespaces, stood by": (outside, True),
            "no namespaces, started anew": (outside, False),
        }
        kinds: dict[str, list[Start]] = {name: [] for name in ways}
        for sandbox, standby in ways.values():
            start(folder, sandbox, search, standby)  # warms the caches
        with load(options.busy) if options.busy else contextlib.nullcontext():
            for number in range(options.pairs):
                for name in sorted(ways, reverse=bool(number % 2)):
                    kinds[name].append(start(folder, ways[name][0], search, ways[name][1]))
    result = {
        "command": "python scripts/benchmarks/bench_start.py " + " ".join(sys.argv[1:]),
        "namespaces": list(support.namespaces),
        "kinds": {name: summary(starts) for name, starts in kinds.items()},
        "walls_cost_ms": _difference_ms(kinds["walls, stood by"], kinds["no namespaces, stood by"]),
        "standing_by_saves_ms": _difference_ms(kinds["walls, started anew"], kinds["walls, stood by"]),
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _difference_ms(these: list[Start], those: list[Start]) -> float:
    """How much later these tasks are created: the median of the pairs."""
    pairs = zip(these, those, strict=True)
    return round(statistics.median((one.until_created_s - other.until_created_s) * 1e3 for one, other in pairs), 1)


if __name__ == "__main__":
    main()
