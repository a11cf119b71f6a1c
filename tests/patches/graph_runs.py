"""Small graphs of modules trained over several processes, and in one: the gradients' difference.

    python -m tests.patches.graph_runs [TOPOLOGY...] [--upstream] [--timeout SECONDS]

starts a process for each rank, and prints a line per topology:

    {"topology": "fan-out", "ranks": 4, "gradient_error": 2.4e-08, "order": ["F0 F1 F2 B0 ...", ...]}

``gradient_error`` is the largest difference of a gradient of any rank from that of one process, over the largest
gradient.  A topology that is not done in time is said to hang, and so are the others after it.  With ``--upstream``
only what names nccl is mended: what Megatron itself makes of the graphs.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.hooks import bus
from scripts.benchmarks.one_gpu import free_port
from tests.patches.graph_topologies import (
    BATCH,
    LENGTH,
    MICROBATCHES,
    TOPOLOGIES,
    WIDTH,
    Topology,
    data,
    expected,
    loss,
    stage_output,
    weights,
)

if TYPE_CHECKING:
    import torch

MENDED = ("cpu_backend", "schedules", "p2p_communicator", "bridge", "multimodule")
UPSTREAM = ("cpu_backend", "bridge")


class _Order:
    """Hears of a rank's passes: F and B, each with its micro-batch."""

    def __init__(self) -> None:
        self.passes: list[str] = []
        self.bubbles: list[str] = []

    def computed(self, name: str, start_ns: int, end_ns: int) -> None:
        letter = name[0].upper()
        self.passes.append(f"{letter}{sum(one[0] == letter for one in self.passes)}")

    def bubble_opened(self, kind: str, index: int, now_ns: int, free_bytes: int | None = None) -> None:
        self.bubbles.append(str(kind))

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


