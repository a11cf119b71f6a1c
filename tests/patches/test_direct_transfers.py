"""Transfers that a schedule posts by itself, with torch's functions, over gloo between two processes."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.patches.fresh import python

SCRIPT = """
import inspect, json, sys
import torch
import torch.distributed as dist
import pipefill_patches
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from megatron.fill.hooks import bus
from megatron.training import training

rank, store, stages = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
pipefill_patches.apply(("cpu_backend",))
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
if stages:
    parallel_state.initialize_model_parallel(1, stages)
bridge = dist.new_group([0, 1])
value = torch.zeros(4)

class Heard:
    watching = True
    def __init__(self):
        self.found, self.keys = [], []
    def __getattr__(self, name):
        return lambda *_: None
    def cycle_started(self, key, now_ns):
        self.keys.append(str(key))
    def bubble_opened(self, kind, index, now_ns, free_bytes=None):
        self.found.append(str(kind))

def forward_step(*_):
    if rank == 0:
        value.fill_(7)

def schedule(*, model, num_microbatches, forward_only=False):
    if rank == 0:
        schedules.forward_step()
    transfer = dist.P2POp(dist.irecv if rank else dist.isend, value, 1 - rank, bridge)
    for work in dist.batch_isend_irecv([transfer]):
        work.wait()
    if rank == 1:
        schedules.forward_step()

def train_step(*_, **__):
    name = "forward_backward_pipelining_without_interleaving"
    getattr(schedules, name)(model=None, num_microbatches=1, forward_only=True)
    dist.barrier()

for holder, its in ((schedules, schedule), (schedules, forward_step), (training, train_step)):
    name = "forward_backward_pipelining_without_interleaving" if its is schedule else its.__name__
    its.__signature__ = inspect.signature(getattr(holder, name))
    setattr(holder, name, its)
pipefill_patches.apply(("training_loop", "schedules"))
bus.listener = heard = Heard()
training.train_step(iteration=0)
spent = {name: one.ns for name, one in bus.account.snapshot().items()}
print(json.dumps([value.tolist(), heard.found, heard.keys, sorted(spent), bus.waited]))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("stages", [2, 1, 0], ids=["a pipeline", "stages across grids", "no parallel state"])
def test_waits_for_transfers_posted_directly_are_bubbles(stages: int, tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as both:
        code = ("-c", SCRIPT)
        rest = (str(tmp_path / "store"), str(stages))
        results = list(both.map(lambda rank: python(*code, str(rank), *rest, megatron=True), range(2)))
    for result in results:
        assert result.returncode == 0, result.stderr[-3000:]
    value, found, keys, spent, waited = json.loads(results[1].stdout.splitlines()[-1])
    assert value == [7.0] * 4
    assert found[0] == "fill"
    assert keys == ["1f1b, 1 microbatches"]  # a training iteration without backwards is no evaluation
    assert waited
    assert "fill" in spent
