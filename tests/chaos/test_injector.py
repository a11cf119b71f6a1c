"""Faults from outside, each on something real and small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.fill.errors import StoreError
from megatron.fill.pages.gate import SharedGate
from megatron.fill.store import open_store
from megatron.fill.work import NewJob, Work
from tests.chaos import marks, memfiles, processes
from tests.chaos.clock import JumpingClock
from tests.chaos.disk import SmallDisk
from tests.chaos.injector import Injector, Spans
from tests.chaos.programs import agent_program, worker_program
from tests.support.waiting import until


@pytest.fixture
def injector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Injector:
    monkeypatch.setattr("tests.chaos.disk._mount", lambda folder: "not in a test")
    clock = JumpingClock(tmp_path / "clock")
    return Injector(clock, SmallDisk(tmp_path / "disk"), tmp_path / "jobs.db", lambda: None, Spans(0.3, 0.3, 1.0))


@pytest.fixture
def sleeper(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def note(path: Path, pid: int) -> None:
    path.write_text(f'{{"event": "ready", "at_ns": 1, "pid": {pid}}}\n')


def here() -> list[int]:
    return [os.getpid()]


@pytest.mark.parametrize("kind", ["store-locked", "store-away"])
def test_a_store_out_of_reach_comes_back_with_its_jobs(injector, tmp_path, kind):
    store = open_store(tmp_path / "jobs.db")
    store.submit([NewJob("kept", Work())])
    deed = injector.commit(kind, tmp_path)
    assert deed is not None
    assert deed.end_ns - deed.start_ns >= 0.3e9
    assert store.find("kept").name == "kept"
    store.close()


def test_nobody_can_write_to_a_locked_store(injector, tmp_path):
    store = open_store(tmp_path / "jobs.db")
    store._patience_s = 0.05  # type: ignore[attr-defined]
    with injector._locked_store() as locked:
        assert locked
        with pytest.raises(StoreError, match="locked"):
            store.submit([NewJob("late", Work())])
    store.submit([NewJob("late", Work())])
    store.close()


def test_a_victim_is_killed(injector, tmp_path, sleeper):
    note(tmp_path / "notes", sleeper.pid)
    assert injector.hit("sigkill-outside", tmp_path / "notes", here) is not None
    assert sleeper.wait(60) == -signal.SIGKILL


def test_a_victim_is_stopped_and_goes_on(injector, tmp_path, sleeper):
    note(tmp_path / "notes", sleeper.pid)
    assert injector.hit("sigstop-outside", tmp_path / "notes", here) is not None
    until(lambda: processes.state(sleeper.pid) != "T")
    # Not "sleeping": an interpreter that is still starting may wait for the disk.
    assert processes.state(sleeper.pid) in "SRD"


def test_a_victim_that_is_gone_is_no_fault(injector, tmp_path, sleeper):
    note(tmp_path / "notes", sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert injector.hit("sigkill-outside", tmp_path / "notes", here) is None


def test_without_an_agent_there_is_no_fault(injector, tmp_path):
    for kind in ("agent-kill", "agent-stop", "clock-forward", "clock-back"):
        assert injector.commit(kind, tmp_path) is None


def test_clocks_jump_in_agents_and_nowhere_else(tmp_path):
    clock = JumpingClock(tmp_path / "clock")
    clock.jump(3600.0)
    code = "import time; print(time.time())"
    for argument, ahead_s in ((agent_program(), 3600), (worker_program(), 0), ("another.module", 0)):
        printed = subprocess.run(
            [sys.executable, "-c", code, argument],
            env=os.environ | {"PYTHONPATH": clock.python_path},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert abs(float(printed) - time.time() - ahead_s) < 60


def test_everything_of_a_run_is_ended_and_nothing_else(tmp_path, sleeper):
    variable = f"PYTHONPATH={tmp_path}"
    elsewhere = tmp_path / "elsewhere"
    code = "import os, time; os.fork(); os.setsid(); time.sleep(600)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, start_new_session=False) as ours:
        until(lambda: len(processes.running(variable, elsewhere)) >= 2)
        assert ours.pid in processes.end_all(variable, elsewhere)
    assert processes.running(variable, elsewhere) == []
    assert sleeper.poll() is None


def test_marks_are_read_back_by_event(tmp_path):
    path = tmp_path / "marks.jsonl"
    assert marks.read(path, marks.Note.FAULT) == []
    marks.prepare(path)
    marks.mark(path, marks.Note.READY)
    marks.mark(path, marks.Note.FAULT)
    (fault,) = marks.read(path, marks.Note.FAULT)
    assert (fault.event, fault.pid) == (marks.Note.FAULT, os.getpid())


def test_attacks_see_through_the_gate_where_it_may_be_written():
    gate = SharedGate()
    assert gate.fd in memfiles.descriptors("gate")["gate"]
    mapped = ("protect", "through_map", "through_memory")
    assert any(one.writable for one in memfiles.mappings("gate"))
    found = {name: attack for name, attack in memfiles.attacks("gate") if name.endswith("gate")}
    assert set(found) == {f"{how} gate" for how in ("write", "map", "reopen", "cut", "grow", "seal", *mapped)}
    with pytest.raises(OSError, match="not permitted"):
        found["cut gate"]()
    os.close(gate.fd)


def test_a_mark_that_makes_no_sense_is_left_out(tmp_path):
    path = tmp_path / "marks.jsonl"
    marks.prepare(path)
    marks.mark(path, marks.Note.FAULT, "x" * 1000)
    with path.open("ab") as file:
        file.write(b"[" * 100_000 + b'\n{"event": "fault"}\n\xff\n{"event": "gremlin", "at_ns": 1, "pid": 1}\n')
    (fault,) = marks.read(path, marks.Note.FAULT)
    assert fault.detail == "x" * 500
    assert fault.folder == os.stat(".").st_ino
    assert path.stat().st_mode & 0o777 == 0o666


def test_a_worker_is_found_by_the_number_and_the_folder_that_it_knows_itself_by(sleeper):
    inode = os.stat(".").st_ino
    assert processes.worker_of(sleeper.pid, inode, here()) == sleeper.pid
    assert processes.worker_of(sleeper.pid, 0, here()) == sleeper.pid
    assert processes.worker_of(sleeper.pid, inode + 1, here()) is None
    assert processes.worker_of(sleeper.pid, inode, [sleeper.pid]) is None


def test_a_process_at_work_in_the_folder_of_a_run_belongs_to_it(tmp_path):
    inside = tmp_path / "job"
    inside.mkdir()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], cwd=inside) as ours:
        until(lambda: ours.pid in processes.running("NO=1", tmp_path))
        assert processes.at_work_in(inside, [ours.pid, os.getpid(), 1 << 22]) == [ours.pid]
        assert processes.end_all("NO=1", tmp_path) == [ours.pid]


def test_cpu_time_is_that_of_those_who_are_there(sleeper):
    assert processes.cpu_s([os.getpid()]) > 0
    assert processes.cpu_s([1 << 22]) == 0
    assert sleeper.pid in processes.below([os.getpid()])
