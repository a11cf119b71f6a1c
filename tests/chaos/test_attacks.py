"""Attacks, each on something real and small: refused attempts, successful ones, and targets that are left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.fill.agent import warden
from megatron.fill.sidetask.base import TaskContext
from megatron.fill.store import open_store
from megatron.fill.work import NewJob, Work
from tests.chaos.attacks import brought, calls, command, kernel
from tests.chaos.attacks.base import Attack, Ground, NoTargetError, Refused, in_child, try_all
from tests.chaos.attacks.table import ATTACKS
from tests.chaos.attacks.task import Attacker
from tests.chaos.holder import MemoryHolder, Shrinking
from tests.chaos.kind import attack, fatal
from tests.chaos.marks import Note, prepare, read
from tests.chaos.meminfo import FreeMemory
from tests.chaos.targets import Targets
from tests.support.waiting import until

HERE = os.stat("/proc/self/ns/net").st_ino


def ground(tmp_path: Path) -> Ground:
    job = tmp_path / "run" / "jobs" / "job-1"
    job.mkdir(parents=True)
    return Ground(job, tmp_path, HERE)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that looks like a rank of this run."""
    words = [sys.executable, "-c", "import time; time.sleep(600)", "--fill-store", str(tmp_path / "jobs.db")]
    with subprocess.Popen(words) as process:
        yield process
        process.kill()


def await_word(pid: int, word: str) -> None:
    until(lambda: word.encode() in Path(f"/proc/{pid}/cmdline").read_bytes())


def refuse() -> None:
    raise PermissionError(1, "no")


def miss() -> None:
    raise NoTargetError("gone")


def test_only_processes_of_the_same_run_are_found(tmp_path, rank):
    await_word(rank.pid, "--fill-store")
    assert ground(tmp_path).ranks() == [rank.pid]
    with pytest.raises(NoTargetError, match="no rank of the run is in sight"):
        Ground(tmp_path, tmp_path / "another", HERE).ranks()
    with pytest.raises(NoTargetError, match="no agent of the run is in sight"):
        ground(tmp_path / "other").agents()


def test_agents_and_wardens_are_found_by_the_command_lines_that_they_are_started_with(tmp_path, monkeypatch):
    """After a rename, outdated names would find no process, and every attack on agents would seem refused."""
    spec = tmp_path / "run" / "agents" / "spec0.json"
    start = subprocess.Popen

    def popen(command: list[str], **kwargs: object) -> subprocess.Popen[bytes]:
        at = command.index("-m") + 1
        words = [sys.executable, "-c", "import time; time.sleep(600)", *command[at:]]
        return start(words, stdin=subprocess.DEVNULL)

    monkeypatch.setattr(subprocess, "Popen", popen)
    agent = warden.start_agent(spec, "", ())
    guard = popen([sys.executable, "-m", warden.__name__, str(spec)])
    try:
        await_word(agent.pid, str(spec))
        await_word(guard.pid, str(spec))
        assert sorted(ground(tmp_path).agents()) == sorted([agent.pid, guard.pid])
    finally:
        for process in (agent, guard):
            process.kill()
            process.wait()


def test_whom_walls_hide_is_asked_for_by_number(tmp_path):
    told = Targets(namespace=os.stat("/proc/self/ns/pid").st_ino, ranks=(1 << 21,), agents=(1 << 22,))
    here = Ground(tmp_path, tmp_path / "nowhere", HERE, told)
    assert here.everyone() == [1 << 21, 1 << 22]
    with pytest.raises(Refused, match="No such process"):
        ATTACKS["signal-agents"].commit(here)
    # In another namespace the number of one of its own processes is not who is meant.
    elsewhere = Ground(tmp_path, tmp_path / "nowhere", HERE, replace(told, namespace=1, ranks=(os.getpid(),)))
    with pytest.raises(NoTargetError):
        elsewhere.ranks()


def test_what_attackers_are_told_is_read_back(tmp_path):
    told = Targets(1, (2,), (3, 4), ("a",), (("/cgroup", 2),), (80,), ("@x",))
    told.write(tmp_path)
    assert Targets.read(tmp_path) == told
    assert Targets.read(tmp_path / "nowhere") == Targets()


def test_where_nothing_is_its_own_the_machine_is_left_alone(tmp_path):
    here = ground(tmp_path)
    assert not here.own_init()
    assert not here.own_network()
    for name in ("kill-everybody", "kill-init", "loopback-down", "rank-ports", "unix-sockets"):
        with pytest.raises(NoTargetError):
            ATTACKS[name].commit(here)


def test_signals_reach_a_rank_that_nothing_protects(tmp_path, rank):
    await_word(rank.pid, "--fill-store")
    assert "kill SIGSTOP" in ATTACKS["signal-rank"].commit(ground(tmp_path))
    assert rank.wait(60) == -signal.SIGKILL


def test_the_ways_that_went_through_are_named_and_none_is_a_refusal():
    assert try_all([("one", refuse), ("two", lambda: None), ("three", lambda: None)]) == "two, three"
    with pytest.raises(Refused, match=r"one: .*no"):
        try_all([("one", refuse)])
    with pytest.raises(NoTargetError, match="no way"):
        try_all([])
    with pytest.raises(NoTargetError, match="one: gone"):
        try_all([("one", miss)])
    with pytest.raises(Refused, match="no"):
        try_all([("one", miss), ("two", refuse)])


