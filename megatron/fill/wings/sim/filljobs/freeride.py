"""FreeRide's side tasks (arXiv 2409.06941), as its artifact measured them on one RTX 6000 Ada.

Step times and memory are those of ``iterative_summary_ada6000.json`` (github.com/jiashu-z/freeride).  A step is the
smallest unit that runs: one microbatch of images, one pass over the graph, or one picture.
"""

from __future__ import annotations

from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.wings.sim.values import FillKind

GPU = "rtx-6000-ada"

# Batch size, mean duration of a step in ms, and its peak GPU memory in bytes.
_STEPS: dict[str, tuple[tuple[int, float, int], ...]] = {
    "freeride-resnet18": (
        (8, 13.53, 1628045312),
        (16, 11.51, 1837760512),
        (32, 14.73, 2504654848),
        (48, 22.37, 3127508992),
        (64, 31.11, 3897163776),
        (80, 38.38, 4652138496),
        (96, 48.45, 5308547072),
        (112, 55.77, 6002704384),
        (128, 64.56, 6705250304),
    ),
    "freeride-resnet50": (
        (8, 32.31, 2592735232),
        (16, 25.31, 3125411840),
        (32, 40.89, 4511629312),
        (48, 64.39, 6111756288),
        (64, 86.67, 8064204800),
        (80, 109.58, 9578348544),
        (96, 136.66, 11325276160),
        (112, 160.16, 12818448384),
        (128, 183.78, 14206763008),
    ),
    "freeride-vgg19": (
        (8, 31.11, 4729733120),
        (16, 49.97, 5908332544),
        (32, 87.28, 7810449408),
        (48, 126.80, 10538844160),
        (64, 160.25, 12361269248),
        (80, 196.68, 15005777920),
        (96, 241.92, 17650286592),
        (112, 279.87, 18724028416),
        (128, 314.91, 20544356352),
    ),
    "freeride-pagerank": ((1, 3.5, 2048000000),),
    "freeride-graph-sgd": ((1, 145, 2048000000),),
    "freeride-image": ((1, 47, 11177295872),),
}
_ITERATIONS = ("freeride-pagerank", "freeride-graph-sgd")  # the unit of their work; that of all others is images


def _kind(name: str) -> FillKind:
    profiles = tuple(
        JobProfile(Configuration(batch), (NodeProfile("step", round(mean_ms * 1e6), size),), batch)
        for batch, mean_ms, size in _STEPS[name]
    )
    best = max(its.work / its.duration_ns for its in profiles) * 1e9
    return FillKind(name, "iterations" if name in _ITERATIONS else "images", profiles, best)


SIDE_TASKS: dict[str, FillKind] = {name: _kind(name) for name in _STEPS}
