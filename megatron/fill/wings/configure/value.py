"""Value of a configuration's bubbles: what the planner packs into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron.fill.models import MODELS
from megatron.fill.planner.held import MARGIN_BYTES, RESERVE_NS, held_cycle, room_bytes
from megatron.fill.profiles import BubbleCycle
from megatron.fill.wings.configure.search import Proposal
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.sim.filljobs.catalog import catalog_kinds
from megatron.fill.wings.sim.filljobs.jobs import jobs_from_file
from megatron.fill.wings.sim.values import FillKind

_DEFAULT = ("bert-base-inference",)


class Objective(StrEnum):
    """By what configurations are ranked."""

    MAIN = "main"  # the iteration's time
    COMBINED = "combined"  # GPU time of an iteration, less what the fill work would have taken alone
    COST = "cost"  # the same in money, on all numbers of nodes


@dataclass(frozen=True, slots=True)
class Valued:
    """A proposal and what fills it."""

    proposal: Proposal
    gpus_worth: float  # number of GPUs of their own that the fill jobs would need for the same work

    @property
    def net_gpu_s(self) -> float:
        """GPU seconds of an iteration, less those that the fill work would have taken on GPUs of its own."""
        return self.proposal.iteration_s * (self.proposal.parallel.gpus - self.gpus_worth)


def fill_kinds(gpu: GpuKind, jobs: Path | None) -> tuple[FillKind, ...]:
    """The kinds of a jobs file, by their names in the catalog; without one, inference of BERT-base.

    Raises:
        ConfigError: the file is wrong, or has a job that the catalog has not.
        ValueError: the GPU cannot hold the default.
    """
    if jobs is None:
        return catalog_kinds(gpu, _DEFAULT)
    return jobs_from_file(jobs, catalog_kinds(gpu, models=MODELS), 1.0)[0]


def valued(proposal: Proposal, kinds: Sequence[FillKind]) -> Valued:
    """With each GPU's bubbles packed by the kind that does most there, and nothing else lost or won."""
    worth = sum(gpus_worth(cycle, kinds) for cycle in proposal.cycles())
    its = proposal.parallel
    return Valued(proposal, worth * its.tp * its.replicas)


def gpus_worth(cycle: BubbleCycle, kinds: Sequence[FillKind]) -> float:
    """The share of a GPU of its own that one GPU's bubbles are worth, packed by the kind that does most there."""
    held = held_cycle(cycle, room_bytes(cycle, MARGIN_BYTES))
    if not held.slots:
        return 0.0
    plans = [(kind, kind.plan(held, RESERVE_NS)) for kind in kinds]
    return max(
        (plan.work_per_cycle / (cycle.period_ns / 1e9) / kind.alone_rate for kind, plan in plans if plan), default=0.0
    )
