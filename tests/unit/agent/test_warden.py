"""The warden: an agent that dies is followed by another, one that was stopped goes on, and nothing is left behind."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron.fill.agent.turn import DeviceTurn, take, turn_file
from megatron.fill.agent.warden import Warden
from megatron.fill.folders import AGENTS
from tests.support.children import Child
from tests.support.waiting import until

# What stands in for the agent: it says who it is, leaves an orphan in a session of its own, and does as told.
AGENT = """
import os, signal, subprocess, sys, time
from pathlib import Path
spec, warden, dead = sys.argv[1:]
folder = Path(spec).parent
if (folder / "saves").exists():
    signal.signal(signal.SIGTERM, lambda *_: (folder / "told").touch())
orphan = subprocess.Popen(["sh", "-c", "sleep 7531 & echo $!"], stdout=subprocess.PIPE, start_new_session=True)
pid = int(orphan.stdout.readline())
with (folder / "seen").open("a") as file:
    print(os.getpid(), warden, dead or "-", pid, os.nice(0), file=file)
while not (folder / "over").exists():
    time.sleep(0.01)
"""
# It notes that it starts a keeper, since the keeper itself says so only later.
WARDEN = """
import sys
from pathlib import Path
from megatron.fill.agent import warden
start = warden.subprocess.Popen
def popen(command, **kwargs):
    if "megatron.fill.agent.keeper" in command:
        Path(command[3]).with_name("started").touch()
        command = [sys.executable, "-c", {keeper!r}, *command[3:]]
        return start(command, **kwargs)
    at = command.index("megatron.fill.agent.agent")
    return start([sys.executable, "-c", {agent!r}, *command[at + 1:]], **kwargs)
warden.subprocess.Popen = popen
warden.main(continue_s=0.2)
"""
# ... and for the keeper: it says whether the rank has ended, what it was told, and in whose session it is.
KEEPER = """
import os, select, sys, time
from pathlib import Path
spec, rank, dead, ended_s = sys.argv[1:]
ended = select.select([int(rank)], [], [], 0)[0]
seen = Path(spec).with_name("keeper")
seen.with_suffix(".new").write_text(f"{bool(ended)} {dead or '-'} {os.getsid(0) == os.getpid()} {ended_s}")
seen.with_suffix(".new").rename(seen)
while (seen.parent / "slow").exists():
    time.sleep(0.01)
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
        settings = {"rank": 0, "parent": os.getpid(), "gate_fd": 0, "run_dir": str(folder), "place": 0}
        (folder / AGENTS).mkdir(exist_ok=True)
        path.write_text(json.dumps(settings | spec))
        program = WARDEN.format(agent=AGENT, keeper=KEEPER)
        self.warden = subprocess.Popen([sys.executable, "-c", program, str(path)])

    def agents(self) -> list[list[str]]:
        return self.agents_in(self.folder)

    @staticmethod
    def agents_in(folder: Path) -> list[list[str]]:
        path = folder / "seen"
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
        made.warden.wait(60)
    finally:
        made.warden.kill()


def test_it_ends_with_its_agent(guarded):
    pid, warden, dead, orphan = guarded.agent(0)
    assert (warden, dead) == (guarded.warden.pid, "-")
    (guarded.folder / "over").touch()
    assert guarded.warden.wait(60) == 0
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
    assert guarded.warden.wait(60) == 0


def test_with_the_end_of_the_rank_everything_ends(guarded):
    pid, _, _, orphan = guarded.agent(0)
    guarded.warden.send_signal(signal.SIGTERM)  # what the kernel sends when the rank dies
    guarded.warden.wait(60)
    assert not alive(pid)
    assert not alive(orphan)


def test_with_the_end_of_the_training_a_keeper_follows_that_no_launcher_ends(tmp_path):
    guarded = Guarded(tmp_path, between_s=1.0)
    first = guarded.agent(0)[0]
    os.kill(first, signal.SIGKILL)
    guarded.agent(1)
    (tmp_path / "over").touch()
    assert guarded.warden.wait(60) == 0
    until(lambda: (tmp_path / "keeper").exists())
    assert (tmp_path / "keeper").read_text().split()[:3] == ["False", str(first), "True"]


def test_none_follows_a_warden_that_was_ended_while_its_rank_goes_on(tmp_path):
    guarded = Guarded(tmp_path, between_s=1.0)
    guarded.agent(0)
    guarded.warden.terminate()
    assert guarded.warden.wait(60) == 0
    assert not (tmp_path / "started").exists()


def test_none_follows_where_an_earlier_keeper_never_left(tmp_path, holder):
    (tmp_path / AGENTS).mkdir()

    def keeps() -> DeviceTurn:
        turn = DeviceTurn(turn_file(tmp_path, 0), create=True)
        assert turn.keep()
        return turn

    holder(keeps)
    guarded = Guarded(tmp_path, between_s=1.0)
    guarded.agent(0)
    (tmp_path / "over").touch()
    assert guarded.warden.wait(60) == 0
    assert not (tmp_path / "started").exists()


def killed_rank(folder: Path) -> None:
    """Start a rank with a warden, and kill it when its agent runs."""

    def trains(out: int) -> None:
        Guarded(folder, between_s=1.0).warden.wait()

    rank = Child(trains)
    try:
        until(lambda: Guarded.agents_in(folder))
    finally:
        rank.end()


def held_by_warden(folder: Path) -> DeviceTurn:
    """Kill a rank whose agent ends only when it is ``over``; return the turn that its warden holds meanwhile."""
    (folder / "saves").touch()
    killed_rank(folder)
    turn = DeviceTurn(turn_file(folder, 0))
    until(lambda: turn.server is not None)
    return turn


