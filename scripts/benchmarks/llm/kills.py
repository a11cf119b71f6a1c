"""A job that is killed again and again, at any moment: is every request answered once, and with the same tokens?"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import write_text
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.wings.llm import BatchJob
from scripts.benchmarks.llm.answers import models
from scripts.benchmarks.llm.trained import prompts, write_requests

KILLS, REQUESTS = 200, 400
SAVE_EVERY = 7  # rounds


def measure(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Half of the requests are sampled, some have several choices or stops; some are wrong."""
    models(folder)  # imported before the first fork
    work = folder / "killed"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    requests = write_requests(
        work / "requests.jsonl",
        prompts(REQUESTS),
        max_tokens=lambda at: 8 + at * 13 % 57,
        temperature=lambda at: at % 2 if at % 41 else -1,
        n=lambda at: 1 + at % 3 // 2,
        stop=lambda at: ["\n\n"] if at % 5 == 0 else [],
    )
    undisturbed, disturbed = work / "undisturbed", work / "disturbed"
    _Child(folder, requests, undisturbed).wait()
    source, kills, found = random.Random(0), 0, Counter[str]()
    while kills < KILLS:
        child = _Child(folder, requests, disturbed)
        if child.wait(source.uniform(0.0, 1.5)):
            found.update(_compare(undisturbed, disturbed))
            shutil.rmtree(disturbed)  # the kills that are left go on with the same requests, begun anew
            continue
        child.kill()
        kills += 1
    _Child(folder, requests, disturbed).wait()
    found.update(_compare(undisturbed, disturbed))
    return dict(found), {"kills": kills, "requests": REQUESTS}


class _Child:
    """The job in a process of its own, forked: what it imports is there."""

    def __init__(self, folder: Path, requests: Path, directory: Path) -> None:
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _work(folder, requests, directory)
                os._exit(0)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", flush=True)
                os._exit(1)

    def wait(self, seconds: float | None = None) -> bool:
        """Whether it ended by itself in this time."""
        end = None if seconds is None else time.monotonic() + seconds
        while end is None or time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                assert status == 0, "the job failed"
                return True
            time.sleep(0.005)
        return False

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def _work(folder: Path, requests: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    job, saved = BatchJob(), directory / "state.json"
    job.context = TaskContext("killed", directory)
    job.create(str(folder / "target"), str(requests), draft=[str(folder / "draft")], tree=[1, 1, 3, 1], chunks=[64])
    if saved.exists():
        job.load_state_dict(json.loads(saved.read_text(encoding="utf-8")))
    job.configure(job.configurations()[0])
    job.init()
    rounds = 0
    while True:
        try:
            job.run_next_step()
        except StopIteration:
            job.stop()
            return
        if job.next_node == 0:
            rounds += 1
            if rounds % SAVE_EVERY == 0:
                write_text(saved, json.dumps(job.state_dict()))


def _answers(directory: Path) -> list[dict[str, Any]]:
    lines = (directory / "answers.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def _compare(undisturbed: Path, disturbed: Path) -> dict[str, int]:
    expected = {answer["custom_id"]: answer for answer in _answers(undisturbed)}
    assert len(expected) == REQUESTS
    found = _answers(disturbed)
    times = Counter(answer["custom_id"] for answer in found)
    differ = sum(answer["response"] != expected[answer["custom_id"]]["response"] for answer in found)
    return {
        "lost": len(expected.keys() - times.keys()),
        "twice": sum(count > 1 for count in times.values()),
        "differ": differ,
    }
