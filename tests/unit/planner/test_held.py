"""A plan never exceeds the cap that the limiter sets: in a run, in ``pipefill plan`` and in the simulator."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.ending import NotStarted
from megatron.fill.agent.ranking import Ranking, _for_job
from megatron.fill.cli.plan import _plan_rank
from megatron.fill.device.cuda import allocator_environment
from megatron.fill.device.port import Limits
from megatron.fill.pages.board import CycleBoard, CycleBoardReader
from megatron.fill.planner.held import held_cycle, room_bytes
from megatron.fill.planner.search import find_plan
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile
from megatron.fill.scheduler.policies import parse_policy
from megatron.fill.types import BubbleKind
from megatron.fill.wings.sim.cluster.rates import Rates
from megatron.fill.wings.sim.values import FillKind, RuntimeModel
from megatron.fill.work import Work
from megatron.fill.worker.nodes import NodeRun
from tests.support.fake_device import FakeDevice, free_memory
from tests.support.fakes import worker_spec
from tests.support.posts import post

MS, MIB = 1_000_000, 1 << 20
pytestmark = pytest.mark.usefixtures("own_pages")


def cycle(*free_mib: int) -> BubbleCycle:
    return BubbleCycle(100 * MS, tuple(BubbleSlot(BubbleKind.FILL, 20 * MS, free * MIB) for free in free_mib))


def profile(batch: int, memory_mib: int) -> JobProfile:
    """The larger the batch, the more work in the same time."""
    return JobProfile(Configuration(batch), (NodeProfile("forward", 5 * MS, memory_mib * MIB),), float(batch))


profiles_ = st.lists(st.integers(1, 300), min_size=1, max_size=4).map(
    lambda sizes: [profile(batch, size) for batch, size in enumerate(sizes, 1)]
)


@given(
    st.lists(st.integers(0, 300), min_size=1, max_size=4),
    st.none() | st.integers(1, 300),
    st.integers(0, 100),
    profiles_,
)
def test_no_plan_exceeds_the_cap(free_mib, asked_mib, margin_mib, profiles):
    bubbles, asked = cycle(*free_mib), None if asked_mib is None else asked_mib * MIB
    limit = free_memory(margin_bytes=margin_mib * MIB).room_bytes(bubbles)
    found = find_plan(held_cycle(bubbles, room_bytes(bubbles, margin_mib * MIB), asked), profiles)
    caps = [] if not limit else [limit if asked is None else min(asked, limit)]
    fitting = [one for one in profiles for cap in caps if one.memory_bytes <= cap]
    assert (found is None) == (not fitting)
    if found is not None:
        assert found.configuration == max(fitting, key=lambda one: one.work).configuration


PROFILES = [profile(1, 20), profile(2, 60), profile(4, 150)]
ROOMY = cycle(500, 100)  # b4 would fit the first bubble


@pytest.mark.parametrize(
    ("limit_mib", "margin_mib", "expected"), [(70, 0, "b2"), (59, 0, "b1"), (None, 30, "b2"), (None, 50, "b1")]
)
def test_a_worker_plans_with_what_it_is_held_to(tmp_path, limit_mib, margin_mib, expected):
    spec = worker_spec(
        tmp_path,
        Work("m:C"),
        margin_bytes=margin_mib * MIB,
        device="cuda:0",  # where nothing is added for what this process holds
        limits=Limits(None if limit_mib is None else limit_mib * MIB),
        profiles=tuple(PROFILES),
    )
    board = CycleBoard()
    board.show(ROOMY)
    anything: Any = SimpleNamespace()
    loop: Any = SimpleNamespace(gate=SimpleNamespace(ended=False), stopping=lambda: False)
    reader = CycleBoardReader(board.reader_fd())
    run = NodeRun(spec, anything, spec.profiles, loop, reader)
    assert run.choose()
    assert run.plan is not None
    assert str(run.plan.configuration) == expected


sizes = st.integers(0, 300)


@given(st.lists(sizes, min_size=1, max_size=4), sizes, st.none() | st.integers(1, 300), st.integers(0, 100))
def test_a_gpus_worker_plans_with_the_very_number_that_its_limiter_keeps(free_mib, now_mib, asked_mib, margin_mib):
    bubbles, memory = cycle(*free_mib), free_memory(now_mib * MIB, margin_mib * MIB, 10 * MIB)
    asked = None if asked_mib is None else asked_mib * MIB
    try:
        limit = memory.cap(asked, bubbles)
    except NotStarted:
        return
    limits = Limits(limit)
    spec = worker_spec("/", Work("m:C"), margin_bytes=margin_mib * MIB, device="cuda:0", limits=limits)
    anything: Any = SimpleNamespace()
    run = NodeRun(spec, anything, anything, anything, anything)
    assert {slot.free_bytes for slot in run._held(bubbles).slots} == {limit}
    said = allocator_environment(limit, 1000 * MIB, {}, "2.15.0")["PYTORCH_ALLOC_CONF"]
    assert float(said.partition(":")[2]) * 1000 * MIB == pytest.approx(limit, abs=0.001 * MIB)
    board = CycleBoard()
    board.show(bubbles)
    reader = CycleBoardReader(board.reader_fd())
    choice = Ranking(parse_policy("sjf"), "rank 0", "cuda:0", reader, memory)
    held = choice._cycle()
    assert held is not None
    assert {slot.free_bytes for slot in _for_job(held, SimpleNamespace(work=Work(memory_bytes=asked))).slots} == {limit}  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "cycle", "asks"), [("cuda:0", None, 0), ("cuda:0", ROOMY, 1), ("cpu", None, 1)])
def test_a_gpu_serves_no_job_before_it_is_known_what_the_main_job_leaves(monkeypatch, tmp_path, device, cycle, asks):
    with post(tmp_path, device=FakeDevice(name=device)) as bench:
        if cycle is not None:
            bench.board.show(cycle)
        asked: list[object] = []
        monkeypatch.setattr(bench.context.claims, "ask", lambda *_: asked.append(None))
        assert not bench.seat().serve()
        assert len(asked) == asks


@pytest.mark.parametrize(("asked_mib", "margin_mib", "expected"), [(None, 0, "b2"), (59, 0, "b1"), (None, 50, "b1")])
def test_choice_command_and_simulator_plan_as_the_worker_does(asked_mib, margin_mib, expected):
    asked, margin_bytes = None if asked_mib is None else asked_mib * MIB, margin_mib * MIB
    memory = free_memory(1000 * MIB, margin_bytes)
    limit = memory.cap(asked, ROOMY)
    [largest] = [one.memory_bytes for one in PROFILES if str(one.configuration) == expected]
    assert isinstance(limit, int)
    assert largest <= limit

    board = CycleBoard()
    board.show(ROOMY)
    choice = Ranking(parse_policy("sjf"), "rank 0", "cpu", CycleBoardReader(board.reader_fd()), memory)
    held = choice._cycle()
    assert held is not None
    found = find_plan(held_cycle(held, room_bytes(held, 0), asked), PROFILES)
    assert found is not None
    assert str(found.configuration) == expected

    [row] = _plan_rank(0, ROOMY, margin_bytes, {"job": PROFILES}, {"job": asked}, {})
    assert row.job is not None
    assert str(row.job.plan.configuration) == expected

    if asked is None:
        kind = FillKind("job", "steps", tuple(PROFILES), 1.0)
        fit = Rates(ROOMY, [kind], RuntimeModel(margin_bytes=margin_bytes)).whole.fits["job"]
        assert str(fit.plan.configuration) == expected


@pytest.mark.parametrize(
    ("asked_mib", "margin_mib", "expected"),
    [
        (200, 0, "it asks for 200 MiB, and the main job leaves 100 MiB"),
        (100, 1, "it asks for 100 MiB, and the main job leaves 99 MiB"),
        (10, 0, "it asks for 10 MiB and needs at least 20 MiB"),
        (None, 100, "the main job leaves 100 MiB free at its peak: no more than the margin of 100 MiB"),
        (None, 90, "10 MiB too large for bubble 0 (fill, 20.000 ms with 0.300 ms reserved, room for 10 MiB)"),
    ],
)
def test_the_command_says_which_memory_is_missing(asked_mib, margin_mib, expected):
    asked = None if asked_mib is None else asked_mib * MIB
    [row] = _plan_rank(0, ROOMY, margin_mib * MIB, {"job": PROFILES}, {"job": asked}, {})
    assert row.job is None
    assert expected in row.error


@pytest.mark.parametrize(("asked_mib", "tail_mib", "fits"), [(60, 40, True), (61, 40, False), (None, 40, True)])
def test_a_tail_job_gets_the_memory_that_was_not_promised(asked_mib, tail_mib, fits):
    asked = None if asked_mib is None else asked_mib * MIB
    short = JobProfile(Configuration(1), (NodeProfile("step", 1 * MS, 20 * MIB),), 1.0)
    profiles = {"job": [profile(1, 60)], "other": [short]}
    caps = {"job": asked, "other": tail_mib * MIB}
    [row, _] = _plan_rank(0, ROOMY, 0, profiles, caps, {})
    assert row.job is not None
    assert (row.tail is not None) == fits


def test_the_second_instance_of_a_job_may_be_its_tail_job():
    small = JobProfile(Configuration(1), (NodeProfile("step", 4 * MS, 0),), 1.0)
    large = JobProfile(Configuration(8), (NodeProfile("step", 15 * MS, 0),), 8.0)
    for twins, name in (({"job": "job-7"}, "job-7"), ({}, None)):
        [row] = _plan_rank(0, ROOMY, 0, {"job": [small, large]}, {"job": None}, twins)
        assert (row.tail and row.tail.name) == name


def test_what_is_free_now_counts_where_it_is_less():
    board = CycleBoard()
    board.show(ROOMY)
    memory = free_memory(60 * MIB, overhead_bytes=10 * MIB)
    choice = Ranking(parse_policy("sjf"), "rank 0", "cpu", CycleBoardReader(board.reader_fd()), memory)
    held = choice._cycle()
    assert held is not None
    assert {slot.free_bytes for slot in held.slots} == {50 * MIB}
