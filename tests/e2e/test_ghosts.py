"""One real stage beside ghosts: its bubbles are the timeline's, and jobs run in them."""

from __future__ import annotations

import re

import pytest

from megatron.fill.pipeline.bubbles import bubble_seconds
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedules import make_schedule
from megatron.fill.pipeline.timeline import simulate
from tests.e2e.training import OURS, stepped, train, train_until, write_jobs

FOUR = "--pipeline-model-parallel-size 4 --global-batch-size 16 --fill-report {folder}/run"
TIMES = ("--forward-ms", "20", "--backward-ms", "40")
SPIN = {"name": "spin", "task": "tasks:Spin"}


def beside_ghosts(stage: int, *options: str) -> tuple[str, ...]:
    """The script of a training of one stage."""
    return ("-m", "pipefill_patches.ghosts", "--stage", str(stage), *options, *OURS)


def expected_s(schedule, stage: int, chunks: int) -> dict[str, float]:
    costs = PipelineCosts.uniform(4, 20_000_000, 40_000_000, chunks=chunks)
    return {kind: time_s for kind, time_s in bubble_seconds(simulate(schedule, costs, True))[stage].items() if time_s}


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_bubbles_are_no_shorter_than_the_timeline_has_them(tmp_path, stage):
    trained = train(tmp_path, FOUR, 9, ranks=1, script=beside_ghosts(stage, *TIMES))
    told = re.search(r"ghosts: stage (\d) of 4 is real \(host waits\), 1f1b .* ms \(given\)", trained.output)
    assert told is not None
    assert int(told[1]) == stage
    (rank,) = trained.report["ranks"]
    assert (rank["stage"], rank["iterations"]) == (stage, 4)  # the first five had no waits
    for kind, time_s in expected_s(make_schedule("1f1b", 4, 8), stage, 1).items():
        assert rank["bubble_s"][kind] >= 0.95 * 4 * time_s, kind


def test_interleaved_ghosts_are_measured_and_jobs_run_beside_them(tmp_path):
    jobs = write_jobs(tmp_path, SPIN)
    flags = "--pipeline-model-parallel-size 4 --global-batch-size 16 --num-layers 8"
    flags += f" --num-layers-per-virtual-pipeline-stage 1 {jobs}"
    script = beside_ghosts(1, "--transfer-ms", "5")
    trained = train_until(tmp_path, flags, {"spin": stepped}, ranks=1, script=script)
    assert re.search(r"ghosts: stage 1 of 4 .* interleaved with 8 microbatches; .* ms \(measured\)", trained.output)
    assert trained.jobs["spin"]["steps"] > 0
    assert trained.jobs["spin"]["rank"] == 0


def test_the_same_is_computed_with_jobs_and_without(tmp_path):
    with_jobs, without = tmp_path / "with", tmp_path / "without"
    with_jobs.mkdir()
    without.mkdir()
    flags = "--pipeline-model-parallel-size 2"
    found = [
        train(folder, f"{flags} {extra}", 12, ranks=1, script=beside_ghosts(1, *TIMES))
        for folder, extra in ((with_jobs, write_jobs(with_jobs, SPIN)), (without, ""))
    ]
    weights = [re.findall(r"weights after 12 iterations: sha256 (\w{64})", one.output) for one in found]
    assert weights[0] == weights[1] != []
    assert found[0].losses == found[1].losses
    assert len(found[0].losses) == 12
