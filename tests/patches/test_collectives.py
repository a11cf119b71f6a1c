"""Whatever waits for other stages between the passes is a bubble, by whichever name it is called."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.patches.fresh import python

SCRIPT = """
import json, os, tempfile, time
import torch
import torch.distributed as dist
from torch.distributed import all_reduce as bound_before
from torch.testing._internal.distributed.fake_pg import FakeStore
import pipefill_patches
from megatron.core import parallel_state
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.timers import Timers, dist_all_gather_func
from megatron.training import training
from megatron.fill.hooks import bus
from megatron.fill.types import CycleKey
from pipefill_patches.collectives import wait_name
from pipefill_patches.schedules import spanned

pipefill_patches.apply(("cpu_backend",))
groups, waited_s = dist.ProcessGroup, 0.02
arrive = groups.barrier
groups.barrier = lambda group, *args, **kwargs: (time.sleep(waited_s), arrive(group, *args, **kwargs))[1]
fsync = os.fsync
before = {name: call for name, call in vars(groups).items()}, dist.Work.wait
training.evaluate = lambda forward_step_func, data_iterator, model: dist.all_reduce(one, group=stage)
pipefill_patches.apply(("training_loop",))
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
parallel_state.initialize_model_parallel(2, 2)
stage, pipeline = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_pipeline_model_parallel_group()

class Bubbles:
    def __init__(self):
        self.found, self.open = [], 0
    def __getattr__(self, name):
        return lambda *_: None
    def bubble_opened(self, kind, index, now_ns, free_bytes=None):
        self.open = now_ns
        self.found.append([str(kind), 0.0])
    def bubble_closed(self, now_ns):
        self.found[-1][1] = (now_ns - self.open) / 1e9

def a_pass(call, report):
    spanned(call, report)()

def bubbles(call, at="drain"):
    bus.listener = heard = Bubbles()
    idle = lambda: None
    bus.begin_iteration(1)
    call() if at == "before" else None
    bus.begin_schedule(CycleKey("1f1b", 1))
    call() if at == "fill" else None
    a_pass(call if at == "pass" else idle, bus.forward)
    call() if at == "between" else None
    a_pass(idle, bus.backward)
    call() if at == "drain" else None
    bus.end_schedule()
    bus.end_iteration()
    call() if at == "after" else None
    if at == "save":
        with bus.saving():
            call()
    return heard.found

one, two = torch.ones(2), torch.ones(4)
group = {"group": pipeline}

def coalesced():
    with dist.distributed_c10d._coalescing_manager(pipeline, async_ops=True) as manager:
        dist.all_reduce(one, **group)
        dist.all_reduce(two, **group)
    manager.wait()

def batched():
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 2), dist.P2POp(dist.irecv, one, 2)]):
        work.wait()

def bridged():
    with dist.distributed_c10d._coalescing_manager(stage, one.device, async_ops=True) as manager:
        dist.isend(one, 1, stage)
    manager.wait()

def within():
    bus.open()
    bound_before(one)
    dist.barrier()
    bus.close()

def stored():
    with tempfile.TemporaryFile() as file:
        os.fsync(file.fileno())

training.evaluate(None, None, None)  # before any iteration
evaluated = sorted(bus.account.snapshot())
timers = Timers(1, "all")
batches = RerunDataIterator(iter(range(9)))
CALLS = {
    "all_reduce": lambda: dist.all_reduce(one),
    "all_reduce bound before": lambda: bound_before(one, **group),
    "broadcast": lambda: dist.broadcast(one, 0),
    "broadcast_object_list": lambda: dist.broadcast_object_list([1], 0),
    "all_gather": lambda: dist.all_gather([one, one], one, **group),
    "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(two, one, **group),
    "all_gather bound by Megatron": lambda: dist_all_gather_func(two, one, **group),
    "reduce": lambda: dist.reduce(one, 0),
    "reduce_scatter": lambda: dist.reduce_scatter(one, [one, one], **group),
    "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(one, two, **group),
    "all_to_all": lambda: dist.all_to_all([one, one], [one, one], **group),
    "all_to_all_single": lambda: dist.all_to_all_single(one, one, **group),
    "gather": lambda: dist.gather(one, [one, one], **group),
    "scatter": lambda: dist.scatter(one, [one, one], **group),
    "send": lambda: dist.send(one, 2),
    "recv": lambda: dist.recv(one, 2),
    "barrier": lambda: dist.barrier(),
    "waited for later": lambda: dist.all_reduce(one, async_op=True).wait(),
    "coalesced": coalesced,
    "of a timer": lambda: timers("sync", log_level=1).start(barrier=True),
}
found = {
    "drain": {name: bubbles(call) for name, call in CALLS.items()},
    "places": {at: bubbles(dist.barrier, at) for at in ("before", "fill", "pass", "between", "drain", "after", "save")},
    "save waited for later": bubbles(lambda: dist.all_reduce(one, async_op=True).wait(), "save"),
    "save not waited for": bubbles(lambda: dist.all_reduce(one, async_op=True), "save"),
    "stored": {at: bubbles(stored, at) for at in ("drain", "after", "save")},
    "batch": bubbles(lambda: next(batches), "pass"),
    "batch of no iteration": bubbles(lambda: next(batches), "after"),
    "not waited for": bubbles(lambda: dist.all_reduce(one, async_op=True)),
    "one stage": bubbles(lambda: (dist.all_reduce(one, group=stage), dist.barrier(stage))),
    "batched": bubbles(batched),
    "bridged": bubbles(bridged),
    "within": bubbles(within),
    "evaluated": evaluated,
}
pipefill_patches.PATCHES["training_loop"].revert()
calls_reverted = all(vars(groups)[name] is call for name, call in before[0].items())
found["reverted"] = calls_reverted and dist.Work.wait == before[1] and os.fsync is fsync
replicas = parallel_state.get_data_parallel_group
parallel_state.get_data_parallel_group = lambda **_: dist.group.WORLD
found["replicas"] = [wait_name(dist.group.WORLD, meets=meets) for meets in (False, True)]