def test_one_follows_when_the_rank_is_killed(tmp_path):
    killed_rank(tmp_path)
    until((tmp_path / "keeper").exists)
    agent = Guarded.agents_in(tmp_path)[0][0]
    assert (tmp_path / "keeper").read_text().split()[:3] == ["True", agent, "True"]


def test_the_keepers_time_counts_from_the_ranks_end_and_not_from_its_jobs(tmp_path):
    before_s = time.monotonic()
    held_by_warden(tmp_path)
    after_s = time.monotonic()  # the jobs are still saved
    (tmp_path / "over").touch()
    until((tmp_path / "keeper").exists)
    assert before_s < float((tmp_path / "keeper").read_text().split()[3]) < after_s


def test_one_follows_a_rank_that_dies_before_an_agent_is_replaced(tmp_path):
    def trains(out: int) -> None:
        guarded = Guarded(tmp_path, between_s=1.0)
        for number in range(5):
            os.kill(guarded.agent(number)[0], signal.SIGKILL)
        agent, _, _, orphan = guarded.agent(4)
        until(lambda: not alive(agent) and not alive(orphan))
        time.sleep(0.2)  # the end of the agent's orphan does not cut the pause short
        os.write(out, b"waits")  # 1.6 s, for the sixth

    rank = Child(trains)
    assert rank.read() == b"waits"
    rank.end()
    until((tmp_path / "keeper").exists)
    assert len(Guarded.agents_in(tmp_path)) == 5


def test_another_rank_waits_for_the_jobs_of_one_that_is_dead_and_for_their_keeper(tmp_path):
    (tmp_path / "slow").touch()
    turn = held_by_warden(tmp_path)
    warden = turn.server
    (tmp_path / "over").touch()  # its jobs have ended
    until((tmp_path / "keeper").exists)
    for _ in range(15):
        assert turn.server == warden  # the keeper, a stand-in, never takes its lock
        time.sleep(0.02)
    (tmp_path / "slow").unlink()
    until(lambda: turn.server is None)


def test_another_rank_waits_for_the_jobs_of_one_whose_other_threads_end_later(tmp_path):
    (tmp_path / "saves").touch()

    def last() -> None:
        until((tmp_path / "gone").exists)
        os._exit(0)

    def trains(_: int) -> None:
        Guarded(tmp_path, between_s=1.0)
        until(lambda: Guarded.agents_in(tmp_path))
        threading.Thread(target=last).start()
        ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[os.uname().machine], 0)  # exit(2): this thread's end

    rank = Child(trains)
    try:
        until((tmp_path / "told").exists)
        turn = DeviceTurn(turn_file(tmp_path, 0))
        assert turn.server is None
        (tmp_path / "gone").touch()
        until(lambda: turn.server is not None)
        assert not (tmp_path / "started").exists()
    finally:
        (tmp_path / "over").touch()
        rank.end()
    until((tmp_path / "keeper").exists)


def test_no_keeper_follows_if_another_rank_has_come(tmp_path):
    turn = held_by_warden(tmp_path)
    turn.ask()
    (tmp_path / "over").touch()
    until(lambda: turn.server is None)
    assert not (tmp_path / "started").exists()


def test_one_follows_a_rank_that_still_has_its_lock_while_it_dies(tmp_path, monkeypatch):
    (tmp_path / AGENTS).mkdir()
    turn_file(tmp_path, 0).touch()

    def has_it(out: int) -> None:
        turn, _ = take(tmp_path, 0)
        os.write(out, b"held")
        signal.pause()
        del turn

    rank = Child(has_it)  # no parent of this process: that is what one sees of a rank whose memory is being released
    wakeup = signal.set_wakeup_fd(-1)
    try:
        assert os.read(rank.out, 4) == b"held"
        spec = {"rank": 0, "parent": rank.pid, "between_s": 1.0, "run_dir": str(tmp_path), "place": 0}
        (tmp_path / "spec0.json").write_text(json.dumps(spec))
        started = []

        def popen(command: list[str], **kwargs: object) -> SimpleNamespace:
            started.append(command[2])
            return SimpleNamespace(poll=lambda: 0)

        monkeypatch.setattr("subprocess.Popen", popen)
        warden = Warden(tmp_path / "spec0.json", 1.0)
        warden.end(signal.SIGTERM, None)
        warden.run()
        assert started == ["megatron.fill.agent.keeper"]
    finally:
        signal.set_wakeup_fd(wakeup)
        rank.end()


def test_jobs_that_are_not_saved_in_time_are_killed_for_another_rank(tmp_path):
    held_by_warden(tmp_path).close()
    assert take(tmp_path, 0, leave_s=0.2)[1]
    agent, warden, _, orphan, _ = Guarded.agents_in(tmp_path)[0]
    assert not any(alive(int(pid)) for pid in (agent, warden, orphan))


def test_nobody_waits_for_the_jobs_of_a_rank_that_lives(tmp_path):
    guarded = Guarded(tmp_path, between_s=1.0)
    (tmp_path / "saves").touch()
    guarded.agent(0)
    turn = DeviceTurn(turn_file(tmp_path, 0))
    assert turn.server is None
    guarded.warden.terminate()
    with pytest.raises(subprocess.TimeoutExpired):
        guarded.warden.wait(0.5)
    assert turn.server is None
    (tmp_path / "over").touch()
    assert guarded.warden.wait(60) == 0


def test_without_the_flag_no_lock_is_made(guarded):
    guarded.agent(0)
    assert not list((guarded.folder / AGENTS).iterdir())
