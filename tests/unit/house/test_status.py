"""A job's status is decided by members alone: no text counts, and none is read back."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.ranking import Misfits
from megatron.fill.agent.watch import End, Judge
from megatron.fill.agent.workers import WorkerPool
from megatron.fill.cli import main
from megatron.fill.spec import typed
from megatron.fill.status import Cause, JobState, Status, Then, why
from megatron.fill.store import open_store
from megatron.fill.store.values import Standing
from megatron.fill.trial import check, run
from megatron.fill.trial.examine import Examined
from megatron.fill.work import NewJob, Work
from megatron.fill.worker.spec import Outcome
from tests.support.memory_store import MemoryStore
from tests.support.posts import post
from tests.unit.house.test_imports import FILL
from tests.unit.trial.test_judge import run as training

MEMORY = "the main job needs the memory: 1 MiB free of a margin of 2 MiB"
STOPS = [
    Ending(How.STOP, Cause.TRAINING_ENDED),
    Ending(How.STOP, Cause.MOVES),
    Ending(How.STOP, Cause.TIMEOUT, "60"),
    Ending(How.STOP, Cause.MEMORY_NEEDED, MEMORY),
    Ending(How.STOP, Cause.CANCELLED),
    Ending(How.STOP, Cause.WARDEN_DIED),
]
LEFT = [Then.SAVED, Then.RESTARTS, Then.COMMAND_RESTARTS, Then.MEASURED_SAVED, Then.MEASURED_RESTARTS]


def late(stop: Ending) -> Ending:
    text = f"stop() did not return within 10 s of the stop: {why(stop.cause, stop.detail)}"
    return Ending(How.LATE, Cause.LATE, text, stop.cause)


stops = st.sampled_from(STOPS)
causes = st.sampled_from([Cause.NONE, *(stop.cause for stop in STOPS)])
cuts = st.one_of(
    st.builds(Ending, st.just(How.CUT), st.sampled_from([Cause.CLAIM_LOST, Cause.KILLED]), stop=causes),
    st.builds(Ending, st.just(How.CUT), st.just(Cause.MEMORY_NEEDED), st.just(MEMORY), causes),
)
fails = st.just(Ending(How.FAIL, Cause.LIMIT, "it held 3 MiB, over its cap of 2 MiB"))
outcomes = st.one_of(
    st.builds(Outcome, st.sampled_from([Cause.STOPPED, Cause.CROWDED]), then=st.sampled_from(LEFT)),
    st.just(Outcome(Cause.DOES_NOT_FIT, "node 3 is too long for bubble 1")),
    st.just(Outcome(Cause.FAILED, "ValueError: no in run_next_step()")),
    st.just(Outcome(Cause.FINISHED)),
    st.builds(Outcome, st.sampled_from([Cause.SIGNAL, Cause.EXITED, Cause.OUT_OF_MEMORY]), st.just("SIGKILL")),
)


def a_job(retries: int = 0) -> Any:
    job = Mock(id=1)
    job.progress.failures, job.work.retries, job.work.timeout_s = 0, retries, 60
    return job


@st.composite
def ends(draw: st.DrawFn) -> End:
    outcome = draw(outcomes)
    ending = draw(st.one_of(st.none(), stops, stops.map(late), cuts, fails))
    if ending is not None and ending.how > How.STOP:  # as the watch has it
        outcome = Outcome(ending.cause, ending.detail)
    flags = {name: draw(st.booleans()) for name in ("saved", "kept")}
    over = draw(st.sampled_from([Cause.NONE, Cause.TRAINING_ENDED, Cause.WARDEN_DIED, Cause.KEEPER_DIED]))
    standing, request = draw(st.sampled_from(Standing)), draw(st.sampled_from(["", MEMORY]))
    return End(outcome, ending, standing, request=request, over=over, **flags)


@given(ends(), st.integers(0, 2))
def test_no_part_of_a_reason_is_said_twice(end, retries):
    judge, job = Judge(), a_job(retries)
    for _ in range(4):
        parts = judge.verdict(job, end).text.split("; ")
        assert len(set(parts)) == len(parts)
        assert sum("begins again" in part or "goes on from" in part for part in parts) <= 1
        assert sum(Cause.TRAINING_ENDED.text in part for part in parts) <= 1


def reword(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put other words in the place of every text."""
    for at, cause in enumerate(Cause):
        monkeypatch.setattr(cause, "text", f"<{at} {{}}>")
    for at, then in enumerate(Then):
        monkeypatch.setattr(then, "text", f"<{at}>")