def named(**sizes):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(1, 2, **sizes, create_gloo_process_groups=False)
    groups = {
        "experts": parallel_state.get_expert_model_parallel_group(),
        "context": parallel_state.get_context_parallel_group(),
        "replicas": replicas(),
        "gradients": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "another": dist.new_group([0, 1]),
    }
    return {name: wait_name(group) for name, group in groups.items()}

parallel_state.get_data_parallel_group = replicas
found["experts"] = named(expert_model_parallel_size=2)
found["context"] = named(context_parallel_size=2)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    result = python("-c", SCRIPT, megatron=True)
    assert result.returncode == 0, result.stderr[-3000:]
    return json.loads(result.stdout.splitlines()[-1])


def kinds(bubbles: list[tuple[str, float]]) -> list[str]:
    return [kind for kind, _ in bubbles]


def test_every_blocking_call_is_a_drain_bubble(found):
    several = {"broadcast_object_list": 2}  # of sizes, and of what they are
    expected = {name: ["drain"] * several.get(name, 1) for name in found["drain"]}
    assert {name: kinds(bubbles) for name, bubbles in found["drain"].items()} == expected


def test_a_bubble_is_as_long_as_the_wait(found):
    for name in ("barrier", "of a timer"):
        assert found["drain"][name][0][1] >= 0.02


def test_bubbles_are_between_the_passes_of_an_iteration(found):
    assert {at: kinds(bubbles) for at, bubbles in found["places"].items()} == {
        "before": ["group"],
        "fill": ["fill"],
        "pass": [],
        "between": ["interior"],
        "drain": ["drain"],
        "after": [],
        "save": ["save"],
    }


def test_waits_in_a_save_and_for_a_batch_are_bubbles_of_their_own_kinds(found):
    assert kinds(found["save waited for later"]) == ["save"]
    assert kinds(found["batch"]) == ["data"]
    assert found["save not waited for"] == found["batch of no iteration"] == []


def test_a_wait_for_storage_is_a_bubble_in_a_save_only(found):
    assert {at: kinds(bubbles) for at, bubbles in found["stored"].items()} == {
        "drain": [],
        "after": [],
        "save": ["save"],
    }


def test_a_barrier_is_no_exchange_of_replicas_though_all_ranks_are_replicas(found):
    assert found["replicas"] == ["data group", "all ranks"]


def test_a_wait_in_an_evaluation_before_any_iteration_has_the_name_of_its_group(found):
    assert found["evaluated"] == ["evaluation", "start-up", "tensor group", "unnamed"]


def test_a_group_has_its_own_name_though_another_has_the_same_ranks(found):
    replicas = dict.fromkeys(("replicas", "gradients", "another"), "data group")
    assert found["experts"] == replicas | {"experts": "expert group", "context": ""}
    contexts = dict.fromkeys(("context", "another"), "context group")
    assert found["context"] == contexts | {"experts": "", "replicas": "", "gradients": "data group"}


def test_no_bubble_where_nobody_waits(found):
    assert found["not waited for"] == []


def test_waits_for_the_own_stage_are_no_pipeline_bubbles(found):
    assert kinds(found["one stage"]) == ["group", "group"]


def test_each_wait_for_a_transfer_is_a_bubble_and_none_inside_another(found):
    assert kinds(found["batched"]) == ["drain", "drain"]
    assert kinds(found["bridged"]) == ["drain"]
    assert kinds(found["within"]) == ["drain"]


def test_reverted(found):
    assert found["reverted"]