def test_what_fails_in_a_child_fails_here():
    in_child(lambda: None)
    with pytest.raises(PermissionError):
        in_child(refuse)
    with pytest.raises(OSError, match="signal 9"):
        in_child(lambda: time.sleep(60), within_s=0.1)


def test_calls_without_a_name_answer_as_the_kernel_does():
    with pytest.raises(OSError, match="tgkill: No such process"):
        calls.syscall("tgkill", 1 << 22, 1 << 22, 0)


def test_a_process_without_powers_has_nothing_wrong():
    clean = "Uid:\t65534\t65534\nCapEff:\t0\nCapPrm:\t0\nCapAmb:\t0\nNoNewPrivs:\t1\nSeccomp:\t2\n"
    assert kernel.powers(clean) == ""
    assert kernel.powers(clean.replace("65534", "0")) == "it is root"
    wrong = (
        clean.replace("CapEff:\t0", "CapEff:\tff")
        .replace("Seccomp:\t2", "Seccomp:\t0")
        .replace("Privs:\t1", "Privs:\t0")
    )
    assert kernel.powers(wrong) == "CapEff ff, it may gain privileges, there is no filter of system calls"


@pytest.mark.parametrize(
    ("commit", "event", "detail"),
    [
        (lambda ground: refuse(), Note.HELD, "no"),
        (lambda ground: miss(), Note.MISSED, "gone"),
        (lambda ground: "all of it", Note.THROUGH, "all of it"),
        (lambda ground: "", Note.THROUGH, "done"),
    ],
)
def test_an_attacker_notes_what_came_of_it_and_does_its_work_once(tmp_path, monkeypatch, commit, event, detail):
    monkeypatch.setitem(ATTACKS, "made-up", Attack(attack("made-up", ""), commit, lasts_s=0.01))
    marks = tmp_path / "marks"
    prepare(marks)
    task = Attacker()
    task.context = TaskContext("job", tmp_path)
    task.create(str(marks), 10, "made-up", str(tmp_path), HERE)
    while task.done < 10:
        task.run_next_step()
    with pytest.raises(StopIteration):
        task.run_next_step()
    assert len(read(marks, Note.FAULT)) == 1
    (noted,) = read(marks, event)
    assert detail in noted.detail


def test_what_a_job_brings_notes_the_powers_that_it_ran_with(tmp_path):
    marks = tmp_path / "marks"
    prepare(marks)
    kinds = {kind.name: kind for kind in brought.KINDS}
    brings = brought.bring(kinds["env-pythonpath"], tmp_path / "brought", marks)
    subprocess.run([sys.executable, "-c", ""], env=brings["env"], check=True)
    assert len(read(marks, Note.FAULT)) == 1
    (seen,) = [*read(marks, Note.THROUGH), *read(marks, Note.HELD)]
    assert "CapEff" in seen.detail


def test_a_damaged_copy_leaves_the_store_as_it_is(tmp_path):
    database = tmp_path / "jobs.db"
    store = open_store(database)
    store.submit([NewJob("kept", Work())])
    for how in ("truncated", "empty", "noise", "future", "read-only"):
        command.damage(database, tmp_path / how, how)
    assert store.find("kept").name == "kept"
    store.close()
    assert (tmp_path / "empty").stat().st_size == 0


def test_what_does_something_to_a_terminal_is_seen():
    assert command.controls("plain\n\ttext") == []
    assert set(command.controls("\x1b[2J\u202e\x00")) == {repr("\x00"), repr("\x1b"), repr("\u202e")}


def test_what_stands_in_for_the_free_memory_is_changed_in_place_and_restored(tmp_path):
    memory = FreeMemory(tmp_path)
    path = tmp_path / "meminfo"
    true, inode = path.read_text(), path.stat().st_ino
    memory.show(900 << 20)
    assert f" {900 << 10} kB" in next(line for line in path.read_text().splitlines() if line.startswith("MemAvailable"))
    assert len(path.read_text()) == len(true)
    memory.restore()
    assert (path.read_text(), path.stat().st_ino) == (true, inode)


def test_a_task_that_holds_memory_gives_it_back_if_it_can(tmp_path):
    for task, kept in ((Shrinking(), 0), (MemoryHolder(), 1 << 10)):
        task.held_bytes = 1 << 10
        marks = tmp_path / type(task).__name__
        prepare(marks)
        task.context = TaskContext("job", tmp_path)
        task.create(str(marks), 10)
        task.init()
        assert task.shrink(0) is (kept == 0)
        assert len(task.memory) == kept
        assert len(read(marks, Note.HELD)) == (kept == 0)


def test_an_attack_that_a_job_should_be_ended_for_says_so_when_nothing_does(tmp_path, monkeypatch):
    monkeypatch.setitem(ATTACKS, "made-up", Attack(fatal("made-up", ""), lambda ground: "", lasts_s=0.01))
    marks = tmp_path / "marks"
    prepare(marks)
    task = Attacker()
    task.context = TaskContext("job", tmp_path)
    task.create(str(marks), 1_000_000, "made-up", str(tmp_path), HERE)
    while not task.until_s or time.monotonic() < task.until_s:
        task.run_next_step()
    with pytest.raises(RuntimeError, match="nothing ended it"):
        task.run_next_step()