def _stage(topology: Topology, module: str, stage: int) -> Any:
    """The stage as the schedule wants it: its inputs are set before each forward pass, as a dictionary by module."""
    import torch
    from megatron.core.model_parallel_config import ModelParallelConfig

    class Stage(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(weights(topology, module, stage))
            self.config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
            self.config.hidden_size = WIDTH
            self.taken: dict[str, torch.Tensor] = {}

        def set_input_tensor(self, tensors: list[dict[str, torch.Tensor]]) -> None:
            self.taken = tensors[0]

        def forward(self, microbatch: int) -> torch.Tensor:
            if stage:
                own = self.taken[module]  # a list of one after some calls of the communicator
                taken = own if isinstance(own, list) else [own]
            else:
                taken = [self.taken[name] for name in topology.inputs(module)]
            return stage_output(self.weight, taken or [data(topology, module, microbatch)])

    return Stage()


def _forward_step(topology: Topology, module: str, last: bool) -> Any:
    def step(data_iterator: Iterator[int], model: Any) -> tuple[Any, Any]:
        microbatch = next(data_iterator)
        output = model(microbatch)
        if not last:
            return {module: output}, None
        targets = data(topology, module, microbatch)

        def sink(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            found = loss(output, targets)
            return found, {"loss": found.detach()}

        return output, sink

    return step


def run(topology: Topology) -> tuple[float, str, list[str]] | None:
    """Train one iteration on this rank's stage.  Every rank calls it, also those without a stage.

    Returns:
        The largest difference of a gradient, over the largest gradient; the order of the passes; and the kinds of the
        bubbles; None on a rank without a stage.
    """
    import torch
    import torch.distributed as dist
    from megatron.core.hyper_comm_grid import HyperCommGrid
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.pipeline_parallel.multimodule_communicator import MultiModulePipelineCommunicator
    from megatron.core.process_groups_config import MultiModuleProcessGroupCollection, ProcessGroupCollection

    grids = {}
    for module, depth in topology.depths.items():
        first = topology.first_rank(module)
        grid = HyperCommGrid([1, 1, depth, 1], ["tp", "cp", "pp", "dp"], rank_offset=first, backend="gloo")
        for dimension in grid.dim_names:
            grid.create_pg([dimension])
        grids[module] = grid
    edges = {module: list(topology.edges.get(module, ())) for module in topology.depths}
    config = ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=True)
    mapping: Any = {"s": 0, "b": 1, "h": 2}
    communicator = MultiModulePipelineCommunicator(grids, edges, config, dim_mapping=mapping)
    place = topology.place(dist.get_rank())
    if place is None:
        return None
    module, stage = place
    sink = not edges[module]
    groups = ProcessGroupCollection()
    groups.tp, groups.cp, groups.pp = (grids[module].get_pg(name) for name in ("tp", "cp", "pp"))
    model = _stage(topology, module, stage)
    last = sink and stage == topology.depths[module] - 1
    bus.listener = order = _Order()
    bus.begin_iteration(1)
    schedules.forward_backward_pipelining_without_interleaving(
        forward_step_func=_forward_step(topology, module, last),
        data_iterator=iter(range(MICROBATCHES)),
        model=model,
        num_microbatches=MICROBATCHES,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        p2p_communicator=communicator,
        pg_collection=MultiModuleProcessGroupCollection({module: groups}, module if sink else None),
    )
    bus.end_iteration()
    bus.listener = None
    truth = expected(topology)
    largest = max(float(gradient.abs().max()) for gradient in truth.values())
    return float((model.weight.grad - truth[place]).abs().max()) / largest, " ".join(order.passes), order.bubbles


def _rank(rank: int, names: Sequence[str], upstream: bool, folder: Path) -> None:
    """One rank: it writes what it finds of each topology into a file, or why it failed."""
    import torch.distributed as dist

    import pipefill_patches

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    try:
        pipefill_patches.apply(UPSTREAM if upstream else MENDED)
        logging.disable(logging.INFO)  # Megatron tells of every group
        dist.init_process_group("gloo")
        for name in names:
            found = run(TOPOLOGIES[name])
            if found is not None:
                line = dict(zip(("gradient_error", "order", "bubbles"), found, strict=True))
                (folder / f"{name}.{rank}.part").write_text(json.dumps(line), encoding="utf-8")
                (folder / f"{name}.{rank}.part").rename(folder / f"{name}.{rank}.json")
            dist.barrier()
        dist.destroy_process_group()
    except Exception:
        (folder / f"failed.{rank}").write_text(traceback.format_exc(), encoding="utf-8")
        raise


def launch(names: Sequence[str], upstream: bool = False, timeout_s: float = 120.0) -> list[dict[str, Any]]:
    """Run topologies one after another, over as many processes as the largest needs.

    Returns:
        Per topology its name and ranks, and ``gradient_error``, ``order`` and ``bubbles``; or ``hangs``, if it was not
        done in time.

    Raises:
        RuntimeError: a rank failed; has its traceback.
    """
    import megatron.core.pipeline_parallel.schedules
    import megatron.training.training  # noqa: F401

    ranks = max(TOPOLOGIES[name].ranks for name in names)
    context = multiprocessing.get_context("fork")
    with free_port() as port, tempfile.TemporaryDirectory(prefix="pipefill-") as name:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        folder = Path(name)
        processes = [
            context.Process(target=_rank, args=(rank, names, upstream, folder), daemon=True) for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        failed = _wait(processes, timeout_s)
        for process in processes:
            process.kill()
            process.join()
        if failed:  # a rank whose peer is gone fails too
            texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("failed.*"))]
            raise RuntimeError("a rank failed:\n" + min(texts, key=lambda text: "Connection closed" in text))
        return [_found(folder, one) for one in names]


def _wait(processes: Sequence[Any], timeout_s: float) -> bool:
    """Whether one failed, when that happens; False when all have ended, or time is up."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        codes = [process.exitcode for process in processes]
        if any(codes) or None not in codes:
            return any(codes)
        time.sleep(0.05)
    return False


def _found(folder: Path, name: str) -> dict[str, Any]:
    topology = TOPOLOGIES[name]
    files = [folder / f"{name}.{rank}.json" for rank in range(topology.ranks)]
    found: dict[str, Any] = {"topology": name, "ranks": topology.ranks}
    if not all(file.exists() for file in files):
        return found | {"hangs": True}
    rows = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    return found | {
        "gradient_error": max(row["gradient_error"] for row in rows),
        "order": [row["order"] for row in rows],
        "bubbles": [row["bubbles"] for row in rows],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="TOPOLOGY", help=f"some of {', '.join(TOPOLOGIES)}; default: all")
    parser.add_argument("--upstream", action="store_true", help="without what mends graphs")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for all of them (120)")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in TOPOLOGIES]:
        parser.error(f"TOPOLOGY is {unknown[0]!r}; expected some of {', '.join(TOPOLOGIES)}")
    names = given.names or list(TOPOLOGIES)
    for found in launch(names, given.upstream, given.timeout):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
