"""``CLUSTER.yaml`` of ``pipefill configure``: what there is to train on.  docs/configure.md explains every field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from megatron.fill.errors import ConfigError
from megatron.fill.given.files import read_yaml
from megatron.fill.given.presets import preset
from megatron.fill.given.problems import explain, shown
from megatron.fill.given.quantities import no_switch, parse_bytes
from megatron.fill.wings.configure.links import Links
from megatron.fill.wings.configure.network import Network
from megatron.fill.wings.mainjob.hardware import GIB, GPUS, NETWORKS, GpuKind
from megatron.fill.wings.mainjob.hardware import Network as NodeNetwork

_SLOWEST = 1e6  # bytes per second of a network
_Whole = Annotated[int, BeforeValidator(no_switch)]
_Real = Annotated[float, BeforeValidator(no_switch)]


class Cluster(BaseModel):
    """Nodes that are all alike."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nodes: _Whole = Field(ge=1, le=4096)
    gpus_per_node: _Whole = Field(ge=1, le=64)
    gpu: Annotated[GpuKind, preset(GPUS)]
    memory: Annotated[int, BeforeValidator(parse_bytes)] | None = None
    network: Annotated[NodeNetwork, preset(NETWORKS)] | None = None  # by its data sheet
    measured: Path | None = None  # or a file of ``pipefill network``, with a rank for each GPU
    # With ``network``, the share of its bandwidth inside a node that collectives reach.  SimuMax measured 0.67 to 0.74
    # on eight B200 (configs/system/b200_bf16_ceperm.json), vTrain 0.66 to 0.76 on two to eight A100 (trace/a100); of
    # other kinds it is assumed.
    intra_node_share: _Real = Field(default=0.7, ge=0.001, le=1)
    nics_per_node: _Whole = Field(default=1, ge=1)  # with ``measured``: GPUs that leave a node at full speed at once
    price_per_gpu_hour: _Real | None = Field(default=None, gt=0, allow_inf_nan=False)
    # Share of the peak that products reach on an A100 whose processors all have work; other kinds sustain a part of it.
    efficiency: _Real = Field(default=0.78, ge=0.001, le=1)
    # Of each GPU, outside the accounting: CUDA context, NCCL's buffers, the allocator's waste.
    memory_reserve: Annotated[int, BeforeValidator(parse_bytes)] = Field(default=2 * GIB, validate_default=True)

    @field_validator("network")
    @classmethod
    def _sends(cls, network: NodeNetwork | None) -> NodeNetwork | None:
        if network is not None and min(network.intra_node_bytes_s, network.inter_node_bytes_s) < _SLOWEST:
            raise ValueError(f"expected {_SLOWEST:g} bytes per second or more, inside a node and between nodes")
        return network

    @field_validator("memory_reserve")
    @classmethod
    def _leaves_room(cls, reserve: int, info: ValidationInfo) -> int:
        gpu = info.data.get("gpu")  # None if it is wrong itself
        memory = info.data.get("memory") or (gpu and gpu.memory_bytes)
        if memory is not None and reserve >= memory:
            raise ValueError(f"expected less than the memory of a GPU, {memory / GIB:.4g} GiB; by default 2GiB")
        return reserve

    @model_validator(mode="after")
    def _one_network(self) -> Cluster:
        if (self.network is None) == (self.measured is None):
            raise ValueError("expected exactly one of network and measured")
        return self

    @property
    def gpus(self) -> int:
        """All of them."""
        return self.nodes * self.gpus_per_node

    @property
    def room_bytes(self) -> int:
        """Bytes that a training may take of one GPU."""
        return (self.memory or self.gpu.memory_bytes) - self.memory_reserve

    def links(self, folder: Path) -> Links:
        """Return the links between its GPUs, node after node.

        Args:
            folder: folder of the measured file.

        Raises:
            ConfigError: that file cannot be used, or is of another cluster.
        """
        if self.network is not None:
            inside = self.intra_node_share * self.network.intra_node_bytes_s
            there = replace(self.network, intra_node_bytes_s=inside, gpus_per_node=self.gpus_per_node)
            return Links.uniform(there, self.nodes)
        assert self.measured is not None
        path = folder / self.measured
        links = Links.measured(Network.load(path), self.nics_per_node)
        each = [links.nodes.count(node) for node in sorted(set(links.nodes))]
        if each != [self.gpus_per_node] * self.nodes:
            raise ConfigError(
                f"{path}: ranks has {shown(each)} per host; expected {self.nodes} hosts with {self.gpus_per_node} each"
            )
        if list(links.nodes) != sorted(links.nodes):
            raise ConfigError(f"{path}: ranks of one host are not next to each other; expected host after host")
        return links


def load_cluster(path: Path) -> Cluster:
    """Read the file; ConfigError naming it, the line, the field, its value and what was expected."""
    read = read_yaml(path, "a YAML file with nodes, gpus_per_node, gpu and network")
    if not isinstance(read.value, dict):
        raise ConfigError(f"{path}: found {shown(read.value)}; expected a mapping with nodes, gpus_per_node and gpu")
    try:
        return Cluster.model_validate(read.value)
    except ValidationError as error:
        raise ConfigError(explain(error, Cluster, lambda place: (read.placed(path, place), place))) from error
