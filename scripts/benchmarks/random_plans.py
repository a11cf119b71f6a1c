"""Random bubble cycles and jobs, for measuring plans."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

from megatron.fill.profiles import BubbleCycle, BubbleSlot, Configuration, JobProfile, NodeProfile, Offload
from megatron.fill.types import BubbleKind

MS = 1_000_000  # ns
GIB = 2**30


def log_uniform(source: random.Random, low: float, high: float) -> float:
    return exp(source.uniform(log(low), log(high)))


def random_cycle(source: random.Random, bubbles: int) -> BubbleCycle:
    """Durations from a decade somewhere in 5 to 500 ms, memory within 40% of the largest."""
    shortest_ns, most = log_uniform(source, 5, 50) * MS, source.uniform(2, 20) * GIB
    slots = tuple(
        BubbleSlot(
            BubbleKind.INTERIOR,
            int(log_uniform(source, shortest_ns, 10 * shortest_ns)),
            int(most * source.uniform(0.6, 1)),
        )
        for _ in range(bubbles)
    )
    return BubbleCycle(int(sum(slot.duration_ns for slot in slots) * source.uniform(1.5, 5)), slots)


@dataclass(frozen=True, slots=True)
class JobModel:
    """A job before it is configured: a forward pass of a layer takes ``fixed_ns + batch * sample_ns``."""

    layers: tuple[float, ...]  # their sizes, around 1
    training: bool
    fixed_ns: float
    sample_ns: float
    weights: float  # bytes
    activations: float  # bytes per layer and sample

    def profile(self, configuration: Configuration) -> JobProfile:
        """An iteration of one batch; for training with Adam: two states of the weights' size, and gradients."""
        batch, offload = configuration.batch_size, configuration.offload is Offload.OPTIMIZER
        working = self.activations * batch
        forward = [size * (self.fixed_ns + self.sample_ns * batch) for size in self.layers]
        if not self.training:
            memory = int(self.weights + working)
            nodes = [NodeProfile(f"forward {i}", int(ns), memory) for i, ns in enumerate(forward)]
            return JobProfile(configuration, tuple(nodes), batch)
        kept = working * (0.15 if configuration.checkpointing else 1)
        states = 0 if offload else 2 * self.weights
        nodes = [
            NodeProfile(f"forward {i}", int(ns), int(self.weights + states + i * kept + working))
            for i, ns in enumerate(forward)
        ]
        nodes += [
            NodeProfile(
                f"backward {i}",
                int(ns * (3 if configuration.checkpointing else 2)),
                int(2 * self.weights + states + i * kept + working),
            )
            for i, ns in reversed(list(enumerate(forward)))
        ]
        # offloaded states come to the device a piece at a time, and slowly
        held = int(2 * self.weights + (0.6 * self.weights if offload else states))
        nodes += [NodeProfile(f"optimizer {i}", int(self.fixed_ns * (6 if offload else 2)), held) for i in range(4)]
        return JobProfile(configuration, tuple(nodes), batch)

    def profiles(self, batches: Sequence[int]) -> list[JobProfile]:
        ways = [(False, Offload.NONE)]
        if self.training:
            ways = [(again, where) for again in (False, True) for where in (Offload.NONE, Offload.OPTIMIZER)]
        return [self.profile(Configuration(batch, *way)) for batch in batches for way in ways]


def random_model(source: random.Random, free_bytes: int, layers: int, slower: float = 1.0) -> JobModel:
    weights, activations = log_uniform(source, 0.01, 0.6), log_uniform(source, 0.0008, 0.08) / layers
    return JobModel(
        tuple(source.uniform(0.7, 1.3) for _ in range(layers)),
        source.random() < 0.6,
        log_uniform(source, 0.05, 1) * slower * MS,
        log_uniform(source, 0.02, 2) * slower * MS,
        weights * free_bytes,
        activations * free_bytes,
    )


def small_tail_job(source: random.Random, free_bytes: int) -> list[JobProfile]:
    """Inference with a small model: steps of 20 us to some ms."""
    layers = tuple(source.uniform(0.7, 1.3) for _ in range(source.randint(2, 12)))
    fixed_ns, sample_ns = log_uniform(source, 0.02, 0.1) * MS, log_uniform(source, 0.005, 0.05) * MS
    model = JobModel(layers, False, fixed_ns, sample_ns, 0.01 * free_bytes, 0.0005 * free_bytes)
    return model.profiles((1, 4, 16))
