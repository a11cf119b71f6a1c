"""What a task's author is shown of a failure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron.fill import worker
from megatron.fill.errors import TaskError
from megatron.fill.sidetask import SideTask, TaskContext
from megatron.fill.sidetask.blame import task_traceback
from megatron.fill.sidetask.loader import load_task
from megatron.fill.sidetask.machine import TaskMachine


class Broken(SideTask):
    def create(self, epochs: int, rate: float = 0.1) -> None:
        self.helper(epochs)

    def helper(self, epochs: int) -> None:
        raise ValueError(f"{epochs} epochs") from KeyError("inner")


class Open(SideTask):
    def create(self, **anything: Any) -> None:
        pass


def test_a_traceback_begins_with_the_tasks_own_code():
    machine = TaskMachine(Broken(), TaskContext("b", Path()))
    with pytest.raises(ValueError, match="3 epochs") as caught:
        machine.create({"epochs": 3})
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the test itself
    text = task_traceback(error)
    assert "KeyError: 'inner'" in text
    assert text.endswith("ValueError: 3 epochs\n")
    lines = [line for line in text.splitlines() if line.startswith("  File")]
    assert [line.rpartition(" ")[2] for line in lines] == ["create", "helper"]


def test_the_frames_of_whoever_calls_a_task_are_not_its_authors():
    """Whatever room of the package they are in: here as if they were the worker's."""
    names: dict[str, Any] = {}
    exec(compile("def call(task): task.create(3)", worker.__file__, "exec"), names)
    with pytest.raises(ValueError, match="3 epochs") as caught:
        names["call"](Broken())
    error = caught.value
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # without the test itself
    lines = [line for line in task_traceback(error).splitlines() if line.startswith("  File")]
    assert [line.rpartition(" ")[2] for line in lines] == ["create", "helper"]


def test_of_a_module_that_fails_its_own_line_is_shown(tmp_path):
    (tmp_path / "blamed_mod.py").write_text("x = 1\ny = x / 0\n")
    with pytest.raises(TaskError) as caught:
        load_task("blamed_mod:Task", (str(tmp_path),))
    lines = task_traceback(caught.value).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{tmp_path}/blamed_mod.py", line 2, in <module>'
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_a_failure_of_ours_is_shown_whole():
    with pytest.raises(TaskError) as caught:
        TaskMachine(Open(), TaskContext("o", Path())).start()
    assert "machine.py" in task_traceback(caught.value)


def test_a_module_without_the_class_says_what_it_has(tmp_path):
    source = "from megatron.fill import SideTask\nclass Two(SideTask): pass\nclass One(SideTask): pass\nx = 1"
    (tmp_path / "having_mod.py").write_text(source)
    with pytest.raises(TaskError, match=r"having_mod has no Three; it has One, Two$"):
        load_task("having_mod:Three", (str(tmp_path),))
