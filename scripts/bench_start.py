"""How long does a worker take from its start until its task is created, and what of that are the walls around it?

Starts workers as an agent does, with the walls that this machine gives and without any namespace or change of user in
turn, and reports the time until the task's ``create`` is called and the CPU time that the whole worker has had.

    python scripts/bench_start.py --json docs/benchmarks/start.json
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.fill.board import CycleBoard
from megatron.fill.control import ControlPage
from megatron.fill.gate import SharedGate
from megatron.fill.runtime.agent import START
from megatron.fill.runtime.baton import Baton
from megatron.fill.runtime.confined import Confined
from megatron.fill.runtime.guest import default_guest, environment
from megatron.fill.runtime.spec import WorkerSpec
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.sandbox import Bind, Cage, look

_TASK = "from megatron.fill import SideTask\nclass Nothing(SideTask):\n    pass\n"


@dataclass(frozen=True, slots=True)
class Start:
    """One worker's, in seconds."""

    until_confined_s: float
    until_created_s: float
    cpu_s: float


def start(folder: Path, cage: Cage, search: Path) -> Start:
    """Start one worker and end it once its task was created."""
    gate, board, control, log_fd = SharedGate(), CycleBoard(), ControlPage.create(0), create_log()
    log, baton_fd = StepLog(log_fd), Baton.create()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    fds = [gate.reader_fd(), board.reader_fd(), control.reader_fd(), baton_fd, log_fd, theirs.fileno()]
    spec = WorkerSpec(
        name="start", directory=str(folder), gate_fd=fds[0], log_fd=log_fd, board_fd=fds[1], control_fd=fds[2],
        baton_fd=baton_fd, channel_fd=fds[5], parent=os.getpid(), cage=cage, task="nothing:Nothing",
        search=[str(search)],
    )  # fmt: skip
    path = search / "spec.json"
    path.write_text(spec.to_json(), encoding="utf-8")
    before = _children_cpu_s()
    began_ns = time.monotonic_ns()
    worker = subprocess.Popen(
        [sys.executable, "-I", "-c", START, str(path), json.dumps(sys.path)],
        stdin=subprocess.DEVNULL,
        pass_fds=fds,
        process_group=0,
        env=environment(os.environ, {}, None, folder),
    )
    theirs.close()
    confined = Confined.receive(ours)
    confined_ns = time.monotonic_ns()
    if confined is None or confined.error:
        raise SystemExit(f"a worker could not be kept in: {confined.error if confined else 'it ended'}")
    ours.send(b"x")
    while not log.ready_ns:
        time.sleep(0.0005)
    created_ns = log.ready_ns
    gate.end()
    worker.wait()
    for fd in fds[:5]:
        os.close(fd)
    ours.close()
    for page in (gate.fd, board.fd, control.fd):
        os.close(page)
    return Start((confined_ns - began_ns) / 1e9, (created_ns - began_ns) / 1e9, _children_cpu_s() - before)


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
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error(f"--pairs is {options.pairs}: expected at least 1")
    guest = default_guest()
    ids = (None, None) if guest is None else (guest.uid, guest.gid)
    walls = look(*ids)
    kinds: dict[str, list[Start]] = {"walls": [], "no namespaces": []}
    with tempfile.TemporaryDirectory(prefix="pipefill-start-") as base:
        search, folder = Path(base) / "search", Path(base) / "job"
        os.chmod(base, 0o755)
        search.mkdir()
        folder.mkdir()
        (search / "nothing.py").write_text(_TASK, encoding="utf-8")
        if guest is not None:
            os.chown(folder, guest.uid, guest.gid)
        inside = Cage(walls.namespaces, str(folder), (Bind(str(search)),), user=ids[0], group=ids[1])
        outside = Cage((), str(folder))
        for cage in (inside, outside):
            start(folder, cage, search)  # warms the caches
        for number in range(options.pairs):
            order = [("walls", inside), ("no namespaces", outside)]
            for name, cage in order if number % 2 else reversed(order):
                kinds[name].append(start(folder, cage, search))
    result = {
        "command": f"python scripts/bench_start.py --pairs {options.pairs}",
        "namespaces": list(walls.namespaces),
        "kinds": {name: summary(starts) for name, starts in kinds.items()},
        "walls_cost_ms": round(
            statistics.median(
                (one.until_created_s - other.until_created_s) * 1e3
                for one, other in zip(kinds["walls"], kinds["no namespaces"], strict=True)
            ),
            1,
        ),
    }
    print(json.dumps(result, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
