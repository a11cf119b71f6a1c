"""The main job's own life: evaluation, checkpoints, its end and its crash; other runs beside it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter

import pytest

from megatron.fill.records.segment import last_segment
from megatron.fill.types import JobState, fills_block
from tests.e2e.training import (
    ENDLESS,
    HERE,
    ROOT,
    SCRIPT,
    WORKER,
    Running,
    Trained,
    finished,
    iterations_in,
    processes,
    settings,
    stepped,
    train,
    train_until,
    write_jobs,
)
from tests.support.waiting import until

SPIN = {"name": "spin", "task": "tasks:Spin"}
WARM = settings(warmup_iterations=2)


def test_profile_only_with_evaluation(tmp_path):
    flags = "--fill-profile-only --fill-report {folder}/run --eval-interval 4 --eval-iters 2"
    trained = train(tmp_path, flags, 9)
    ranks = json.loads((tmp_path / "run" / "bubbles.json").read_text())["ranks"]
    assert [rank["stage"] for rank in ranks] == [0, 1]
    assert ranks[1]["training"][0]["kind"] == "fill"
    assert ranks[1]["evaluation"][0]["kind"] == "fill"
    assert all(bubble["free_bytes"] > 0 for bubble in ranks[0]["training"])
    assert "Bubbles of rank 0 (stage 0)" in trained.output
    assert "Evaluation bubbles of rank 1 (stage 1)" in trained.output
    assert not (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(("how", "asked"), [("destroyed", {"baseline_seconds": 0.1}), ("works on", {})])
def test_no_rank_needs_the_process_groups_at_its_end_nor_waits_for_rank_0(tmp_path, how, asked):
    script = ("-m", "pipefill_patches", "tests/e2e/ending.py", how, SCRIPT)
    trained = train(tmp_path, f"{write_jobs(tmp_path, SPIN)} {settings(warmup_iterations=2, **asked)}", 9, script)
    for wrong in ("Traceback", "the training itself is done", "rank 1 waits"):
        assert wrong not in trained.output
    assert [rank["rank"] for rank in trained.report["ranks"]] == [0, 1]


def test_a_training_that_begins_again_in_its_process_is_a_segment_of_its_own(tmp_path):
    script = ("-m", "pipefill_patches", "tests/e2e/ending.py", "again", SCRIPT)
    trained = train(tmp_path, f"{write_jobs(tmp_path, SPIN)} {WARM}", 9, script)
    segments = [(one["ending"], one["iterations"]) for one in trained.report["segments"]]
    assert segments == [("failed", 3), ("by itself", 9)]
    assert len(trained.losses) == 9


def test_evaluation_and_checkpoints_are_filled_around_and_resume_gives_the_same_losses(tmp_path):
    """Iterations before and after a checkpoint at any moment equal all at once; the side task goes on from its own."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    common = f"--eval-interval 7 --eval-iters 1 --lr-warmup-iters 0 {WARM}"
    jobs = write_jobs(parts, SPIN)
    first = train_until(parts, f"{common} {jobs} --save {parts}/model --save-interval 6", {"spin": stepped})
    before, spin = len(first.losses), first.jobs["spin"]  # the second run's report takes its place, and covers both
    assert spin["result"]["done"] == spin["steps"] > 0
    assert spin["reason"] == "the main job ended first; goes on from its checkpoint"
    further = {"spin": lambda job: job.progress.steps > spin["steps"]}
    second = train_until(parts, f"{common} {jobs} --load {parts}/model", further)
    steps: Counter[int] = Counter()  # by segment; when a rank ends first, the other one may still take its job
    for attempt in second.jobs["spin"]["attempts"]:
        steps[attempt["segment"]] += attempt["steps"]
    assert steps[1] == spin["steps"] < second.jobs["spin"]["steps"] == steps.total()
    assert second.jobs["spin"]["result"]["done"] == second.jobs["spin"]["steps"]
    last = len(second.losses)
    assert last > before
    reference = train(whole, f"{common} --exit-interval {last}", ENDLESS)
    assert len(reference.losses) == last
    assert second.losses == reference.losses


