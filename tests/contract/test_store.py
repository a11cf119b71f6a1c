"""What every job store does: the in-memory twin, SQLite, PostgreSQL, PostgreSQL behind PgBouncer."""

from __future__ import annotations

import math
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.errors import JobError
from megatron.fill.status import Cause, Status, Then
from megatron.fill.store import Claim, DeviceEntry, Job, JobStore, Progress, Standing
from megatron.fill.store.queue import ASK_AGAIN_S
from megatron.fill.store.rules import ASK_S
from megatron.fill.store.schema import metadata, version
from megatron.fill.store.sql import SqlStore
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from tests.support.clock import Clock
from tests.support.memory_store import MemoryStore
from tests.support.postgres import NoPostgres

WORK = Work("tasks:Pi", args={"points": 10}, search=("/jobs",))
FINISHED = [JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED]


@dataclass
class Backend:
    """One store, opened as often as a test likes."""

    clock: Clock[float]
    open_again: Callable[[], JobStore]
    opened: list[JobStore] = field(default_factory=list)

    def open(self) -> JobStore:
        self.opened.append(self.open_again())
        return self.opened[-1]


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory) -> Path:
    """An empty store, for copies of it: it takes longer to make one."""
    path: Path = tmp_path_factory.mktemp("store") / "jobs.db"
    SqlStore(f"sqlite:///{path}").close()
    return path


@pytest.fixture(scope="session")
def in_postgres(postgres) -> Iterator[Callable[[], str]]:
    """Empties the one store in PostgreSQL and returns its URL: a database of its own for each test takes far longer."""
    import psycopg

    url: str = postgres.new_database()
    SqlStore(url).close()
    tables = ", ".join(metadata.tables.keys() - {version.name})
    with psycopg.connect(url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute("SET lock_timeout = '10s'")

        def emptied() -> str:
            connection.execute(f"TRUNCATE {tables} RESTART IDENTITY".encode())
            return url

        yield emptied


@pytest.fixture(params=["memory", "sqlite", "postgresql", "pgbouncer"])
def backend(request: pytest.FixtureRequest, tmp_path) -> Iterator[Backend]:
    clock = Clock(1_000_000.0)
    if request.param == "memory":
        twin = MemoryStore(clock)
        made = Backend(clock, lambda: twin)
    else:
        if request.param == "sqlite":
            url = f"sqlite:///{tmp_path}/jobs.db"
            shutil.copy(request.getfixturevalue("sqlite"), tmp_path)
        else:
            postgres = request.getfixturevalue("postgres")
            url = request.getfixturevalue("in_postgres")()
            if request.param == "pgbouncer":
                try:
                    url = postgres.pooled(url)
                except NoPostgres as reason:
                    pytest.skip(str(reason))
        made = Backend(clock, lambda: SqlStore(url, clock=clock))
    yield made
    for store in made.opened:
        store.close()


@pytest.fixture
def store(backend) -> JobStore:
    return backend.open()


def new(name: str = "pi", **values) -> NewJob:
    usual: dict[str, Any] = {"name": name, "work": WORK, "user": "ada"}
    return NewJob(**usual | values)


def submitted(store: JobStore, *names: str) -> list[Job]:
    return store.submit([new(name) for name in names])


def claimed(store: JobStore, job: Job, owner: str = "agent", lease_s: float = 10) -> Claim:
    claim = store.claim(owner, [job.id], lease_s)
    assert claim is not None
    return claim


class TestSubmit:
    def test_a_new_job_is_queued_as_it_was_given(self, store, backend):
        [job] = store.submit([new(priority=-3, deadline_s=2_000_000.5)])
        assert (job.name, job.work, job.user, job.priority, job.deadline_s) == ("pi", WORK, "ada", -3, 2_000_000.5)
        assert (job.state, job.reason, job.attempt, job.owner) == (JobState.QUEUED, "", 0, None)
        assert (job.submitted_s, job.started_s, job.finished_s) == (backend.clock.now, None, None)
        assert (job.progress, job.result, job.cancelling) == (Progress(), {}, False)
        assert store.get(job.id) == job

    def test_another_opener_sees_it(self, store, backend):
        [job] = submitted(store, "pi")
        assert backend.open().get(job.id) == job

    def test_jobs_are_numbered_in_their_order(self, store):
        ids = [job.id for job in submitted(store, "c", "a", "b")] + [job.id for job in submitted(store, "d")]
        assert ids == sorted(ids)
        assert [job.name for job in store.list()] == ["c", "a", "b", "d"]

    def test_the_same_job_again_is_the_same_job(self, store):
        [first] = submitted(store, "pi")
        claimed(store, first)
        [again, other] = submitted(store, "pi", "other")
        assert again == store.get(first.id)
        assert other.id != first.id
        assert len(store.list()) == 2

    def test_a_finished_jobs_name_is_free(self, store):
        [first] = submitted(store, "pi")
        store.cancel(first.id)
        [second] = store.submit([new(work=Work("tasks:Other"))])
        assert second.id != first.id

    def test_a_job_may_be_after_another_of_the_same_call_or_an_earlier_one(self, store):
        submitted(store, "early")
        store.submit([new("late", work=replace(WORK, after=("early", "beside"))), new("beside")])
        assert [job.name for job in store.list()] == ["early", "late", "beside"]

    def test_a_job_after_one_that_there_is_not_stops_them_all(self, store):
        late = new("late", work=replace(WORK, after=("beside", "besode")))
        with pytest.raises(JobError, match=r"^job 'late' is after 'besode', but there is no job 'besode'; the "):
            store.submit([late, new("beside")])
        assert store.list() == []

    def test_a_name_in_use_by_another_job_stops_them_all(self, store):
        submitted(store, "pi")
        with pytest.raises(JobError, match=r"the name 'pi' is in use by the QUEUED job 1"):
            store.submit([new("before"), new(work=Work("tasks:Other")), new("after")])
        assert [job.name for job in store.list()] == ["pi"]

    def test_one_name_twice_in_one_call(self, store):
        first, second = submitted(store, "pi", "pi")
        assert first == second
        with pytest.raises(JobError, match="two different jobs are named 'e'"):
            store.submit([new("e"), new("e", work=Work())])

    def test_thousands_at_once(self, store):
        names = [f"job-{number}" for number in range(2500)]
        jobs = submitted(store, *names)
        assert [job.name for job in jobs] == [job.name for job in store.list()] == names
        assert submitted(store, *names[::-1]) == jobs[::-1]

    def test_nothing_is_nothing(self, store):
        assert store.submit([]) == []

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"name": ""}, "name of a job is ''"),
            ({"name": "a\0b"}, "expected printable text"),
            ({"user": "\udcff"}, "expected printable text"),
            ({"work": Work(args={"points": {1, 2}})}, "work is .* not JSON data"),
            ({"priority": 2**70}, "priority is .* expected a number of 64 bits"),
        ],
    )
    def test_what_no_database_holds_is_refused(self, store, values, message):
        with pytest.raises(JobError, match=message):
            store.submit([new(**values)])

    def test_any_text_and_any_size_come_back(self, store):
        work = Work(
            args={"text": "naïve 数据 🚀 \0 \udcff '; DROP TABLE jobs; --", "nan": math.nan, "big": "x" * 3_000_000}
        )
        [job] = store.submit([new("ünï-数", work=work, user="Ada Lovelace 🚀")])
        assert repr(store.find("ünï-数").work) == repr(work)  # NaN is not equal to itself
        assert store.get(job.id).user == "Ada Lovelace 🚀"
        [again] = store.submit([new("ünï-数", work=work)])
        assert again.id == job.id


