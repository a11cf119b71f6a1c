"""A plan: a graph of stages, each with its operators, devices, microbatch and schedule; and its validity check."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

from megatron.fill.display import counted
from megatron.fill.errors import GraphError
from megatron.fill.pipeline.schedule import Op, Pass, execution_order
from megatron.fill.wings.graph.cost import Cluster, Costs
from megatron.fill.wings.graph.model import ModelGraph, members
from megatron.fill.wings.graph.schedule import passes

_HEAD = re.compile(r"graph plan of (.+): (\d+) samples, (\d+) stages?(, sequential)?")
_AHEAD = "ahead: "
_MOST_PASSES = 1 << 21  # of an iteration, as of one stage with the largest batch: its timeline takes 20 s, and 1.3 GB
_LINE = re.compile(r"(\d+): devices (\S+), micro-batch (\d+), (\d+)F(\d+)B, in flight (\d+): (.+)")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the model on devices of its own."""

    operators: tuple[str, ...]  # names of the operators
    devices: tuple[int, ...]  # device numbers from 0; a microbatch is divided over them
    micro_batch: int  # samples per microbatch
    k: int  # the *k* of kFkB: ``k`` forward passes alternate with ``k`` backward passes
    in_flight: int  # maximum samples between their forward and their backward pass
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a file, a misspelt field is an error


