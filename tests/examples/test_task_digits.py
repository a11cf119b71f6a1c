from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from examples.tasks.digits import DigitsTraining
from megatron.fill.given.jobs import load_jobs
from megatron.fill.sidetask.loader import load_task
from megatron.fill.worker import checkpoint
from tests.support.drive import begin, drive, finish, task_of
from tests.support.extras import needs

needs("sklearn", "tasks")
TRAINED, TESTED = 1437, 360
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_learns_to_read_digits(tmp_path):
    task = drive(DigitsTraining, tmp_path, epochs=6)
    assert task.context.result["accuracy"] > 0.9
    assert task.context.result["epoch"] == 6
    assert json.loads((tmp_path / "result.json").read_text()) == task.context.result


@pytest.mark.parametrize("batch_size", [50, 64, 1437, 5000])
def test_every_training_sample_counts_once_an_epoch(tmp_path, batch_size):
    machine = begin(DigitsTraining, tmp_path, epochs=2, batch_size=batch_size)
    work = finish(machine)
    assert sum(work) == machine.task.context.total_work == 2 * TRAINED
    assert max(work) <= batch_size
    assert work.count(0.0) == 2 * -(-TESTED // (2 * batch_size))  # the test is cut into steps too


def test_interrupted_and_resumed_is_uninterrupted_bit_for_bit(tmp_path):
    whole = drive(DigitsTraining, tmp_path / "whole", epochs=3, seed=7)
    directory = tmp_path / "parts"
    state, steps = None, 0
    for count in (11, 15, 9, 10_000):  # inside an epoch; inside a test; between two epochs at the latest
        machine = begin(DigitsTraining, directory, state, epochs=3, seed=7)
        try:
            for _ in range(count):
                machine.run_next_step()
                steps += 1
        except StopIteration:
            pass
        checkpoint.save(directory, machine.state_dict() or {})
        for _ in range(3 if count < 20 else 0):  # what runs on after the checkpoint must not leak into it
            machine.run_next_step()
        machine.stop()
        state = checkpoint.load(directory)
    assert steps == 3 * (23 + 3)
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, task_of(machine, type(whole)).model.state_dict()[name]), name
    assert machine.task.context.result == whole.context.result


def test_resuming_after_the_last_step_keeps_the_result(tmp_path):
    machine = begin(DigitsTraining, tmp_path, epochs=1)
    finish(machine)
    resumed = begin(DigitsTraining, tmp_path, machine.state_dict(), epochs=1)
    assert finish(resumed) == []
    assert resumed.task.context.result == machine.task.context.result


def test_the_seed_decides(tmp_path):
    def weights(seed: int) -> torch.Tensor:
        return drive(DigitsTraining, tmp_path, epochs=1, batch_size=256, seed=seed).model[0].weight

    torch.manual_seed(1)
    first = weights(3)
    torch.manual_seed(2)  # the caller's generator plays no part
    assert torch.equal(first, weights(3))
    assert not torch.equal(first, weights(4))


def test_the_callers_generator_is_left_alone(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    begin(DigitsTraining, tmp_path)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize("epochs", [None, 0])
def test_without_epochs_it_goes_on(tmp_path, epochs):
    machine = begin(DigitsTraining, tmp_path, epochs=epochs, batch_size=1437)
    for _ in range(50):
        machine.run_next_step()
    assert machine.task.context.total_work is None
    assert machine.task.context.result["epoch"] == 25


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0: expected a whole number of at least 1"),
        ({"epochs": -1}, "epochs is -1: expected a whole number of at least 0"),
        ({"epochs": "ten"}, "epochs is 'ten': expected a whole number"),
        ({"seed": 1.5}, "seed is 1.5: expected a whole number"),
        ({"learning_rate": 0}, "learning_rate is 0: expected a number above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan: expected a number above 0"),
    ],
)
def test_wrong_arguments(tmp_path: Path, args, message):
    with pytest.raises(ValueError, match=message):
        begin(DigitsTraining, tmp_path, **args)


@pytest.mark.parametrize("name", ["jobs.yaml", "monte_carlo.yaml", "command.yaml"])
def test_the_examples_run(tmp_path, monkeypatch, name):
    monkeypatch.setattr(sys, "path", list(sys.path))
    for job in load_jobs(EXAMPLES / name):
        if job.task is None:
            continue
        machine = begin(type(load_task(job.task, (str(EXAMPLES),))), tmp_path / job.name, **job.args)
        done = sum(machine.run_next_step() for _ in range(20))
        machine.pause()
        assert 0 < done < (machine.task.context.total_work or 0)
        checkpoint.save(tmp_path / job.name, machine.state_dict() or {})
        again = begin(type(machine.task), tmp_path / job.name, checkpoint.load(tmp_path / job.name), **job.args)
        assert done + sum(finish(again)) == again.task.context.total_work