def test_jobs_that_finish_make_room_for_others_by_priority(tmp_path):
    who = "echo hello $PIPEFILL_JOB $PIPEFILL_INDEX/$PIPEFILL_COUNT"
    jobs = write_jobs(
        tmp_path,
        {"name": "short", "task": "tasks:Spin", "args": {"steps": 20}, "count": 3},
        {"name": "urgent", "task": "tasks:Spin", "args": {"steps": 5}, "priority": 9},
        {"name": "shell", "command": ["sh", "-c", f"{who}; i=0; while [ $i -lt 2000 ]; do i=$((i+1)); done"]},
        {"name": "endless-a", "task": "tasks:Spin", "priority": -1},
        {"name": "endless-b", "task": "tasks:Spin", "priority": -1},
        {"name": "never", "task": "tasks:Spin", "priority": -2},
    )
    ending = dict.fromkeys(["short-0", "short-1", "short-2", "urgent", "shell"], finished)
    expected = ending | dict.fromkeys(["endless-a", "endless-b"], stepped)
    trained = train_until(tmp_path, f"{jobs} {WARM}", expected)
    states = {name: job["state"] for name, job in trained.jobs.items()}
    assert states == {
        **dict.fromkeys(ending, "SUCCEEDED"),
        **dict.fromkeys(["endless-a", "endless-b", "never"], "QUEUED"),
    }
    assert trained.jobs["never"]["steps"] == 0
    assert trained.jobs["endless-a"]["steps"] > 0
    assert trained.jobs["short-0"]["work_done"] == trained.jobs["short-0"]["total_work"] == 20
    assert trained.jobs["shell"]["unit"] == "seconds"
    assert trained.printed("shell").read_text() == "hello shell 0/1\n"


def blocks_of(trained: Trained) -> list[dict[int, int]]:
    """The block of each iteration, of each rank."""
    records = last_segment(trained.folder / "run").records()
    return [{one.iteration: one.block for one in record.iterations} for record in records]