@dataclass(frozen=True)
class Plan:
    """Stages, each after those that it depends on.

    A plan is valid under these conditions (GraphPipe, section 4), whose numbers appear in errors:

    - C1: every operator is in exactly one stage, and every stage is convex: no path leaves it and comes back.
    - C2: the stages' dependencies, which follow from their operators', have no cycle: each stage is after those it
      depends on.
    - C3: no device has two stages, and each stage fits the memory of its devices.
    - C4: every stage's microbatches make up the batch, and all stages' passes can run in their order without deadlock.

    The text form has a line per stage:

        graph plan of toy: 8 samples, 2 stages:
        0: devices 0-1, micro-batch 2, 1F1B, in flight 4: a b
        1: devices 2, micro-batch 2, 1F1B, in flight 2: c

    If frozen operators run ahead, outside all stages, a line with ``ahead:`` and their names follows.

    Raises:
        GraphError: the plan is not valid; the error names the condition, stages and operators, and shows the plan.
    """

    graph: ModelGraph
    cluster: Cluster
    batch: int  # samples per iteration
    stages: tuple[Stage, ...]
    sequential: bool = False  # True if each stage also waits for the one before it, as in a pipeline that is a chain

    def __post_init__(self) -> None:
        if problem := self._c1() or self._c2() or self._c3() or self._c4():
            raise GraphError(f"{problem}; the plan is\n{self}")

    @cached_property
    def masks(self) -> tuple[int, ...]:
        """Per stage, its set of operators."""
        return tuple(self.graph.mask(stage.operators) for stage in self.stages)

    @cached_property
    def edges(self) -> dict[tuple[int, int], float]:
        """Edges between stages, with the bytes per sample that the first sends to the second."""
        graph = self.graph
        home = {at: number for number, mask in enumerate(self.masks) for at in members(mask)}
        found = dict.fromkeys(pairwise(range(len(self.stages))), 0.0) if self.sequential else {}
        for at, operator in enumerate(graph.operators):
            for to in {home[target] for target in members(graph.outputs[at])} - {home[at]}:
                found[home[at], to] = found.get((home[at], to), 0.0) + operator.output_bytes
        return found

    @cached_property
    def costs(self) -> Costs:
        return Costs(self.graph, self.cluster, self.batch)

    def predecessors(self, stage: int) -> list[int]:
        """The stages whose output a stage takes, or for which it waits in a sequential plan."""
        return sorted(source for source, target in self.edges if target == stage)

    def passes(self, stage: int) -> tuple[Op, ...]:
        """A stage's passes of an iteration, in order."""
        its = self.stages[stage]
        return passes(self.batch, its.micro_batch, its.in_flight, its.k)

    @cached_property
    def needs(self) -> list[list[tuple[tuple[int, int | None], ...]]]:
        """Per stage and pass, the passes that it depends on.

        Each is given by its number, counted from 0 over the passes of all stages, and by its stage, which is None for
        the stage's own forward pass.
        """
        rows = [self.passes(stage) for stage in range(len(self.stages))]
        numbers: list[dict[Op, int]] = []
        count = 0
        for row in rows:
            numbers.append({op: count + at for at, op in enumerate(row)})
            count += len(row)
        found = []
        for stage, row in enumerate(rows):
            mine, sources = self.stages[stage].micro_batch, self.predecessors(stage)
            entries = []
            for op in row:
                others = sources if op.kind is Pass.FORWARD else self.successors[stage]
                last = (op.microbatch + 1) * mine - 1  # sample
                needs: list[tuple[int, int | None]] = [
                    (numbers[other][Op(op.kind, last // self.stages[other].micro_batch)], other) for other in others
                ]
                if op.kind is Pass.BACKWARD:
                    needs.append((numbers[stage][Op(Pass.FORWARD, op.microbatch)], None))
                entries.append(tuple(needs))
            found.append(entries)
        return found

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        """Per stage, the stages that take its output, or that wait for it in a sequential plan."""
        edges, stages = sorted(self.edges), range(len(self.stages))
        return tuple(tuple(to for source, to in edges if source == stage) for stage in stages)

    @cached_property
    def after(self) -> tuple[int, ...]:
        """Per stage, the number of stages on the longest path behind it."""
        found = [0] * len(self.stages)
        for stage in reversed(range(len(found))):
            found[stage] = max((1 + found[to] for to in self.successors[stage]), default=0)
        return tuple(found)

    @property
    def depth(self) -> int:
        """Number of stages on the longest path."""
        return 1 + max(self.after)

    @property
    def devices(self) -> int:
        return sum(len(stage.devices) for stage in self.stages)

    def time_per_sample_s(self, stage: int) -> float:
        """A stage's time per sample, in seconds."""
        its = self.stages[stage]
        return self.costs.time_per_sample_s(self.masks[stage], its.micro_batch, len(its.devices))

    @property
    def bottleneck_s(self) -> float:
        """The longest time per sample of any stage, in seconds."""
        return max(map(self.time_per_sample_s, range(len(self.stages))))

    def memory_bytes(self, stage: int) -> float:
        """Peak memory of each device of one stage."""
        its = self.stages[stage]
        return self.costs.memory_bytes(self.masks[stage], its.in_flight, len(its.devices))

    def _c1(self) -> str:
        graph = self.graph
        if not self.stages:
            return "C1: there are no stages; expected at least one"
        home: dict[str, int] = {}
        for number, stage in enumerate(self.stages):
            if not stage.operators:
                return f"C1: stage {number} has no operators; expected at least one"
            for name in stage.operators:
                if name not in graph.position:
                    return f"C1: stage {number} has {name}, which is not an operator of {graph.name}"
                if name in home:
                    return f"C1: operator {name} is in stages {home[name]} and {number}; expected it in one"
                home[name] = number
        missing = [operator.name for operator in graph.operators if operator.name not in home]
        if missing:
            return f"C1: {', '.join(missing[:5])} {'is' if len(missing) == 1 else 'are'} in no stage"
        for number, mask in enumerate(self.masks):
            for at in members(graph.everything & ~mask):
                if graph.before[at] & mask and graph.after[at] & mask:
                    first = graph.names(graph.before[at] & mask)[-1]
                    last = graph.names(graph.after[at] & mask)[0]
                    path = f"{first} -> {graph.operators[at].name} -> {last}"
                    return f"C1: stage {number} is not convex: the path {path} leaves it and comes back"
        return ""

    def _c2(self) -> str:
        back = next((edge for edge in self.edges if edge[0] >= edge[1]), None)
        if back is None:
            return ""
        source, target = back
        at = next(at for at in members(self.masks[source]) if self.graph.outputs[at] & self.masks[target])
        to = next(members(self.graph.outputs[at] & self.masks[target]))
        names = self.graph.operators
        return (
            f"C2: {names[to].name} of stage {target} takes {names[at].name} of stage {source}, which is not before it;"
            " expected each stage after those that it depends on, and no cycle"
        )

    def _c3(self) -> str:
        home: dict[int, int] = {}
        for number, stage in enumerate(self.stages):
            if not stage.devices:
                return f"C3: stage {number} has no devices; expected at least one"
            for device in stage.devices:
                if not 0 <= device < self.cluster.devices:
                    return f"C3: stage {number} is on device {device}; expected 0 to {self.cluster.devices - 1}"
                if device in home:
                    return f"C3: device {device} has stages {home[device]} and {number}; expected one"
                home[device] = number
        for number in range(len(self.stages)):
            bytes_, most = self.memory_bytes(number), self.cluster.device_bytes
            if bytes_ > most:
                return f"C3: stage {number} needs {bytes_ / 2**30:.2f} GiB on a device of {most / 2**30:.2f} GiB"
        return ""

    def _c4(self) -> str:
        for number, stage in enumerate(self.stages):
            size = stage.micro_batch
            if size < 1 or self.batch % size:
                return f"C4: stage {number} has micro-batches of {size}; expected a divisor of {self.batch}"
            if size % len(stage.devices):
                count = len(stage.devices)
                return f"C4: stage {number} has micro-batches of {size}; expected a multiple of its {count} devices"
            if stage.k < 1:
                return f"C4: stage {number} has k {stage.k}; expected at least 1"
            if stage.in_flight % size or not size <= stage.in_flight <= self.batch:
                return (
                    f"C4: stage {number} has {stage.in_flight} samples in flight; expected a multiple of {size},"
                    f" at most {self.batch}"
                )
        count = sum(2 * (self.batch // stage.micro_batch) for stage in self.stages)
        if count > _MOST_PASSES:
            return f"C4: an iteration has {count:,} passes; expected at most {_MOST_PASSES:,}, by larger micro-batches"
        _, stuck = execution_order([[tuple(n for n, _ in entry) for entry in row] for row in self.needs])
        if stuck:
            places = ", ".join(f"stage {stage} at {self.passes(stage)[at]}" for stage, at in stuck[:5])
            return f"C4: stages wait for each other forever: {places}"
        return ""

    def __str__(self) -> str:
        count = counted(len(self.stages), "stage")
        lines = [f"graph plan of {self.graph.name}: {self.batch} samples, {count}{', sequential' * self.sequential}:"]
        for number, its in enumerate(self.stages):
            shape = f"devices {_say_ranges(its.devices)}, micro-batch {its.micro_batch}, {its.k}F{its.k}B"
            lines.append(f"{number}: {shape}, in flight {its.in_flight}: {' '.join(its.operators)}")
        if self.graph.ahead:
            lines.append(_AHEAD + " ".join(its.name for its in self.graph.ahead))
        return "\n".join(lines)

    @classmethod
    def parse(cls, text: str, graph: ModelGraph, cluster: Cluster) -> Plan:
        """Read the text form, of a plan for the model with all operators in stages.

        GraphError if the text is not a plan's, with the line, or if the plan is not valid.
        """
        head, *rows = text.strip().splitlines() or [""]
        match = _HEAD.fullmatch(head.strip().removesuffix(":"))
        if match is None:
            raise GraphError(f"line 1 is {head!r}; expected such as 'graph plan of mmt: 32 samples, 4 stages:'")
        if match[1] != graph.name:
            raise GraphError(f"line 1 is a plan of {match[1]}; expected one of {graph.name}, which is the model given")
        if rows and rows[-1].strip().startswith(_AHEAD):
            graph = graph.running_ahead()
            names, given = {its.name for its in graph.ahead}, set(rows.pop().split()[1:])
            if given != names:
                wrong = ", ".join(sorted(given ^ names)[:5])
                raise GraphError(
                    f"the last line runs other operators ahead than the frozen ones of {graph.name}: {wrong}"
                )
        stages = []
        for number, row in enumerate(rows):
            found = _LINE.fullmatch(row.strip())
            if found is None or int(found[1]) != number or found[4] != found[5]:
                raise GraphError(
                    f"line {number + 2} is {row!r}; expected such as"
                    f" '{number}: devices 0-1, micro-batch 2, 1F1B, in flight 4: a b'"
                )
            devices = _parse_ranges(found[2], number + 2)
            stages.append(Stage(tuple(found[7].split()), devices, int(found[3]), int(found[4]), int(found[6])))
        if len(stages) != int(match[3]):
            raise GraphError(f"line 1 says {match[3]} stages, and there are {len(stages)}")
        return cls(graph, cluster, int(match[2]), tuple(stages), match[4] is not None)


def _say_ranges(numbers: tuple[int, ...]) -> str:
    """Return numbers as ranges: ``0-2,5`` for 0, 1, 2 and 5, and ``none`` for none."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs) or "none"


def _parse_ranges(text: str, line: int) -> tuple[int, ...]:
    """Parse the text that ``_say_ranges`` returns, of this line of a plan."""
    if text == "none":
        return ()
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part)
        if match is None:
            raise GraphError(f"line {line}: devices are {text!r}; expected such as 0-2,5")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)
