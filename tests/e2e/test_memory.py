"""A main job that grows gets its memory back: from who can give it, and from who cannot by stopping him."""

from __future__ import annotations

import mmap
from pathlib import Path

from megatron.fill.types import JobState
from tests.e2e.training import Running, stepped, write_jobs

MIB = 1 << 20
_SPARE_MIB = 4 * 1024  # free beyond the margin before anything is started
_JOBS = (
    {"name": "giving", "task": "tasks:Hoard", "args": {"mib": 400}, "memory": "1GiB"},
    {"name": "keeping", "task": "tasks:Miser", "args": {"mib": 400}, "memory": "1GiB"},
)


def available_mib() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("MemAvailable:"))


def test_a_task_that_can_shrinks_and_one_that_cannot_is_saved_and_stopped(tmp_path):
    margin_mib = available_mib() - _SPARE_MIB
    flags = f"{write_jobs(tmp_path, *_JOBS)} --fill-memory-margin-mib {margin_mib} --fill-warmup-iterations 2"
    running = Running(tmp_path, flags)
    grown: list[mmap.mmap] = []
    try:
        running.wait_for_jobs(dict.fromkeys(["giving", "keeping"], stepped))
        # In place of the main job: what is free is free for everyone.
        given = Path(running.job("giving").directory) / "result.json"

        def both_were_asked() -> bool:
            if available_mib() > margin_mib - 100:
                block = mmap.mmap(-1, 300 * MIB)
                block.write(b"x" * len(block))
                grown.append(block)
            return given.exists() and running.job("keeping").state is JobState.QUEUED

        running.wait(both_were_asked)
        for block in grown:
            block.close()
        running.wait(lambda: running.job("keeping").attempt > 1 and running.job("keeping").state is JobState.RUNNING)
        log = Path(running.job("keeping").directory) / "output.log"
        running.wait(lambda: log.exists() and "goes on from its checkpoint" in log.read_text())
        trained = running.end()
    finally:
        running.process.kill()
    giving = trained.jobs["giving"]
    assert running.job("giving").attempt == 1
    assert giving["result"]["left_mib"] < 400
    assert giving["steps"] > 0
