"""What one process tells another comes out as it went in."""

from __future__ import annotations

from megatron.fill.device.port import Limits, Sharing
from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile, Offload
from megatron.fill.rank.relay import RelaySpec
from megatron.fill.rank.rule import FillRule
from megatron.fill.rank.spec import RankSpec
from megatron.fill.sandbox.config import Bind, Sandbox
from megatron.fill.trial.measure import MeasureSpec
from megatron.fill.trial.spec import CheckSpec
from megatron.fill.types import BubbleKind, RankInfo
from megatron.fill.work import Work
from megatron.fill.worker.spec import WorkerSpec

CAGE = Sandbox(namespaces=("pid", "mount"), binds=(Bind("/data"), Bind("/out", True)), user=3, devices=("nvidia0",))


def test_values_in_values_enums_and_tuples():
    worker = WorkerSpec(
        "job",
        "/jobs/job",
        3,
        4,
        5,
        6,
        CAGE,
        Work("m:C", args={"a": 1}, array=(1, 2), after=("b",)),
        cycle=BubbleCycle(7, (BubbleSlot(BubbleKind.FILL, 3, 1 << 40),)),
        profiles=(JobProfile(Configuration(2, offload=Offload.WEIGHTS), (NodeProfile("f", 3, 4),), 0.1),),
        limits=Limits(memory_bytes=1 << 30),
        sharing=Sharing.MPS,
    )
    assert WorkerSpec.from_json(worker.to_json()) == worker
    found = WorkerSpec.from_json(worker.to_json())
    assert (type(found.sharing), type(found.sandbox.binds[0])) == (Sharing, Bind)
    relay = RelaySpec(RankSpec(RankInfo(0, 2, 0, 2, 0, 1, 0, 2), "rank0", FillRule(warmup=3)), 1, 2, gate_fd=3)
    assert RelaySpec.from_json(relay.to_json()) == relay


def test_what_is_not_there_stays_none():
    worker = WorkerSpec("job", "/jobs/job", 3, 4, 5, 6, Sandbox(), Work(command=("true",)))
    assert WorkerSpec.from_json(worker.to_json()) == worker
    measure = MeasureSpec("job", Work("m:C", args={"a": [1, None]}, search=("/",), array=(1, 2)), "cpu", "/jobs/job")
    assert MeasureSpec.from_json(measure.to_json()) == measure
    check = CheckSpec(1, "/trial", [], [{"env": {}, "jobs": [{"task": None}]}])
    assert CheckSpec.from_json(check.to_json()) == check
