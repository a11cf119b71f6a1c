"""How late side tasks make the main job's waits end: a slowdown that is told from the noise of a host.

An iteration's length varies by several per cent on a machine that shares its host, a hundred times more than what one
step of a side task costs.  But a wait ends because the other stage ended a pass, and when that was is in the records.
So per iteration: the time from the end of a pass of one stage to the end of the wait of the other that it ends, and
from the last pass of all to the end of the iteration, summed.  What of that is more in the blocks with filling than in
those without is what side tasks add; as a share of the iteration it is their slowdown, if no delay is hidden by another
wait.

    python scripts/benchmarks/lateness.py runs/emulated-run runs/emulated-no-gate-run \\
        --json docs/benchmarks/lateness.json

For runs of bench_main.py and bench_fill.py (--keep): two stages, one rank each.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from megatron.fill.errors import FillError
from megatron.fill.records import last_segment
from megatron.fill.types import BubbleKind, RankRecord
from scripts.benchmarks.trainings import Blocks

_DRAWS = 10_000


def late_ns(records: Sequence[RankRecord]) -> dict[int, int]:
    """By iteration, the sum of its waits' lateness in ns, for those that were watched.

    Args:
        records: of both ranks, with the passes of all iterations that were watched.
    """
    late: defaultdict[int, int] = defaultdict(int)
    ends = [sorted(span.end_ns for span in record.spans) for record in records]
    for record, others in zip(records, reversed(ends), strict=True):
        for bubble in record.bubbles:
            # A pass that ended before the wait began is not what the wait is for.
            last = bisect_right(others, bubble.end_ns) - 1
            if bubble.kind is not BubbleKind.DRAIN and last >= 0 and others[last] >= bubble.start_ns:
                late[bubble.iteration] += bubble.end_ns - others[last]
    for iteration in records[0].iterations:
        passes = [end for its in ends if (end := its[bisect_right(its, iteration.end_ns) - 1]) >= iteration.start_ns]
        if passes:
            late[iteration.iteration] += iteration.end_ns - max(passes)
    return late


def compare(records: Sequence[RankRecord], blocks: Blocks) -> dict[str, Any]:
    """What filling adds to an iteration, in ms and as a share of it, with 95% bootstrap intervals over iterations.

    Args:
        blocks: of a run without jobs; one with jobs says itself which of its iterations are in which block.
    """
    late = late_ns(records)
    iterations = records[0].iterations
    if not any(one.block >= 0 for one in iterations):
        iterations = blocks.mark(iterations)
    counted = [one for one in iterations if one.block >= 0 and one.iteration in late]
    on, off = (
        np.array([late[one.iteration] / 1e6 for one in counted if one.filling is filling]) for filling in (True, False)
    )
    usual_ms = np.mean([(one.end_ns - one.start_ns) / 1e6 for one in counted if not one.filling])
    random = np.random.default_rng(0)
    drawn = random.choice(on, (_DRAWS, len(on))).mean(1) - random.choice(off, (_DRAWS, len(off))).mean(1)
    low, high = np.percentile(drawn, [2.5, 97.5])
    added_ms = on.mean() - off.mean()
    return {
        "added_ms": added_ms,
        "ci95_ms": [low, high],
        "share": added_ms / usual_ms,
        "share_ci95": [low / usual_ms, high / usual_ms],
        "late_ms": {"with": on.mean(), "without": off.mean()},
        "iterations": len(counted),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of runs, such as KEEP/emulated-run")
    parser.add_argument("--block", type=int, default=5, help="iterations per block (default: 5)")
    parser.add_argument("--warmup", type=int, default=15, help="iterations before the first block (default: 15)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.block < 1 or options.warmup < 0:
        parser.error("expected at least 1 for --block and 0 for --warmup")
    found = {}
    for run in options.runs:
        try:
            records = list(last_segment(run).records())
        except FillError as error:
            parser.error(str(error))
        if len(records) != 2 or not all(record.spans for record in records):
            parser.error(f"{run}: records of {len(records)} ranks; expected a run of two stages with their passes")
        counted = len(records[0].iterations) - options.warmup
        if counted < 2 * options.block:
            parser.error(f"{run}: {len(records[0].iterations)} iterations; expected a pair of blocks after the warm-up")
        name = run.name.removesuffix("-run")
        one = found[name] = compare(records, Blocks(options.block, counted // (2 * options.block), options.warmup))
        low, high = one["ci95_ms"]
        print(f"{name:22} {one['added_ms']:+8.1f} ms ({low:+.1f} to {high:+.1f})  {one['share']:+.2%} of an iteration")
    if options.json:
        content = {"command": "python scripts/benchmarks/lateness.py " + " ".join(sys.argv[1:]), "summary": found}
        options.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
