"""What is said of arguments that do not fit a job."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.fill.errors import TaskError
from megatron.fill.sidetask import SideTask
from megatron.fill.trial.examine import check_args


class Epochs(SideTask):
    def create(self, epochs: int, rate: float = 0.1) -> None:
        pass


class Open(SideTask):
    def create(self, **anything: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        (
            Epochs,
            {},
            r"args do not fit Epochs.create\(\): missing a required argument: 'epochs'; it takes epochs, rate",
        ),
        (Epochs, {"epochs": 1, "lr": 2}, r"got an unexpected keyword argument 'lr'; it takes epochs, rate"),
        (SideTask, {"epochs": 1}, "SideTask takes no args; got epochs"),
    ],
)
def test_arguments_that_do_not_fit_are_named(task, args, message):
    with pytest.raises(TaskError, match=message):
        check_args(task(), args)


@pytest.mark.parametrize(("task", "args"), [(Epochs, {"epochs": 1}), (Open, {"any": 1}), (SideTask, {})])
def test_arguments_that_fit(task, args):
    check_args(task(), args)
