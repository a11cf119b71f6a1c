"""Filling changes nothing: the losses of every iteration are those of upstream Megatron, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks.emulated import Emulation, emulation, why_not
from tests.e2e.training import ENDLESS, RESTED, UPSTREAM, Trained, settings, stepped, train, train_until, write_jobs

JOBS = ({"name": "a", "task": "tasks:Spin"}, {"name": "b", "task": "tasks:Spin", "args": {"milliseconds": 0.5}})
GOT_ON = {"a": stepped, "b": stepped}
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
# Megatron wants more than two stages to interleave without overlapping the transfers.
FOUR_STAGES = "--pipeline-model-parallel-size 4 --num-layers 8 --global-batch-size 8"
BLOCKING = f"{INTERLEAVED} --no-overlap-p2p-communication {FOUR_STAGES}"
SCHEDULES = {
    "1f1b": ("", ""),
    "gpipe": ("--fill-pipeline-schedule gpipe", ""),
    "interleaved": (INTERLEAVED, INTERLEAVED),
    "interleaved-blocking": (BLOCKING, BLOCKING),
}
LEAST = 6  # iterations: jobs may have got on before
SPARE = 20  # iterations: those of the schedules with the same flags are not as many
if not why_not():
    SCHEDULES["not-preempting"] = ("", "")

Upstream = dict[str, Trained]  # by flags


@pytest.fixture(scope="module")
def upstream() -> Upstream:
    """Trainings with no patch but the CPU backend, which schedules share."""
    return {}


@pytest.fixture(scope="module", params=SCHEDULES)
def trained(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, upstream: Upstream
) -> tuple[str, Trained, Trained]:
    """A schedule, a training whose jobs have got on, and at least as many iterations of upstream's."""
    schedule: str = request.param
    flags, plain = SCHEDULES[schedule]
    folder: Path = tmp_path_factory.mktemp(schedule)
    # No brake: what it leaves unfilled to compare with is a good part of so short a run.
    filling = f"{flags} {write_jobs(folder, *JOBS)} --fill-max-slowdown 0 {settings(warmup_iterations=3)}"
    # NVIDIA's script is run in this way, and ours is a plain Megatron script then.
    way: dict[str, Any] = {"script": RESTED, "torchrun": True, "fresh": True} if schedule == "1f1b" else {}
    if schedule == "not-preempting":
        way = {"environment": emulation(Emulation.COMPLETION)}
    filled = train_until(folder, filling, GOT_ON, LEAST, ranks=ranks(flags), **way)
    count = len(filled.losses)
    if plain not in upstream or len(upstream[plain].losses) < count:
        shared = [flags for _, flags in SCHEDULES.values()].count(plain) > 1
        upstream[plain] = train(
            tmp_path_factory.mktemp("upstream"),
            f"{plain} --exit-interval {count + SPARE * shared}",
            ENDLESS,  # the data are shuffled for that many
            script=UPSTREAM,
            ranks=ranks(plain),
        )
    return schedule, filled, upstream[plain]


def ranks(flags: str) -> int:
    return 4 if BLOCKING in flags else 2


def test_losses_are_identical_to_upstream(trained):
    _, filled, upstream = trained
    losses, reference = filled.losses, upstream.losses
    assert len(losses) >= LEAST
    assert losses == {iteration: reference[iteration] for iteration in range(1, len(losses) + 1)}


def test_bubbles_are_filled(trained):
    _, filled, _ = trained
    report = filled.report
    assert report["summary"]["iterations"] == len(filled.losses)
    assert 0 < report["summary"]["bubble_share"] < 1
    assert report["summary"]["harvest_ratio"] > 0
    assert [job["state"] for job in report["jobs"]] == ["QUEUED", "QUEUED"]
    assert all(job["work_done"] == job["steps"] > 0 for job in report["jobs"])
    assert "harvest" in filled.output
    for name in ("trace.json", "timeline.png"):
        assert (filled.folder / "run" / name).stat().st_size > 1000


def test_the_kinds_are_those_of_the_schedule(trained):
    schedule, filled, _ = trained
    cycles = [[bubble["kind"] for bubble in rank["training"]] for rank in filled.report["cycle"]]
    first, last = cycles[0], cycles[-1]
    assert last[0] == "fill"
    assert "fill" not in first
    assert first.count("fwd-bwd") == 1 if schedule != "interleaved" else "fwd-bwd" in first
    assert first[-1] == last[-1] == "drain"
    if schedule == "gpipe":
        # One stretch of forwards, one of backwards: the first stage's waits before its backwards are one bubble apart.
        assert last.index("drain") > last.index("fill")
