"""A job's folder: bounded output, outcomes; how a task is loaded."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.agent import folder as folder_module
from megatron.fill.agent.folder import BoundedOutput
from megatron.fill.agent.watch import progress_of
from megatron.fill.errors import TaskError
from megatron.fill.pages import steplog
from megatron.fill.pages.steplog import MOST_WORD_BYTES, StepLog, WorkerPhase, create_log, map_log
from megatron.fill.sidetask.loader import load_task
from megatron.fill.status import Cause, Then
from megatron.fill.types import BubbleUse, Lack
from megatron.fill.work import NewJob, Work
from megatron.fill.worker.spec import Outcome
from tests.support.memory_store import MemoryStore

WORD_AT = 8 * (64 + 65_536 * 5 + 8_192 * 2)
JOB = MemoryStore().submit([NewJob("job", Work())])[0]


@given(st.lists(st.integers(0, 400), max_size=30))
def test_output_keeps_the_beginning_and_the_end(tmp_path_factory, sizes):
    kept, folder_module.KEPT_BYTES = folder_module.KEPT_BYTES, 500
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
        folder_module.KEPT_BYTES = kept
    written = path.read_bytes()
    assert bounded.total_bytes == len(whole)
    if len(whole) <= 1000:
        assert written == whole
    else:
        assert written[:500] == whole[:500]
        assert written[-500:] == whole[-500:]
        assert f"[... {len(whole) - 1000} bytes left out ...]".encode() in written


def test_an_outcome_comes_through_and_one_too_large_loses_its_result():
    log = StepLog(create_log())
    assert Outcome.left(log) is None
    outcome = Outcome(Cause.FAILED, "because", Then.NONE, "images", 7.0, {"accuracy": 0.5})
    outcome.leave(log)
    assert Outcome.left(log) == outcome
    replace(outcome, result={"text": "x" * MOST_WORD_BYTES}).leave(log)
    assert Outcome.left(log) == replace(outcome, result={})


@pytest.mark.parametrize(
    "word",
    [
        "[]",
        "null",
        '{"cause": "finished"}',
        '{"cause": "training-ended", "then": ""}',
        '{"cause": "signal", "then": ""}',
        '{"cause": "odd", "then": ""}',
        '{"cause": ["finished"], "then": ""}',
        '{"cause": "stopped", "then": "tried-again"}',
        '{"cause": "stopped", "then": {}}',
        '{"cause": "finished", "then": "", "detail": 1}',
        '{"cause": "finished", "then": "", "unit": 1}',
        '{"cause": "finished", "then": "", "result": []}',
        '{"cause": "finished", "then": "", "total_work": "much"}',
        '{"cause": "finished", "then": "", "total_work": NaN}',
        '{"cause": "finished", "then": "", "total_work": 1e400}',
        '{"cause": "finished", "then": "", "total_work": true}',
        '{"cause": "finished", "then": "", "total_work": 5e-324}',
        '{"cause": "finished", "then": "", "total_work": -1}',
        '{"cause": "finished", "then": "", "detail": "\\ud800"}',
        '{"cause": "finished", "then": "", "result": {"loss": NaN}}',
        '{"cause": "finished", "then": "", "result": {"a": ' + "[" * 100_000 + "]" * 100_000 + "}}",
        '{"cause": "finished", "then": "", "more": 1}',
        "\xff",
    ],
)
def test_a_word_that_makes_no_sense_is_none(word):
    log = StepLog(create_log())
    log.leave_word(word.encode("latin-1"))
    assert Outcome.left(log) is None


def test_what_makes_sense_is_taken():
    """As a control: each word above has one fault only."""
    log = StepLog(create_log())
    log.leave_word(b'{"cause": "finished", "then": ""}')
    assert Outcome.left(log) == Outcome(Cause.FINISHED)


def test_a_result_with_what_json_lacks_still_arrives():
    log = StepLog(create_log())
    Outcome(Cause.FINISHED, "a\ud800", result={"loss": math.nan, "big": 10**30}, total_work=math.inf).leave(log)
    assert Outcome.left(log) == Outcome(Cause.FINISHED, "a", result={"loss": None, "big": 1e30})
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for result in ({"deep": deep}, {"no": object()}, {"large": "x" * MOST_WORD_BYTES}):
        Outcome(Cause.FINISHED, result=result).leave(log)
        assert Outcome.left(log) == Outcome(Cause.FINISHED)


def test_a_log_keeps_the_longest_of_each_callback_that_has_returned(monkeypatch):
    log, now = StepLog(create_log()), 1_000_000
    monkeypatch.setattr(steplog.time, "monotonic_ns", lambda: now)
    stays = [(WorkerPhase.CREATE, 500), (WorkerPhase.ASLEEP, 70)]
    stays += [(phase, ns) for ns in (3, 9, 4) for phase in (WorkerPhase.START, WorkerPhase.STEP, WorkerPhase.PAUSE)]
    for phase, ns in [*stays, (WorkerPhase.SAVE, 20)]:
        log.phase = phase
        now += ns
    assert log.longest_ns == {"create()": 500, "start()": 9, "pause()": 9}
    log.phase = WorkerPhase.STOP
    assert log.longest_ns["state_dict()"] == 20
    assert "stop()" not in log.longest_ns
    assert log.record("job", 0).callbacks == log.longest_ns


hostile_floats = st.sampled_from([1e308, -1e308, 4.9e-324, math.inf, math.nan, -0.0, 1e100, 1e-100]) | st.floats()
noise = st.one_of(
    st.binary(max_size=400),
    st.lists(hostile_floats, max_size=50).map(lambda values: struct.pack(f"{len(values)}d", *values)),
    st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50).map(lambda values: struct.pack(f"{len(values)}q", *values)),
)


@settings(max_examples=25)
@given(noise, st.integers(0, 1100), noise, st.sampled_from([0, 8 * 64 + 65_536 * 56, WORD_AT]), st.integers(0, 3))
def test_whatever_is_written_over_a_log_it_can_be_read(some, at, more, where, rows):
    fd = create_log()
    log = StepLog(fd)
    log.leave_word(b'{"state": "SUCCEEDED", "reason": ""}')
    for number in range(rows):
        log.step_ended(number, number + 1, 1.0, alone=False)
        log.leave_bubble(BubbleUse(number, 0, 1, 0, 1), alone=False)
    os.pwrite(fd, some, at)
    os.pwrite(fd, more, where)
    try:
        outcome = Outcome.left(log)
        record = log.record("job", 0)
        progress = progress_of(JOB, log, time.monotonic() - 1e-9)
        amounts = (record.work_done, record.alone_work, log.work_done, log.total_work or 0, log.checkpoint_s or 0)
        assert all(0 <= amount < math.inf for amount in amounts)
        for count in (record.steps_done, record.harvested_ns, log.ready_ns, log.step_count):
            assert 0 <= count < 1 << 62
        if progress.total_work:
            assert math.isfinite(100 * progress.work_done / progress.total_work)
        now_ns = time.monotonic_ns()
        assert all(0 <= start <= end <= now_ns for start, end in record.steps)
        assert all(min(use.harvested_ns, use.overrun_ns, use.steps, use.latency_ns + 1) >= 0 for use in record.uses)
        assert all(0 <= use.lack < len(Lack) and 0 <= use.left_ns < 1 << 62 for use in record.uses)
        assert log.phase.callback
        assert all(0 < duration_ns < 1 << 62 for duration_ns in record.callbacks.values())
        told = [dataclasses.asdict(record), dataclasses.asdict(progress)]
        told += [dataclasses.asdict(outcome)] if outcome else []
        json.dumps(told, allow_nan=False, ensure_ascii=False).encode()
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("absent_mod:Task", None, "importing absent_mod failed: ModuleNotFoundError"),
        ("broken_mod:Task", "1 / 0", "importing broken_mod failed: ZeroDivisionError: division by zero"),
        ("leaving_mod:Task", "raise SystemExit(3)", "importing leaving_mod failed: SystemExit: 3"),
        ("empty_mod:Task", "", "empty_mod has no Task"),
        ("other_mod:Task", "class Task: pass", "other_mod:Task is not a SideTask"),
        ("value_mod:Task", "Task = 3", "value_mod:Task is not a SideTask"),
        (
            "needy_mod:Task",
            "from megatron.fill import SideTask\nclass Task(SideTask):\n    def __init__(self, x): pass",
            "needy_mod:Task cannot be constructed: TypeError",
        ),
        (
            "half_mod:Task",
            "from megatron.fill.sidetask.nodes import NodeTask\nclass Task(NodeTask):\n def configure(self, x): pass",
            "without an implementation for abstract methods 'iteration_work', 'node_names'",
        ),
    ],
)
def test_a_task_that_cannot_be_loaded_says_why(tmp_path, path, source, expected):
    if source is not None:
        (tmp_path / f"{path.split(':')[0]}.py").write_text(source)
    with pytest.raises(TaskError) as error:
        load_task(path, (str(tmp_path),))
    assert expected in str(error.value)


def test_a_worker_s_log_stays_mapped_and_leaves_no_descriptor():
    def open_logs() -> int:
        links = []
        for entry in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                links.append(entry.readlink().name)
        return sum(link.startswith("memfd:pipefill-steps") for link in links)

    before, fd = open_logs(), create_log()
    log = StepLog(map_log(fd))
    os.close(fd)
    log.unit = "images"
    assert (log.unit, open_logs()) == ("images", before)
