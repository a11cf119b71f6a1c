"""Pictures of plans."""

from __future__ import annotations

import subprocess
import sys

from matplotlib.image import imread

from megatron.fill.planner.draw import DrawnJob, Panel, draw_plans
from megatron.fill.planner.held import leftover
from megatron.fill.planner.search import best_plan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.types import BubbleKind

CYCLE = BubbleCycle(1000, (BubbleSlot(BubbleKind.FWD_BWD, 50, 9), BubbleSlot(BubbleKind.DRAIN, 90, 9)))
TRAINING = JobProfile(
    Configuration(4),
    (NodeProfile("forward", 11, 1), NodeProfile("backward", 22, 1), NodeProfile("optimizer", 7, 1)),
    4,
)
SMALL = JobProfile(Configuration(1), (NodeProfile("embed", 3, 1),), 1)


def resident(name: str, cycle: BubbleCycle, profile: JobProfile, reserve_ns: int = 0) -> DrawnJob:
    return DrawnJob(name, best_plan(cycle, [profile], reserve_ns), profile)


def colours(path) -> set[str]:
    pixels = (imread(path)[:, :, :3] * 255).round().astype(int).reshape(-1, 3)
    return {f"#{red:02X}{green:02X}{blue:02X}" for red, green, blue in set(map(tuple, pixels.tolist()))}


def test_each_kind_of_node_has_its_colour(tmp_path):
    job = resident("bert", CYCLE, TRAINING, reserve_ns=2)
    path = tmp_path / "plan.png"
    draw_plans(path, [Panel("rank 0", CYCLE, job)])
    assert {"#56B4E9", "#0072B2", "#E69F00", "#8F8F8F"} <= colours(path)
    assert "#CC79A7" not in colours(path)


def test_a_tail_and_more_panels(tmp_path):
    job = resident("bert", CYCLE, TRAINING)
    tail = resident("embed", leftover(CYCLE, job.plan, job.profile), SMALL)
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    draw_plans(one, [Panel("rank 0", CYCLE, job, tail)])
    draw_plans(two, [Panel("rank 0", CYCLE, job, tail), Panel("rank 1", CYCLE, resident("embed", CYCLE, SMALL))])
    assert "#CC79A7" in colours(one)
    assert "#009E73" not in colours(one)
    assert "#009E73" in colours(two)
    assert imread(two).shape[0] > imread(one).shape[0]


def test_matplotlib_is_imported_when_drawing_only():
    code = "import sys, megatron.fill.planner.draw; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
