"""Plans that can be trained: one device for each stage, and 1F1B with the same microbatches everywhere.

Megatron's pipeline of several modules runs them, with the patches ``bridge`` and ``multimodule``.  Its transfers are
synchronous: a stage continues when its peer has received what it sent.  A plan that would run with asynchronous
transfers may thus deadlock there, which is detected here, before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.plan import Plan


class _Meeting(StrEnum):
    """An exchange between two stages: an activation, a gradient, or both."""

    FORWARD = "F"
    BACKWARD = "B"
    BOTH = "FB"


@dataclass(frozen=True)
class Runnable:
    """A plan with a rank for each stage; rank and stage have the same number.

    GraphError, which names the stage, if the plan cannot be trained this way.
    """

    plan: Plan
    ranks: int

    def __post_init__(self) -> None:
        if problem := self._problem():
            raise GraphError(problem)

    @property
    def micro_batch(self) -> int:
        """Samples per microbatch."""
        return self.plan.stages[0].micro_batch

    @property
    def microbatches(self) -> int:
        """Microbatches per iteration."""
        return self.plan.batch // self.micro_batch

    @cached_property
    def outputs(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the operators whose output other stages take, in the graph's order."""
        graph = self.plan.graph
        homes = {name: number for number, stage in enumerate(self.plan.stages) for name in stage.operators}
        taken = {
            name
            for operator in graph.operators
            for name in operator.inputs
            if homes.get(name, homes[operator.name]) != homes[operator.name]
        }
        order = [graph.operators[at].name for at in graph.order]
        return tuple(
            tuple(name for name in order if name in taken and homes[name] == number)
            for number in range(len(self.plan.stages))
        )

    @property
    def received_ahead(self) -> int:
        """Maximum number of microbatches that a stage receives ahead of its next forward pass."""
        after = self.plan.after
        return max((after[source] - after[to] - 1 for source, to in self.plan.edges), default=0)

    @cached_property
    def ahead(self) -> tuple[tuple[str, ...], ...]:
        """Per stage, the operators running ahead whose output it takes."""
        graph = self.plan.graph
        names = [operator.name for operator in graph.ahead]
        taken = [{name for its in stage.operators for name in graph.by_name[its].inputs} for stage in self.plan.stages]
        return tuple(tuple(name for name in names if name in some) for some in taken)

    def _problem(self) -> str:
        plan, stages = self.plan, self.plan.stages
        if plan.sequential:
            return "the plan is sequential: Megatron's own pipeline trains a chain; expected a graph of stages"
        for number, its in enumerate(stages):
            if len(its.devices) > 1:
                return (
                    f"stage {number} is on {len(its.devices)} devices: a stage is trained on one; expected a plan made"
                    f" with --micro-batches {plan.batch}, so that a micro-batch is one sample, which is not divided"
                )
        if len(stages) != self.ranks:
            ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
            return f"the plan has {len(stages)} stages and the run has {ranks}; expected RANKS={len(stages)}"
        if len(stages) == 1:
            return "the plan has one stage, and so no pipeline; expected two or more"
        for number, its in enumerate(stages):
            if its.devices != (number,):
                return f"stage {number} is on device {its.devices[0]}; expected {number}: rank {number} trains it"
            if its.micro_batch != self.micro_batch or its.k != 1:
                return (
                    f"stage {number} has {its.k}F{its.k}B with micro-batches of {its.micro_batch}; expected 1F1B with"
                    f" {self.micro_batch}, as in stage 0: a plan made with --micro-batches"
                )
            flight = min(self.microbatches, plan.after[number] + 1) * self.micro_batch
            if its.in_flight != flight:
                return f"stage {number} has {its.in_flight} samples in flight; expected {flight}, as the schedule has"
            if plan.successors[number] and all(plan.graph.by_name[name].frozen for name in self.outputs[number]):
                return (
                    f"stage {number} sends only what frozen operators return, so no gradient comes back to it; expected"
                    " a trained operator's output, or a plan made with --ahead"
                )
        if stuck := self._stuck():
            return (
                f"stages {', '.join(map(str, stuck))} would wait for each other forever, since a transfer waits for its"
                f" receiver; expected fewer stages that others skip; the plan is\n{plan}"
            )
        return ""

    def _stuck(self) -> list[int]:
        """Return the stages that deadlock."""
        programs = [self._meetings(stage) for stage in range(len(self.plan.stages))]
        at = [0] * len(programs)
        moved = True
        while moved:
            moved = False
            for stage, program in enumerate(programs):
                while at[stage] < len(program):
                    edge, kind = program[at[stage]]
                    peer = edge[edge[0] == stage]
                    if at[peer] == len(programs[peer]) or programs[peer][at[peer]][0] != edge:
                        break
                    assert programs[peer][at[peer]][1] is kind
                    at[stage] += 1
                    at[peer] += 1
                    moved = True
        return [stage for stage, program in enumerate(programs) if at[stage] < len(program)]

    def _meetings(self, stage: int) -> list[tuple[tuple[int, int], _Meeting]]:
        """Return a stage's exchanges of one iteration in the patched communicator's order, each with its edge."""
        count, after = self.microbatches, self.plan.after  # as many warm-up passes as there are stages behind
        targets = sorted(self.plan.successors[stage], key=lambda to: -after[to])
        ahead = {source: after[source] - after[stage] - 1 for source in self.plan.predecessors(stage)}
        sources = sorted(ahead, key=lambda source: ahead[source])
        found: list[tuple[tuple[int, int], _Meeting]] = []
        received = dict.fromkeys(sources, 0)
        given = 0

        def lacks(source: int) -> bool:
            return received[source] < min(count, given + 1 + ahead[source])

        def receive() -> None:
            nonlocal given
            while late := [source for source in sources if lacks(source)]:
                for source in late:
                    found.append(((source, stage), _Meeting.FORWARD))
                    received[source] += 1
            given += 1

        def send_back(take: bool) -> None:
            nonlocal given
            for source in sources:
                both = take and lacks(source)
                received[source] += both
                found.append(((source, stage), _Meeting.BOTH if both else _Meeting.BACKWARD))
            given += take

        def outwards(kind: _Meeting) -> None:
            found.extend(((stage, target), kind) for target in targets)

        warm = min(after[stage], count)
        for _ in range(warm):
            receive()
            outwards(_Meeting.FORWARD)
        if warm < count:
            receive()
        for number in range(warm, count):
            outwards(_Meeting.BOTH)
            send_back(number < count - 1)
        for _ in range(warm):
            outwards(_Meeting.BACKWARD)
            send_back(False)
        return found