class TestFind:
    def test_the_latest_of_a_name(self, store):
        [first] = submitted(store, "pi")
        store.cancel(first.id)
        [second] = submitted(store, "pi")
        assert store.find("pi").id == second.id

    def test_a_number(self, store):
        _, second = submitted(store, "a", "b")
        assert store.find(str(second.id)).name == "b"

    def test_a_name_that_looks_like_a_number_comes_first(self, store):
        _, second = submitted(store, "a", "1")
        assert store.find("1").id == second.id

    @pytest.mark.parametrize("name", ["digit", "99", "9" * 40, "-1", "1.5", "", "\udcff", "²"])
    def test_what_there_is_not(self, store, name):
        submitted(store, "digits", "pagerank")
        with pytest.raises(JobError) as caught:
            store.find(name)
        assert str(caught.value).startswith(f"there is no job {name!r}")
        assert ("the closest: digits" in str(caught.value)) == (name == "digit")

    @pytest.mark.parametrize("job_id", [0, -1, 77, 10**30])
    def test_no_such_number(self, store, job_id):
        submitted(store, "pi")
        for method in (store.get, store.cancel, store.retry):
            with pytest.raises(JobError, match=f"there is no job {job_id}"):
                method(job_id)
        assert store.claim("agent", [job_id], 1) is None


