"""Costs of a stage: time, memory and transfers, from its operators and the devices that it runs on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import isfinite

from megatron.fill.errors import GraphError
from megatron.fill.wings.graph.model import ModelGraph, Operator, members
from megatron.fill.wings.mainjob.hardware import GpuKind, Network
from megatron.fill.wings.mainjob.parallel import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The devices of a plan."""

    devices: int
    gpu: GpuKind
    network: Network | None  # the interconnect, or None if transfers and all-reduces take no time
    efficiency: float = 0.45  # achieved fraction of the GPU's peak FLOP/s
    precision: Precision = Precision.BF16
    memory_bytes: int | None = None  # memory of one device; None for the GPU kind's own

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise GraphError(f"devices is {self.devices}; expected at least 1")
        if not (isfinite(self.efficiency) and 0 < self.efficiency <= 1):
            raise GraphError(f"efficiency is {self.efficiency}; expected more than 0, and at most 1")
        if self.memory_bytes is not None and self.memory_bytes < 1:
            raise GraphError(f"memory is {self.memory_bytes} bytes; expected at least 1")

    @property
    def device_bytes(self) -> int:
        return self.gpu.memory_bytes if self.memory_bytes is None else self.memory_bytes

    def passes_s(self, operator: Operator, input_bytes: float, samples: int) -> tuple[float, float]:
        """Forward and backward pass of ``samples`` samples on one device, in seconds.

        A pass takes the longer of its operations at the achieved FLOP/s and its traffic at the memory's bandwidth (the
        roofline): small microbatches are slow because the parameters are read for each.  A frozen operator has no
        backward pass.

        Args:
            input_bytes: size of the operator's inputs per sample.
        """
        if operator.forward_s is not None:
            backward_s = 2 * operator.forward_s if operator.backward_s is None else operator.backward_s
            forward_s, backward_s = samples * operator.forward_s, samples * backward_s
        else:
            rate = self.gpu.peak_flops * self.efficiency
            read = 0 if operator.lookup else operator.parameters * self.precision.weight_bytes
            moved = samples * (operator.moved_bytes + operator.output_bytes + input_bytes)
            traffic_s = (read + moved) / self.gpu.memory_bandwidth
            backward = 2 * operator.forward_flops if operator.backward_flops is None else operator.backward_flops
            forward_s = max(samples * operator.forward_flops / rate, traffic_s)
            backward_s = max(samples * backward / rate, 2 * traffic_s)
        return forward_s, 0.0 if operator.frozen else backward_s

    def link_bytes_s(self, replicas: int) -> float:
        """Bytes per second and direction between one device of a stage and other stages, with all replicas sending.

        Stages are assumed to be on different nodes as soon as the cluster has more devices than a node.
        """
        assert self.network is not None
        node = self.network.gpus_per_node
        return self.network.bandwidth(self.devices > node, min(replicas, node))

    def transfer_s(self, sample_bytes: float, samples: int, senders: int, receivers: int) -> float:
        """Seconds for a transfer between two stages; each device of the smaller stage sends or receives its part."""
        if self.network is None:
            return 0.0
        fewest = min(senders, receivers)
        return self.network.latency_s + sample_bytes * samples / fewest / self.link_bytes_s(fewest)

    def reduce_s(self, parameters: int, replicas: int) -> float:
        """Seconds per iteration for the all-reduce of the gradients over the replicas of a stage."""
        if self.network is None:
            return 0.0
        size = parameters * self.precision.gradient_bytes
        return self.network.all_reduce_s(size, replicas, replicas > self.network.gpus_per_node, 1)

    def state_bytes(self, parameters: int) -> int:
        """Bytes of weights, gradients and Adam's state, which every replica holds."""
        its = self.precision
        return parameters * (its.weight_bytes + its.gradient_bytes + its.optimizer_bytes)


