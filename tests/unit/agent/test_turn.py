"""A rank and the keeper of an earlier one never both have a device, in whatever order they come."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from megatron.fill.agent.turn import DeviceTurn, take, turn_file
from megatron.fill.folders import AGENTS
from megatron.fill.linux import recordlock
from megatron.fill.linux.tree import read_process
from tests.support.children import Child
from tests.support.hopping import all_ended, hopping
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path) -> Path:
    (tmp_path / AGENTS).mkdir()
    return tmp_path


def turn(run: Path, place: int = 0) -> DeviceTurn:
    return DeviceTurn(turn_file(run, place), create=True)


def rank(run: Path) -> DeviceTurn | None:
    turn(run).close()
    return take(run, 0)[0]


def keeper(run: Path, place: int = 0) -> DeviceTurn:
    held = turn(run, place)
    assert held.keep()
    return held


def gone(pid: int) -> bool:
    process = read_process(pid)
    return process is None or not process.alive


def test_without_the_flag_there_is_no_keeper_and_nothing_is_made(run):
    assert take(run, 0) == (None, False)
    assert take(run / "new", 0) == (None, False)
    assert not list((run / AGENTS).iterdir())


def test_a_rank_that_is_alone_takes_the_device_at_once(run):
    turn(run).close()
    taken, found = take(run, 0)
    assert taken is not None
    assert not found


def test_a_keeper_leaves_the_device_to_a_rank_that_came_first(run, holder):
    holder(lambda: rank(run))
    kept = turn(run)
    assert not kept.keep()
    assert kept.wanted


def test_ranks_do_not_exclude_each_other(run, holder):
    first, second = holder(lambda: rank(run)), holder(lambda: rank(run))
    assert not take(run, 0)[1]
    kept = turn(run, 0)
    for one in (first, second):
        assert kept.wanted
        one.kill()
    assert not kept.wanted


def test_devices_have_turns_of_their_own(run, holder):
    turn(run, 1).close()
    holder(lambda: rank(run))
    assert turn(run, 1).keep()


def test_the_turn_of_a_rank_that_is_killed_is_over(run, holder):
    first = holder(lambda: rank(run))
    kept = turn(run)
    assert kept.wanted
    first.kill()
    assert not kept.wanted
    assert kept.keep()


@pytest.mark.parametrize("place", [0, 5])
def test_a_rank_sends_the_keepers_of_all_places_away_and_sees_them_leave(run, place):
    def leaves(out: int) -> None:
        kept = keeper(run, place)
        os.write(out, b"held")
        until(lambda: kept.wanted)
        os.write(out, b"left")

    one = Child(leaves)
    try:
        assert os.read(one.out, 4) == b"held"
        assert take(run, 0, leave_s=60)[1]
        assert one.read() == b"left"
    finally:
        one.end()
    assert turn(run, 5).keep()  # that place is free again


def test_no_place_of_another_node_is_asked(run, holder, monkeypatch):
    node = os.uname().nodename
    path = run / AGENTS / f"turn-{node}-b-0.lock"
    holder(lambda: DeviceTurn(path, create=True).keep())
    assert take(run, 0) == (None, False)


def test_keepers_that_do_not_leave_are_killed_after_one_wait_for_all(run, holder):
    stay = [holder(lambda place=place: keeper(run, place)) for place in range(4)]
    began_s = time.monotonic()
    assert take(run, 0, leave_s=2)[1]
    assert time.monotonic() - began_s < 4 * 2  # as four waits would take
    assert all(gone(one.pid) for one in stay)


def test_a_rank_waits_for_a_warden_that_ends_jobs(run, holder):
    def holds() -> DeviceTurn:
        held = turn(run)
        held.end_jobs()
        return held

    one = holder(holds)
    assert take(run, 0, leave_s=0.1)[1]
    assert gone(one.pid)


HOLDS = """
from pathlib import Path
from megatron.fill.agent.turn import DeviceTurn
held = DeviceTurn(Path(sys.argv[1]), create=True)
held.keep()
"""


def test_a_job_that_forks_and_leaves_its_parents_does_not_survive_its_keeper(run):
    with hopping(HOLDS, str(turn_file(run, 0))) as keeper:
        assert take(run, 0, leave_s=0.1)[1]
        assert all_ended(keeper)


@pytest.mark.parametrize("pid", [0, -17])
def test_what_cannot_be_seen_is_not_killed_and_that_is_said(run, holder, monkeypatch, caplog, pid):
    one = holder(lambda: keeper(run))
    monkeypatch.setattr(recordlock, "holder", lambda *_: (2, pid))  # in another namespace; on another machine
    assert take(run, 0, leave_s=0.1)[1]
    assert not gone(one.pid)
    assert "cannot be killed: they may go on beside the training" in caplog.text


def test_a_process_that_has_the_pid_of_a_keeper_by_now_is_left_alone(run, holder, monkeypatch):
    other = holder(lambda: None)
    held = iter([(2, other.pid)] * 2)  # to the two looks before the kill, and not to that before the signal
    turn(run).close()
    monkeypatch.setattr(recordlock, "holder", lambda *_: next(held, None))
    assert take(run, 0, leave_s=-1.0)[1]
    assert next(held, None) is None
    assert not gone(other.pid)