class TestList:
    def test_states_are_those_of_the_latest_of_a_name(self, store):
        first, _ = submitted(store, "a", "b")
        store.cancel(first.id)
        assert store.states(["a", "b", "c"]) == {"a": JobState.CANCELLED, "b": JobState.QUEUED}
        [again] = submitted(store, "a")
        claimed(store, again)
        assert store.states(["a"]) == {"a": JobState.RUNNING}
        assert store.states([]) == {}
        many = [f"many-{number}" for number in range(1200)]
        submitted(store, *many)
        assert store.states(many) == dict.fromkeys(many, JobState.QUEUED)

    def test_the_stamp_changes_with_what_waits_and_with_what_has_succeeded(self, store):
        stamps = [store.stamp()]
        first, _ = submitted(store, "a", "b")
        stamps.append(store.stamp())
        claim = claimed(store, first)
        stamps.append(store.stamp())
        store.heartbeat(claim, Progress(1.0), 60)
        assert store.stamp() == stamps[-1]
        assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        stamps.append(store.stamp())
        assert stamps == [(0, 0, 0), (2, 3, 0), (1, 2, 0), (1, 2, 1)]

    def test_the_time_that_each_user_has_had(self, store):
        ada, bob, late = store.submit([NewJob(name, WORK, user=name[:3]) for name in ("ada", "bob", "ada-2")])
        assert store.used_s(0.0) == {"ada": 0.0, "bob": 0.0}
        for job, harvested_s in ((ada, 2.0), (bob, 3.0)):
            claim = claimed(store, job)
            assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(harvested_s=harvested_s), {})
        store.heartbeat(claimed(store, late), Progress(harvested_s=5.0), 60)
        assert store.used_s(store.now_s() - 60) == {"ada": 7.0, "bob": 3.0}
        assert store.used_s(store.now_s() + 60) == {"ada": 5.0}  # what has not finished

    def test_by_state_and_the_latest(self, store):
        jobs = submitted(store, "a", "b", "c", "d")
        claimed(store, jobs[1])
        store.cancel(jobs[3].id)
        assert [job.name for job in store.list([JobState.QUEUED])] == ["a", "c"]
        assert [job.name for job in store.list({JobState.RUNNING, JobState.CANCELLED})] == ["b", "d"]
        assert [job.name for job in store.list(limit=2)] == ["c", "d"]
        assert [job.name for job in store.list([JobState.QUEUED], limit=1)] == ["c"]
        assert store.list(limit=0) == []


