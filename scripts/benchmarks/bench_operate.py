"""How fast does the report's page of a long run open, and do the parts of `pipefill usage` add up to the whole?

``page``: the records of a made-up run (as ``bench_report.py`` makes them, 1F1B in four stages of four microbatches),
the page that ``pipefill report --html`` makes of it, and headless Chromium that opens it from the disk.  The time is
from Chromium's start to its end with all charts drawn, so ``page_empty_opens_s``, that of an empty page, is beside it.

``usage``: a store whose jobs have known device times, of several users and runs.  ``usage_off_s`` is the largest
difference, over ``--by user``, ``job`` and ``run``, between the sum of the rows and what the jobs had, and between the
total and what they had.

``deaths``: a training with two jobs, of which a rank or all processes are killed again and again at random moments, and
which is started again in the same run folder.  ``work_lost_s_max`` is the longest time from the first step that a job
does again to its last one, beside the ``checkpoint_s`` between two checkpoints;
``work_lost_s_max_without_pause`` leaves out the longest time between two of them, since a probe of the brake has no
steps.  With ``--trace``, the deaths are those of an availability trace of spot machines, replayed.

``nodes``: a training over three nodes, which are network namespaces of this machine, one rank on each, with short jobs
in one PostgreSQL; it takes root.  At random, nodes are cut off from the database, from each other or from both, for
less than the jobs' lease or for longer, the database is restarted or crashes, and agents are killed.  ``lost`` jobs did
not succeed or lack a step, the store heard of those in ``twice`` more than once, and ``main_failures`` are ranks that
failed.  Of the jobs ``at_the_end_again``, the store did not hear that they were at their end before the lease ended.

``watching``: a training of two ranks with two jobs that is watched by turns: with metrics scraped every 5 s, metrics
and the spans of one iteration in ten sent by OTLP, and figures in TensorBoard, and then without.  ``metrics_slowdown``
is that of its iterations, in pairs of turns; on a busy machine it says little.

    python scripts/benchmarks/bench_operate.py --json docs/benchmarks/operate.json
    python scripts/benchmarks/bench_operate.py --parts deaths --json docs/benchmarks/operate.json
    python scripts/benchmarks/bench_operate.py --parts nodes --json docs/benchmarks/operate.json
    python scripts/benchmarks/bench_operate.py --parts watching --json docs/benchmarks/operate.json
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megatron.fill.status import Status
from megatron.fill.store import Progress, open_store
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from scripts.benchmarks.bench_report import write_run
from scripts.benchmarks.harness import arguments, check_above_zero, opened, pipefill
from scripts.benchmarks.watched import measure_watching
from tests.e2e.deaths import Fate, die, in_turn, traced
from tests.e2e.network import why_no_network
from tests.e2e.nodes import survive
from tests.e2e.training import warm_ranks

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--virtual-time-budget=20000"]
_OFFLINE = "--host-resolver-rules=MAP * ~NOTFOUND"
_STAGES = _MICROBATCHES = 4
_USERS, _RUNS = 7, 5
_PARTS = ("page", "usage", "deaths", "nodes", "watching")


def timed(call: Callable[[], Any]) -> float:
    """Return the seconds that a call takes."""
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


def browse(page: Path, profile: Path) -> str:
    """Return the page's document once Chromium has drawn it."""
    command = [str(_CHROMIUM), *_FLAGS, _OFFLINE, f"--user-data-dir={profile}", f"file://{page}"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def opening_s(page: Path, profile: Path, turns: int) -> list[float]:
    """Return the seconds of each turn; a first one, which makes the browser's profile, does not count."""
    browse(page, profile)
    return [round(timed(lambda: browse(page, profile)), 3) for _ in range(turns)]


def measure_page(folder: Path, ranks: int, iterations: int, turns: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the page's figures, and the details of them."""
    run, page, empty = folder / "run", folder / "page.html", folder / "empty.html"
    made = write_run(run, ranks, _STAGES, _MICROBATCHES, iterations)
    seconds = timed(lambda: pipefill("report", str(run), "--html", str(page)))
    figures: dict[str, Any] = {
        "page_ranks": ranks,
        "page_iterations": iterations,
        "page_bytes": page.stat().st_size,
        "page_report_s": round(seconds, 1),
    }
    details: dict[str, Any] = {"records": made}
    if _CHROMIUM is not None:
        if "data-drawn=" not in browse(page, folder / "chromium"):
            raise RuntimeError(f"{_CHROMIUM} did not draw the page")
        empty.write_text("<!doctype html><title>empty</title>", encoding="utf-8")
        details["opens_s"] = opening_s(page, folder / "chromium", turns)
        details["empty_opens_s"] = opening_s(empty, folder / "chromium", turns)
        figures["page_opens_s"] = round(statistics.median(details["opens_s"]), 2)
        figures["page_empty_opens_s"] = round(statistics.median(details["empty_opens_s"]), 2)
    return figures, details


def measure_usage(folder: Path, jobs: int) -> dict[str, Any]:
    """Return the largest error of the sums of `pipefill usage`, and the time of a call."""
    draw, url = random.Random(0), str(folder / "jobs.db")
    store = open_store(url)
    whole_s = 0.0
    for number in range(jobs):
        new = NewJob(f"job-{number}", Work("bench:Job"), user=f"user-{draw.randrange(_USERS)}")
        (job,) = store.submit([new])
        claim = store.claim("agent", [job.id], 600, device=f"rank 0 of runs/run-{draw.randrange(_RUNS)} on node0")
        assert claim is not None
        harvested_s = draw.expovariate(1 / 100)
        whole_s += harvested_s
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(1.0, 1.0, steps=1, harvested_s=harvested_s), {})
    store.close()
    off_s, seconds = 0.0, []
    for by in ("user", "job", "run"):
        began_s = time.monotonic()
        found = json.loads(pipefill("usage", "--store", url, "--by", by, "--json"))
        seconds.append(time.monotonic() - began_s)
        rows_s = sum(row["device_s"] for row in found["rows"])
        off_s = max(off_s, abs(rows_s - whole_s), abs(found["total"]["device_s"] - whole_s))
    return {
        "usage_jobs": jobs,
        "usage_device_s": round(whole_s, 3),
        "usage_off_s": round(off_s, 6),
        "usage_s": round(statistics.median(seconds), 2),
    }


def measure_deaths(folder: Path, fates: Sequence[Fate]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what jobs lost by deaths of their training, and each death."""
    with warm_ranks():
        found = die(folder, fates, checkpoint_s=1.0)
    filling_s = [death.filling_after_s for death in found]
    figures = {"deaths": len(found), "checkpoint_s": 1.0, "work_lost_steps_max": max(one.lost_steps for one in found)}
    figures |= {
        "work_lost_s_max": max(one.lost_s for one in found),
        "work_lost_s_max_without_pause": max(one.lost_s - one.pause_s for one in found),
        "filling_after_s": statistics.median(filling_s),
        "filling_after_s_max": max(filling_s),
    }
    return figures, {"each": [asdict(death) for death in found]}


def measure_nodes(folder: Path, jobs: int, longest_s: float) -> dict[str, Any]:
    """Return what became of the jobs and the training."""
    with warm_ranks():
        found = survive(folder, jobs, longest_s)
    return {
        "jobs": found.jobs,
        "lost": found.lost,
        "twice": found.twice,
        "main_failures": found.main_failures,
        "at_the_end_again": found.again,
        "with_two_workers": found.overlapped,
        "attempts": found.attempts,
        "nodes_iterations": found.iterations,
        "nodes_losses_identical": found.losses_compared,
        "nodes_longest_cut_s": longest_s,
        "nodes_cuts": dict(sorted(found.cuts.items())),
        "nodes_s": found.seconds,
    }


def main() -> None:
    """Measure the parts that are asked for."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=["page", "usage"])
    parser.add_argument("--ranks", type=int, default=64, help=f"a multiple of {_STAGES} (default: 64)")
    parser.add_argument("--iterations", type=int, default=10_000, help="(default: 10000)")
    parser.add_argument("--turns", type=int, default=5, help="times that each page is opened (default: 5)")
    parser.add_argument("--jobs", type=int, default=1000, help="of the usage's store, and of the nodes (default: 1000)")
    parser.add_argument("--deaths", type=int, default=100, help="of the training, at most (default: 100)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="when machines of a training came and went")
    parser.add_argument("--speed", type=float, default=60, help="seconds of the trace in one (default: 60)")
    parser.add_argument("--seconds", type=float, default=60, help="longest time that a node is cut off (default: 60)")
    parser.add_argument("--pairs", type=int, default=20, help="turns watched and not watched (default: 20)")
    parser.add_argument("--turn", type=float, default=30, help="seconds of a turn (default: 30)")
    options = parser.parse_args()
    check_above_zero(parser, options, "iterations", "turns", "jobs", "deaths", "speed", "seconds", "pairs", "turn")
    if "nodes" in options.parts and (lacking := why_no_network()):
        parser.error(f"--parts nodes: {lacking}")
    if options.ranks < 1 or options.ranks % _STAGES:
        parser.error(f"--ranks is {options.ranks}; expected a multiple of the {_STAGES} stages")
    try:
        fates = traced(options.trace, options.speed) if options.trace else in_turn(options.deaths)
    except (OSError, ValueError) as error:
        parser.error(f"--trace: {error}")
    if not fates:
        parser.error(f"--trace: {options.trace}: no node is removed; expected a line MILLISECONDS,remove,NODE")
    results = opened(parser, options.json)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if "page" in options.parts:
            figures, details = measure_page(folder, options.ranks, options.iterations, options.turns)
            results.add("page", figures, **details)
        if "usage" in options.parts:
            results.add("usage", measure_usage(folder, options.jobs))
        if "deaths" in options.parts:
            figures, details = measure_deaths(folder, fates[: options.deaths])
            where = ["trace"] if options.trace else []
            results.add(" ".join(["deaths", *where]), figures, *where, **details)
        if "nodes" in options.parts:
            results.add("nodes", measure_nodes(folder, options.jobs, options.seconds))
        if "watching" in options.parts:
            folder.chmod(0o755)  # the jobs run as a user without rights
            figures, details = measure_watching(folder, options.pairs, options.turn)
            results.add("watching", figures, **details)
    print(json.dumps(results.summary, indent=2))


if __name__ == "__main__":
    main()
