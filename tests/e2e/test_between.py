"""Jobs go on between two trainings, and the next one loses nothing by it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from megatron.fill.records.segment import last_segment
from tests.e2e.training import Running, processes, settings, stepped, train, write_jobs
from tests.support.waiting import until

ITERATIONS = 12
SAVES = "--save {folder}/model --load {folder}/model --save-interval 4 --ckpt-format torch"
CLI = [sys.executable, "-c", "from megatron.fill.cli import main; main()"]


def go_on(running: Running, steps: int) -> None:
    """Wait until each job has done so many more."""

    def done() -> list[int]:
        return [job.progress.steps for job in running.store.list()]

    before = done()
    until(lambda: all(now >= then + steps for now, then in zip(done(), before, strict=True)), 240, every_s=0.5)


def test_jobs_go_on_until_the_ranks_are_back_and_the_losses_stay_the_same(tmp_path):
    plain, folder = tmp_path / "plain", tmp_path / "filled"
    plain.mkdir()
    folder.mkdir()
    expected = train(plain, SAVES, ITERATIONS).losses
    jobs = [{"name": name, "task": "tasks:Spin"} for name in ("one", "two")]
    limits = settings(warmup_iterations=2, lease_seconds=5)
    flags = f"{SAVES} {write_jobs(folder, *jobs)} --fill-between 300 {limits}"
    first = Running(folder, flags)
    second = None
    try:
        first.wait_for_jobs({"one": stepped, "two": stepped})
        first.wait(lambda: first.iterations >= 6)
        os.kill(first.ranks()[1], signal.SIGKILL)
        first.process.wait(240)
        go_on(first, 20)
        ranks = last_segment(folder / "run").between
        until(lambda: any(job.steps for its in ranks().values() for job, _ in its.attempts()))
        keepers = processes("agent.keeper", str(folder))
        assert len(keepers) == 2
        second = Running(folder, flags)
        second.wait(lambda: second.iterations >= ITERATIONS - 4)
        assert not keepers.keys() & processes("agent.keeper", str(folder)).keys()
        go_on(first, 1)
        trained = second.end()
        assert {number: trained.losses[number] for number in expected} == expected
        segment = trained.report["segments"][0]
        assert segment["ending"] == "failed"
        assert segment["between_steps"] > 0
        assert segment["between_s"] > 0
        go_on(first, 1)
        # On a busy machine it says, with 1, that not all have heard of it yet: they do, or these waits fail.
        done = subprocess.run([*CLI, "kill", str(folder / "run")], check=False, stdout=subprocess.DEVNULL)
        assert done.returncode in (0, 1)
        until(lambda: not processes(str(folder)))
        assert {job.state for job in first.store.list()} == {"QUEUED"}
    finally:
        for training in (first, second):
            if training is not None:
                training.process.kill()
        for pid in processes("agent.keeper", str(folder)):
            os.kill(pid, signal.SIGTERM)
