"""Language models as fill jobs: whether the tokens are right, how many a pass gives, how fast that is.

    python scripts/benchmarks/bench_llm.py --parts identical --json docs/benchmarks/llm.json

It trains a byte-level model of about 2 million weights and a draft of about 70,000 on the sources of
Python's standard library, with this project, into ``--folder``, once.  The parts:

    identical   greedy answers against those of transformers itself, request by request, and the logits of tree nodes
    killed      a job that is killed again and again: requests lost, answered twice, tokens that differ
    bubbles     tokens a second in the bubbles of a training, against the same job alone
    lag         how many checkpoints the evaluation of a training's checkpoints is behind, in its own bubbles
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from scripts.benchmarks.harness import arguments, opened
from scripts.benchmarks.llm import answers, bubbles, kills, trained

PARTS: dict[str, Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]] = {
    "identical": answers.measure,
    "killed": kills.measure,
    "bubbles": bubbles.measure,
    "lag": bubbles.measure_lag,
}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", default=",".join(PARTS), help="which ones, separated by commas (default: all)")
    parser.add_argument("--folder", type=Path, default=Path("runs/llm"), help="for the models (default: %(default)s)")
    args = parser.parse_args()
    parts = args.parts.split(",")
    unknown = [part for part in parts if part not in PARTS]
    if unknown:
        parser.error(f"--parts has {unknown[0]!r}: expected some of {', '.join(PARTS)}")
    results = opened(parser, args.json)
    if set(parts) - {"lag"}:  # it has models of its own
        trained.train(args.folder)
    for part in parts:
        summary, details = PARTS[part](args.folder)
        results.add(part, summary, **details)
        print(f"{part}: " + ", ".join(f"{name} {value}" for name, value in summary.items()), flush=True)


if __name__ == "__main__":
    main()