class Costs:
    """Costs of sets of operators on the devices of a cluster, in iterations of ``batch`` samples."""

    def __init__(self, graph: ModelGraph, cluster: Cluster, batch: int) -> None:
        self.graph = graph
        self.cluster = cluster
        self.batch = batch
        self._passes: dict[tuple[int, int], tuple[float, float]] = {}
        self._operators: dict[int, list[tuple[float, float]]] = {}
        self._sums: dict[int, tuple[int, int, float, float]] = {}
        # A device holds the weights of the operators that run ahead, and two iterations' outputs that stages take.
        taken = {name for its in graph.operators for name in its.inputs}
        kept = sum(its.output_bytes for its in graph.ahead if its.name in taken)
        weights = sum(its.parameters for its in graph.ahead) * cluster.precision.weight_bytes
        self._ahead_bytes = weights + 2 * batch * kept

    @cached_property
    def _input_bytes(self) -> list[float]:
        of = self.graph.operators
        return [sum(of[source].output_bytes for source in members(inputs)) for inputs in self.graph.inputs]

    def ahead_s(self, micro_batch: int) -> float:
        """Time of one iteration's passes of the operators that run ahead, on one device, in seconds."""
        every = self.graph.by_name
        passes_s = (
            self.cluster.passes_s(its, sum(every[name].output_bytes for name in its.inputs), micro_batch)[0]
            for its in self.graph.ahead
        )
        return self.batch / micro_batch * sum(passes_s)

    def each(self, samples: int) -> Sequence[tuple[float, float]]:
        """Per operator, forward and backward pass of ``samples`` samples on one device, in seconds."""
        if samples not in self._operators:
            self._operators[samples] = [
                self.cluster.passes_s(operator, taken, samples)
                for operator, taken in zip(self.graph.operators, self._input_bytes, strict=True)
            ]
        return self._operators[samples]

    def passes_s(self, mask: int, samples: int) -> tuple[float, float]:
        """Forward and backward pass of a set of operators, one after another on one device, in seconds."""
        key = mask, samples
        if key not in self._passes:
            each = self.each(samples)
            found = [each[at] for at in members(mask)]
            self._passes[key] = sum(forward for forward, _ in found), sum(backward for _, backward in found)
        return self._passes[key]

    def sums(self, mask: int) -> tuple[int, int, float, float]:
        """Trained and frozen parameters, and per sample the bytes kept and the bytes that enter or leave the set."""
        if mask not in self._sums:
            graph = self.graph
            trained = frozen = inside = 0
            kept = crossing = 0.0
            for at in members(mask):
                operator = graph.operators[at]
                trained += 0 if operator.frozen else operator.parameters
                frozen += operator.parameters if operator.frozen else 0
                kept += operator.kept
                inside |= graph.inputs[at]
                if graph.outputs[at] & ~mask:
                    crossing += operator.output_bytes
            crossing += sum(graph.operators[at].output_bytes for at in members(inside & ~mask))
            self._sums[mask] = trained, frozen, kept, crossing
        return self._sums[mask]

    def time_per_sample_s(self, mask: int, micro_batch: int, replicas: int) -> float:
        """A stage's time per sample: passes and amortised all-reduce, or transfers if these take longer.

        A microbatch is divided over the replicas.
        """
        trained, _, _, crossing = self.sums(mask)
        passes_s = sum(self.passes_s(mask, micro_batch // replicas)) / micro_batch
        passes_s += self.cluster.reduce_s(trained, replicas) / self.batch
        if self.cluster.network is None:
            return passes_s
        return max(passes_s, crossing / replicas / self.cluster.link_bytes_s(replicas))

    def memory_bytes(self, mask: int, in_flight: int, replicas: int) -> float:
        """Bytes that one device of a stage holds with ``in_flight`` samples in flight in the stage."""
        return self._state_bytes(mask) + self.sums(mask)[2] * in_flight / replicas

    def most_in_flight(self, mask: int, replicas: int) -> float:
        """Number of samples in flight that fit a stage's memory; negative if its parameters do not fit."""
        kept = self.sums(mask)[2]
        free = self.cluster.device_bytes - self._state_bytes(mask)
        if free < 0:
            return -1.0
        return free * replicas / kept if kept else float("inf")

    def _state_bytes(self, mask: int) -> float:
        """Bytes that each device of a stage holds besides activations; frozen operators have only weights."""
        trained, frozen, _, _ = self.sums(mask)
        its = self.cluster
        return its.state_bytes(trained) + frozen * its.precision.weight_bytes + self._ahead_bytes
