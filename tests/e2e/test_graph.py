"""A plan of a graph of stages, trained: with jobs in its bubbles the losses stay the same to the bit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.fill.wings.graph.cost import Cluster
from megatron.fill.wings.graph.files import load_model, plan_text
from megatron.fill.wings.graph.model import ModelGraph
from megatron.fill.wings.graph.search import plan_graph
from megatron.fill.wings.graph.zoo import mmt
from megatron.fill.wings.mainjob.hardware import GPUS
from tests.e2e.training import ROOT, start, stepped, train, train_until, write_jobs

SCRIPT = ("-m", "pipefill_patches", "examples/graph/train_two_towers.py")
MODEL = (
    "--graph-plan {folder}/plan.json --hidden-size 64 --seq-length 32 --lr 1e-3 --lr-decay-style constant "
    "--log-interval 1 --tensorboard-log-interval 1"
)


def write_plan(folder: Path, graph: ModelGraph | None = None, devices: int = 4) -> str:
    """A plan in the folder; the flags of a training of it."""
    graph = graph or load_model(ROOT / "examples" / "graph" / "two_towers.yaml")
    cluster = Cluster(devices=devices, gpu=GPUS["v100-16gb"], network=None)
    (folder / "plan.json").write_text(plan_text(plan_graph(graph, cluster, 8, (1,)).plan), encoding="utf-8")
    return MODEL.replace("{folder}", str(folder))


def test_jobs_run_in_the_bubbles_of_a_graph_and_change_no_loss(tmp_path):
    with_jobs, without, three = (tmp_path / name for name in ("with", "without", "three"))
    for folder in (with_jobs, without, three):
        folder.mkdir()
    jobs = write_jobs(with_jobs, *({"name": f"spin{number}", "task": "tasks:Spin"} for number in range(4)))
    expected = {f"spin{number}": stepped for number in range(4)}
    flags = {"script": SCRIPT, "ranks": 4}
    one = train_until(with_jobs, jobs, expected, 8, model=write_plan(with_jobs), **flags)
    other = train(without, "", 8, model=write_plan(without), **flags)
    assert len(other.losses) == 8
    assert {number: loss for number, loss in one.losses.items() if number <= 8} == other.losses
    assert other.losses[8] < other.losses[1]
    # Another cut of the same model: three stages, and both towers in the first one, which sends two outputs.
    cut = train(three, "", 3, model=write_plan(three, devices=3), **flags | {"ranks": 3})
    assert list(cut.losses.values()) == pytest.approx([other.losses[number] for number in (1, 2, 3)], rel=1e-6)
    report = one.report
    assert {path.name for path in (one.folder / "run").iterdir()} >= {"trace.json", "timeline.png"}
    assert {job["rank"] for job in one.jobs.values()} == {0, 1, 2, 3}  # the towers' ranks wait at bridges alone
    for rank in report["ranks"]:
        assert rank["bubble_s"]["interior"] > 0
        assert rank["bubble_s"]["drain"] > 0
    assert report["ranks"][0]["bubble_s"]["fwd-bwd"] > 0
    assert report["ranks"][3]["bubble_s"]["fill"] > 0


def test_frozen_towers_that_run_ahead_have_the_losses_of_those_in_their_place(tmp_path):
    graph = load_model(ROOT / "examples" / "graph" / "frozen_towers.yaml")
    found = {}
    for name, its in (("place", graph), ("ahead", graph.running_ahead())):
        (folder := tmp_path / name).mkdir()
        run = train(folder, "", 12, model=write_plan(folder, its, devices=2), script=SCRIPT)
        found[name] = run.losses
        said = re.findall(r"rank (\d): \d+ of (\d+) passes of frozen operators were in bubbles", run.output)
        if name == "ahead":
            # 12 iterations of 8 micro-batches through 7 operators; rank 0 alone needs those of the first iteration
            assert sum(int(every) for _, every in said) == 12 * 8 * 7
            assert {rank for rank, _ in said} == {"0", "1"}
        else:
            assert not said
    assert len(found["place"]) == 12
    assert found["ahead"] == found["place"]
    assert found["place"][12] < found["place"][1]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--iterations-to-skip 3",
            "--iterations-to-skip is given; expected none: operators that run ahead take the data",
        ),
        ("--rerun-mode report_stats", "--rerun-mode is report_stats; expected disabled"),
        (
            "--step-batch-size-schedule 0:4",
            "--step-batch-size-schedule is given; expected none: the plan says what the",
        ),
    ],
)
def test_flags_with_which_ranks_would_have_other_data_are_refused(tmp_path, flags, said):
    graph = load_model(ROOT / "examples" / "graph" / "frozen_towers.yaml").running_ahead()
    process = start(tmp_path, model=f"{write_plan(tmp_path, graph, devices=2)} {flags}", script=SCRIPT, ranks=2)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert f"train_two_towers.py: error: {said}" in output


@pytest.mark.parametrize(
    ("graph", "said"),
    [
        (None, "the plan has 4 stages and the run has 1 rank; expected RANKS=4"),
        (mmt(2, 1), "the plan is of another model: mmt has modality0.0, and this script has none"),
    ],
)
def test_a_plan_that_cannot_be_trained_is_refused(tmp_path, graph, said):
    process = start(tmp_path, model=write_plan(tmp_path, graph), script=SCRIPT, ranks=1)
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 2
    assert f"train_two_towers.py: error: {said}" in output
    assert "Traceback" not in output
