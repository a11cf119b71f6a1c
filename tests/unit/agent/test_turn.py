"""A rank and the keeper of an earlier one never both have a device, in whatever order they come."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from megatron.fill.agent.turn import Turn
from megatron.fill.folders import AGENTS
from tests.support.children import Child
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / AGENTS).mkdir()
    return tmp_path


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[], object]], Child]]:
    children: list[Child] = []

    def start(body: Callable[[], object]) -> Child:
        def run(out: int) -> None:
            kept = body()
            os.write(out, b"held")
            time.sleep(1000)
            del kept

        children.append(Child(run))
        assert os.read(children[-1].out, 4) == b"held"
        return children[-1]

    yield start
    for one in children:
        one.end()


def rank(run: Path) -> Turn:
    turn = Turn(run, 0)
    turn.take()
    return turn


def keeper(run: Path) -> Turn:
    turn = Turn(run, 0)
    assert turn.keep()
    return turn


def test_a_new_run_folder_has_no_keeper(tmp_path):
    with pytest.raises(FileNotFoundError):
        Turn(tmp_path, 0)


def test_a_rank_that_is_alone_takes_the_device_at_once(run):
    assert not Turn(run, 0).take()


def test_a_keeper_leaves_the_device_to_a_rank_that_came_first(run, child):
    child(lambda: rank(run))
    turn = Turn(run, 0)
    assert not turn.keep()
    assert turn.wanted


def test_ranks_do_not_exclude_each_other(run, child):
    child(lambda: rank(run))
    assert not Turn(run, 0).take()


def test_devices_have_turns_of_their_own(run, child):
    child(lambda: rank(run))
    assert Turn(run, 1).keep()


def test_the_turn_of_a_rank_that_is_killed_is_over(run, child):
    first = child(lambda: rank(run))
    turn = Turn(run, 0)
    assert turn.wanted
    os.kill(first.pid, signal.SIGKILL)
    until(lambda: not turn.wanted)
    assert turn.keep()


def test_a_keeper_sees_a_rank_that_waits_for_it_and_the_rank_sees_it_leave(run):
    def leaves(out: int) -> None:
        turn = keeper(run)
        os.write(out, b"held")
        until(lambda: turn.wanted)
        os.write(out, b"left")

    one = Child(leaves)
    try:
        assert os.read(one.out, 4) == b"held"
        assert Turn(run, 0).take(leave_s=60)
        assert one.read() == b"left"
    finally:
        one.end()


def test_a_keeper_that_does_not_leave_is_killed_with_all_below_it(run, child):
    def stays() -> tuple[Turn, object]:
        turn = keeper(run)
        below = subprocess.Popen(["sh", "-c", "trap '' TERM; sleep 86400 & wait"], start_new_session=True)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (run / "below").write_text(str(below.pid))
        return turn, below

    child(stays)
    below = int((run / "below").read_text())
    assert Turn(run, 0).take(leave_s=0.1)
    until(lambda: not Path(f"/proc/{below}").exists() or ") Z " in Path(f"/proc/{below}/stat").read_text(), 10)
