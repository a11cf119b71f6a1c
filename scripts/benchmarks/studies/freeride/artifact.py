"""Data from FreeRide's artifact (github.com/jiashu-z/freeride): its trainings, side tasks, prices and results."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.fill.wings.sim.filljobs.freeride import SIDE_TASKS, STEPS, MeasuredStep

STAGES = 4
PRICE_ADA_H, PRICE_3080_H = 3.96, 0.18  # per hour of the servers with four GPUs and with one (analyze_cost.ipynb)
BATCH = 64  # batch size of image training in all of the artifact's results

# By number of microbatches.  The model is not stated (train_simplegpt2.py, ``thresholds``); 3.6B is assumed: it fits.
ITERATION_S = {4: 4.122, 5: 4.714, 6: 5.359, 7: 6.051, 8: 6.609}
# The only time of 1.2B, with four microbatches: 833.28 s for 127 iterations, filled with ResNet18
# (artifact_evaluation.md).  The time without it is not given.
ITERATION_1_2B_S = 6.56


@dataclass(frozen=True, slots=True)
class ArtifactTask:
    """A side task and its results in the bubbles of 3.6B with four microbatches (artifact_evaluation.md).

    Attributes:
        kind: name in the catalog.
        throughput_3080: units of work per second on an RTX 3080, in steps of ``batch`` (analyze_cost.ipynb).
        compiled: True for a C++ program, False for a Python one.
        increase: relative increase of the training's time.
        saving: saving as a share of the training's cost, without subtracting the time increase.
    """

    kind: str
    batch: int
    throughput_3080: float
    compiled: bool
    increase: float
    saving: float

    @property
    def steps(self) -> dict[int, MeasuredStep]:
        """Measured steps by batch size."""
        return STEPS[self.kind]

    @property
    def alone_rate(self) -> float:
        """Work per second alone on an RTX 6000 Ada, in the best batch size."""
        return SIDE_TASKS[self.kind].alone_rate


TASKS = {
    "ResNet18": ArtifactTask("freeride-resnet18", BATCH, 998.7, False, 0.0003, 0.0807),
    "ResNet50": ArtifactTask("freeride-resnet50", BATCH, 393.4, False, 0.0136, 0.0592),
    "VGG19": ArtifactTask("freeride-vgg19", BATCH, 161.8, False, 0.0210, 0.0534),
    "Graph SGD": ArtifactTask("freeride-graph-sgd", 1, 1.5, True, 0.0116, 0.1987),
    "PageRank": ArtifactTask("freeride-pagerank", 1, 126.3, True, 0.0005, 0.0306),
    "Image": ArtifactTask("freeride-image", 1, 7.8, True, 0.0074, 0.0485),
}

# The mixed workload in the order of submission (run_mix.py), and each task's work in 128 iterations.
MIX_WORK = {"PageRank": 12107, "ResNet18": 217152, "Image": 1597, "VGG19": 64448}
MIX_ITERATIONS = 128
MIX_INCREASE, MIX_SAVING = 0.0157, 0.0615  # with the time increase subtracted


@dataclass(frozen=True, slots=True)
class Size:
    """A model, its microbatch, and each stage's free memory (experiment_config.py).

    Attributes:
        model: name in the catalog of models.
        free_gib: free memory per stage; the unit GiB follows from the artifact's use of the numbers (run_side_task.py,
            analyze_bubbles.py).
    """

    model: str
    microbatch: int
    free_gib: tuple[int, ...]


SIZES = {
    "1.2B": Size("freeride-1.2b", 12, (5, 12, 21, 32)),
    "3.6B": Size("freeride-3.6b", 3, (3, 9, 16, 24)),
    "6B": Size("freeride-6b", 1, (1, 6, 10, 14)),
}
