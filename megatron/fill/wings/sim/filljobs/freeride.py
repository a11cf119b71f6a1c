"""FreeRide's side tasks (arXiv 2409.06941), as its artifact measured them on one RTX 6000 Ada.

Step times and memory are those of ``iterative_summary_ada6000.json`` (github.com/jiashu-z/freeride).  A step is the
smallest unit that runs: one microbatch of images, one pass over the graph, or one picture.  The figures of PageRank,
graph SGD and the pictures are rounded there, and the mean equals the median.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.profiles import Configuration, JobProfile, NodeProfile
from megatron.fill.wings.sim.values import FillKind

GPU = "rtx-6000-ada"
_SOURCE = "measured: FreeRide's artifact, one RTX 6000 Ada, iterative interface"


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step of a side task in one batch size.

    Attributes:
        batch: units of work per step.
        memory_bytes: peak GPU memory.
    """

    batch: int
    mean_ns: int
    median_ns: int
    memory_bytes: int

    @property
    def profile(self) -> JobProfile:
        """Return the planner's profile of a job with such steps."""
        node = NodeProfile("step", self.mean_ns, self.memory_bytes)
        return JobProfile(Configuration(self.batch), (node,), self.batch)


def _steps(*rows: tuple[int, float, float, int]) -> dict[int, MeasuredStep]:
    """Return steps by batch size, from rows of batch size, mean and median in ms, and memory in bytes."""
    return {row[0]: MeasuredStep(row[0], round(row[1] * 1e6), round(row[2] * 1e6), row[3]) for row in rows}


STEPS: dict[str, dict[int, MeasuredStep]] = {
    "freeride-resnet18": _steps(
        (8, 13.53, 12.80, 1628045312),
        (16, 11.51, 10.53, 1837760512),
        (32, 14.73, 14.29, 2504654848),
        (48, 22.37, 21.87, 3127508992),
        (64, 31.11, 30.62, 3897163776),
        (80, 38.38, 38.29, 4652138496),
        (96, 48.45, 48.35, 5308547072),
        (112, 55.77, 56.45, 6002704384),
        (128, 64.56, 65.51, 6705250304),
    ),
    "freeride-resnet50": _steps(
        (8, 32.31, 33.35, 2592735232),
        (16, 25.31, 22.94, 3125411840),
        (32, 40.89, 40.60, 4511629312),
        (48, 64.39, 65.13, 6111756288),
        (64, 86.67, 88.94, 8064204800),
        (80, 109.58, 114.70, 9578348544),
        (96, 136.66, 140.65, 11325276160),
        (112, 160.16, 165.87, 12818448384),
        (128, 183.78, 192.59, 14206763008),
    ),
    "freeride-vgg19": _steps(
        (8, 31.11, 30.74, 4729733120),
        (16, 49.97, 50.51, 5908332544),
        (32, 87.28, 90.23, 7810449408),
        (48, 126.80, 133.20, 10538844160),
        (64, 160.25, 174.84, 12361269248),
        (80, 196.68, 214.38, 15005777920),
        (96, 241.92, 255.49, 17650286592),
        (112, 279.87, 298.75, 18724028416),
        (128, 314.91, 347.61, 20544356352),
    ),
    "freeride-pagerank": _steps((1, 3.5, 3.5, 2048000000)),
    "freeride-graph-sgd": _steps((1, 145, 145, 2048000000)),
    "freeride-image": _steps((1, 47, 47, 11177295872)),
}
_IMAGES = ("freeride-resnet18", "freeride-resnet50", "freeride-vgg19", "freeride-image")


def _kind(name: str, steps: dict[int, MeasuredStep]) -> FillKind:
    best = max(step.batch / step.mean_ns for step in steps.values()) * 1e9
    unit = "images" if name in _IMAGES else "iterations"
    return FillKind(name, unit, tuple(step.profile for step in steps.values()), best, _SOURCE)


SIDE_TASKS: dict[str, FillKind] = {name: _kind(name, steps) for name, steps in STEPS.items()}
