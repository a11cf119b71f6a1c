"""The keeper waits for its rank's end, serves until another starts or its time is over, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.agent.turn import DeviceTurn, take, turn_file
from megatron.fill.folders import AGENTS
from megatron.fill.pages.control import RunState
from megatron.fill.pages.find import find_pages, notes
from megatron.fill.profiles import BubbleCycle, BubbleSlot
from megatron.fill.types import BubbleKind
from tests.support.posts import Post, post
from tests.support.waiting import until

# What stands in for the agent: it says what it sees, acts on the control page, and ends with the gate.
AGENT = """
import os, signal, sys, time
from pathlib import Path
from megatron.fill.agent.spec import AgentSpec
from megatron.fill.linux import host
from megatron.fill.pages.board import CycleBoardReader
from megatron.fill.pages.control import ControlPage
from megatron.fill.pages.gate import SharedGateReader
from megatron.fill.pages.watcher import watch_control
path, keeper, dead = sys.argv[1:]
host.die_with_parent(int(keeper))
spec = AgentSpec.from_json(Path(path).read_text())
gate = SharedGateReader(spec.gate_fd)
cycle, seen = CycleBoardReader(spec.board_fd).read(), Path(spec.run_dir) / "seen"
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
if seen.with_name("dies").exists():
    os._exit(1)
def act(state):
    while seen.with_name("slow").exists():
        time.sleep(0.01)
watch_control(ControlPage(spec.control_fd), act)
while (bubble := gate.wait(0)) is None and not gate.ended:
    pass
free = all(slot.free_bytes > 1 << 40 for slot in cycle.slots)
facts = os.getpid(), bubble and bubble.alone, cycle.period_ns, free, dead, Path(spec.records).name
seen.with_suffix(".new").write_text(" ".join(map(str, facts)))
seen.with_suffix(".new").rename(seen)
while not gate.ended:
    time.sleep(0.01)
(seen.parent / "ended").touch()
"""
KEEPER = """
import sys
from megatron.fill.agent import keeper
start = keeper.subprocess.Popen
def popen(command, **kwargs):
    at = command.index("megatron.fill.agent.agent")
    return start([sys.executable, "-c", {agent!r}, *command[at + 1:]], **kwargs)
