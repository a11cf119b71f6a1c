"""Which job a seat takes next: by policy, by what fits, and what is left for a tail job."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.fill.agent.memory import MemoryShare
from megatron.fill.agent.ranking import Ranking, Resident
from megatron.fill.device.port import Limits
from megatron.fill.folders import PLAN
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.planner.held import RESERVE_NS
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.planner.search import best_plan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, MeasuredJob, NodeProfile
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.status import Cause, Status
from megatron.fill.store.values import DeviceEntry, Job, Progress
from megatron.fill.types import BubbleKind, JobState, Quota
from megatron.fill.work import NewJob, Work
from tests.support.fake_device import free_memory
from tests.support.memory_store import MemoryStore

MS = 1_000_000
MIB = 1 << 20
ELSEWHERE = Status(JobState.QUEUED, Cause.DOES_NOT_FIT, "no bubble", device="rank 1")
pytestmark = pytest.mark.usefixtures("own_pages")


def work(task: str = "m:C", memory_bytes: int | None = None) -> Work:
    return Work(task, memory_bytes=memory_bytes)


def profile(node_ms: float, memory_mib: int = 10) -> JobProfile:
    return JobProfile(Configuration(1), (NodeProfile("forward 0", int(node_ms * MS), memory_mib * MIB),), 1.0)


class Bench:
    def __init__(self, policy: str = "priority") -> None:
        self.board = CycleBoard()
        self.store = MemoryStore()
        self.ranking = Ranking(
            parse_policy(policy), "rank 0", "cpu", CycleBoardReader(self.board.reader_fd()), free_memory()
        )
        self.show(20)

    def show(self, bubble_ms: int, free_mib: int = 100) -> None:
        self.board.show(BubbleCycle(100 * MS, (BubbleSlot(BubbleKind.FILL, bubble_ms * MS, free_mib * MIB),)))

    def submit(self, name: str, found: JobProfile | None = None, task: str = "", **job: Any) -> Job:
        memory_bytes, total = job.pop("memory_bytes", None), job.pop("total", None)
        submitted = self.store.submit([NewJob(name, work(task or f"m:{name}", memory_bytes), **job)])[0]
        if found is not None:
            content = {"configurations": [found.to_dict()], "total_work": total}
            self.store.keep_profile(self.ranking.key(submitted), content)
        return submitted

    def wanted(self, beside: Resident | None = None) -> list[str]:
        return [self.store.get(number).name for number in self.ranking.wanted(self.store, beside)]


def test_priority_then_order():
    bench = Bench()
    for name, priority in (("a", 0), ("b", 5), ("c", 0)):
        bench.submit(name, priority=priority)
    assert bench.wanted() == ["b", "a", "c"]


def test_jobs_known_not_to_fit_are_left_out_until_the_bubbles_change():
    bench = Bench()
    bench.submit("long", profile(30))
    bench.submit("large", profile(3, 500))
    bench.submit("unknown")
    bench.submit("small", profile(3))
    assert bench.wanted() == ["unknown", "small"]
    reason = bench.store.find("long").reason
    assert "rank 0" in reason
    assert "10.300 ms too long for bubble 0" in reason
    assert "MiB too large for bubble 0" in bench.store.find("large").reason
    assert bench.store.find("small").reason == ""
    bench.show(40)
    assert bench.wanted() == ["long", "unknown", "small"]
    bench.ranking.misfits.tried(bench.store.find("unknown").id, tail=False)
    assert bench.wanted() == ["long", "small"]
    bench.show(41)
    assert bench.wanted() == ["long", "unknown", "small"]


def test_those_that_wait_are_told_why_also_while_no_seat_is_free():
    bench = Bench()
    reasons = {name: lambda name=name: bench.store.find(name).reason for name in ("long", "unknown", "others")}
    for name, found in (("long", profile(30)), ("unknown", None), ("others", profile(3))):
        bench.submit(name, found)
    bench.show(1)
    for name in ("unknown", "others"):
        bench.ranking.misfits.note(bench.store, bench.store.find(name), "no bubble")
    bench.store.note(bench.store.find("others").id, ELSEWHERE)
    bench.ranking.explain(bench.store)
    assert "29.300 ms too long for bubble 0" in reasons["long"]()
    assert reasons["unknown"]() == ""  # that was said of another cycle
    assert reasons["others"]().startswith("does not fit rank 0: node 'forward 0'")
    bench.show(20)
    bench.ranking.misfits.tried(bench.store.find("unknown").id, tail=True)
    bench.ranking.misfits.note(bench.store, bench.store.find("unknown"), "no bubble")
    bench.ranking.explain(bench.store)
    assert "10.300 ms too long for bubble 0" in reasons["long"]()
    assert reasons["unknown"]() == "does not fit rank 0: no bubble"
    assert reasons["others"]() == ""
    bench.store.note(bench.store.find("others").id, ELSEWHERE)
    bench.show(40)
    bench.ranking.explain(bench.store)
    assert [reason() for reason in reasons.values()] == ["", "", "does not fit rank 1: no bubble"]


def test_shortest_job_first_uses_the_work_that_is_left():
    bench = Bench("sjf")
    for name, total in (("long", 100.0), ("short", 10.0)):
        bench.submit(name, profile(3), total=total)
    assert bench.wanted() == ["short", "long"]
    claim = bench.store.claim("x", [bench.store.find("long").id], 60)
    assert claim is not None
    assert bench.store.release(claim, Status(JobState.QUEUED), Progress(work_done=95.0), {})
    assert bench.wanted() == ["long", "short"]


def test_a_job_that_is_after_others_waits_until_they_have_succeeded():
    bench = Bench()
    for name in ("a", "b"):
        bench.submit(name)
    bench.store.submit([NewJob("last", replace(work(), after=("a", "b")))])
    assert bench.wanted() == ["a", "b"]
    for name, state in (("a", JobState.SUCCEEDED), ("b", JobState.FAILED)):
        claim = bench.store.claim("x", [bench.store.find(name).id], 60)
        assert claim is not None
        assert bench.store.finish(claim, Status(state), Progress(), {})
    assert bench.wanted() == []
    b = bench.store.retry(bench.store.find("b").id)
    assert bench.wanted() == ["b"]
    claim = bench.store.claim("x", [b.id], 60)
    assert claim is not None
    assert bench.wanted() == []
    assert bench.store.finish(claim, Status(JobState.SUCCEEDED), Progress(), {})
    assert bench.wanted() == ["last"]


def test_users_share(tmp_path):
    bench = Bench("fair")
    for name, user in (("a", "ada"), ("b", "bob"), ("c", "ada")):
        bench.submit(name, user=user)
    claim = bench.store.claim("x", [bench.store.find("a").id], 60)
    assert claim is not None
    bench.store.release(claim, Status(JobState.QUEUED), Progress(harvested_s=5.0), {})
    assert bench.wanted()[0] == "b"


def test_a_user_has_no_more_than_the_quota():
    bench = Bench()
    bench.ranking.quota = Quota(jobs=1, device_hours=1.0, days=2.0)
    for name, user in (("a", "ada"), ("b", "ada"), ("c", "bob"), ("d", "eve")):
        bench.submit(name, user=user)
    ids = {name: bench.store.find(name).id for name in "abcd"}
    first = bench.store.claim("x", [ids["a"]], 60, most=1)
    assert first is not None
    assert bench.wanted() == ["c", "d"]
    assert bench.store.get(ids["b"]).reason == "its user runs 1 job, the quota; it waits"
    second = bench.store.claim("y", [ids["b"], ids["c"]], 60, most=1)  # as of before the first claim
    assert second is not None
    assert second.job.name == "c"
    bench.store.finish(first, Status(JobState.SUCCEEDED), Progress(harvested_s=3599.0), {})
    bench.store.finish(second, Status(JobState.SUCCEEDED), Progress(harvested_s=3600.0), {})
    assert bench.wanted() == ["b", "d"]
    assert bench.store.get(ids["b"]).reason == ""
    bench.submit("e", user="bob")
    assert bench.wanted() == ["b", "d"]
    assert bench.store.find("e").status == Status(JobState.QUEUED, Cause.QUOTA, "has had 1 device-hour in 2 days")


@pytest.fixture
def resident(tmp_path: Path) -> tuple[Bench, Resident]:
    """A job of 12 ms nodes in bubbles of 20 ms: it leaves less than 8."""
    bench = Bench()
    job = bench.submit("resident", profile(12, 40))
    assert bench.wanted() == ["resident"]
    cycle = bench.ranking.board.read()
    assert cycle is not None
    plan = best_plan(cycle, [profile(12, 40)], RESERVE_NS)
    (tmp_path / PLAN).write_text(json.dumps(plan.to_dict()))
    assert bench.store.claim("x", [job.id], 600) is not None
    return bench, Resident(job, tmp_path)


def test_the_leftover_is_planned_for_a_tail_job(resident):
    bench, job = resident
    left = bench.ranking.leftover(job)
    assert left is not None
    assert [slot.free_bytes for slot in left.slots] == [60 * MIB]
    assert 7 * MS < left.slots[0].duration_ns < 8 * MS
    bench.submit("too-long", profile(9))
    bench.submit("too-large", profile(1, 70))
    bench.submit("nobody-knows")
    bench.submit("capped", memory_bytes=50 * MIB)
    bench.submit("fits", profile(3))
    assert bench.wanted(job) == ["capped", "fits"]


def test_memory_that_the_resident_job_holds_already_is_not_subtracted_again(resident):
    bench, job = resident
    bench.show(20, free_mib=60)  # without the job's 40
    limiter = bench.ranking.memory.device.limiter(Limits(), "job")
    with MemoryShare(bench.ranking.memory, limiter, 0, lambda size: None, lambda: False):
        limiter.held_bytes = 40 * MIB
        left = bench.ranking.leftover(job)
        assert left is not None
        assert [slot.free_bytes for slot in left.slots] == [60 * MIB]
        limiter.held_bytes = 10 * MIB  # it will take 30 more
        left = bench.ranking.leftover(job)
        assert left is not None
        assert [slot.free_bytes for slot in left.slots] == [30 * MIB]


def test_a_tail_takes_no_job_that_an_idle_device_would_run(resident):
    bench, job = resident
    bench.store.report_device(DeviceEntry("rank 1", "run"), 60)
    bench.submit("first", profile(3))
    assert bench.wanted(job) == []
    bench.submit("second", profile(3))
    assert bench.wanted(job) == ["second"]
    bench.store.report_device(DeviceEntry("rank 1", "run", float("inf"), "other"), 60)
    assert bench.wanted(job) == ["first", "second"]


def test_a_job_that_the_idle_device_refuses_is_not_kept_for_it(resident):
    bench, job = resident
    refused = bench.submit("refused", profile(3))
    bench.submit("first", profile(3))
    bench.submit("second", profile(3))
    bench.store.report_device(DeviceEntry("rank 1", "run", refuses=(refused.id,)), 60)
    assert bench.wanted(job) == ["refused", "second"]
    bench.store.report_device(DeviceEntry("rank 2", "run"), 60)
    assert bench.wanted(job) == ["second"]
    bench.store.report_device(DeviceEntry("rank 2", "run", refuses=(refused.id,)), 60)
    assert bench.wanted(job) == ["refused"]


def test_what_fits_no_bubble_and_what_was_tried_in_vain_is_refused_until_the_bubbles_change():
    bench = Bench()
    long, tried = bench.submit("long", profile(30)), bench.submit("tried")
    bench.submit("small", profile(3))
    assert bench.ranking.misfits.refused == ()
    bench.wanted()
    bench.ranking.misfits.tried(tried.id, tail=False)
    bench.ranking.misfits.tried(bench.store.find("small").id, tail=True)  # only beside another one
    assert bench.ranking.misfits.refused == (long.id, tried.id)
    bench.show(40)
    assert bench.ranking.misfits.refused == ()


def test_how_long_a_unit_of_work_takes_here_is_known_from_its_profile():
    bench = Bench()
    assert bench.ranking.unit_s(bench.store, bench.submit("nobody-knows")) is None
    assert bench.ranking.unit_s(bench.store, bench.submit("long", profile(30))) == float("inf")
    small = bench.submit("small", profile(18))
    assert bench.ranking.unit_s(bench.store, small) == pytest.approx(0.1)  # one in each bubble
    bench.ranking.misfits.tried(small.id, tail=False)
    assert bench.ranking.unit_s(bench.store, small) == float("inf")


def test_a_resident_job_without_a_plan_leaves_nobody_knows_what(resident, tmp_path):
    bench, job = resident
    (tmp_path / PLAN).unlink()
    assert bench.ranking.leftover(job) is None
    bench.submit("fits", profile(3))
    assert bench.wanted(job) == ["fits"]


def test_the_end_of_a_planned_job_is_estimated(resident, tmp_path):
    bench, _ = resident
    assert bench.ranking.done_at_s(Progress(work_done=40.0), tmp_path) == float("inf")
    progress = Progress(work_done=40.0, total_work=100.0)
    before_s = time.time()
    takes_s = bench.ranking.done_at_s(progress, tmp_path) - before_s
    assert 60 * 0.1 - 0.5 <= takes_s <= 60 * 0.1 + 0.5 + time.time() - before_s


DEEP = "[" * 100_000 + "]" * 100_000
PLAN_JSON = {"configuration": "b1", "nodes": 1, "work": 1.0, "first_node": 0, "counts": [[1]], "reserve_ns": 0}


@pytest.mark.parametrize("kind", ["pipe", "link", "deep", "flood", "list"])
def test_a_plan_that_the_job_made_a_trap_of_is_none(resident, tmp_path, kind):
    bench, job = resident
    (tmp_path / PLAN).unlink()
    if kind == "pipe":
        os.mkfifo(tmp_path / PLAN)  # to open it would block the seat for ever
    elif kind == "link":
        (tmp_path / PLAN).symlink_to("/dev/zero")
    elif kind == "flood":
        with (tmp_path / PLAN).open("wb") as file:
            file.truncate(1 << 40)
    else:
        (tmp_path / PLAN).write_text({"deep": DEEP, "list": "[]"}[kind])
    assert bench.ranking.leftover(job) is None
    assert bench.ranking.done_at_s(Progress(total_work=100.0), tmp_path) == float("inf")


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"configurations": 1},
        {"configurations": []},
        {"configurations": [1]},
        {"configurations": [{"configuration": 1, "work": 1.0, "nodes": []}]},
        {"configurations": [profile(3).to_dict()], "total_work": "much"},
        {"configurations": [profile(3).to_dict()], "total_work": -1.0},
        {"configurations": [profile(3).to_dict()], "split": []},
        {"configurations": [profile(3).to_dict() | {"work": "1"}]},
        {"configurations": [profile(3).to_dict() | {"work": 1e-300}]},
        {"configurations": [profile(3).to_dict() | {"nodes": {"a": 1}}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [{"name": "n", "duration_ns": 0, "memory_bytes": 0}]}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [{"name": "n", "duration_ns": "1", "memory_bytes": 0}]}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [{"name": "n", "duration_ns": 1e30, "memory_bytes": 0}]}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [{"name": [], "duration_ns": 1, "memory_bytes": 0}]}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [{"name": "n", "duration_ns": 1, "memory_bytes": -1}]}]},
        {"configurations": [profile(3).to_dict() | {"nodes": [["name", "duration_ns", "memory_bytes"]]}]},
    ],
)
def test_a_profile_in_the_store_that_makes_no_sense_is_measured_again(content):
    bench = Bench("sjf")
    job = bench.submit("odd")
    bench.store.keep_profile(bench.ranking.key(job), content)
    bench.submit("sound", profile(3), total=10.0)
    assert sorted(bench.wanted()) == ["odd", "sound"]
    assert bench.ranking.profiles_of(job) is None
    with pytest.raises(ValueError):  # noqa: PT011
        MeasuredJob.from_dict(content)


@pytest.mark.parametrize(
    "changed",
    [
        {"work": "1"},
        {"work": float("inf")},
        {"nodes": float("inf")},
        {"nodes": 1 << 80},
        {"counts": 1},
        {"counts": [1]},
        {"counts": [["1"]]},
        {"counts": [[True]]},
        {"counts": [[1 << 60]]},
        {"counts": [[-1]]},
        {"counts": []},
        {"configuration": None},
        {"first_node": None},
        {"reserve_ns": 1.5},
    ],
)
def test_a_plan_of_a_wrong_shape_is_a_value_error(changed):
    assert ExecutionPlan.from_dict(PLAN_JSON).to_dict() == PLAN_JSON
    with pytest.raises(ValueError):  # noqa: PT011
        ExecutionPlan.from_dict(PLAN_JSON | changed)
    shapes: tuple[Any, ...] = (None, [], "x", 1)
    for wrong in shapes:
        with pytest.raises(ValueError):  # noqa: PT011
            ExecutionPlan.from_dict(wrong)