@given(end=ends(), retries=st.integers(0, 2))
def test_a_verdict_needs_no_words(end, retries):
    """What an agent decides is the same whatever the texts are."""
    found = []
    for reworded in (False, True):
        judge = Judge()
        with pytest.MonkeyPatch.context() as monkeypatch:
            if reworded:
                reword(monkeypatch)
            found.append([judge.verdict(a_job(retries), end) for _ in range(4)])
    assert found[0] == found[1]


@pytest.fixture
def words(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The texts, or others in their place."""
    if request.param == "reworded":
        reword(monkeypatch)


both = pytest.mark.parametrize("words", ["as they are", "reworded"], indirect=True)


@both
@pytest.mark.parametrize("where", ["memory", "file"])
def test_a_note_of_another_cycle_is_withdrawn_by_the_device_that_left_it(words, where, tmp_path):
    store = MemoryStore() if where == "memory" else open_store(str(tmp_path / "jobs.db"))
    board: Any = Mock(version=1)
    mine, theirs = Misfits("rank 1", board), Misfits("rank 11", board)
    store.submit([NewJob(name, Work("m:C")) for name in ("mine", "theirs", "cut")])
    mine.note(store, store.find("mine"), "too long")
    theirs.note(store, store.find("theirs"), "too long")
    store.note(store.find("cut").id, Status(JobState.QUEUED, Cause.FAILED, "does not fit rank 1: too long"))
    for name in ("mine", "theirs", "cut"):
        mine.withdraw(store, store.find(name))
    assert [job.status.cause for job in store.list()] == [Cause.NONE, Cause.DOES_NOT_FIT, Cause.FAILED]
    store.close()


@both
@pytest.mark.parametrize(
    ("work", "state", "failures"),
    [
        ({"command": ("true",)}, JobState.SUCCEEDED, 0),
        ({"command": ("false",)}, JobState.FAILED, 1),
        ({"command": ("false",), "retries": 1}, JobState.QUEUED, 1),
        ({"command": ("sleep", "600"), "timeout_s": 0.01}, JobState.FAILED, 1),
        ({"command": ("true",), "memory_bytes": 1 << 60}, JobState.QUEUED, 0),
    ],
)
def test_a_seat_tells_the_store_the_same_in_any_words(words, work, state, failures, tmp_path, monkeypatch):
    monkeypatch.setattr(WorkerPool, "stand_by", lambda self: None)
    with post(tmp_path) as bench:
        job = bench.submit(task=None, **work)
        bench.gate.open(1 << 62, 0)
        assert bench.seat().serve()
        told = bench.store.get(job.id)
        assert (told.state, told.progress.failures) == (state, failures)
        unfit = (job.id,) if "memory_bytes" in work else ()
        assert bench.context.ranking.misfits.refused == unfit


@both
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (Status(JobState.SUCCEEDED, Cause.FINISHED), 0),
        (Status(JobState.QUEUED, Cause.TRAINING_ENDED, then=Then.SAVED), 0),
        (Status(JobState.QUEUED, Cause.SIGNAL, "SIGSEGV in init()", Then.TRIED_AGAIN), 1),
        (Status(JobState.QUEUED, Cause.FAILED, "the main job ended first"), 1),
        (Status(JobState.FAILED, Cause.TIMEOUT, "3"), 1),
    ],
)
def test_pipefill_try_exits_alike_in_any_words(words, status, code, tmp_path, monkeypatch):
    (tmp_path / "jobs.yaml").write_text("jobs: [{name: count, task: 'counts:Count'}]")
    monkeypatch.setattr(check, "examine", lambda *_: [Examined()])
    monkeypatch.setattr(run, "train", lambda *_: training(status))
    monkeypatch.setattr("sys.argv", ["pipefill", "try", str(tmp_path / "jobs.yaml"), "--device", "cpu"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert int(ended.value.code or 0) == code


CASES = [
    (Outcome(Cause.FINISHED), {}, JobState.SUCCEEDED, ""),
    (Outcome(Cause.FAILED, "ValueError: x"), {}, JobState.FAILED, "ValueError: x"),
    (Outcome(Cause.SIGNAL, "SIGSEGV in init()"), {}, JobState.QUEUED, "the worker was killed by SIGSEGV in init()"),
    (Outcome(Cause.EXITED, "3 in init()"), {}, JobState.QUEUED, "the worker exited with status 3 in init()"),
    (Outcome(Cause.OUT_OF_MEMORY, "out of memory"), {}, JobState.QUEUED, "out of memory"),
    (Outcome(Cause.DOES_NOT_FIT, "too long"), {}, JobState.QUEUED, "does not fit : too long"),
    (Outcome(Cause.STOPPED), {"ending": STOPS[0]}, JobState.QUEUED, "the main job ended first"),
    (Outcome(Cause.STOPPED), {"ending": STOPS[1]}, JobState.QUEUED, "it moves to a rank that is idle"),
    (Outcome(Cause.STOPPED), {"ending": STOPS[2]}, JobState.FAILED, "it ran for longer than its timeout of 60 s"),
    (Outcome(Cause.STOPPED), {"ending": STOPS[3]}, JobState.QUEUED, MEMORY),
    (Outcome(Cause.STOPPED), {"standing": Standing.CANCELLED}, JobState.CANCELLED, "cancelled while it ran"),
    (Outcome(Cause.CROWDED), {"request": MEMORY}, JobState.QUEUED, MEMORY),
    (Outcome(Cause.STOPPED), {}, JobState.QUEUED, "the worker gave up without being asked to"),
    (Outcome(Cause.LIMIT, "over its cap"), {}, JobState.FAILED, "over its cap"),
    (Outcome(Cause.OUTPUT, "16"), {}, JobState.FAILED, "printed more than 16 MiB; its output has the beginning and "),
]


@pytest.mark.parametrize(("outcome", "more", "state", "text"), CASES)
def test_each_cause_has_its_state_and_its_text(outcome, more, state, text):
    status = Judge().verdict(a_job(), End(outcome, **more))
    assert status.state is state
    assert status.why.startswith(text)
    assert bool(status.why) == bool(text)


def _texts_compared(path: Path) -> Iterator[int]:
    """Yield the lines at which a text of a job's end is compared or searched."""
    searches = ("startswith", "endswith", "removesuffix", "removeprefix", "find", "match", "fullmatch", "search")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Compare):
            parts = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in searches:
            parts = [node.func.value, *node.args]
        else:
            continue
        if any(isinstance(part, ast.Attribute) and part.attr in ("reason", "detail", "why") for part in parts):
            yield node.lineno