class TestClaim:
    def test_it_takes_the_first_wanted_that_is_queued(self, store, backend):
        a, b, c = submitted(store, "a", "b", "c")
        claimed(store, b)
        claim = store.claim("agent-2", [b.id, 10**6, c.id, a.id], 5, device="rank 1 of runs/first")
        assert claim.job.name == "c"
        assert (claim.owner, claim.attempt) == ("agent-2", 1)
        job = store.get(c.id)
        assert job == claim.job
        assert (job.state, job.owner, job.attempt) == (JobState.RUNNING, "agent-2", 1)
        assert (job.started_s, job.lease_until_s) == (backend.clock.now, backend.clock.now + 5)
        assert job.device == "rank 1 of runs/first"

    def test_it_looks_through_a_long_list(self, store):
        jobs = submitted(store, *(f"job-{number}" for number in range(100)))
        wanted = [job.id for job in reversed(jobs)]
        names = [store.claim("agent", wanted, 5).job.name for _ in range(100)]
        assert names == [f"job-{number}" for number in reversed(range(100))]
        assert store.claim("agent", iter(wanted), 5) is None

    def test_nothing_wanted_is_nothing_claimed(self, store):
        submitted(store, "pi")
        assert store.claim("agent", [], 5) is None

    @pytest.mark.parametrize("lease_s", [0, -1, math.inf, math.nan])
    def test_a_lease_has_an_end(self, store, lease_s):
        [job] = submitted(store, "pi")
        with pytest.raises(JobError, match="lease"):
            store.claim("agent", [job.id], lease_s)

    def test_a_user_has_no_more_running_than_may_be_however_many_claim_at_once(self, backend):
        store = backend.open()
        new = [NewJob(f"{user}{number}", WORK, user=user) for user in "ab" for number in range(4)]
        ids = [job.id for job in store.submit(new)]
        claims: list[Claim | None] = []

        def claim(own: JobStore, number: int) -> None:
            claims.append(own.claim(f"agent-{number}", ids, 1000, most=2))

        threads = [threading.Thread(target=claim, args=(backend.open(), number)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken = [found for found in claims if found is not None]
        assert sorted(found.job.user for found in taken) == ["a", "a", "b", "b"]
        assert store.claim("agent", ids, 1000, most=2) is None
        first = next(found for found in taken if found.job.user == "b")
        assert store.finish(first, Status(JobState.SUCCEEDED), Progress(), {})
        assert store.claim("agent", ids, 1000, most=2).job.user == "b"

    def test_many_threads_claim_each_job_once(self, backend):
        store = backend.open()
        ids = [job.id for job in submitted(store, *(f"job-{number}" for number in range(60)))]
        taken: list[int] = []

        def agent(number: int) -> None:
            mine = store if number % 2 else backend.open()
            while claim := mine.claim(f"agent-{number}", ids, 1000):
                taken.append(claim.job.id)
                assert mine.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})

        threads = [threading.Thread(target=agent, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # A claim passes over what another one is looking at, so an agent may stop early; none is taken twice.
        while claim := store.claim("last", ids, 1000):
            taken.append(claim.job.id)
        assert sorted(taken) == ids

    def test_many_threads_submit_the_same_jobs_once(self, backend):
        found: list[list[int]] = []
        names = [f"job-{number}" for number in range(8)]

        def submit(store: JobStore, order: list[str]) -> None:
            found.append(sorted(job.id for job in submitted(store, *order)))

        orders = [names, names[::-1], names[4:] + names[:4], names]
        threads = [threading.Thread(target=submit, args=(backend.open(), order)) for order in orders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(found) == 4
        assert len({tuple(ids) for ids in found}) == 1

    @pytest.mark.parametrize("other", [{"search": ("/there",)}, {"array": (0, 3)}])
    def test_where_it_is_imported_from_and_which_instance_it_is_make_no_other_job(self, store, other):
        [first] = store.submit([new("pi", work=replace(WORK, search=("/here",), array=(0, 2)))])
        [again] = store.submit([new("pi", work=replace(WORK, **{"search": ("/here",), "array": (0, 2)} | other))])
        assert again == first


class TestClaimOrder:
    def test_a_number_named_twice_counts_where_it_comes_first(self, store):
        first, second = submitted(store, "a", "b")
        claim = store.claim("agent", [first.id, second.id, first.id], 10)
        assert claim is not None
        assert claim.job.id == first.id


class TestNote:
    def test_it_says_why_a_job_waits(self, store):
        [job] = store.submit([new("pi")])
        unfit = Status(JobState.QUEUED, Cause.DOES_NOT_FIT, "too long\x00 for every bubble", device="rank \udcff")
        store.note(job.id, unfit)
        noted = store.get(job.id)
        assert (noted.state, noted.attempt) == (JobState.QUEUED, 0)
        assert noted.status == replace(unfit, detail="too long? for every bubble", device="rank ?")
        claim = store.claim("agent", [job.id], 10)
        assert claim is not None
        assert claim.job.reason == ""
        store.note(job.id, Status(JobState.QUEUED, detail="too late"))
        assert store.get(job.id) == claim.job

    def test_there_must_be_such_a_job(self, store):
        with pytest.raises(JobError):
            store.note(77, Status(JobState.QUEUED, detail="why"))


class TestHeartbeat:
    def test_it_renews_the_lease_and_says_how_far(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        progress = Progress(3.5, 10.0, "points", 0.25, 7, 1.5, 999_999.0)
        for _ in range(3):
            backend.clock.now += 8
            assert store.heartbeat(claim, progress, 10) is Standing.HELD
            assert store.recover() == 0
        job = store.get(claim.job.id)
        assert (job.progress, job.lease_until_s) == (progress, backend.clock.now + 10)

    def test_it_tells_of_a_cancellation(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        assert store.cancel(claim.job.id).cancelling
        assert store.heartbeat(claim, Progress(), 10) is Standing.CANCELLED
        assert store.get(claim.job.id).state is JobState.RUNNING

    def test_one_that_comes_late_but_first_keeps_the_job(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        backend.clock.now += 50
        assert store.heartbeat(claim, Progress(), 10) is Standing.HELD
        assert store.recover() == 0


class TestLeases:
    def test_a_job_whose_lease_ran_out_comes_back(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], owner="agent-1", lease_s=10)
        backend.clock.now += 9.9
        assert store.recover() == 0
        backend.clock.now += 0.1
        assert store.recover() == 1
        job = store.get(claim.job.id)
        assert (job.state, job.owner, job.lease_until_s, job.attempt) == (JobState.QUEUED, None, None, 1)
        assert job.reason == "agent-1 was not heard of in time"

    def test_it_keeps_its_progress_and_folder(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        assert store.place(claim, "/runs/first/jobs/pi")
        store.heartbeat(claim, Progress(5.0), 10)
        backend.clock.now += 10
        again = store.claim("agent-2", [claim.job.id], 10)
        assert (again.attempt, again.job.progress, again.job.directory) == (2, Progress(5.0), "/runs/first/jobs/pi")

    def test_a_former_owner_changes_nothing(self, store, backend):
        old = claimed(store, submitted(store, "pi")[0], owner="agent", lease_s=10)
        backend.clock.now += 10
        claimed(store, old.job, owner="agent")  # of the same name: the attempt tells them apart
        before = store.get(old.job.id)
        assert store.heartbeat(old, Progress(99.0), 10) is Standing.LOST
        assert not store.place(old, "/elsewhere")
        assert not store.finish(old, Status(JobState.SUCCEEDED), Progress(99.0), {"late": True})
        assert not store.release(old, Status(JobState.QUEUED, detail="late"), Progress(99.0), {"late": True})
        assert store.get(old.job.id) == before

    def test_another_one_cannot_use_a_claim(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        forged = Claim(claim.job, "someone else")
        assert store.heartbeat(forged, Progress(), 10) is Standing.LOST
        assert not store.finish(forged, Status(JobState.FAILED), Progress(), {})

    def test_after_recovery_nobody_has_it(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        backend.clock.now += 10
        store.recover()
        assert store.heartbeat(claim, Progress(), 10) is Standing.LOST
        assert not store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        assert store.get(claim.job.id).state is JobState.QUEUED

    def test_a_dead_owners_jobs_go_back_at_once_and_nobody_elses(self, store):
        dead = [claimed(store, job, owner="dead") for job in submitted(store, "a", "b")]
        other = claimed(store, submitted(store, "c")[0], owner="alive")
        store.cancel(dead[1].job.id)
        assert store.disown("dead") == 2
        states = [(job.state, job.reason, job.owner) for job in store.list()]
        assert states == [
            (JobState.QUEUED, "its agent died", None),
            (JobState.CANCELLED, "cancelled", None),
            (JobState.RUNNING, "", other.owner),
        ]
        assert store.heartbeat(dead[0], Progress(), 10) is Standing.LOST
        assert store.disown("dead") == 0


class TestFinish:
    @pytest.mark.parametrize("state", FINISHED)
    def test_the_job_is_done(self, store, backend, state):
        claim = claimed(store, submitted(store, "pi")[0])
        backend.clock.now += 3
        assert store.finish(
            claim, Status(state, detail="why\0 \udcff"), Progress(10.0, 10.0), {"accuracy": 0.5, "text": "数"}
        )
        job = store.get(claim.job.id)
        assert (job.state, job.reason, job.finished_s) == (state, "why? ?", backend.clock.now)
        assert (job.owner, job.lease_until_s) == (None, None)
        assert (job.progress, job.result) == (Progress(10.0, 10.0), {"accuracy": 0.5, "text": "数"})
        assert store.claim("agent", [job.id], 10) is None

    def test_all_of_a_status_is_kept(self, store):
        full = Status(JobState.FAILED, Cause.SIGNAL, "SIGKILL {}", Then.DIED_IN_A_ROW, 3, 1, 2, "rank 0", unheard=True)
        claim = claimed(store, submitted(store, "pi")[0])
        assert store.finish(claim, full, Progress(), {})
        assert store.get(claim.job.id).status == full
        assert [job.status for job in store.list({JobState.FAILED})] == [full]
        assert store.retry(claim.job.id).status == Status(JobState.QUEUED)

    def test_every_cause_is_kept(self, store):
        [job] = submitted(store, "pi")
        for cause in Cause:
            assert store.release(claimed(store, job), Status(JobState.QUEUED, cause), Progress(), {})
            assert store.get(job.id).status == Status(JobState.QUEUED, cause)

    def test_the_same_call_again_agrees_and_changes_nothing(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(1.0), {"a": 1})
        before = store.get(claim.job.id)
        assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(2.0), {"a": 2})
        assert not store.finish(claim, Status(JobState.FAILED), Progress(2.0), {"a": 2})
        assert store.get(claim.job.id) == before

    def test_a_cancelled_job_may_finish_first(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        store.cancel(claim.job.id)
        assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        job = store.get(claim.job.id)
        assert (job.state, job.cancelling) == (JobState.SUCCEEDED, False)

    @pytest.mark.parametrize("state", [JobState.QUEUED, JobState.RUNNING])
    def test_with_an_end_only(self, store, state):
        claim = claimed(store, submitted(store, "pi")[0])
        with pytest.raises(JobError, match=f"cannot finish as {state}"):
            store.finish(claim, Status(state), Progress(), {})

    def test_with_plain_results_only(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        with pytest.raises(JobError, match="result"):
            store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {"a": object()})


class TestRelease:
    def test_the_job_is_queued_again(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        progress = Progress(5.0, 10.0, checkpoint_s=1.0)
        assert store.release(claim, Status(JobState.QUEUED, detail="the main job ended"), progress, {"epoch": 3})
        job = store.get(claim.job.id)
        assert (job.state, job.reason, job.owner, job.attempt) == (JobState.QUEUED, "the main job ended", None, 1)
        assert (job.progress, job.result, job.finished_s) == (progress, {"epoch": 3}, None)
        assert claimed(store, job).job.reason == ""


class TestCancel:
    def test_a_queued_job_at_once(self, store, backend):
        [job] = submitted(store, "pi")
        cancelled = store.cancel(job.id)
        assert (cancelled.state, cancelled.finished_s) == (JobState.CANCELLED, backend.clock.now)
        assert store.get(job.id) == cancelled
        assert store.claim("agent", [job.id], 10) is None

    def test_a_running_job_when_it_is_given_back(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        store.cancel(claim.job.id)
        assert store.cancel(claim.job.id).cancelling  # twice is no harm
        assert store.release(claim, Status(JobState.QUEUED, detail="the main job ended"), Progress(2.0), {})
        job = store.get(claim.job.id)
        assert (job.state, job.reason, job.cancelling) == (JobState.CANCELLED, "cancelled", False)
        assert job.progress == Progress(2.0)

    def test_a_running_job_when_its_agent_is_gone(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        store.cancel(claim.job.id)
        backend.clock.now += 10
        assert store.recover() == 1
        assert store.get(claim.job.id).state is JobState.CANCELLED

    def test_at_once_where_the_agent_is_gone_already(self, store, backend):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        assert not store.get(claim.job.id).lost(store.now_s())
        backend.clock.now += 10
        assert store.get(claim.job.id).lost(store.now_s())
        job = store.cancel(claim.job.id)
        assert (job.state, job.reason, job.owner, job.cancelling) == (JobState.CANCELLED, "cancelled", None, False)
        assert store.get(job.id) == job
        assert store.heartbeat(claim, Progress(), 10) is Standing.LOST
        assert store.recover() == 0

    @pytest.mark.parametrize("state", FINISHED)
    def test_not_a_finished_one(self, store, state):
        claim = claimed(store, submitted(store, "pi")[0])
        store.finish(claim, Status(state), Progress(), {})
        with pytest.raises(JobError, match=rf"job pi \(1\) is {state}"):
            store.cancel(claim.job.id)


class TestRetry:
    @pytest.mark.parametrize("state", [JobState.FAILED, JobState.CANCELLED])
    def test_the_job_is_queued_again_with_its_checkpoint(self, store, state):
        claim = claimed(store, submitted(store, "pi")[0])
        store.place(claim, "/runs/first/jobs/pi")
        store.finish(claim, Status(state, detail="why"), Progress(5.0, checkpoint_s=1.0), {})
        job = store.retry(claim.job.id)
        assert (job.state, job.reason, job.finished_s, job.attempt) == (JobState.QUEUED, "", None, 1)
        assert (job.progress, job.directory) == (Progress(5.0, checkpoint_s=1.0), "/runs/first/jobs/pi")
        assert store.get(job.id) == job
        assert not store.finish(claim, Status(state, detail="why"), Progress(), {})
        assert claimed(store, job).attempt == 2

    def test_its_failures_are_forgotten(self, store):
        claim = claimed(store, submitted(store, "pi")[0])
        assert store.finish(claim, Status(JobState.FAILED), Progress(work_done=2.0, failures=3), {})
        assert store.get(claim.job.id).progress == Progress(work_done=2.0, failures=3)
        assert store.retry(claim.job.id).progress == Progress(work_done=2.0)

    def test_not_one_that_waits_runs_or_has_succeeded(self, store):
        [job] = submitted(store, "pi")
        with pytest.raises(JobError, match="is QUEUED; expected a FAILED or CANCELLED job"):
            store.retry(job.id)
        claim = claimed(store, job)
        with pytest.raises(JobError, match="is RUNNING"):
            store.retry(job.id)
        store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
        with pytest.raises(JobError, match="is SUCCEEDED"):
            store.retry(job.id)

    @pytest.mark.parametrize("cancelling", [False, True])
    def test_a_job_whose_agent_is_gone(self, store, backend, cancelling):
        claim = claimed(store, submitted(store, "pi")[0], lease_s=10)
        store.heartbeat(claim, Progress(5.0, checkpoint_s=1.0), 10)
        if cancelling:
            store.cancel(claim.job.id)
        backend.clock.now += 10
        job = store.retry(claim.job.id)
        assert (job.state, job.reason) == (JobState.QUEUED, "agent was not heard of in time")
        assert (job.owner, job.lease_until_s, job.cancelling) == (None, None, False)
        assert job.progress == Progress(5.0, checkpoint_s=1.0)
        assert store.get(job.id) == job
        assert store.heartbeat(claim, Progress(), 10) is Standing.LOST
        assert claimed(store, job).attempt == 2

    def test_not_when_its_name_is_in_use_again(self, store):
        [first] = submitted(store, "pi")
        store.cancel(first.id)
        [second] = submitted(store, "pi")
        with pytest.raises(JobError, match=f"its name is in use by the QUEUED job {second.id}"):
            store.retry(first.id)


class TestDevices:
    def test_they_are_there_until_their_lease_ends(self, store, backend):
        cycle = {"period_ns": 10**12, "slots": [{"kind": "fill", "duration_ns": 5, "free_bytes": 2**40}]}
        one = DeviceEntry("run/rank 0", "run", busy_until_s=2e6, job="pi", cycle=cycle, refuses=(3, 12))
        two = DeviceEntry("RUN/rank 1", "run", busy_until_s=math.inf)
        store.report_device(one, 10)
        store.report_device(two, 20)
        assert store.devices() == [two, one]
        backend.clock.now += 10
        assert store.devices() == [two]
        store.report_device(one, 10)
        assert backend.open().devices() == [two, one]

    def test_the_last_report_counts(self, store):
        store.report_device(DeviceEntry("a", "run", busy_until_s=1.0, job="pi"), 10)
        store.report_device(DeviceEntry("a", "run"), 10)
        assert store.devices() == [DeviceEntry("a", "run")]

    def test_they_can_be_forgotten(self, store):
        for name in ("a", "of a folder \udcff"):
            store.report_device(DeviceEntry(name, "run"), 10)
            assert len(store.devices()) == 1
            store.forget_device(name)
        store.forget_device("never there")
        assert store.devices() == []


class TestMoves:
    """A job that runs is asked for by a device that is idle."""

    @pytest.fixture
    def claim(self, store) -> Claim:
        """Of a job that runs on rank 1 while rank 0 is idle."""
        store.report_device(DeviceEntry("rank 0", "run"), 1000)
        store.report_device(DeviceEntry("rank 1", "run", math.inf, "other"), 1000)
        [job] = submitted(store, "pi")
        claim = store.claim("agent-1", [job.id], 1000, "rank 1")
        assert claim is not None
        return claim

    def ask(self, store: JobStore, claim: Claim, device: str = "rank 0") -> bool:
        return store.ask_for(claim.job.id, claim.attempt, device)

    def test_its_holder_hears_of_it_and_the_asker_gets_it(self, store, claim):
        assert store.heartbeat(claim, Progress(1.0), 1000) is Standing.HELD
        assert self.ask(store, claim)
        assert store.heartbeat(claim, Progress(2.0), 1000) is Standing.MOVE
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(3.0), {})
        assert store.claim("agent-1", [claim.job.id], 10, "rank 1") is None
        again = store.claim("agent-0", [claim.job.id], 10, "rank 0")
        assert again is not None
        assert (again.attempt, again.job.progress, again.job.device) == (2, Progress(3.0), "rank 0")
        assert store.heartbeat(again, Progress(3.0), 10) is Standing.HELD
        assert store.heartbeat(claim, Progress(9.0), 10) is Standing.LOST

    def test_another_one_takes_the_next_job_meanwhile(self, store, claim):
        [other] = submitted(store, "other")
        assert self.ask(store, claim)
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        taken = store.claim("agent-1", [claim.job.id, other.id], 10, "rank 1")
        assert taken is not None
        assert taken.job.id == other.id

    def test_it_is_not_asked_for_again_for_a_while(self, store, backend, claim):
        store.report_device(DeviceEntry("rank 2", "run"), 1000)
        assert self.ask(store, claim)
        assert not self.ask(store, claim, "rank 2")
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        again = store.claim("agent-0", [claim.job.id], 1000, "rank 0")
        assert again is not None
        backend.clock.now += ASK_AGAIN_S - 0.1
        assert not self.ask(store, again, "rank 2")
        backend.clock.now += 0.1
        assert self.ask(store, again, "rank 2")
        assert store.heartbeat(again, Progress(), 1000) is Standing.MOVE

    def test_only_a_job_that_runs_elsewhere_is_asked_for_and_only_by_an_idle_device(self, store, claim):
        [waiting] = submitted(store, "waiting")
        assert not store.ask_for(waiting.id, 0, "rank 0")
        assert not store.ask_for(claim.job.id, claim.attempt - 1, "rank 0")
        assert not store.ask_for(77, 1, "rank 0")
        assert not self.ask(store, claim, "rank 7")  # nobody knows it
        store.report_device(DeviceEntry("rank 0", "run", math.inf, "busy"), 1000)
        assert not self.ask(store, claim)
        store.report_device(DeviceEntry("rank 1", "run"), 1000)
        assert not self.ask(store, claim, "rank 1")  # it is there
        store.report_device(DeviceEntry("rank 0", "run"), 1000)
        store.cancel(claim.job.id)
        assert not self.ask(store, claim)
        assert store.heartbeat(claim, Progress(), 10) is Standing.CANCELLED

    def test_a_cancellation_counts_for_more(self, store, claim):
        assert self.ask(store, claim)
        store.cancel(claim.job.id)
        assert store.heartbeat(claim, Progress(), 1000) is Standing.CANCELLED
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        assert store.get(claim.job.id).state is JobState.CANCELLED
        assert store.claim("agent-0", [claim.job.id], 10, "rank 0") is None

    def test_when_the_asker_dies_the_job_stays_or_anybody_has_it(self, store, claim):
        assert self.ask(store, claim)
        store.forget_device("rank 0")
        assert store.heartbeat(claim, Progress(), 1000) is Standing.HELD
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        assert store.claim("agent-1", [claim.job.id], 10, "rank 1") is not None

    def test_when_the_asker_has_another_job_the_job_stays_or_anybody_has_it(self, store, claim):
        assert self.ask(store, claim)
        store.report_device(DeviceEntry("rank 0", "run", math.inf, "another"), 1000)
        assert store.heartbeat(claim, Progress(), 1000) is Standing.HELD
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        assert store.claim("agent-1", [claim.job.id], 10, "rank 1") is not None

    def test_an_asker_that_does_not_come_is_not_waited_for(self, store, backend, claim):
        assert self.ask(store, claim)
        assert store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(), {})
        backend.clock.now += ASK_S - 0.1
        assert store.claim("agent-1", [claim.job.id], 10, "rank 1") is None
        backend.clock.now += 0.1
        assert store.claim("agent-1", [claim.job.id], 10, "rank 1") is not None

    def test_a_holder_that_does_not_hear_of_it_in_time_keeps_the_job(self, store, backend, claim):
        assert self.ask(store, claim)
        backend.clock.now += ASK_S
        assert store.heartbeat(claim, Progress(), 1000) is Standing.HELD

    def test_when_the_holder_dies_the_asker_gets_it_after_the_lease(self, store, backend, claim):
        assert store.heartbeat(claim, Progress(5.0), 10) is Standing.HELD
        assert self.ask(store, claim)
        assert store.claim("agent-0", [claim.job.id], 10, "rank 0") is None
        backend.clock.now += 10
        again = store.claim("agent-0", [claim.job.id], 10, "rank 0")
        assert again is not None
        assert (again.attempt, again.job.progress) == (2, Progress(5.0))
        assert not store.release(claim, Status(JobState.QUEUED, detail="moves"), Progress(9.0), {})

    def test_a_job_that_ends_before_it_could_move_has_ended(self, store, claim):
        assert self.ask(store, claim)
        assert store.finish(claim, Status(JobState.SUCCEEDED), Progress(10.0), {})
        assert store.claim("agent-0", [claim.job.id], 10, "rank 0") is None
        assert store.get(claim.job.id).state is JobState.SUCCEEDED

    def test_many_askers_and_a_cancellation_at_once(self, backend, store, claim):
        for rank in range(2, 6):
            store.report_device(DeviceEntry(f"rank {rank}", "run"), 1000)
        asked: list[bool] = []

        def asker(rank: int) -> None:
            asked.append(backend.open().ask_for(claim.job.id, claim.attempt, f"rank {rank}"))

        threads = [threading.Thread(target=asker, args=(rank,)) for rank in range(2, 6)]
        threads.append(threading.Thread(target=lambda: backend.open().cancel(claim.job.id)))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(asked) <= 1
        assert store.heartbeat(claim, Progress(), 1000) is Standing.CANCELLED


class TestProfiles:
    def test_the_last_one_is_kept(self, store, backend):
        assert store.profile("key") is None
        store.keep_profile("key", {"nodes": [1, 2.5, None], "nested": {"a": "数"}})
        store.keep_profile("other", {})
        store.keep_profile("key", {"nodes": []})
        assert backend.open().profile("key") == {"nodes": []}
        assert store.profile("other") == {}

    def test_what_is_read_is_the_readers_own(self, store):
        profile = {"nodes": [1]}
        store.keep_profile("key", profile)
        profile["nodes"].append(2)
        assert store.profile("key") == {"nodes": [1]}


class TestForget:
    DONE = Status(JobState.SUCCEEDED, Cause.FINISHED)

    def ended(self, store: JobStore, name: str, after: tuple[str, ...] = ()) -> Job:
        [job] = store.submit([new(name, work=replace(WORK, after=after))])
        assert store.finish(claimed(store, job), self.DONE, Progress(), {})
        return store.get(job.id)

    def test_of_the_finished_jobs_only_the_old_ones_go(self, store, backend):
        old = self.ended(store, "old")
        waits, runs = submitted(store, "waits", "runs")
        claimed(store, runs, lease_s=1e6)
        backend.clock.now += 100
        young, newest = self.ended(store, "young"), self.ended(store, "newest")
        before_s = backend.clock.now - 50
        every = [job.id for job in store.list()]
        assert store.forget([young.id, waits.id, runs.id, newest.id], before_s) == []
        assert store.forget([*every, 99, -1], before_s) == [old.id]
        assert [job.name for job in store.list()] == ["waits", "runs", "young", "newest"]
        assert store.forget(every, before_s) == []

    def test_a_job_stays_that_another_is_after(self, store, backend):
        first, second, third = (self.ended(store, *one) for one in (("a",), ("b", ("a",)), ("c", ("b",))))
        self.ended(store, "a")  # the latest of that name is the one that counts
        [waits] = store.submit([new("waits", work=replace(WORK, after=("b",)))])
        every = [job.id for job in store.list()]
        assert store.forget(every, backend.clock.now + 1) == [first.id, third.id]
        claim = claimed(store, waits)
        assert store.finish(claim, self.DONE, Progress(), {})
        submitted(store, "newest")
        assert store.forget(every, backend.clock.now + 1) == [second.id, second.id + 2, waits.id]

    def test_a_number_is_not_given_twice(self, store, backend):
        jobs = [self.ended(store, name) for name in "ab"]
        assert store.forget([job.id for job in jobs], backend.clock.now + 1) == [jobs[0].id]
        [another] = submitted(store, "c")
        assert another.id > jobs[1].id

    def test_a_job_that_was_put_back_stays(self, store, backend):
        [job, _] = submitted(store, "a", "newest")
        store.cancel(job.id)
        backend.open().retry(job.id)
        assert store.forget([job.id], backend.clock.now + 1) == []
