"""Transfers through the host: two real gloo ranks, with CPU tensors staged as CUDA tensors would be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pipefill_patches

ROOT = Path(__file__).resolve().parents[2]
RANK = """
import torch
import torch.distributed as dist
import pipefill_patches
from megatron.core.pipeline_parallel import p2p_communication as upstream
from megatron.fill.hooks import bus
from megatron.fill.types import CycleKey
from pipefill_patches import host_p2p

dist.init_process_group("gloo")
rank = dist.get_rank()
group = dist.new_group([0, 1])
staged = []
host_p2p._staged = lambda tensor: staged.append(tuple(tensor.shape)) or True


class Seen:
    def __init__(self):
        self.facts = []
        self.target = None
    def __getattr__(self, name):
        return lambda *args: self.facts.append((name, bool((self.target == 0).all())))


def exchange(post):
    # Both send in both directions, as in the steady state of two stages: tensors of every dtype a pipeline uses.
    for dtype in (torch.float32, torch.bfloat16):
        sent = [torch.full((3, 4), 1.5 + rank + 10 * at, dtype=dtype).requires_grad_() for at in range(2)]
        got = [torch.zeros(3, 4, dtype=dtype, requires_grad=True) for _ in range(2)]
        if rank == 0:
            which = {"tensor_send_next": sent[0], "tensor_recv_next": got[1]}
        else:
            which = {"tensor_send_prev": sent[1], "tensor_recv_prev": got[0]}
        names = ("tensor_send_prev", "tensor_recv_prev", "tensor_send_next", "tensor_recv_next")
        seen = bus.listener = Seen()
        seen.target = got[1 - rank].detach()
        requests = post(**dict.fromkeys(names) | which, group=group, prev_pipeline_rank=1 - rank,
                        next_pipeline_rank=1 - rank)
        for request in requests.values() if isinstance(requests, dict) else requests:
            request.wait()
        expected = torch.full((3, 4), 12.5 if rank == 0 else 1.5, dtype=dtype)
        found = got[1 - rank]
        assert torch.equal(found, expected), (rank, found)
        assert found.requires_grad and found.grad_fn is None
        yield seen


patches = ("host_p2p", "p2p_communicator")
originals = upstream._p2p_ops, upstream._batched_p2p_ops
for names in (patches[:1], patches):
    pipefill_patches.apply(names)
    for post in (upstream._p2p_ops, upstream._batched_p2p_ops):
        bus.begin_iteration(1)
        bus.begin_schedule(CycleKey("1f1b", 1))
        for seen in exchange(post):
            if names is patches:
                # The copy back is inside of the bubble.
                assert seen.facts[0] == ("bubble_opened", True), seen.facts
                assert seen.facts[-1] == ("bubble_closed", False), seen.facts
        bus.end_iteration()
    pipefill_patches.revert()
pipefill_patches.apply(("p2p_communicator",))
try:
    pipefill_patches.apply(("host_p2p",))
except pipefill_patches.PatchError as error:
    assert "before 'p2p_communicator'" in str(error)
else:
    raise AssertionError("it was applied outside of what watches")
pipefill_patches.revert()
assert (upstream._p2p_ops, upstream._batched_p2p_ops) == originals
assert len(staged) == 2 * 2 * 2 * 2
print("passed", rank, flush=True)
dist.destroy_process_group()
"""


def test_staged_transfers_bring_what_was_sent(tmp_path):
    script = tmp_path / "rank.py"
    script.write_text(RANK, encoding="utf-8")
    command = [sys.executable, str(ROOT / "tests" / "e2e" / "launch.py"), "2", "-W", "ignore", str(script)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("passed") == 2


def test_it_is_applied_when_asked_for_and_before_the_waits_are_watched(monkeypatch):
    monkeypatch.setenv("PIPEFILL_HOST_P2P", "1")
    assert "host_p2p" in pipefill_patches.defaults([])
    monkeypatch.delenv("PIPEFILL_HOST_P2P")
    assert "host_p2p" not in pipefill_patches.defaults([])
    order = list(pipefill_patches.PATCHES)
    assert order.index("host_p2p") < order.index("p2p_communicator")
