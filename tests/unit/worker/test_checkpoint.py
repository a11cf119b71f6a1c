"""A job's checkpoints: whole or not at all, whatever happens to the disk."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch

from megatron.fill.errors import TaskError
from megatron.fill.pages.steplog import Saving, StepLog, WorkerPhase, create_log
from megatron.fill.sidetask.base import SideTask, TaskContext
from megatron.fill.sidetask.machine import TaskMachine
from megatron.fill.worker import checkpoint
from megatron.fill.worker.saver import Saver


class Rude:
    """What a checkpoint must not hold: loading it would run code."""


def test_what_is_saved_is_loaded(tmp_path):
    assert checkpoint.load(tmp_path) is None
    checkpoint.save(tmp_path, {"weights": torch.ones(2), "epoch": 3})
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded["epoch"] == 3
    assert torch.equal(loaded["weights"], torch.ones(2))
    checkpoint.discard(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"turns": 3, "seed": None, "rates": [0.1, float("inf")], "ünï": {"a": True}},
        {"pair": (1, 2), 3: "number as key"},  # JSON would make a list of the one and a text of the other
        {"tensor": [torch.arange(3)]},
    ],
)
def test_every_kind_of_state_comes_back_as_it_was(tmp_path, state):
    checkpoint.save(tmp_path, state)
    assert repr(checkpoint.load(tmp_path)) == repr(state)


def test_a_plain_state_needs_no_torch(tmp_path):
    code = "import sys; from pathlib import Path; from megatron.fill.worker import checkpoint; d = Path(sys.argv[1])"
    code += "; checkpoint.save(d, {'a': 1}); assert checkpoint.load(d) == {'a': 1}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [flip, cut, empty])
def test_a_damaged_checkpoint_is_kept_aside_and_the_one_before_is_used(tmp_path, damage):
    checkpoint.save(tmp_path, {"at": 1, "weights": torch.zeros(1000)})
    checkpoint.save(tmp_path, {"at": 2, "weights": torch.zeros(1000)})
    damage(tmp_path / checkpoint.NAME)
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded["at"] == 1
    assert (tmp_path / "checkpoint.corrupt").exists()
    damage(tmp_path / checkpoint.PREVIOUS)
    with pytest.raises(TaskError, match=r"no checkpoint can be loaded: .*checkpoint-previous\.corrupt"):
        checkpoint.load(tmp_path)


@pytest.mark.parametrize("kind", ["PCG64", "MT19937", "Philox", "SFC64"])
def test_the_states_of_all_generators_of_numpy_come_back(tmp_path, kind):
    rng = np.random.Generator(getattr(np.random, kind)(7))
    old = np.random.RandomState(3)
    checkpoint.save(tmp_path, {"new": rng.bit_generator.state, "old": old.get_state()})
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    again = np.random.Generator(getattr(np.random, kind)(0))
    again.bit_generator.state = loaded["new"]
    assert np.array_equal(again.random(5), rng.random(5))
    new = np.random.RandomState(0)
    new.set_state(loaded["old"])
    assert np.array_equal(new.rand(5), old.rand(5))


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6.0).reshape(2, 3),
        np.asfortranarray(np.ones((2, 3))),
        np.arange(10_000, dtype=">i4")[::-2],  # more than what is saved as a small one
        np.array(["a", "ünï"]),
        np.array([(1, 0.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.zeros((3, 0)),
        np.array(5),
        np.float64(0.1),
        np.bool_(True),
        np.str_(""),
        np.datetime64("2020-01-01"),
    ],
    ids=repr,
)
def test_arrays_and_scalars_of_numpy_come_back(tmp_path, value):
    checkpoint.save(tmp_path, {"value": value, "twice": [value]})
    loaded = checkpoint.load(tmp_path)
    assert loaded is not None
    assert loaded["twice"][0] is loaded["value"]
    assert type(loaded["value"]) is type(value)
    assert (loaded["value"].dtype, loaded["value"].shape) == (value.dtype, value.shape)
    assert np.array_equal(loaded["value"], value)


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (Rude(), r"Rude"),
        (deque([1]), r"collections\.deque"),
        (frozenset([1]), r"frozenset"),
        (PurePosixPath("a"), r"PurePosixPath"),
        (range(3), r"range"),
        (np.array([None]), r"an array of object"),
        (np.ma.array([1]), r"numpy\.ma\.MaskedArray"),
        (np.random.default_rng(0), r"PCG64"),
        pytest.param(1 << 3000, r"what torch\.load does not read", id="int"),
    ],
)
def test_what_could_not_be_loaded_is_refused_by_name_when_it_is_saved(tmp_path, value, named):
    checkpoint.save(tmp_path, {"at": 1})
    with pytest.raises(TaskError, match=rf"state_dict\(\) returned .*{named}.*cannot be saved"):
        checkpoint.save(tmp_path, {"value": value, "weights": torch.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == [checkpoint.NAME]
    assert checkpoint.load(tmp_path) == {"at": 1}


def test_a_checkpoint_with_code_is_not_loaded_and_what_it_holds_is_named(tmp_path, monkeypatch):
    with monkeypatch.context() as unchecked:
        unchecked.setattr(checkpoint, "_refused", lambda file: "")
        checkpoint.save(tmp_path, {"code": Rude()})
    with pytest.raises(TaskError, match=r"no checkpoint can be loaded: .* \(it holds [\w.]*Rude; expected tensors"):
        checkpoint.load(tmp_path)


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from megatron.fill.worker import checkpoint
folder = Path(sys.argv[1])
checkpoint.save(folder, {"at": 1})
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    checkpoint.save(folder, {"at": 2, "weights": torch.zeros(1_000_000)})
except OSError as error:
    print("OSError", error)
print(checkpoint.load(folder)["at"], sorted(path.name for path in folder.iterdir()))
"""


