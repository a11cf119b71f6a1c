"""The agent's log: cut at its most bytes, with what was in it beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.fill.agent.logfile import turn_over


@pytest.fixture
def log(tmp_path: Path):
    with (tmp_path / "agent0.log").open("ab", buffering=0) as file:
        yield file


def test_a_long_log_moves_beside_and_both_who_append_go_on(log, tmp_path):
    path, beside = tmp_path / "agent0.log", tmp_path / "agent0.log.1"
    with path.open("ab", buffering=0) as warden:
        for turn in range(3):
            log.write(b"x" * 100 + b"%d\n" % turn)
            turn_over(log.fileno(), 100)
            assert path.read_bytes() == b""
            assert beside.read_bytes() == b"x" * 100 + b"%d\n" % turn
        warden.write(b"warden\n")
        log.write(b"agent\n")
    assert path.read_bytes() == b"warden\nagent\n"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["agent0.log", "agent0.log.1"]


def test_a_short_log_stays(log, tmp_path):
    log.write(b"short\n")
    turn_over(log.fileno(), 100)
    assert [one.name for one in tmp_path.iterdir()] == ["agent0.log"]
    assert (tmp_path / "agent0.log").read_bytes() == b"short\n"


def test_what_is_no_file_of_that_name_is_left_alone(log, tmp_path):
    log.write(b"x" * 200)
    (tmp_path / "agent0.log").rename(tmp_path / "moved")
    (tmp_path / "agent0.log").write_bytes(b"another")
    turn_over(log.fileno(), 100)  # the kernel knows its new name
    assert (tmp_path / "moved.1").read_bytes() == b"x" * 200
    assert (tmp_path / "agent0.log").read_bytes() == b"another"
    (tmp_path / "moved").unlink()
    log.write(b"x" * 200)
    turn_over(log.fileno(), 100)
    assert (tmp_path / "moved.1").read_bytes() == b"x" * 200
    reading, writing = os.pipe()
    turn_over(writing, 0)
    os.close(reading)
    os.close(writing)
