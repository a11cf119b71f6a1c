"""A main job that grows gets its memory back: from who can give it, and from who cannot by stopping him."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.fill.folders import output_file
from megatron.fill.linux.held import private_bytes
from megatron.fill.store import Job
from megatron.fill.types import JobState
from tests.chaos.meminfo import FreeMemory
from tests.e2e.training import MODEL, WORKER, Running, processes, settings, stepped, write_jobs

MIB = 1 << 20
_MARGIN, _SPARE = 1024 * MIB, 4096 * MIB  # what jobs have to leave free, and what is free beyond before they start
_MISSING = 60 * MIB  # of the margin, once the main job has grown
_TRIES = 4
_LOOK_S = 0.1
# Its bubbles are longer than elsewhere: what the language model does in one step fits them on a busy machine too.
_LONGER = f"{MODEL} --hidden-size 256 --seq-length 64 --max-position-embeddings 64"
# A job that gets little of a busy machine has the grace to give memory back.  All of a language model's is written in
# one step, which takes a second where the machine has to find that much first.
_FLAGS = f"--fill-memory-margin-mib {_MARGIN // MIB} {settings(warmup_iterations=2, grace_ms=10000)}"
_JOBS = (
    {"name": "giving", "task": "tasks:Hoard", "args": {"mib": 400}, "memory": "1GiB"},
    {"name": "keeping", "task": "tasks:Miser", "args": {"mib": 400}, "memory": "1GiB"},
)

if os.geteuid() != 0:
    pytest.skip("only root can mount what the training is to see of the memory", allow_module_level=True)


class Machine:
    """What a training sees of the machine's memory: that of its jobs is measured, and its own is made up.

    So it is large enough whatever else there is, and nobody else's memory is in it.

    Args:
        folder: the training's, which its workers name.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._grown = folder, 0
        self._memory = FreeMemory(folder)
        self.mounts = {"/proc/meminfo": self._memory.path}
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._show)
        self._memory.show(self._available())

    def __enter__(self) -> Machine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def grown_until(self, running: Running, condition: Callable[[], object]) -> None:
        """Wait until it holds.  Meanwhile the main job is so large that a little of the margin is missing.

        It grows again only when a job has given memory back: growing on would ask for it again and again.
        """

        def met() -> object:
            if not condition() and (available := self._available()) > _MARGIN:
                self._grown += available - (_MARGIN - _MISSING)
            return condition()

        try:
            running.wait(met)
        finally:
            self._grown = 0

    def _available(self) -> int:
        held = sum(map(private_bytes, processes(WORKER, str(self._folder))))
        return _MARGIN + _SPARE - held - self._grown

    def _show(self) -> None:
        while not self._done.wait(_LOOK_S):
            self._memory.show(self._available())


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with Machine(tmp_path) as made:
        yield made


def test_a_task_that_can_shrinks_and_one_that_cannot_is_saved_and_stopped(tmp_path, machine):
    running = Running(tmp_path, f"{write_jobs(tmp_path, *_JOBS)} {_FLAGS}", mounts=machine.mounts)
    try:
        running.wait_for_jobs(dict.fromkeys(["giving", "keeping"], stepped))
        given = Path(running.job("giving").directory) / "result.json"
        for _ in range(_TRIES):
            before = running.job("giving")
            machine.grown_until(running, given.exists)
            running.wait(lambda: running.job("giving").progress.steps > before.progress.steps)  # noqa: B023
            if running.job("giving").attempt == before.attempt:
                break
            given.unlink(missing_ok=True)  # it was stopped instead: on a busy machine it may not get to it in time
        else:
            pytest.fail(f"asked {_TRIES} times, it never gave memory back in time")
        assert json.loads(given.read_text())["left_mib"] < 400
        machine.grown_until(running, lambda: running.job("keeping").attempt > 1 or stopped(running.job("keeping")))
        running.wait(lambda: running.job("keeping").attempt > 1 and running.job("keeping").state is JobState.RUNNING)
        log = output_file(Path(running.job("keeping").directory))
        running.wait(lambda: log.exists() and "goes on from its checkpoint" in log.read_text())
        running.end()
    finally:
        running.process.kill()


def test_a_language_model_gives_keys_and_values_back_and_goes_on(tmp_path, machine):
    """Those of eight sequences take 500 MiB; less than half of that is asked for."""
    for name in ("greenlet", "transformers"):
        pytest.importorskip(name)
    from tests.support.small_models import folder, model

    large = folder(tmp_path / "model", model(layers=2, head_dim=1024, context=2048))
    body = {"prompt": "abc", "max_tokens": 1900, "temperature": 0}
    lines = [{"custom_id": f"r{at}", "method": "POST", "url": "/v1/completions", "body": body} for at in range(8)]
    requests = tmp_path / "requests.jsonl"
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    args = {"model": str(large), "requests": str(requests), "batch_sizes": [8], "chunks": [32]}
    job = {"name": "answers", "task": "megatron.fill.wings.llm:BatchJob", "args": args, "memory": "3GiB"}
    flags = f"{write_jobs(tmp_path, job)} --fill-bind {tmp_path} {_FLAGS}"
    running = Running(tmp_path, flags, mounts=machine.mounts, model=_LONGER)
    try:
        for _ in range(_TRIES):
            running.wait(lambda: running.job("answers").progress.work_done > 0)
            before = running.job("answers")
            running.wait(lambda: goes_on(running.job("answers"), before))  # noqa: B023 - it has all its memory
            log = output_file(Path(before.directory))

            def asked() -> bool:
                now = running.job("answers")
                return now.attempt > before.attempt or stopped(now) or "of keys and values" in log.read_text()  # noqa: B023

            machine.grown_until(running, asked)
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
