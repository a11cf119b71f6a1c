"""A main job that grows gets its memory back: from who can give it, and from who cannot by stopping him."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.store import Job
from megatron.fill.types import JobState
from tests.e2e.training import Running, stepped, write_jobs
from tests.unit import small_models

MIB = 1 << 20
_SPARE_MIB = 4 * 1024  # free beyond the margin before anything is started
_TRIES = 4
_KEEPING = {"name": "keeping", "task": "tasks:Miser", "args": {"mib": 400}, "memory": "1GiB"}


def giving(folder: Path) -> dict[str, Any]:
    """A language model's job that holds 250 MiB of keys and values."""
    model = small_models.folder(folder / "model", small_models.model("llama", head_dim=512, context=768))
    lines = [
        {"prompt": small_models.LETTERS[at % 30] * 400, "max_tokens": 200, "temperature": 0, "seed": at}
        for at in range(2000)
    ]
    requests = folder / "requests.jsonl"
    with requests.open("w") as file:
        for at, body in enumerate(lines):
            request = {"custom_id": str(at), "method": "POST", "url": "/v1/completions", "body": body}
            file.write(json.dumps(request) + "\n")
    args = {"model": str(model), "requests": str(requests), "batch_sizes": [8], "chunks": [128]}
    return {"name": "giving", "task": "megatron.fill.llm:BatchJob", "args": args, "memory": "1GiB"}


def answering(job: Job) -> bool:
    """Whether it runs, and is neither starting nor measured."""
    log = Path(job.directory) / "output.log"
    return job.state is JobState.RUNNING and log.exists() and "planned as" in log.read_text()


def answered_once(job: Job) -> bool:
    """Whether what is answered so far is answered, and once."""
    data = (Path(job.directory) / "answers.jsonl").read_text()
    lines = [json.loads(line) for line in data.splitlines(keepends=True) if line.endswith("\n")]
    once = len({line["custom_id"] for line in lines}) == len(lines)
    return once and all(line["response"]["status_code"] == 200 for line in lines)


def available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))


class Growth:
    """In place of the main job's: what is free is free for everyone."""

    def __init__(self, below_mib: int) -> None:
        self._below_mib = below_mib
        self._blocks: list[mmap.mmap] = []

    def until(self, running: Running, condition: Callable[[], bool]) -> None:
        """Grow until so little is free, and stay so until the condition holds; then give it all back."""

        def grown() -> bool:
            if available_mib() > self._below_mib:
                block = mmap.mmap(-1, 100 * MIB)
                block.write(b"x" * len(block))
                self._blocks.append(block)
            return condition()

        try:
            running.wait(grown)
        finally:
            while self._blocks:
                self._blocks.pop().close()


def test_a_task_that_can_shrinks_and_one_that_cannot_is_saved_and_stopped(tmp_path):
    margin_mib = available_mib() - _SPARE_MIB
    jobs = write_jobs(tmp_path, giving(tmp_path), _KEEPING)
    flags = f"{jobs} --fill-memory-margin-mib {margin_mib} --fill-warmup-iterations 2"
    running, growth = Running(tmp_path, flags), Growth(margin_mib - 100)
    try:
        running.wait_for_jobs(dict.fromkeys(["giving", "keeping"], stepped))
        for _ in range(_TRIES):
            running.wait(lambda: answering(running.job("giving")))
            before = running.job("giving")
            said = Path(before.directory) / "output.log"
            size = said.stat().st_size
            gave = lambda: b"gave back" in said.read_bytes()[size:]  # noqa: B023, E731
            growth.until(running, lambda: gave() or stopped(running.job("giving")))  # noqa: B023
            running.wait(lambda: running.job("giving").progress.steps > before.progress.steps)  # noqa: B023
            if gave() and running.job("giving").attempt == before.attempt:
                break
            # It was stopped instead: on a busy machine it may not get to it within the second it has.
        else:
            pytest.fail(f"asked {_TRIES} times, it never gave memory back in time")
        done = running.job("giving").progress.work_done
        running.wait(lambda: running.job("giving").progress.work_done >= done + 10)
        assert answered_once(running.job("giving"))
        growth.until(running, lambda: running.job("keeping").attempt > 1 or stopped(running.job("keeping")))
        running.wait(lambda: running.job("keeping").attempt > 1 and running.job("keeping").state is JobState.RUNNING)
        log = Path(running.job("keeping").directory) / "output.log"
        running.wait(lambda: log.exists() and "goes on from its checkpoint" in log.read_text())
        running.end()
    finally:
        running.process.kill()


def stopped(job: Job) -> bool:
    return job.state is JobState.QUEUED
