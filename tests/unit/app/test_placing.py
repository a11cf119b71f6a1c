"""A rank that starts takes its device from the jobs of an earlier start, where there can be any."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from megatron.fill.agent.turn import DeviceTurn, turn_file
from megatron.fill.app.launch import Launch, launch
from megatron.fill.app.placing import check_between, take_turn
from megatron.fill.config import FillSettings
from megatron.fill.errors import ConfigError
from megatron.fill.folders import AGENTS
from tests.support.flags import flags

BETWEEN = FillSettings(between=60.0, report="run")


@pytest.fixture(autouse=True)
def nothing_else_is_set(monkeypatch):
    for name in ("SLURM_STEP_ID", "SLURM_LOCALID", "TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_a_new_run_has_nobody_to_wait_for(tmp_path):
    assert take_turn(tmp_path) is None


def test_each_device_has_a_turn_of_its_own(tmp_path, monkeypatch):
    (tmp_path / AGENTS).mkdir()
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert take_turn(tmp_path) is None  # none of the starts before had the flag
    assert not list((tmp_path / AGENTS).iterdir())
    DeviceTurn(turn_file(tmp_path, 3), create=True).close()
    turn = take_turn(tmp_path)
    assert turn is not None
    assert turn.path.name.endswith("-3.lock")


def test_a_folder_that_cannot_be_used_delays_nobody(tmp_path):
    (tmp_path / AGENTS).write_text("")
    assert take_turn(tmp_path) is None


def test_it_is_refused_where_srun_ends_what_a_rank_leaves(monkeypatch):
    check_between(BETWEEN)
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    check_between(FillSettings())
    with pytest.raises(ConfigError, match="expected torchrun"):
        check_between(BETWEEN)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    check_between(BETWEEN)


@pytest.fixture
def looks(tmp_path, child) -> Callable[[], bytes]:
    """Says whether a rank has the device of a run in which jobs have gone on, as another process sees it."""
    (tmp_path / AGENTS).mkdir()
    DeviceTurn(turn_file(tmp_path, 0), create=True).close()

    def look(out: int) -> None:
        os.write(out, b"taken" if DeviceTurn(turn_file(tmp_path, 0)).wanted else b"free")

    return lambda: child(look).read()


def test_a_rank_takes_its_turn_before_the_script_imports_anything(tmp_path, monkeypatch, looks):
    monkeypatch.setattr("sys.argv", ["train.py", f"--fill-report={tmp_path}"])
    seen: list[bytes] = []
    launch(lambda: seen.append(looks()), patches=())
    assert seen == [b"taken"]


def test_a_rank_takes_its_turn_in_a_folder_that_its_command_line_does_not_name(tmp_path, looks):
    run = Launch()
    assert looks() == b"free"
    run.on_parse(flags(report=str(tmp_path), profile_only=True))
    assert looks() == b"taken"


def test_a_training_that_srun_has_started_is_refused_before_it_takes_its_turn(tmp_path, monkeypatch, looks):
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    monkeypatch.setattr("sys.argv", ["train.py", f"--fill-report={tmp_path}", "--fill-between", "60"])
    run = Launch()
    run.take_turn()
    with pytest.raises(ConfigError, match="expected torchrun"):
        run.on_parse(flags(report=str(tmp_path), between=60.0, store=str(tmp_path)))
    assert looks() == b"free"
