"""GPUs and networks as data, from vendors' data sheets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import ClassVar

GIB = 2**30
_GBIT = 1e9 / 8  # bytes per second
# Per second: less is of no GPU or would take times that nothing counts, and more is as if there were no limit.
_LEAST, _LEAST_OF_LINKS, _MOST = 1e6, 1e-3, 1e30
_LEAST_SHARE = 1e-3


@dataclass(frozen=True, slots=True)
class GpuKind:
    """A kind of GPU.

    Attributes:
        peak_flops: FLOP/s of half-precision dense matrix products, accumulated in single precision.
        memory_bytes: device memory (a data sheet's gigabytes are GiB).
        memory_bandwidth: bytes per second to and from device memory.
        host_bytes_s: bytes per second to or from the host's memory, in one direction.
        source: title of the data sheet.
        flash_attention: share of the efficiency of products that flash attention reaches; 0 for generations before
            Ampere, which its kernels do not run on.
        sustained: share of the efficiency of other kinds that large products reach, at the clock that power allows.
        fp8_any_order: True if products take 8-bit numbers in either order, so that weights need no transposed copies.
        processors: number of processors that a product's tiles are shared out among; 0 to count none as idle.
        traffic: share of ``memory_bandwidth`` that kernels between products reach.
        capability: its compute capability, 9.0 for Hopper; 0 if it is not known.
    """

    name: str
    peak_flops: float
    memory_bytes: int
    memory_bandwidth: float
    host_bytes_s: float
    source: str = ""
    flash_attention: float = 1.0
    sustained: float = 1.0
    fp8_any_order: bool = False
    processors: int = 0
    traffic: float = 0.7
    capability: float = 0.0
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a configuration file, a misspelt field is an error

    def __post_init__(self) -> None:
        for name in ("peak_flops", "memory_bandwidth", "host_bytes_s"):
            _check_rate(name, getattr(self, name), _LEAST)
        for name in ("memory_bytes", "sustained", "traffic"):
            _check_positive(name, getattr(self, name))
        for name in ("flash_attention", "sustained", "traffic"):
            value = getattr(self, name)
            if not (value == 0 or _LEAST_SHARE <= value <= 1):
                raise ValueError(f"{name} is {value}; expected a share from 0 to 1, 0.001 or more if it is not 0")
        for name in ("processors", "capability"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected at least 0")


@dataclass(frozen=True, slots=True)
class Network:
    """The network of a cluster.

    Attributes:
        intra_node_bytes_s: bytes per second between GPUs of a node, per GPU and direction.
        inter_node_bytes_s: bytes per second between nodes, per node and direction, shared by the node's GPUs.
        latency_s: seconds of latency of one message.
    """

    name: str
    intra_node_bytes_s: float
    inter_node_bytes_s: float
    gpus_per_node: int = 8
    latency_s: float = 10e-6
    source: str = ""
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a configuration file, a misspelt field is an error

    def __post_init__(self) -> None:
        for name in ("intra_node_bytes_s", "inter_node_bytes_s"):
            _check_rate(name, getattr(self, name), _LEAST_OF_LINKS)
        _check_positive("gpus_per_node", self.gpus_per_node)
        if not 0 <= self.latency_s <= 1:
            raise ValueError(f"latency_s is {self.latency_s}; expected 0 to 1 seconds")

    def bandwidth(self, crosses_nodes: bool, sharing: int) -> float:
        """Return the bytes per second of each of ``sharing`` GPUs of a node that send at once."""
        if not crosses_nodes:
            return self.intra_node_bytes_s
        return min(self.intra_node_bytes_s, self.inter_node_bytes_s / sharing)

    def all_reduce_s(self, size_bytes: float, ranks: int, crosses_nodes: bool, sharing: int) -> float:
        """Return the seconds of a ring all-reduce: ``2 (n-1)`` messages, with ``2 (n-1) / n`` of the data per link."""
        if ranks == 1:
            return 0.0
        share = 2 * (ranks - 1) / ranks
        return share * size_bytes / self.bandwidth(crosses_nodes, sharing) + 2 * (ranks - 1) * self.latency_s


def _check_rate(name: str, value: float, least: float) -> None:
    """Check that what is divided by a rate is a time that can be counted in nanoseconds."""
    if not least <= value <= _MOST:
        raise ValueError(f"{name} is {value}; expected {least:g} to {_MOST:g} per second")


def _check_positive(name: str, value: float) -> None:
    if not (isfinite(value) and value > 0):
        raise ValueError(f"{name} is {value}; expected more than 0")


_PCIE3, _PCIE4, _PCIE5 = 16e9, 32e9, 64e9  # sixteen lanes, in one direction
_V100 = "NVIDIA V100 Tensor Core GPU data sheet, V100 SXM2"
# SimuMax's measured kernels.  B200 (configs/system/b200_bf16_ceperm.json): products reach 0.479 of the peak, weighted
# by their operations, where busy processors of an A100 reach 0.78; attention, with half of its scores and heads of 128
# channels, 0.433 (``roofline`` says what is added for its last rows).  A100 (configs/system/a100_pcie.json): attention
# 0.572.
_SUSTAINED, _FLASH = 0.613, 0.906
_A100_FLASH = 0.733
# With more power for each GPU, more of it: as NVIDIA's published trainings of 405B, 235B and DeepSeek-V3 on 256 GPUs
# have it (Megatron-Bridge's docs/performance-summary.md), where those on 256 B200 are right with B200's.
_GB200_SUSTAINED, _GB300_SUSTAINED = 0.66, 0.82
_MOVED, _B200_MOVED = 0.71, 0.67  # of memory bandwidth, there too
# Of H100 there is no such table.  Layers of Sailor's profiles (GPT-Neo of 2.7 billion parameters, TF32) are 2.1 times
# as fast on a GH200 as on an A100, whose peaks are 3.2 to 1.  Products and attention are taken to reach 0.52 of it.
_H100_SUSTAINED = 0.667
_C2C = 225e9  # half of a Grace CPU's NVLink-C2C, which two GPUs share
_H100 = "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM"
_A100 = "NVIDIA A100 Tensor Core GPU data sheet, A100 SXM"
_A100_80GB = GpuKind(
    "a100-80gb", 312e12, 80 * GIB, 2039e9, _PCIE4, _A100, _A100_FLASH, processors=108, traffic=_MOVED, capability=8.0
)
_DGX_B200, _HGX_B300 = (f"NVIDIA {its} data sheet: an eighth of it" for its in ("DGX B200", "HGX B300"))
_GB200, _GB300 = (f"NVIDIA {its} NVL72 data sheet" for its in ("GB200", "GB300"))
_ADA = "NVIDIA RTX 6000 Ada Generation data sheet: a quarter of its 1,457 TFLOPS, which are of FP8 and sparse"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_blackwell = partial(GpuKind, memory_bandwidth=8000e9, flash_attention=_FLASH, fp8_any_order=True, traffic=_B200_MOVED)
_DGX_A100 = (
    "NVIDIA DGX A100 data sheet: 8 x 200 Gbit/s InfiniBand; latency: vTrain's all-reduces of 1 MiB in a node of eight "
    "(trace/a100), 14 messages in 92 us, 22 of which are the beginning"
)
_NVL72 = "NVIDIA GB200 NVL72 data sheet: NVLink 1,800 GB/s both ways; 400 Gbit/s InfiniBand per GPU"
_NVL72_ULTRA = "NVIDIA GB300 NVL72 data sheet: NVLink 1,800 GB/s both ways; 800 Gbit/s InfiniBand per GPU"

GPUS: dict[str, GpuKind] = {
    gpu.name: gpu
    for gpu in (
        GpuKind("v100-16gb", 125e12, 16 * GIB, 900e9, _PCIE3, _V100, flash_attention=0.0, capability=7.0),
        GpuKind("v100-32gb", 125e12, 32 * GIB, 900e9, _PCIE3, _V100, flash_attention=0.0, capability=7.0),
        replace(_A100_80GB, name="a100-40gb", memory_bytes=40 * GIB, memory_bandwidth=1555e9),
        _A100_80GB,
        GpuKind("h100-80gb", 989.5e12, 80 * GIB, 3350e9, _PCIE5, _H100, sustained=_H100_SUSTAINED, capability=9.0),
        _blackwell(
            "b200", 2250e12, 180 * GIB, host_bytes_s=_PCIE5, source=_DGX_B200, sustained=_SUSTAINED, capability=10.0
        ),
        _blackwell(
            "b300", 2250e12, 268 * GIB, host_bytes_s=_PCIE5, source=_HGX_B300, sustained=_SUSTAINED, capability=10.3
        ),
        _blackwell(
            "gb200", 2500e12, 186 * GIB, host_bytes_s=_C2C, source=_GB200, sustained=_GB200_SUSTAINED, capability=10.0
        ),
        _blackwell(
            "gb300", 2500e12, 278 * GIB, host_bytes_s=_C2C, source=_GB300, sustained=_GB300_SUSTAINED, capability=10.3
        ),
        GpuKind("rtx-6000-ada", 364.2e12, 48 * GIB, 960e9, _PCIE4, _ADA, capability=8.9),
        GpuKind("rtx-3080", 59.5e12, 10 * GIB, 760e9, _PCIE4, _GA102, capability=8.6),
    )
}

NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("p3.16xlarge", 150e9, 25 * _GBIT, source="Amazon EC2 P3: NVLink 300 GB/s both ways, 25 Gbit/s"),
        Network("p3dn.24xlarge", 150e9, 100 * _GBIT, source="Amazon EC2 P3dn: NVLink 300 GB/s both ways, 100 Gbit/s"),
        Network("v100-edr", 150e9, 100 * _GBIT, source="NVLink 300 GB/s both ways, one InfiniBand EDR port per node"),
        Network("a100-hdr", 300e9, 200 * _GBIT, source="NVLink 600 GB/s both ways, one InfiniBand HDR port per node"),
        Network("dgx-a100", 300e9, 8 * 200 * _GBIT, latency_s=5e-6, source=_DGX_A100),
        Network("dgx-h100", 450e9, 8 * 400 * _GBIT, source="NVIDIA DGX H100 data sheet: 8 x 400 Gbit/s InfiniBand"),
        Network("dgx-b200", 900e9, 8 * 400 * _GBIT, source="NVIDIA DGX B200 data sheet: 8 x 400 Gbit/s InfiniBand"),
        Network("dgx-b300", 900e9, 8 * 800 * _GBIT, source="NVIDIA DGX B300 data sheet: 8 x 800 Gbit/s InfiniBand"),
        Network("gb200-nvl72", 900e9, 72 * 400 * _GBIT, 72, source=_NVL72),
        Network("gb300-nvl72", 900e9, 72 * 800 * _GBIT, 72, source=_NVL72_ULTRA),
        Network("pcie4", _PCIE4, 10 * _GBIT, 4, source="a workstation: PCIe 4.0 x16, 10 Gbit/s Ethernet (assumed)"),
    )
}
