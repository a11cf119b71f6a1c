"""The warden: an agent that dies is followed by another, one that was stopped goes on, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.children import Child
from tests.support.waiting import until

# What stands in for the agent: it says who it is, leaves an orphan in a session of its own, and does as told.
AGENT = """
import os, subprocess, sys, time
from pathlib import Path
spec, warden, dead = sys.argv[1:]
folder = Path(spec).parent
orphan = subprocess.Popen(["sh", "-c", "sleep 7531 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
pid = int(orphan.stdout.readline())
with (folder / "agents").open("a") as file:
    print(os.getpid(), warden, dead or "-", pid, os.nice(0), file=file)
while not (folder / "over").exists():
    time.sleep(0.01)
"""
WARDEN = """
import sys
from megatron.fill.agent import warden
start = warden.subprocess.Popen
def popen(command, **kwargs):
    if "megatron.fill.agent.keeper" in command:
        command = [sys.executable, "-c", {keeper!r}, *command[3:]]
        return start(command, **kwargs)
    at = command.index("megatron.fill.agent.agent")
    return start([sys.executable, "-c", {agent!r}, *command[at + 1:]], **kwargs)
warden.subprocess.Popen = popen
warden.main(continue_s=0.2)
"""
# ... and for the keeper: it says whether the rank has ended, what it was told, and in whose session it is.
KEEPER = """
import os, select, sys
from pathlib import Path
spec, rank, dead = sys.argv[1:]
ended = select.select([int(rank)], [], [], 0)[0]
seen = Path(spec).with_name("keeper")
seen.with_suffix(".new").write_text(f"{bool(ended)} {dead or '-'} {os.getsid(0) == os.getpid()}")
seen.with_suffix(".new").rename(seen)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class Guarded:
    """A warden whose agents are stand-ins."""

    def __init__(self, folder: Path, **spec: float) -> None:
        self.folder = folder
        path = folder / "spec0.json"
        path.write_text(json.dumps({"rank": 0, "parent": os.getpid(), "gate_fd": 0} | spec))
        program = WARDEN.format(agent=AGENT, keeper=KEEPER)
        self.warden = subprocess.Popen([sys.executable, "-c", program, str(path)])

    def agents(self) -> list[list[str]]:
        return self.agents_in(self.folder)

    @staticmethod
    def agents_in(folder: Path) -> list[list[str]]:
        path = folder / "agents"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def agent(self, number: int) -> tuple[int, int, str, int]:
        until(lambda: len(self.agents()) > number)
        pid, warden, dead, orphan, _ = self.agents()[number]
        return int(pid), int(warden), dead, int(orphan)


@pytest.fixture
def guarded(tmp_path):
    made = Guarded(tmp_path)
    yield made
    (tmp_path / "over").touch()
    try:
        made.warden.wait(15)
    finally:
        made.warden.kill()


def test_it_ends_with_its_agent(guarded):
    pid, warden, dead, orphan = guarded.agent(0)
    assert (warden, dead) == (guarded.warden.pid, "-")
    (guarded.folder / "over").touch()
    assert guarded.warden.wait(15) == 0
    assert not alive(pid)
    assert not alive(orphan)


def test_not_even_an_agents_imports_compete_with_the_main_job(guarded):
    guarded.agent(0)
    assert guarded.agents()[0][-1] == "19"


def test_an_agent_that_dies_is_followed_by_another_which_knows(guarded):
    first, _, _, orphan = guarded.agent(0)
    os.kill(first, signal.SIGKILL)
    second, _, dead, _ = guarded.agent(1)
    assert dead == str(first)
    assert not alive(orphan)
    os.kill(second, signal.SIGKILL)
    assert guarded.agent(2)[2] == f"{first},{second}"


def test_an_agent_that_was_stopped_goes_on(guarded):
    pid = guarded.agent(0)[0]
    os.kill(pid, signal.SIGSTOP)
    (guarded.folder / "over").touch()
    assert guarded.warden.wait(15) == 0


def test_with_the_end_of_the_rank_everything_ends(guarded):
    pid, _, _, orphan = guarded.agent(0)
    guarded.warden.send_signal(signal.SIGTERM)  # what the kernel sends when the rank dies
    guarded.warden.wait(15)
    assert not alive(pid)
    assert not alive(orphan)


def test_with_the_end_of_the_training_a_keeper_follows_that_no_launcher_ends(tmp_path):
    guarded = Guarded(tmp_path, between_s=1.0)
    first = guarded.agent(0)[0]
    os.kill(first, signal.SIGKILL)
    guarded.agent(1)
    (tmp_path / "over").touch()
    assert guarded.warden.wait(15) == 0
    until(lambda: (tmp_path / "keeper").exists())
    assert (tmp_path / "keeper").read_text().split() == ["False", str(first), "True"]


def test_none_follows_a_warden_that_was_ended_while_its_rank_goes_on(tmp_path):
    guarded = Guarded(tmp_path, between_s=1.0)
    guarded.agent(0)
    guarded.warden.terminate()
    assert guarded.warden.wait(15) == 0
    assert not (tmp_path / "keeper").exists()


def test_one_follows_when_the_rank_is_killed(tmp_path):
    def trains(out: int) -> None:
        Guarded(tmp_path, between_s=1.0).warden.wait()

    rank = Child(trains)
    try:
        until((tmp_path / "agents").exists)
    finally:
        rank.end()
    until((tmp_path / "keeper").exists)
    agent = Guarded.agents_in(tmp_path)[0][0]
    assert (tmp_path / "keeper").read_text().split() == ["True", agent, "True"]
