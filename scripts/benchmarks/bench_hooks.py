"""What measuring the bubbles, without jobs, costs the main job.

A difference of 0.1% drowns in the noise of whole iterations, so the cost is measured by itself: the real patches are
applied over stand-ins that do nothing, and one iteration's worth of calls (1F1B, four microbatches, a middle stage) is
timed without them, with them, and with the rank's record written as well, in turn.  Collectives are torch's own, over
its fake backend: four within the stage in each pass, and four across stages in the drain.  The share is that last cost
over the iteration time of a real run.

    python scripts/benchmarks/bench_hooks.py --iteration-ms 1170 --json docs/benchmarks/hooks.json
"""

from __future__ import annotations

import inspect
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipefill_patches
from megatron.fill.hooks import bus
from megatron.fill.linux.host import FreeHostMemory
from megatron.fill.rank.listener import RankListener
from megatron.fill.rank.predictor import BubblePredictor
from megatron.fill.rank.recorder import Recorder
from megatron.fill.rank.rule import FillRule
from megatron.fill.types import RankInfo
from scripts.benchmarks.harness import arguments, write_figures

MICROBATCHES = 4
COLLECTIVES = 4  # in a pass, and in the drain
PATCHES = ("cpu_backend", "training_loop", "schedules", "p2p_communicator")


def stand_in(holder: Any, name: str, call: Any) -> None:
    """Put ``call`` where upstream's function was, under upstream's signature."""
    call.__signature__ = inspect.signature(getattr(holder, name))
    setattr(holder, name, call)


def prepare() -> Any:
    """Replace what the patches wrap by stand-ins; returns the module whose ``train_step`` is one iteration."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import p2p_communication, schedules
    from megatron.training import training
    from torch.testing._internal.distributed.fake_pg import FakeStore

    communicator = SimpleNamespace()

    request = SimpleNamespace(wait=lambda: None)

    def post(**kwargs: Any) -> dict[str, Any]:
        return {"send_next": request, "recv_prev": request}

    def communicate(self: Any, **kwargs: Any) -> tuple[None, None, None]:
        for posted in p2p_communication._p2p_ops().values():
            posted.wait()
        return None, None, None

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    parallel_state.initialize_model_parallel(2, 2)
    stage, both = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_model_parallel_group()
    tensor = torch.ones(2)

    def a_pass(*args: Any, **kwargs: Any) -> None:
        for _ in range(COLLECTIVES):
            dist.all_reduce(tensor, group=stage)

    def schedule(**kwargs: Any) -> None:
        transfer = p2p_communication.P2PCommunicator._communicate
        arguments: dict[str, Any] = dict.fromkeys(("tensor_send_next", "tensor_send_prev", "tensor_shape"))
        for _ in range(MICROBATCHES):
            transfer(communicator, recv_prev=True, recv_next=False, **arguments)
            schedules.forward_step()
            transfer(communicator, recv_prev=False, recv_next=True, **arguments)
            schedules.backward_step()
        transfer(communicator, recv_prev=True, recv_next=False, **arguments)

    def train_step(*args: Any, **kwargs: Any) -> None:
        schedules.forward_backward_pipelining_without_interleaving(model=None, num_microbatches=MICROBATCHES)
        for _ in range(COLLECTIVES):
            dist.all_reduce(tensor, group=both)

    stand_in(p2p_communication.P2PCommunicator, "_communicate", communicate)
    stand_in(p2p_communication, "_p2p_ops", post)
    stand_in(schedules, "forward_step", a_pass)
    stand_in(schedules, "backward_step", lambda *args: a_pass())
    stand_in(schedules, "forward_backward_pipelining_without_interleaving", schedule)
    stand_in(training, "train_step", train_step)
    return training


def _median_us(some: list[float], others: list[float]) -> float:
    return statistics.median(one - other for one, other in zip(some, others, strict=True)) * 1e6


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--iteration-ms", type=float, required=True, help="of the real run to compare with")
    parser.add_argument("--rounds", type=int, default=40, help="pairs of blocks (default: 40)")
    parser.add_argument("--block", type=int, default=50, help="iterations per block (default: 50)")
    options = parser.parse_args()
    pipefill_patches.apply(("cpu_backend",))  # for the core pinning, and so that Megatron imports without a device
    training = prepare()
    info = RankInfo(0, 2, 0, 2, 0, 1, 0, 2)
    seconds: dict[str, list[float]] = {"off": [], "measuring": [], "recording": []}
    with tempfile.TemporaryDirectory() as scratch:
        recorders = {"measuring": Recorder(info, 3), "recording": Recorder(info, 3, Path(scratch) / "rank0.jsonl")}
        listeners = {
            name: RankListener(None, recorder, BubblePredictor(FillRule()), FreeHostMemory())
            for name, recorder in recorders.items()
        }
        for _ in range(options.rounds):
            for name, its in seconds.items():
                if name == "off":
                    for patch in PATCHES[1:]:
                        pipefill_patches.PATCHES[patch].revert()
                else:
                    pipefill_patches.apply(PATCHES)
                    bus.listener = listeners[name]
                start = time.perf_counter()
                for number in range(options.block):
                    training.train_step(iteration=number)
                its.append((time.perf_counter() - start) / options.block)
        assert recorders["recording"].close()
    cost_us = _median_us(seconds["recording"], seconds["off"])
    summary = {
        "cost_us_per_iteration": round(cost_us, 1),
        "of_which_writing_us": round(_median_us(seconds["recording"], seconds["measuring"]), 1),
        "iteration_ms": options.iteration_ms,
        "measuring_share": cost_us / (options.iteration_ms * 1e3),
    }
    write_figures(options.json, summary)


if __name__ == "__main__":
    main()