keeper.subprocess.Popen = popen
keeper.host.yield_to_other_sessions = lambda: None  # to those of other tests
keeper.main()
"""
BETWEEN_S = 300.0


class Kept:
    """A rank that only waits, or ended ``ended_s`` seconds ago, and the keeper that its warden would have started."""

    def __init__(self, folder: Path, bench: Post, ended_s: float | None) -> None:
        self.folder, self.bench = folder, bench
        self.rank = subprocess.Popen(["sleep", "86400"])
        rank_fd = os.pidfd_open(self.rank.pid)
        if ended_s is not None:
            self.rank.kill()
            self.rank.wait()
        told_s = str(time.monotonic() - (ended_s or 0.0))
        bench.board.show(BubbleCycle(7_000, (BubbleSlot(BubbleKind.FILL, 1_000, 0),)))
        spec = replace(bench.context.spec, between_s=BETWEEN_S)
        path = folder / AGENTS / "spec3.json"
        path.write_text(spec.to_json(), encoding="utf-8")
        with (folder / "keeper.log").open("wb") as log:
            self.keeper = subprocess.Popen(
                [sys.executable, "-c", KEEPER.format(agent=AGENT), str(path), str(rank_fd), "17", told_s],
                pass_fds=(rank_fd, spec.board_fd, spec.control_fd),
                start_new_session=True,
                stderr=log,
            )
        os.close(rank_fd)

    @property
    def seen(self) -> list[str]:
        path = self.folder / "seen"
        return path.read_text().split() if path.exists() else []

    def die(self) -> int:
        """Kill the rank; return the pid of the agent that serves its jobs then."""
        self.rank.kill()
        self.rank.wait()
        until(lambda: self.seen)
        return int(self.seen[0])

    def gone(self, agent: int) -> bool:
        """True once neither keeper nor agent is left."""
        path = Path(f"/proc/{agent}/stat")
        return self.keeper.wait(60) is not None and not path.exists()

    @property
    def in_order(self) -> bool:
        return (self.folder / "ended").exists() and not notes(self.folder)


@pytest.fixture
def kept(tmp_path, request) -> Iterator[Kept]:
    (tmp_path / AGENTS).mkdir()
    DeviceTurn(turn_file(tmp_path, 0), create=True).close()  # as the warden does
    with post(tmp_path) as bench:
        made = Kept(tmp_path, bench, getattr(request, "param", None))
        yield made
        for process in (made.rank, made.keeper):
            process.kill()
            process.wait()


def test_it_waits_for_the_rank_and_then_keeps_the_gate_open_on_the_last_cycle(kept):
    with pytest.raises(subprocess.TimeoutExpired):
        kept.keeper.wait(1)
    assert not kept.seen
    kept.die()
    assert kept.seen[1:] == ["True", "7000", "True", "17", "between"]


@pytest.mark.parametrize("kept", [BETWEEN_S - 5.0], indirect=True)
def test_no_job_goes_on_for_longer_than_was_said_after_the_ranks_end(kept):
    assert kept.keeper.wait(60) == 0
    assert not notes(kept.folder)
    assert "time" in (kept.folder / "keeper.log").read_text()


@pytest.mark.parametrize("kept", [BETWEEN_S], indirect=True)
def test_none_begins_if_the_last_ones_took_all_the_time_to_end(kept):
    assert kept.keeper.wait(60) == 0
    assert not kept.seen
    assert "no job runs between two trainings: the time for it was over" in (kept.folder / "keeper.log").read_text()


def test_it_leaves_when_a_rank_starts(kept):
    agent = kept.die()
    assert take(kept.folder, 0, leave_s=60)[1]
    assert kept.gone(agent)
    assert kept.in_order


def test_a_new_ranks_note_stays_when_it_leaves(kept):
    kept.die()
    [note] = notes(kept.folder)
    note.write_text(json.dumps({"pid": os.getpid(), "fd": 3}))
    kept.keeper.terminate()
    assert kept.keeper.wait(60) == 0
    assert notes(kept.folder) == [note]


def test_on_a_full_disk_no_note_stays_and_that_is_said(kept):
    (kept.folder / AGENTS / "between3.json").mkdir()  # so that it can be written no more than on a full disk
    kept.rank.kill()
    assert kept.keeper.wait(60) != 0
    assert not notes(kept.folder)
    assert not kept.seen
    said = (kept.folder / "keeper.log").read_text()
    assert "no job runs between two trainings: " in said
    assert "Traceback" not in said


def test_it_leaves_on_sigterm(kept):
    agent = kept.die()
    kept.keeper.terminate()
    assert kept.gone(agent)
    assert kept.in_order


def test_it_leaves_after_pipefill_kill_and_not_before_its_agent_has_heard(kept):
    agent = kept.die()
    [page] = find_pages(kept.folder)
    assert (page.rank, page.pid) == (3, kept.keeper.pid)
    until(lambda: page.agent == agent)  # a thread of the agent's own notes it there
    (kept.folder / "slow").touch()
    page.change(RunState.KILLED)
    with pytest.raises(subprocess.TimeoutExpired):
        kept.keeper.wait(0.5)
    (kept.folder / "slow").unlink()
    assert kept.gone(agent)
    assert page.acknowledged
    assert kept.in_order


def test_with_a_keeper_that_is_killed_its_agent_dies(kept):
    agent = kept.die()
    kept.keeper.kill()
    kept.keeper.wait()
    until(lambda: not Path(f"/proc/{agent}/stat").exists(), 30)


def test_an_agent_that_dies_is_followed_by_another_which_knows(kept):
    agent = kept.die()
    os.kill(agent, signal.SIGKILL)
    until(lambda: int(kept.seen[0]) != agent)
    assert kept.seen[1:] == ["True", "7000", "True", f"17,{agent}", "between"]
    kept.keeper.terminate()
    assert kept.gone(int(kept.seen[0]))
    assert kept.in_order


def test_an_agent_that_was_stopped_goes_on(kept):
    agent = kept.die()
    [page] = find_pages(kept.folder)
    until(lambda: page.agent == agent)
    os.kill(agent, signal.SIGSTOP)
    page.change(RunState.KILLED)  # the keeper leaves once its agent has heard
    assert kept.gone(agent)
    assert kept.in_order


def test_it_leaves_while_no_agent_lives(kept):
    agent = kept.die()
    (kept.folder / "dies").touch()
    os.kill(agent, signal.SIGKILL)
    until(lambda: "in 0.4 s" in (kept.folder / "keeper.log").read_text())
    kept.keeper.terminate()
    assert kept.keeper.wait(60) == 0
    assert not notes(kept.folder)


def test_it_ends_with_an_agent_that_ends_of_itself(kept):
    agent = kept.die()
    os.kill(agent, signal.SIGTERM)
    assert kept.gone(agent)
    assert not notes(kept.folder)


@pytest.mark.parametrize("state", [RunState.PAUSED, RunState.DRAINING, RunState.KILLED])
def test_what_an_operator_stopped_does_not_go_on_by_itself(kept, state):
    kept.bench.control.change(state)
    kept.rank.kill()
    assert kept.keeper.wait(60) == 0
    assert not kept.seen


def test_a_rank_that_started_first_has_the_device(kept):
    turn, found = take(kept.folder, 0)
    assert turn is not None
    assert not found
    kept.rank.kill()
    assert kept.keeper.wait(60) == 0
    assert not kept.seen
