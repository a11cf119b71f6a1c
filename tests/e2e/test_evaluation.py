"""A training that only evaluates (``--skip-train``): its bubbles are filled, and its losses stay."""

from __future__ import annotations

import re
from pathlib import Path

from tests.e2e.training import UPSTREAM, train, write_jobs

ALONE = "--skip-train --eval-iters 40"


def losses(output: str) -> list[str]:
    return re.findall(r"loss at iteration .*lm loss value: (\S+)", output)


def test_the_bubbles_of_evaluations_alone_are_filled_and_the_losses_stay(tmp_path: Path):
    jobs = write_jobs(tmp_path, {"name": "a", "task": "tasks:Naps"}, {"name": "b", "task": "tasks:Naps"})
    trained = train(tmp_path, f"{ALONE} {jobs}")
    for rank in trained.report["ranks"]:
        assert rank["iterations"] == 0
        of_pipeline_s = rank["fillable_s"] - sum(one["fillable_s"] for one in rank["outside"].values())
        assert 0 < of_pipeline_s < sum(rank["evaluation_bubble_s"].values())  # but the warm-up's
    assert "written an iteration down" not in trained.output
    upstream = train(tmp_path, ALONE, script=UPSTREAM)
    assert losses(trained.output) == losses(upstream.output) != []
