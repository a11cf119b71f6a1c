"""FreeRide's side tasks (arXiv 2409.06941), as its artifact measured them on one RTX 6000 Ada.

The mean time and the memory of a step are those of ``iterative_summary_ada6000.json``.  A step is the least that runs
at a time: one micro-batch of 64 images, one pass over the graph, or one picture.
"""

from __future__ import annotations

from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.sim.values import FillKind

GPU = "rtx-6000-ada"
_SOURCE = "measured: FreeRide's artifact, one RTX 6000 Ada, iterative interface"


def _side_task(name: str, unit: str, batch: int, step_s: float, memory_bytes: float) -> FillKind:
    node = NodeProfile("step", round(step_s * 1e9), round(memory_bytes))
    profile = JobProfile(Configuration(batch), (node,), batch)
    return FillKind(f"freeride-{name}", unit, (profile,), batch / step_s, _SOURCE)


SIDE_TASKS: dict[str, FillKind] = {
    kind.name: kind
    for kind in (
        _side_task("resnet18", "images", 64, 0.03111, 3.897e9),
        _side_task("resnet50", "images", 64, 0.08667, 8.064e9),
        _side_task("vgg19", "images", 64, 0.16025, 12.361e9),
        _side_task("pagerank", "iterations", 1, 0.0035, 2.048e9),
        _side_task("graph-sgd", "iterations", 1, 0.145, 2.048e9),
        _side_task("image", "images", 1, 0.047, 11.177e9),
    )
}
