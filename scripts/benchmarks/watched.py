"""A script's training that is watched by turns: for so many seconds not, and then with all that an operator can have.

    python -m scripts.benchmarks.watched SECONDS SCRIPT ARGUMENTS...

While it is watched, Prometheus' endpoint is scraped, metrics and spans go out by OTLP, and the rank with Megatron's
writers writes the figures of the run.  While it is not, the node's metrics server is stopped and no agent reads records
for the writers.
"""

from __future__ import annotations

import os
import runpy
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from megatron.fill.linux.tree import descendants
from megatron.fill.pages import control
from megatron.fill.pages.control import ControlPage
from megatron.fill.types import Iteration
from megatron.fill.wings.operate.spec import OTLP
from scripts.benchmarks.one_gpu import free_port
from scripts.benchmarks.sidetasks import JOBS
from scripts.benchmarks.trainings import command, iterations_of, jobs_file, settings, slowdown_of, training

_ITERATIONS = 100_000  # more than there is time for
_SCRAPE_S = 5.0
_SAMPLED = 0.1  # part of the iterations whose bubbles are sent as spans: ten times the usual one
_START_MINUTES = 2


def turn_of(seconds: float, at_ns: int) -> int:
    """Return the number of a turn, by CLOCK_MONOTONIC; it is watched in those with odd numbers."""
    return int(at_ns / 1e9 // seconds)


def by_turns(iterations: Sequence[Iteration], seconds: float, first_ns: int) -> list[Iteration]:
    """Return the iterations within one turn after ``first_ns``, as if filled where they were watched."""
    return [
        replace(one, block=turn, filling=bool(turn % 2))
        for one in iterations
        if one.start_ns > first_ns and (turn := turn_of(seconds, one.start_ns)) == turn_of(seconds, one.end_ns)
    ]


def measure_watching(folder: Path, pairs: int, seconds: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the slowdown of a training by being watched, and how much was asked for and sent."""
    counts: Counter[str] = Counter()
    collector = _collector(counts)
    with free_port() as port:
        pass  # the metrics server does not share it
    run, minutes = folder / "watched-run", _START_MINUTES + -(-int(2 * pairs * seconds) // 60)
    flags = ["--fill-jobs", str(jobs_file(folder / "jobs.yaml", JOBS)), "--fill-report", str(run)]
    flags += [*settings(metrics=port), "--exit-duration-in-mins", str(minutes)]
    script = ["--module", "scripts.benchmarks.watched", str(seconds), "pretrain_gpt.py"]
    os.environ |= {
        OTLP: f"http://127.0.0.1:{collector.server_port}",
        "OTEL_METRIC_EXPORT_INTERVAL": str(int(_SCRAPE_S * 1e3)),
        "OTEL_TRACES_EXPORTER": "otlp",
        "OTEL_TRACES_SAMPLER_ARG": str(_SAMPLED),
    }
    over = threading.Event()
    with training(command(_ITERATIONS, folder / "watched", script, *flags), folder / "watched.log") as process:
        with suppress(PermissionError):
            os.nice(19)  # Prometheus and the collector would be other machines'
        watcher = threading.Thread(target=_watch, args=(process, port, seconds, counts, over), daemon=True)
        watcher.start()
    over.set()
    watcher.join()
    collector.shutdown()
    ended = iterations_of(run)
    first_ns = ended[0].start_ns + int(60e9)  # jobs and the server have started
    slowdown = slowdown_of(by_turns(ended, seconds, first_ns))
    return {"metrics_slowdown": slowdown, "metrics_turn_s": seconds}, {"asked_and_sent": dict(counts)}


def _collector(counts: Counter[str]) -> ThreadingHTTPServer:
    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            counts[self.path] += len(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing of each request."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _watch(
    process: subprocess.Popen[str], port: int, seconds: float, counts: Counter[str], over: threading.Event
) -> None:
    """Scrape the metrics server in its turns, and stop it in the others."""
    while not over.wait(_SCRAPE_S if _watched(seconds) else 0.2):
        servers = [pid for pid in descendants(process.pid) if _serves(pid)]
        for pid in servers:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if _watched(seconds) else signal.SIGSTOP)
        if servers and _watched(seconds):
            with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2) as answer:
                counts["scraped"] += len(answer.read())


def _serves(pid: int) -> bool:
    with suppress(OSError):
        return b"fill.wings.operate.serve" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _watched(seconds: float) -> bool:
    return bool(turn_of(seconds, time.monotonic_ns()) % 2)


def main() -> None:
    seconds, ask = float(sys.argv[1]), ControlPage.ask

    def ask_by_turns(page: ControlPage) -> dict[str, float]:
        if _watched(seconds):
            return ask(page)
        page._words[control._ASKED] = 0
        return {}

    ControlPage.ask = ask_by_turns  # type: ignore[method-assign, assignment]
    del sys.argv[:2]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
