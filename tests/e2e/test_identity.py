"""Filling changes nothing: the losses of every iteration are those of upstream Megatron, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.fill.device.emulated import why_not
from tests.e2e.training import ENDLESS, OURS, PATCHED, UPSTREAM, Trained, stepped, train, train_until, write_jobs

JOBS = ({"name": "a", "task": "tasks:Spin"}, {"name": "b", "task": "tasks:Spin", "args": {"milliseconds": 0.5}})
GOT_ON = {"a": stepped, "b": stepped}
INTERLEAVED = "--num-layers-per-virtual-pipeline-stage 1"
# Megatron wants more than two stages to interleave without overlapping the transfers.
BLOCKING = f"{INTERLEAVED} --no-overlap-p2p-communication --pipeline-model-parallel-size 4 --num-layers 8"
SCHEDULES = {
    "1f1b": ("", ""),
    "gpipe": ("--fill-pipeline-schedule gpipe", ""),
    "interleaved": (INTERLEAVED, INTERLEAVED),
    "interleaved-blocking": (BLOCKING, BLOCKING),
}
if not why_not():
    SCHEDULES["not-preempting"] = ("--fill-emulate completion", "")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Trained]]:
    """Per schedule a training whose jobs have got on, and as many iterations with no patch but the CPU backend."""
    filled = {}
    for schedule, (flags, _) in SCHEDULES.items():
        folder: Path = tmp_path_factory.mktemp(schedule)
        # No brake: what it leaves unfilled to compare with is a good part of so short a run.
        settings = f"{flags} {write_jobs(folder, *JOBS)} --fill-warmup-iterations 3 --fill-max-slowdown 0"
        # NVIDIA's script is run in this way, and ours is a plain Megatron script then.
        way: dict[str, Any] = {"script": PATCHED, "fresh": True} if schedule == "1f1b" else {"script": OURS}
        filled[schedule] = train_until(folder, settings, GOT_ON, ranks=ranks(flags), **way)
    longest: dict[str, int] = {}
    for schedule, (_, flags) in SCHEDULES.items():
        longest[flags] = max(longest.get(flags, 0), len(filled[schedule].losses))
    upstream = {
        flags: train(
            tmp_path_factory.mktemp("upstream"),
            f"{flags} --exit-interval {count}",
            ENDLESS,  # the data are shuffled for that many
            script=UPSTREAM,
            ranks=ranks(flags),
        )
        for flags, count in longest.items()
    }
    return {schedule: (filled[schedule], upstream[flags]) for schedule, (_, flags) in SCHEDULES.items()}


def ranks(flags: str) -> int:
    return 4 if BLOCKING in flags else 2


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_are_identical_to_upstream(schedule, trained):
    losses, reference = (training.losses for training in trained[schedule])
    assert len(losses) > 5
    assert losses == {iteration: reference[iteration] for iteration in range(1, len(losses) + 1)}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_bubbles_are_filled(schedule, trained):
    filled, _ = trained[schedule]
    report = filled.report
    assert report["summary"]["iterations"] == len(filled.losses)
    assert 0 < report["summary"]["bubble_share"] < 1
    assert report["summary"]["harvest_ratio"] > 0
    assert [job["state"] for job in report["jobs"]] == ["QUEUED", "QUEUED"]
    assert all(job["work_done"] == job["steps"] > 0 for job in report["jobs"])
    assert "harvest" in filled.output
    for name in ("trace.json", "timeline.png"):
        assert (filled.folder / "run" / name).stat().st_size > 1000


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kinds_are_those_of_the_schedule(schedule, trained):
    cycle = trained[schedule][0].report["cycle"]
    cycles = [[bubble["kind"] for bubble in rank["training"]] for rank in cycle]
    first, last = cycles[0], cycles[-1]
    assert last[0] == "fill"
    assert "fill" not in first
    assert first.count("fwd-bwd") == 1 if schedule != "interleaved" else "fwd-bwd" in first
    assert first[-1] == last[-1] == "drain"
    if schedule == "gpipe":
        # One stretch of forwards, one of backwards: the first stage's waits before its backwards are one bubble apart.
        assert last.index("drain") > last.index("fill")
