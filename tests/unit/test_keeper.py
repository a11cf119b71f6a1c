"""An agent and its store: heartbeats, cancellations, lost leases, and a database that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from megatron.fill.errors import StoreError
from megatron.fill.runtime import keeper as module
from megatron.fill.runtime.keeper import Held, Keeper, progress_of
from megatron.fill.runtime.steplog import StepLog, create_log
from megatron.fill.store.memory import MemoryStore
from megatron.fill.store.port import Device, NewJob, Progress, Standing
from megatron.fill.types import JobState

SPEC = {"task": "m:C", "command": None, "args": {}, "memory_bytes": None, "search": []}


class Flaky:
    """A store that does not answer while ``down``."""

    def __init__(self, store: MemoryStore) -> None:
        self.store, self.down, self.calls = store, False, 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.calls += 1
            if self.down:
                raise StoreError("the database is locked")
            return getattr(self.store, name)(*args)

        return call


@pytest.fixture
def flaky(monkeypatch: pytest.MonkeyPatch) -> Flaky:
    store = Flaky(MemoryStore())
    monkeypatch.setattr(module, "open_store", lambda url, create: store)
    monkeypatch.setattr(module, "_TICK_S", 0.02)
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 0.05)
    return store


def make(names: str = "a", lease_s: float = 1.0) -> Keeper:
    jobs = [NewJob(name, SPEC) for name in names]
    return Keeper("memory", "agent", jobs, lambda: Device("rank 0", "run"), lease_s)


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def take(keeper: Keeper, work: Callable[[], float] = lambda: 0.0) -> Held:
    claim = keeper.claim(lambda store: [job.id for job in store.list({JobState.QUEUED})], "rank 0")
    assert claim is not None
    held = Held(claim, lambda: Progress(work_done=work()))
    keeper.hold(held)
    return held


def test_jobs_are_submitted_and_the_device_is_known(flaky):
    keeper = make("ab")
    keeper.start()
    wait_for(lambda: len(flaky.store.list()) == 2)
    wait_for(lambda: [device.name for device in flaky.store.devices()] == ["rank 0"])
    keeper.stop()
    assert flaky.store.devices() == []


def test_a_job_whose_name_is_taken_does_not_keep_the_others_out(flaky):
    flaky.store.submit([NewJob("a", SPEC | {"task": "other:C"})])
    keeper = make("ab")
    assert keeper.ask(lambda store: len(store.list())) == 2
    assert [name for name, _ in keeper.refused] == ["a"]


def test_heartbeats_keep_a_job_and_carry_progress(flaky):
    keeper = make(lease_s=0.3)
    keeper.start()
    work = [0.0]
    held = take(keeper, lambda: work[0])
    for _ in range(20):
        work[0] += 1
        time.sleep(0.05)
    job = flaky.store.get(held.claim.job.id)
    assert job.state is JobState.RUNNING
    assert job.progress.work_done > 10
    assert held.standing is Standing.HELD
    keeper.let_go(held)
    assert keeper.finish(held, JobState.SUCCEEDED, "", {"x": 1}, 1.0)
    assert flaky.store.get(held.claim.job.id).result == {"x": 1}
    keeper.stop()


def test_a_cancellation_arrives(flaky):
    keeper = make(lease_s=0.3)
    keeper.start()
    held = take(keeper)
    flaky.store.cancel(held.claim.job.id)
    wait_for(lambda: held.standing is Standing.CANCELLED)
    keeper.stop()


def test_a_store_that_is_away_is_asked_again_and_the_job_goes_on(flaky):
    keeper = make(lease_s=5.0)
    keeper.every_s = 0.02
    keeper.start()
    held = take(keeper)
    flaky.down = True
    assert keeper.ask(lambda store: store.list()) is None
    calls = flaky.calls
    time.sleep(0.3)
    assert flaky.calls - calls < 10  # the pauses grow
    assert held.standing is Standing.HELD
    flaky.down = False
    keeper.let_go(held)
    assert keeper.finish(held, JobState.QUEUED, "the main job ended first", {}, 3.0)
    assert flaky.store.get(held.claim.job.id).state is JobState.QUEUED
    keeper.stop()


def test_threads_that_find_the_store_away_at_once_lengthen_the_pause_once(flaky, caplog, monkeypatch):
    monkeypatch.setattr(module, "_FIRST_PAUSE_S", 60.0)
    keeper = make()
    flaky.down = True
    for _ in range(3):
        assert keeper.ask(lambda store: store.list(), 0.001) is None
    assert flaky.calls >= 3
    assert [record.args[0] for record in caplog.records] == [60.0]


def test_a_job_whose_lease_ran_out_is_not_finished_twice(flaky):
    keeper = make(lease_s=0.2)
    held = take(keeper)  # no heartbeats: the keeper was not started
    time.sleep(0.3)
    other = flaky.store.claim("other", [held.claim.job.id], 60.0)
    assert other is not None
    assert not keeper.finish(held, JobState.SUCCEEDED, "", {}, 0.0)
    assert flaky.store.get(held.claim.job.id).owner == "other"


def test_progress_adds_up_over_attempts(flaky):
    job = flaky.store.submit([NewJob("a", SPEC)])[0]
    log = StepLog(create_log())
    log.unit, log.base_work, log.total_work = "Bilder/ü", 10.0, 30.0
    log.step_ended(0, 10, 5.0, False)
    progress = progress_of(job, log, time.monotonic() - 2.0)
    assert (progress.work_done, progress.total_work, progress.unit, progress.steps) == (15.0, 30.0, "Bilder/ü", 1)
    assert progress.rate == pytest.approx(2.5, rel=0.2)
    assert (progress.checkpoint_s, progress.resumable, progress.startup_s) == (None, False, None)


def test_a_worker_that_starts_has_not_undone_what_was_done(flaky):
    [job] = flaky.store.submit([NewJob("a", SPEC)])
    job, log = replace(job, progress=Progress(40.0, 100.0, checkpoint_s=5.0)), StepLog(create_log())
    assert progress_of(job, log, time.monotonic()).work_done == 40
    log.serving_ns = time.monotonic_ns()  # the checkpoint could not be used: it began again
    assert progress_of(job, log, time.monotonic()).work_done == 0
    log.base_work = 38.0
    assert progress_of(job, log, time.monotonic()).work_done == 38


def test_a_worker_that_serves_says_how_long_it_took_and_whether_it_can_go_on_elsewhere(flaky):
    job = flaky.store.submit([NewJob("a", SPEC)])[0]
    log = StepLog(create_log())
    began_s = time.monotonic() - 5.0
    log.serving_ns, log.resumable = int((began_s + 2.0) * 1e9), True
    progress = progress_of(job, log, began_s)
    assert progress.startup_s == pytest.approx(2.0)
    assert progress.resumable
    log.serving_ns = int((began_s + 3600) * 1e9)  # a job can write there what it likes
    assert progress_of(job, log, began_s).startup_s is None


def test_that_another_rank_asks_for_the_job_arrives(flaky):
    keeper = make(lease_s=0.3)
    keeper.start()
    held = take(keeper)
    flaky.store.report_device(Device("rank 1", "run"), 60)
    assert flaky.store.ask_for(held.claim.job.id, held.claim.attempt, "rank 1")
    wait_for(lambda: held.standing is Standing.MOVE)
    keeper.stop()


def test_what_a_dead_agent_held_is_given_back_once_the_store_answers(flaky):
    flaky.store.submit([NewJob("a", SPEC)])
    assert flaky.store.claim("dead agent", [1], 60.0) is not None
    told = []
    keeper = Keeper(
        "memory", "agent", None, lambda: Device("rank 0", "run"), 1.0, ["dead agent"], submitted=lambda: told.append(1)
    )
    flaky.down = True
    assert keeper.ask(lambda store: store.list()) is None
    flaky.down = False
    time.sleep(0.1)
    assert keeper.ask(lambda store: store.get(1).state) is JobState.QUEUED
    assert told == []  # the dead one had submitted already


def test_an_agent_that_follows_another_makes_no_store(tmp_path):
    path = tmp_path / "jobs.db"
    following = Keeper(str(path), "agent", None, lambda: Device("rank 0", "run"), 1.0, ["dead agent"])
    assert following.ask(lambda store: store.list()) is None
    assert not path.exists()
    told = []
    first = Keeper(str(path), "agent", [], lambda: Device("rank 0", "run"), 1.0, submitted=lambda: told.append(1))
    assert first.ask(lambda store: store.list()) == []
    assert told == [1]
    assert following.ask(lambda store: store.list(), 5.0) == []


def test_where_one_is_in_the_way_the_others_are_submitted_each_after_what_it_is_after(flaky):
    flaky.store.submit([NewJob("a", SPEC | {"task": "other:C"})])
    jobs = [NewJob("c", SPEC | {"after": ["b"]}), NewJob("a", SPEC), NewJob("b", SPEC)]
    keeper = Keeper("memory", "agent", jobs, lambda: Device("rank 0", "run"), 1.0)
    assert keeper.ask(lambda store: [job.name for job in store.list()]) == ["a", "b", "c"]
    assert [name for name, _ in keeper.refused] == ["a"]


def test_that_the_jobs_are_submitted_is_told(flaky):
    told = []
    keeper = Keeper(
        "memory", "agent", [NewJob("a", SPEC)], lambda: Device("rank 0", "run"), 1.0, submitted=lambda: told.append(1)
    )
    assert keeper.ask(lambda store: len(store.list())) == 1
    assert told == [1]


def test_the_end_of_a_job_is_said_later_if_nobody_hears_it_now(flaky):
    keeper = make(lease_s=60.0)
    keeper.start()
    held = take(keeper)
    flaky.down = True
    keeper.let_go(held)
    assert not keeper.finish(held, JobState.SUCCEEDED, "", {"x": 1}, 0.05)
    assert flaky.store.get(held.claim.job.id).state is JobState.RUNNING
    flaky.down = False
    wait_for(lambda: flaky.store.get(held.claim.job.id).state is JobState.SUCCEEDED)
    keeper.stop()


def test_an_end_that_cannot_be_said_stops_nothing_else(flaky):
    keeper = make("ab", lease_s=5.0)
    keeper.every_s = 0.02
    said = []

    def broken(store: Any) -> bool:
        raise KeyError("what no store expects")

    keeper._unsaid = [broken, lambda store: bool(said.append("the next one")) or True]
    keeper.start()
    held = take(keeper)
    before_s = held.beat_s
    wait_for(lambda: said == ["the next one"] and held.beat_s > before_s)
    assert keeper._unsaid == []
    keeper.stop()


def test_one_job_s_broken_progress_stops_no_other_heartbeat(flaky):
    keeper = make("ab", lease_s=5.0)
    keeper.every_s = 0.02
    broken, sound = take(keeper), take(keeper)
    broken.progress = lambda: Progress(work_done=1 / 0)
    before_s = sound.beat_s
    keeper.start()
    wait_for(lambda: sound.beat_s > before_s)
    wait_for(lambda: flaky.store.devices() != [])
    keeper.stop()
