"""An agent and its store: heartbeats, cancellations, lost leases, and a database that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from megatron.fill.agent import claims as agent_claims
from megatron.fill.agent.claims import Claims, HeldClaim
from megatron.fill.agent.watch import progress_of
from megatron.fill.errors import StoreError
from megatron.fill.pages.steplog import StepLog, create_log
from megatron.fill.status import Status
from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import DeviceEntry, Progress, Standing
from megatron.fill.types import JobState
from megatron.fill.work import NewJob, Work
from tests.support.memory_store import MemoryStore
from tests.support.waiting import until

WORK = Work("m:C")


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
def flaky(monkeypatch) -> Flaky:
    monkeypatch.setattr(agent_claims, "_TICK_S", 0.02)
    monkeypatch.setattr(agent_claims, "_FIRST_PAUSE_S", 0.05)
    return Flaky(MemoryStore())


def make(flaky: Flaky, names: str = "a", lease_s: float = 1.0, **settings: Any) -> Claims:
    return claims_of(flaky, [NewJob(name, WORK) for name in names], lease_s, **settings)


def claims_of(flaky: Flaky, jobs: list[NewJob] | None, lease_s: float = 1.0, **others: Any) -> Claims:
    settings: dict[str, Any] = {
        "device": lambda: DeviceEntry("rank 0", "run"),
    } | others
    return Claims(
        "memory", "agent", jobs, lease_s=lease_s, connect=lambda url, create: cast(JobStore, flaky), **settings
    )


def take(claims: Claims, work: Callable[[], float] = lambda: 0.0) -> HeldClaim:
    claim = claims.ask(
        lambda store: store.claim(
            claims.owner, [job.id for job in store.list({JobState.QUEUED})], claims.lease_s, "rank 0"
        )
    )
    assert claim is not None
    held = HeldClaim(claim, lambda: Progress(work_done=work()))
    claims.renew(held)
    return held


def test_jobs_are_submitted_and_the_device_is_known(flaky):
    claims = make(flaky, "ab")
    claims.start()
    until(lambda: len(flaky.store.list()) == 2)
    until(lambda: [device.name for device in flaky.store.devices()] == ["rank 0"])
    claims.stop()
    assert flaky.store.devices() == []


def test_a_job_whose_name_is_taken_does_not_keep_the_others_out(flaky, caplog):
    flaky.store.submit([NewJob("a", replace(WORK, task="other:C"))])
    claims = make(flaky, "ab")
    assert claims.ask(lambda store: len(store.list())) == 2
    [refused] = caplog.messages
    assert refused.startswith("job a is not submitted: ")


def test_heartbeats_keep_a_job_and_carry_progress(flaky):
    claims = make(flaky, lease_s=0.3)
    claims.start()
    work = [0.0]
    held = take(claims, lambda: work[0])
    for _ in range(20):
        work[0] += 1
        time.sleep(0.05)
    job = flaky.store.get(held.claim.job.id)
    assert job.state is JobState.RUNNING
    assert job.progress.work_done > 10
    assert held.standing is Standing.HELD
    claims.stop_renewing(held.claim)
    assert claims.finish(held.claim, Status(JobState.SUCCEEDED), held.progress(), {"x": 1}, 1.0)
    assert flaky.store.get(held.claim.job.id).result == {"x": 1}
    claims.stop()


def test_a_first_step_is_told_at_once_and_others_with_the_heartbeats(flaky):
    claims = make(flaky, lease_s=1e6)
    claims.every_s = 1e6
    held = take(claims)
    beats = flaky.calls
    for _ in range(3):
        claims.ask(claims._beat)
    assert flaky.calls == beats
    for steps in (1, 2):
        held.progress = lambda: Progress(steps=steps)  # noqa: B023
        claims.ask(claims._beat)
        assert flaky.store.get(held.claim.job.id).progress.steps == 1


def test_the_steps_of_earlier_attempts_are_no_first_step(flaky):
    claims = make(flaky, lease_s=1e6)
    claims.every_s = 1e6
    before = take(claims)
    claims.stop_renewing(before.claim)
    assert claims.finish(before.claim, Status(JobState.QUEUED), Progress(steps=7), {}, 1.0)
    held = take(claims)
    for steps, told in ((7, 7), (8, 8), (9, 8)):
        held.progress = lambda: Progress(steps=steps, harvested_s=1.0)  # noqa: B023
        claims.ask(claims._beat)
        progress = flaky.store.get(held.claim.job.id).progress
        assert (progress.steps, progress.harvested_s) == (told, float(told == 8))


def test_a_cancellation_arrives(flaky):
    claims = make(flaky, lease_s=0.3)
    claims.start()
    held = take(claims)
    flaky.store.cancel(held.claim.job.id)
    until(lambda: held.standing is Standing.CANCELLED)
    claims.stop()


def test_a_store_that_is_away_is_asked_again_and_the_job_goes_on(flaky):
    claims = make(flaky, lease_s=5.0)
    claims.every_s = 0.02
    claims.start()
    held = take(claims)
    flaky.down = True
    assert claims.ask(lambda store: store.list()) is None
    calls = flaky.calls
    time.sleep(0.3)
    assert flaky.calls - calls < 10  # the pauses grow
    assert held.standing is Standing.HELD
    flaky.down = False
    claims.stop_renewing(held.claim)
    assert claims.finish(
        held.claim, Status(JobState.QUEUED, detail="the main job ended first"), held.progress(), {}, 3.0
    )
    assert flaky.store.get(held.claim.job.id).state is JobState.QUEUED
    claims.stop()


def test_threads_that_find_the_store_away_at_once_lengthen_the_pause_once(flaky, caplog, monkeypatch):
    monkeypatch.setattr(agent_claims, "_FIRST_PAUSE_S", 60.0)
    claims = make(flaky)
    flaky.down = True
    for _ in range(3):
        assert claims.ask(lambda store: store.list(), 0.001) is None
    assert flaky.calls >= 3
    assert [record.args[0] for record in caplog.records] == [60.0]


def test_a_job_whose_lease_ran_out_is_not_finished_twice(flaky):
    claims = make(flaky, lease_s=0.2)
    held = take(claims)  # no heartbeats: the claims was not started
    time.sleep(0.3)
    other = flaky.store.claim("other", [held.claim.job.id], 60.0)
    assert other is not None
    assert not claims.finish(held.claim, Status(JobState.SUCCEEDED), held.progress(), {}, 0.0)
    assert flaky.store.get(held.claim.job.id).owner == "other"


def test_a_job_that_ends_during_its_heartbeat_is_not_called_lost(flaky, caplog):
    caplog.set_level("INFO")
    claims = make(flaky)
    claims.ask(lambda store: None)
    ending: list[bool] = []

    def ends() -> Progress:
        if not ending:
            ending.append(True)
            ending.append(claims.finish(held.claim, Status(JobState.SUCCEEDED), Progress(1.0), {}, 1.0))
        return Progress(1.0, steps=1)

    held = take(claims)
    held.progress = ends
    claims._beat(flaky)
    assert ending == [True, True]
    assert "lost" not in caplog.text


def test_progress_adds_up_over_attempts(flaky):
    job = flaky.store.submit([NewJob("a", WORK)])[0]
    log = StepLog(create_log())
    log.unit, log.base_work, log.total_work = "Bilder/ü", 10.0, 30.0
    log.step_ended(0, 10, 5.0, False)
    log.serving_ns = 1
    progress = progress_of(job, log, time.monotonic() - 2.0)
    assert (progress.work_done, progress.total_work, progress.unit, progress.steps) == (15.0, 30.0, "Bilder/ü", 1)
    assert progress.rate == pytest.approx(2.5, rel=0.2)
    assert (progress.checkpoint_s, progress.resumable, progress.startup_s) == (None, False, None)


def test_a_worker_that_starts_has_not_undone_what_was_done(flaky):
    [job] = flaky.store.submit([NewJob("a", WORK)])
    job, log = replace(job, progress=Progress(40.0, 100.0, checkpoint_s=5.0)), StepLog(create_log())
    log.step_ended(0, 10, 0.0, False)  # it is measured
    assert progress_of(job, log, time.monotonic()).work_done == 40
    log.serving_ns = time.monotonic_ns()  # the checkpoint could not be used: it began again
    assert progress_of(job, log, time.monotonic()).work_done == 0
    log.base_work = 38.0
    assert progress_of(job, log, time.monotonic()).work_done == 38


def test_a_worker_that_serves_says_how_long_it_took_and_whether_it_can_go_on_elsewhere(flaky):
    job = flaky.store.submit([NewJob("a", WORK)])[0]
    log = StepLog(create_log())
    began_s = time.monotonic() - 5.0
    log.serving_ns, log.resumable = int((began_s + 2.0) * 1e9), True
    progress = progress_of(job, log, began_s)
    assert progress.startup_s == pytest.approx(2.0)
    assert progress.resumable
    log.serving_ns = int((began_s + 3600) * 1e9)  # a job can write there what it likes
    assert progress_of(job, log, began_s).startup_s is None


def test_that_another_rank_asks_for_the_job_arrives(flaky):
    claims = make(flaky, lease_s=0.3)
    claims.start()
    held = take(claims)
    flaky.store.report_device(DeviceEntry("rank 1", "run"), 60)
    assert flaky.store.ask_for(held.claim.job.id, held.claim.attempt, "rank 1")
    until(lambda: held.standing is Standing.MOVE)
    claims.stop()


def test_what_a_dead_agent_held_is_given_back_once_the_store_answers(flaky):
    flaky.store.submit([NewJob("a", WORK)])
    assert flaky.store.claim("dead agent", [1], 60.0) is not None
    told = []
    claims = claims_of(flaky, None, dead=["dead agent"], submitted=lambda: told.append(1))
    flaky.down = True
    assert claims.ask(lambda store: store.list()) is None
    flaky.down = False
    time.sleep(0.1)
    assert claims.ask(lambda store: store.get(1).state) is JobState.QUEUED
    assert told == []  # the dead one had submitted already


def test_an_agent_that_follows_another_makes_no_store(tmp_path):
    path = tmp_path / "jobs.db"
    following = Claims(str(path), "agent", None, lambda: DeviceEntry("rank 0", "run"), 1.0, ["dead agent"])
    assert following.ask(lambda store: store.list()) is None
    assert not path.exists()
    told = []
    first = Claims(str(path), "agent", [], lambda: DeviceEntry("rank 0", "run"), 1.0, submitted=lambda: told.append(1))
    assert first.ask(lambda store: store.list()) == []
    assert told == [1]
    assert following.ask(lambda store: store.list(), 5.0) == []


def test_where_one_is_in_the_way_the_others_are_submitted_each_after_what_it_is_after(flaky, caplog):
    flaky.store.submit([NewJob("a", replace(WORK, task="other:C"))])
    jobs = [NewJob("c", replace(WORK, after=("b",))), NewJob("a", WORK), NewJob("b", WORK)]
    claims = claims_of(flaky, jobs)
    assert claims.ask(lambda store: [job.name for job in store.list()]) == ["a", "b", "c"]
    [refused] = caplog.messages
    assert refused.startswith("job a is not submitted: ")


def test_that_the_jobs_are_submitted_is_told(flaky):
    told = []
    claims = make(flaky, submitted=lambda: told.append(1))
    assert claims.ask(lambda store: len(store.list())) == 1
    assert told == [1]


def test_the_end_of_a_job_is_said_later_if_nobody_hears_it_now(flaky):
    claims = make(flaky, lease_s=60.0)
    claims.start()
    held = take(claims)
    flaky.down = True
    claims.stop_renewing(held.claim)
    assert not claims.finish(held.claim, Status(JobState.SUCCEEDED), held.progress(), {"x": 1}, 0.05)
    assert flaky.store.get(held.claim.job.id).state is JobState.RUNNING
    flaky.down = False
    until(lambda: flaky.store.get(held.claim.job.id).state is JobState.SUCCEEDED)
    claims.stop()


def test_an_end_that_cannot_be_said_stops_nothing_else(flaky):
    claims = make(flaky, "ab", lease_s=5.0)
    claims.every_s = 0.02
    said: list[str] = []

    def broken(store: Any) -> bool:
        raise KeyError("what no store expects")

    def sound(store: Any) -> bool:
        said.append("the next one")
        return True

    claims._unsaid = [broken, sound]
    claims.start()
    held = take(claims)
    before_s = held.beat_s
    until(lambda: said == ["the next one"] and held.beat_s > before_s)
    assert claims._unsaid == []
    claims.stop()


def test_a_device_that_cannot_be_described_stops_no_heartbeat(flaky):
    claims = make(flaky, lease_s=5.0, device=lambda: 1 / 0)
    claims.every_s = 0.02
    held = take(claims)
    before_s = held.beat_s
    claims.start()
    until(lambda: held.beat_s > before_s)
    claims._done.set()


def test_one_job_s_broken_progress_stops_no_other_heartbeat(flaky):
    claims = make(flaky, "ab", lease_s=5.0)
    claims.every_s = 0.02
    broken, sound = take(claims), take(claims)
    broken.progress = lambda: Progress(work_done=1 / 0)
    before_s = sound.beat_s
    claims.start()
    until(lambda: sound.beat_s > before_s)
    until(lambda: flaky.store.devices() != [])
    claims.stop()


def test_a_store_that_stays_away_is_told_once_and_asked_with_pauses(flaky, caplog):
    claims = make(flaky)
    claims.ask(lambda store: store.list())
    flaky.down = True
    for _ in range(3):
        claims.ask(lambda store: store.list(), 0.001)
        claims._again_s = 0.0
    assert len(caplog.records) == 1
    assert claims._pause_s > 2 * agent_claims._FIRST_PAUSE_S


def test_an_end_without_patience_asks_no_store_that_is_away(flaky):
    claims = make(flaky)
    held = take(claims)
    flaky.down = True
    claims.ask(lambda store: store.list())
    claims._again_s, calls = 0.0, flaky.calls
    assert not claims.finish(held.claim, Status(JobState.QUEUED), held.progress(), {}, 0.0)
    assert flaky.calls == calls
    flaky.down = False
    claims.start()
    claims.stop()
    assert flaky.store.get(held.claim.job.id).state is JobState.QUEUED


def test_the_end_waits_only_a_short_time_for_a_store_that_never_answers(flaky, monkeypatch):
    monkeypatch.setattr(agent_claims, "_LAST_S", 0.05)
    claims = make(flaky, lease_s=3600.0)
    claims.start()
    asked, answers = threading.Event(), threading.Event()

    def frozen() -> DeviceEntry:
        asked.set()
        answers.wait()
        return DeviceEntry("rank 0", "run")

    claims.device = frozen
    claims.look_again()
    asked.wait()
    ended = threading.Thread(target=claims.stop, daemon=True)
    ended.start()
    ended.join(30.0)
    assert not ended.is_alive()
    answers.set()
