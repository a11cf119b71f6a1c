"""A main job that grows gets its memory back: from who can give it, and from who cannot by stopping him."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.fill.store import Job
from megatron.fill.types import JobState
from tests.e2e.training import Running, stepped, write_jobs

MIB = 1 << 20
_SPARE_MIB = 4 * 1024  # free beyond the margin before anything is started
_TRIES = 4
# A job that gets little of a busy machine has the grace to give memory back.  All of a language model's is written in
# one step, which takes a second where the machine has to find that much first.
_FLAGS = "--fill-warmup-iterations 2 --fill-grace-ms 10000"
_MISSING_MIB = 60  # of the margin, once it has grown
_JOBS = (
    {"name": "giving", "task": "tasks:Hoard", "args": {"mib": 400}, "memory": "1GiB"},
    {"name": "keeping", "task": "tasks:Miser", "args": {"mib": 400}, "memory": "1GiB"},
)


def available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))


class Growth:
    """In place of the main job's: what is free is free for everyone.

    Args:
        margin_mib: what the main job's jobs have to leave free.
    """

    def __init__(self, margin_mib: int) -> None:
        self._margin_mib = margin_mib
        self._blocks: list[mmap.mmap] = []

    def until(self, running: Running, condition: Callable[[], bool]) -> None:
        """Be so large until the condition holds that a little of the margin is missing; then give it all back.

        It grows at once: growing on while memory is given back would ask for it again and again.
        """

        def met() -> bool:
            if not condition() and available_mib() > self._margin_mib:
                size = (available_mib() - self._margin_mib + _MISSING_MIB) * MIB
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
                self._blocks.append(mmap.mmap(-1, size, flags=flags))
            return condition()

        try:
            running.wait(met)
        finally:
            while self._blocks:
                self._blocks.pop().close()


def test_a_task_that_can_shrinks_and_one_that_cannot_is_saved_and_stopped(tmp_path):
    margin_mib = available_mib() - _SPARE_MIB
    flags = f"{write_jobs(tmp_path, *_JOBS)} --fill-memory-margin-mib {margin_mib} {_FLAGS}"
    running, growth = Running(tmp_path, flags), Growth(margin_mib)
    try:
        running.wait_for_jobs(dict.fromkeys(["giving", "keeping"], stepped))
        given = Path(running.job("giving").directory) / "result.json"
        for _ in range(_TRIES):
            before = running.job("giving")
            growth.until(running, given.exists)
            running.wait(lambda: running.job("giving").progress.steps > before.progress.steps)  # noqa: B023
            if running.job("giving").attempt == before.attempt:
                break
            given.unlink(missing_ok=True)  # it was stopped instead: on a busy machine it may not get to it in time
        else:
            pytest.fail(f"asked {_TRIES} times, it never gave memory back in time")
        assert json.loads(given.read_text())["left_mib"] < 400
        growth.until(running, lambda: running.job("keeping").attempt > 1 or stopped(running.job("keeping")))
        running.wait(lambda: running.job("keeping").attempt > 1 and running.job("keeping").state is JobState.RUNNING)
        log = Path(running.job("keeping").directory) / "output.log"
        running.wait(lambda: log.exists() and "goes on from its checkpoint" in log.read_text())
        running.end()
    finally:
        running.process.kill()


def test_a_language_model_gives_keys_and_values_back_and_goes_on(tmp_path):
    """Those of eight sequences take 500 MiB; less than half of that is asked for."""
    for name in ("greenlet", "transformers"):
        pytest.importorskip(name)
    from tests.unit.small_models import folder, model

    large = folder(tmp_path / "model", model(layers=2, head_dim=1024, context=2048))
    body = {"prompt": "abc", "max_tokens": 1900, "temperature": 0}
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body} for at in range(8)]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = {"model": str(large), "requests": str(requests), "batch_sizes": [8], "chunks": [32]}
    job = {"name": "answers", "task": "megatron.fill.llm:BatchJob", "args": args, "memory": "3GiB"}
    margin_mib = available_mib() - _SPARE_MIB
    flags = f"{write_jobs(tmp_path, job)} --fill-bind {tmp_path} --fill-memory-margin-mib {margin_mib}"
    flags += f" {_FLAGS}"
    running, growth = Running(tmp_path, flags), Growth(margin_mib)
    try:
        for _ in range(_TRIES):
            running.wait(lambda: running.job("answers").progress.work_done > 0)
            before = running.job("answers")
            running.wait(lambda: goes_on(running.job("answers"), before))  # noqa: B023 - it has all its memory
            log = Path(before.directory) / "output.log"

            def asked() -> bool:
                now = running.job("answers")
                return now.attempt > before.attempt or stopped(now) or "of keys and values" in log.read_text()  # noqa: B023

            growth.until(running, asked)
            running.wait(lambda: goes_on(running.job("answers"), before))  # noqa: B023
            if running.job("answers").attempt == before.attempt:
                break
        else:
            pytest.fail(f"asked {_TRIES} times, it never gave memory back in time")
        gave = re.search(r"gave back (\d+) MiB of keys and values; (\d) sequences wait for room", log.read_text())
        assert gave is not None
        assert int(gave[1]) >= 100
        assert 0 < int(gave[2]) < 8
        running.end()
    finally:
        running.process.kill()


def goes_on(job: Job, before: Job) -> bool:
    """It runs and has done more: one that was stopped, and waits, shows what it had done until then."""
    return job.state is JobState.RUNNING and job.progress.work_done > before.progress.work_done


def stopped(job: Job) -> bool:
    return job.state is JobState.QUEUED
