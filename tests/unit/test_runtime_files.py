"""The run folder's parts: the claim queue, bounded output, outcomes, checkpoints."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.errors import TaskError
from megatron.fill.runtime import checkpoint, output
from megatron.fill.runtime.output import BoundedOutput
from megatron.fill.runtime.queue import ClaimQueue
from megatron.fill.runtime.spec import Outcome
from megatron.fill.sidetask.loader import load_task
from megatron.fill.types import JobState


def test_every_job_is_claimed_exactly_once_by_many(tmp_path):
    names = [f"job-{number}" for number in range(50)]
    ClaimQueue(tmp_path, names).prepare()
    taken: list[str] = []

    def take(who: int) -> None:
        queue = ClaimQueue(tmp_path, names)
        while (name := queue.claim(f"rank {who}", who)) is not None:
            taken.append(name)

    threads = [threading.Thread(target=take, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == sorted(names)


def test_claims_begin_where_asked_and_are_forgotten_by_the_next_run(tmp_path):
    queue = ClaimQueue(tmp_path, ["a", "b", "c"])
    queue.prepare()
    assert [queue.claim("x", 1), queue.claim("x", 1), queue.claim("x", 1), queue.claim("x")] == ["b", "c", "a", None]
    assert queue.claimed("a")
    queue.prepare()
    assert not queue.claimed("a")


@given(st.lists(st.integers(0, 400), max_size=30))
def test_output_keeps_the_beginning_and_the_end(tmp_path_factory, sizes):
    kept, output.KEPT_BYTES = output.KEPT_BYTES, 500
    try:
        path: Path = tmp_path_factory.mktemp("out") / "log"
        bounded = BoundedOutput(path)
        whole = b""
        for number, size in enumerate(sizes):
            data = bytes([65 + number % 26]) * size
            whole += data
            bounded.write(data)
        bounded.close()
    finally:
        output.KEPT_BYTES = kept
    written = path.read_bytes()
    assert bounded.total_bytes == len(whole)
    if len(whole) <= 1000:
        assert written == whole
    else:
        assert written[:500] == whole[:500]
        assert written[-500:] == whole[-500:]
        assert f"[... {len(whole) - 1000} bytes left out ...]".encode() in written


def test_an_outcome_survives_the_file_and_rubbish_is_none(tmp_path):
    outcome = Outcome(JobState.FAILED, "because", "images", 7.0, {"accuracy": 0.5})
    outcome.write(tmp_path)
    assert Outcome.read(tmp_path) == outcome
    (tmp_path / "outcome.json").write_text('{"state": "ODD"')
    assert Outcome.read(tmp_path) is None
    Outcome.discard(tmp_path)
    assert Outcome.read(tmp_path) is None


def test_checkpoints_load_data_and_nothing_else(tmp_path):
    import torch

    assert checkpoint.load(tmp_path) is None
    checkpoint.save(tmp_path, {"weights": torch.ones(2), "epoch": 3})
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["weights"], torch.ones(2))
    torch.save({"code": ClaimQueue(tmp_path, [])}, tmp_path / checkpoint.NAME)
    with pytest.raises(TaskError, match="cannot be loaded"):
        checkpoint.load(tmp_path)
    (tmp_path / checkpoint.NAME).write_bytes(b"not a checkpoint")
    with pytest.raises(TaskError, match="cannot be loaded"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("absent_mod:Task", None, "importing absent_mod failed: ModuleNotFoundError"),
        ("broken_mod:Task", "1 / 0", "importing broken_mod failed: ZeroDivisionError: division by zero"),
        ("leaving_mod:Task", "raise SystemExit(3)", "importing leaving_mod failed: SystemExit: 3"),
        ("empty_mod:Task", "", "empty_mod has no Task"),
        ("other_mod:Task", "class Task: pass", "other_mod:Task is no SideTask"),
        ("value_mod:Task", "Task = 3", "value_mod:Task is no SideTask"),
        (
            "needy_mod:Task",
            "from megatron.fill import SideTask\nclass Task(SideTask):\n    def __init__(self, x): pass",
            "needy_mod:Task cannot be constructed: TypeError",
        ),
    ],
)
def test_a_task_that_cannot_be_loaded_says_why(tmp_path, path, source, expected):
    if source is not None:
        (tmp_path / f"{path.split(':')[0]}.py").write_text(source)
    with pytest.raises(TaskError) as error:
        load_task(path, (str(tmp_path),))
    assert expected in str(error.value)