def test_paired_blocks_and_baseline(tmp_path):
    flags = f"{write_jobs(tmp_path, SPIN | {'count': 2})} {settings(warmup_iterations=5)}"
    # Without the brake: it would end blocks early on a machine that is busy with something else.
    measured = f"{flags} --fill-paired-blocks 4 --fill-max-slowdown 0 "
    measured += settings(baseline_seconds=0.5, price={"main": 3.96, "side": 0.18})
    running = Running(tmp_path, measured)
    try:
        running.wait_for_jobs(dict.fromkeys(["spin-0", "spin-1"], stepped))
        running.wait(lambda: len(list((tmp_path / "run").glob("records/*/settled/*"))) == 2)
        seen = len(running.output)
        running.wait(lambda: iterations_in(running.output[seen:]) >= 4 * 8)
        trained = running.end()
    finally:
        running.process.kill()
    summary = trained.report["summary"]
    blocks = blocks_of(trained)
    counted = [number for number in blocks[0] if min(its[number] for its in blocks) >= 0]
    assert counted == list(range(counted[0], len(trained.losses) + 1))
    assert (counted[0] - 6) % 8 == 0  # with the first pair after the jobs have settled
    assert all(its[number] == (number - 6) // 4 for its in blocks for number in counted)
    pairs, rest = divmod(len(counted), 2 * 4)
    assert pairs >= 2
    assert summary["slowdown"]["pairs"] == pairs + (rest >= 4 + 4 / 2)  # a last one that is cut to no less than half
    low, high = summary["slowdown"]["ci95"]
    assert low <= summary["slowdown"]["mean"] <= high
    assert summary["fill_efficiency"] > 0
    total, cost = trained.report["total"], trained.report["cost"]
    assert sum(total["time_use_ns"].values()) == round(total["fillable_s"] * 1e9)
    assert total["time_use_ns"]["steps"] > 0
    assert (cost["lacking"], cost["prices"]) == ([], {"main": 3.96, "side": 0.18})
    low, high = cost["saving_ci95"]
    assert low <= cost["saving"] <= high
    assert all(one["measured"] for one in cost["work"])
    of_ranks = [number for its in blocks for number in its if its[number] >= 0]
    filled = sum(fills_block((number - 6) // 4) for number in of_ranks)
    assert total["paired"]["on"]["count"] == filled
    # The middle of a block without filling is not watched; one is not compared where the run ends with it.
    middle = {number for number in of_ranks if (number - 6) % 4 == 2 and not fills_block((number - 6) // 4)}
    watched = [number for number in of_ranks if number not in middle]
    assert total["paired"]["off"]["count"] == len(watched) - filled
    assert summary["watching"]["pairs"] == sum({one - 1, one, one + 1} <= set(counted) for one in middle)


WRONG = {
    "--fill-jobs {folder}/none.yaml": "none.yaml: cannot be read: No such file or directory",
    "--fill-jobs {folder}/bad.yaml": "bad.yaml, line 1: job 'x': unknown field speed",
    "--fill-report /proc/nowhere": "--fill-report /proc/nowhere: ",
    "--fill-paired-blocks -1": "--fill-paired-blocks is -1",
    "--fill-pipeline-schedule gpipe --num-layers-per-virtual-pipeline-stage 1": "gpipe does not interleave",
}
PARSE = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from megatron.fill.app.launch import launch
from megatron.training import arguments
for flags in sys.argv[1:]:
    sys.argv = ["pretrain_gpt.py", *flags.split()]
    try:
        launch(lambda: arguments.parse_args())
    except SystemExit as stop:
        print(stop.code, file=sys.stderr)
"""


def test_wrong_input_stops_before_training(tmp_path):
    (tmp_path / "bad.yaml").write_text("jobs: [{name: x, task: m:C, speed: 1}]")
    script = tmp_path / "parse.py"
    script.write_text(PARSE)
    flags = [flag.format(folder=tmp_path) for flag in WRONG]
    command = [sys.executable, str(HERE / "launch.py"), "1", str(script), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    lines = done.stderr.replace(f"{tmp_path}/", "").splitlines()
    said = [line for line in lines if line == "2" or "error:" in line]
    assert len(said) == 2 * len(WRONG), done.stderr
    for number, expected in enumerate(WRONG.values()):
        assert said[2 * number].startswith("pretrain_gpt.py: error: ")
        assert expected in said[2 * number]
        assert said[2 * number + 1] == "2"


@pytest.mark.parametrize("victim", ["rank 1", "launcher"])
def test_a_crash_leaves_nothing_behind(tmp_path, victim):
    shared_memory = tmp_path / "shm"
    shared_memory.mkdir(mode=0o777)
    mounts = {"/dev/shm": shared_memory} if os.geteuid() == 0 else {}  # else it stays empty whatever is left
    hang = {"name": "hang", "task": "tasks:Faulty", "args": {"where": "run_next_step", "what": "hang"}}
    jobs = write_jobs(tmp_path, SPIN, hang)
    running = Running(tmp_path, f"{jobs} {WARM}", torchrun=victim == "launcher", mounts=mounts)
    try:
        running.wait_for_jobs({"spin": stepped})
        running.wait(lambda: len(processes(WORKER, str(tmp_path))) >= 2)
        if victim == "launcher":
            running.process.terminate()
        else:
            os.kill(running.ranks()[1], signal.SIGKILL)
        running.process.wait(240)
    finally:
        running.process.kill()
    until(lambda: not processes(str(tmp_path)))
    assert not list(shared_memory.iterdir())


def test_two_runs_share_a_store(tmp_path):
    """Both take jobs from it, whoever submitted them, and each job is run once."""
    names = [f"{run}-{number}" for run in ("one", "two") for number in range(2)]
    runs = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        jobs = write_jobs(folder, SPIN | {"name": name, "args": {"steps": 5}, "count": 2})
        store = tmp_path / "shared.db"
        flags = f"{jobs} --fill-store {store} {settings(warmup_iterations=2, lease_seconds=60)}"
        runs.append(Running(folder, flags, store))
    try:
        for run in runs:
            run.wait_for_jobs(dict.fromkeys(names, finished))
        for run in runs:
            run.end()
    finally:
        for run in runs:
            run.process.kill()
    kept = runs[0].store.list()
    assert {(job.state, job.attempt, job.progress.work_done) for job in kept} == {(JobState.SUCCEEDED, 1, 5.0)}
    assert sorted(job.name for job in kept) == names
