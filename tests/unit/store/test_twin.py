"""The SQL store does what its in-memory twin does, whatever is asked of the two."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.fill.errors import JobError
from megatron.fill.status import Cause, JobState, Status
from megatron.fill.store import Claim, DeviceEntry, JobStore, Progress
from megatron.fill.store.sql import SqlStore
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore

NAMES = st.sampled_from(["a", "b", "2"])
IDS = st.integers(0, 6)
CLAIMS = st.integers(0, 3)  # which of the claims so far
STATES = st.sampled_from(JobState)
CAUSES = st.sampled_from(Cause)
PROGRESS = st.builds(Progress, work_done=st.floats(0, 10), steps=st.integers(0, 9))
JOBS = st.builds(NewJob, NAMES, work=st.sampled_from([Work("t:A"), Work("t:B")]), priority=st.integers(-1, 1))
OPERATIONS = st.one_of(
    st.tuples(st.just("submit"), st.lists(JOBS, max_size=3)),
    st.tuples(st.just("claim"), st.sampled_from(["x", "y"]), st.lists(IDS, max_size=7), st.sampled_from([1, 5])),
    st.tuples(st.just("claim"), st.just("x"), st.just(list(range(7))), st.sampled_from([1, 5])),
    st.tuples(st.just("heartbeat"), CLAIMS, PROGRESS, st.sampled_from([1, 5])),
    st.tuples(st.just("place"), CLAIMS, st.just("/folder")),
    st.tuples(st.just("finish"), CLAIMS, st.builds(Status, STATES, CAUSES), PROGRESS, st.just({"r": 1})),
    st.tuples(st.just("release"), CLAIMS, st.builds(Status, st.just(JobState.QUEUED), CAUSES), PROGRESS, st.just({})),
    st.tuples(st.sampled_from(["get", "cancel", "retry"]), IDS),
    st.tuples(st.just("forget"), st.lists(IDS, max_size=7), st.sampled_from([0, 1e9])),
    st.tuples(st.just("find"), NAMES),
    st.tuples(st.just("list"), st.lists(STATES, max_size=2), st.none() | st.integers(0, 3)),
    st.tuples(st.just("recover")),
    st.tuples(st.just("report_device"), st.builds(DeviceEntry, NAMES, NAMES), st.sampled_from([1, 5])),
    st.tuples(st.just("forget_device"), NAMES),
    st.tuples(st.just("devices")),
    st.tuples(st.just("keep_profile"), NAMES, st.dictionaries(NAMES, st.integers(), max_size=2)),
    st.tuples(st.just("profile"), NAMES),
    st.tuples(st.just("pass"), st.sampled_from([0.5, 1, 4])),
)
OF_CLAIMS = ("heartbeat", "place", "finish", "release")


@pytest.fixture(scope="module")
def empty(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("store") / "jobs.db"
    SqlStore(path).close()
    return path


class Driven:
    """One of the two stores, and the claims it has given."""

    def __init__(self, store: JobStore) -> None:
        self.store = store
        self.claims: list[Claim] = []

    def do(self, name: str, *arguments: Any) -> object:
        if name in OF_CLAIMS:
            if not self.claims:
                return None
            arguments = (self.claims[arguments[0] % len(self.claims)], *arguments[1:])
        method: Callable[..., object] = getattr(self.store, name)
        try:
            answer = method(*arguments)
        except JobError as error:
            return str(error)
        if isinstance(answer, Claim):
            self.claims.append(answer)
        return answer


@settings(max_examples=150)
@given(st.lists(OPERATIONS, min_size=5, max_size=40))
def test_the_two_stores_agree(empty: Path, operations: list[tuple[Any, ...]]) -> None:
    now_s = 1000.0

    def clock() -> float:
        return now_s

    with tempfile.TemporaryDirectory() as folder:
        path = shutil.copy(empty, Path(folder, "jobs.db"))
        twin, sql = Driven(MemoryStore(clock)), Driven(SqlStore(path, clock=clock))
        try:
            for name, *arguments in operations:
                if name == "pass":
                    now_s += arguments[0]
                else:
                    assert twin.do(name, *arguments) == sql.do(name, *arguments), (name, arguments)
            assert twin.store.list() == sql.store.list()
        finally:
            sql.store.close()
