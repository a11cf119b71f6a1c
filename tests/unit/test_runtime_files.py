"""A job's folder: bounded output, outcomes; how a task is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.errors import TaskError
from megatron.fill.runtime import output
from megatron.fill.runtime.output import BoundedOutput
from megatron.fill.runtime.spec import Outcome
from megatron.fill.sidetask.loader import load_task
from megatron.fill.types import JobState


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
    outcome = Outcome(JobState.FAILED, "because", False, "images", 7.0, {"accuracy": 0.5})
    outcome.write(tmp_path)
    assert Outcome.read(tmp_path) == outcome
    (tmp_path / "outcome.json").write_text('{"state": "ODD"')
    assert Outcome.read(tmp_path) is None
    Outcome.discard(tmp_path)
    assert Outcome.read(tmp_path) is None


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