def test_a_full_disk_leaves_the_last_checkpoint_alone(tmp_path):
    """The file may not grow beyond 100 kB: the write fails half-way, as on a full disk."""
    done = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("OSError")
    assert done.stdout.endswith("1 ['checkpoint.pt']\n")


class Counter(SideTask):
    unit = "turns"

    def create(self) -> None:
        self.turns = 0

    def run_next_step(self) -> float:
        self.turns += 1
        return 2.0

    def state_dict(self) -> dict[str, Any]:
        return {"turns": self.turns}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.turns = state["turns"]


def counter(folder: Path, every_s: float) -> tuple[Counter, StepLog, Saver]:
    task = Counter()
    machine = TaskMachine(task, TaskContext("c", folder))
    machine.create({})
    log = StepLog(create_log())
    return task, log, Saver(machine, folder, every_s, log)


def step(task: Counter, log: StepLog) -> None:
    log.step_ended(0, 1, task.run_next_step(), False)


def test_a_task_is_saved_when_the_agent_wants_it_and_says_what_came_of_it(tmp_path, monkeypatch):
    task, log, saver = counter(tmp_path, 60)
    saver.load()
    saver.save_if_wanted()
    assert log.checkpoint_s is None
    for _ in range(2):  # the second time there is nothing new to save
        log.saving = Saving.WANTED
        saver.save_if_wanted()
        assert log.saving is Saving.SAVED
        assert checkpoint.exists(tmp_path)
    step(task, log)
    monkeypatch.setattr(checkpoint, "save", broken)
    log.saving = Saving.WANTED
    saver.save_if_wanted()
    assert log.saving is Saving.FAILED


@pytest.mark.parametrize("there", [False, True])
def test_reading_a_checkpoint_is_no_time_of_create(tmp_path, monkeypatch, there):
    task, log, saver = counter(tmp_path, 60)
    log.phase = WorkerPhase.CREATE
    if there:
        step(task, log)
        saver.save()
        log.phase = WorkerPhase.CREATE
    seen, load = [], checkpoint.load

    def noted(folder: Path) -> dict[str, Any] | None:
        seen.append(log.phase)
        return load(folder)

    monkeypatch.setattr(checkpoint, "load", noted)
    saver.load()
    assert seen == [WorkerPhase.LOAD if there else WorkerPhase.CREATE]
    assert log.phase is WorkerPhase.CREATE
    assert ("load_state_dict()" in log.longest_ns) is there


def test_a_task_that_has_no_state_after_all_says_so(tmp_path, monkeypatch):
    task, log, saver = counter(tmp_path, 60)
    monkeypatch.setattr(task, "state_dict", lambda: None)
    log.saving = Saving.WANTED
    saver.save_if_wanted()
    assert (log.saving, log.resumable) == (Saving.FAILED, False)


def broken(*_: object) -> None:
    raise OSError("no space left on device")


def test_only_a_task_that_saves_and_loads_can_go_on_elsewhere(tmp_path):
    _, log, saver = counter(tmp_path, 60)
    assert not log.resumable
    saver.load()
    assert log.resumable

    class Neither(SideTask):
        pass

    class Half(SideTask):
        def state_dict(self) -> dict[str, Any]:
            return {}

    for task in (Neither(), Half()):
        assert not TaskMachine(task, TaskContext("c", tmp_path)).resumable


def test_a_task_goes_on_where_it_was_saved(tmp_path):
    task, log, saver = counter(tmp_path, 0.05)
    saver.load()
    assert log.checkpoint_s is None
    step(task, log)
    saver.save_if_due()
    assert log.checkpoint_s is None  # not due yet
    time.sleep(0.06)
    saver.save_if_due()
    first_s = log.checkpoint_s
    assert first_s == pytest.approx(time.time(), abs=10)
    step(task, log)  # lost
    task, log, saver = counter(tmp_path, 60)
    saver.load()
    assert (task.turns, log.base_work, log.work_done, log.checkpoint_s) == (1, 2.0, 0.0, first_s)
    step(task, log)
    saver.save()
    task, log, saver = counter(tmp_path, 60)
    saver.load()
    assert (task.turns, log.base_work) == (2, 4.0)


def test_saving_and_loading_are_named_while_they_last(tmp_path, monkeypatch):
    task, log, saver = counter(tmp_path, 60)
    seen = []

    def noted(call: Callable[..., Any], *given: Any) -> Any:
        seen.append(log.phase.callback)
        return call(*given)

    for name in ("state_dict", "load_state_dict"):
        monkeypatch.setattr(task, name, partial(noted, getattr(task, name)))
    log.phase = WorkerPhase.ASLEEP
    saver.save()
    assert log.phase is WorkerPhase.ASLEEP
    saver.load()
    assert seen == ["state_dict()", "load_state_dict()"]
    assert set(log.longest_ns) >= {"state_dict()", "load_state_dict()"}


def test_a_checkpoint_that_cannot_be_written_does_not_end_the_job(tmp_path, monkeypatch):
    task, log, saver = counter(tmp_path, 0.0)

    def full(folder: Path, state: dict[str, Any]) -> None:
        raise OSError("No space left on device")

    step(task, log)
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "save", full)
        saver.save_if_due()
    assert log.checkpoint_s is None
    saver.save_if_due()
    assert log.checkpoint_s is not None


def test_what_is_no_file_is_no_checkpoint_and_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "checkpoint.pt")
    with pytest.raises(TaskError, match=r"no checkpoint can be loaded: .*is not a plain file"):
        checkpoint.load(tmp_path)
