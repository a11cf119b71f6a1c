"""A job that gets another one's tail moves to the rank that falls idle, and goes on there from its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.fill.folders import output_file
from megatron.fill.records.segment import last_segment
from megatron.fill.types import JobRecord, JobState
from tests.e2e.training import Running, processes, settings, write_jobs

# The first two take a rank each.  One leaves little of its bubbles, the other one nobody may share before it serves.
LONG = {"name": "long", "task": "tasks:Spin", "args": {"milliseconds": 0.5}, "memory": "1GiB", "priority": 2}
SHORT = {"name": "short", "task": "tasks:Waits", "priority": 1}
TAIL = {"name": "tail", "task": "tasks:Spin", "args": {"milliseconds": 0.3}, "memory": "1GiB"}


def attempts(folder: Path, name: str, device: str) -> list[JobRecord]:
    """What a rank's agent recorded of the job."""
    rank = device.split()[1]  # rank 1 of ...
    files = last_segment(folder / "run").files()[int(rank)]
    return [job for job, _ in files.attempts() if job.name == name]


def test_a_tail_job_moves_to_the_rank_that_falls_idle_and_goes_on_from_its_checkpoint(tmp_path):
    jobs = write_jobs(tmp_path, LONG, SHORT, TAIL)
    running = Running(tmp_path, f"{jobs} --fill-checkpoint-seconds 0.5 {settings(warmup_iterations=3)}")
    try:
        running.wait(lambda: len(running.store.list()) == 3)
        running.wait(lambda: running.job("tail").progress.checkpoint_s)
        beside, short = running.job("tail"), running.job("short")
        assert beside.device == running.job("long").device != short.device
        (Path(short.directory) / "go").touch()
        running.wait(lambda: running.job("tail").device == short.device, 240)
        moved = running.job("tail")
        assert (moved.attempt, moved.asked_by) == (2, "")
        running.wait(lambda: running.job("tail").progress.work_done > moved.progress.work_done)
        assert running.job("long").attempt == 1
        trained = running.end()
    finally:
        running.process.kill()
    assert running.job("short").state is JobState.SUCCEEDED
    job = running.job("tail")
    assert (job.state, job.attempt) == (JobState.QUEUED, 2)
    # The one attempt's work is what the other one began from.
    [first] = attempts(tmp_path, "tail", beside.device)
    assert first.reason == "it moves to a rank that is idle; goes on from its checkpoint"
    said = output_file(Path(job.directory)).read_text()
    assert f"goes on from its checkpoint at {first.work_done:g} spins" in said
    [second] = attempts(tmp_path, "tail", short.device)
    assert job.progress.work_done == first.work_done + second.work_done
    # What the task counted itself, over both ranks: nothing was lost on the way, and nothing done twice.
    assert job.progress.work_done == json.loads(trained.path("tail", "result.json").read_text())["done"]
    assert not processes(str(tmp_path))