def test_nothing_in_the_core_compares_a_text_of_an_end():
    rooms = ("agent", "worker", "store", "trial", "records", "report", "cli", "scheduler", "client.py")
    paths = [path for room in rooms for path in [FILL / room, *(FILL / room).rglob("*.py")] if path.suffix == ".py"]
    assert len(paths) > 100
    assert {str(path.relative_to(FILL)): lines for path in paths if (lines := list(_texts_compared(path)))} == {}


def test_what_follows_is_said_after_the_cause():
    status = Status(JobState.FAILED, Cause.SIGNAL, "SIGKILL", Then.DIED_IN_A_ROW, 3)
    assert status.text == "the worker was killed by SIGKILL, 3 times in a row without having saved anything"
    again = replace(status, state=JobState.QUEUED, retry=1, retries=2)
    assert again.text == f"{status.text}; retry 1 of 2"
    assert (status.failed, again.failed, Status(JobState.QUEUED).failed) == (True, True, False)
    assert replace(again, unheard=True).text == f"{again.text} (the store did not hear of it)"


def test_no_text_keeps_its_braces_and_a_detail_is_no_template():
    for cause in Cause:
        for then in Then:
            assert "{" not in Status(JobState.QUEUED, cause, "12", then).text
    assert Status(JobState.FAILED, Cause.FAILED, "KeyError: '{0.x}' {}").text == "KeyError: '{0.x}' {}"


@given(
    st.builds(
        Status,
        st.sampled_from(JobState),
        st.sampled_from(Cause),
        st.text(),
        st.sampled_from(Then),
        st.integers(0, 12),
        st.integers(0, 3),
        st.integers(0, 3),
        st.text(),
        st.booleans(),
    )
)
def test_it_survives_json(status):
    assert typed(Status, json.loads(json.dumps(asdict(status)))) == status


@pytest.mark.parametrize("data", [{"state": "GONE"}, {"state": "QUEUED", "cause": "x"}, {"state": "QUEUED", "no": 1}])
def test_what_is_none_is_refused(data):
    with pytest.raises((KeyError, ValueError)):
        typed(Status, data)
