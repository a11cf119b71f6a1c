"""Analytic fill jobs: a model's blocks, their speed on a GPU, and the resulting profiles for the planner.

The smallest unit that runs is a block's pass.  Its time is a roofline (Williams et al. 2009) with a fixed part::

    max(launch_s, max(FLOPs / (compute_share * peak), traffic / bandwidth) + block_s)

The fixed part makes small batches slow: with ``t`` more seconds per sample, a batch of ``b`` reaches
``b / (b + block_s / t)`` of the best rate.  NVIDIA's figures for BERT have this shape; those for EfficientNet show a
minimum time per pass, in which the host launches kernels (``catalog.py`` has both).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron.fill.profiles import Configuration, JobProfile, NodeProfile, Offload
from megatron.fill.wings.mainjob.hardware import GpuKind

# Bytes per parameter in mixed precision as torch.amp has it, with Adam.
_WEIGHT, _GRADIENT, _MOMENTS = 4, 4, 8
_CAST = 2  # the half-precision copy, which passes read; inference has no other weights
_STEP_TRAFFIC = 28  # Adam reads all four (16) and writes weights and moments (12)
_LARGEST_INFERENCE_BATCH = 256
_MOST_MICROBATCHES = 16  # per training step
_TRAINING = (  # offload and checkpointing, as TrainingJob offers them
    (Offload.NONE, False),
    (Offload.NONE, True),
    (Offload.OPTIMIZER, False),
    (Offload.OPTIMIZER, True),
    (Offload.WEIGHTS, True),
)


@dataclass(frozen=True, slots=True)
class Block:
    """A part of a model; all values except ``parameters`` are per sample and forward pass, in half precision."""

    name: str
    parameters: int  # number of parameters
    flops: float  # multiplications and additions; a block with 0 looks its weights up, and does not read all of them
    traffic_bytes: float  # memory traffic without the weights
    kept_bytes: float  # activations that the backward pass needs
    working_bytes: float  # peak of live activations if none are kept
    output_bytes: float  # output, which is the next block's input

    @property
    def cast_bytes(self) -> int:
        """Size of the half-precision copy of the weights that a pass reads."""
        return _CAST * self.parameters if self.flops else 0


@dataclass(frozen=True, slots=True)
class Speed:
    """Achieved speed of a model on a GPU."""

    compute_share: float  # achieved fraction of ``GpuKind.peak_flops`` at large batches
    block_s: float  # fixed part of each block's pass, in seconds
    launch_s: float = 0.0  # minimum duration of a block's pass, in seconds


@dataclass(frozen=True, slots=True)
class FillModel:
    """A model as a fill job runs it."""

    name: str
    blocks: tuple[Block, ...]
    speed: Speed
    backward: float = 2.0  # duration of a backward pass as a multiple of the forward pass's
    batch: int = 32  # samples per training step; configurations divide it into microbatches

    @property
    def parameters(self) -> int:
        return sum(block.parameters for block in self.blocks)

    def forward_s(self, block: Block, samples: int, gpu: GpuKind) -> float:
        """Duration of a block's forward pass, in seconds."""
        compute = samples * block.flops / (self.speed.compute_share * gpu.peak_flops)
        memory = (samples * block.traffic_bytes + block.cast_bytes) / gpu.memory_bandwidth
        return max(self.speed.launch_s, max(compute, memory) + self.speed.block_s)


def training_profiles(model: FillModel, gpu: GpuKind, context_bytes: int) -> Iterator[JobProfile]:
    """Yield a profile of each training configuration that fits the GPU alone, a process's CUDA context included.

    Copies to and from the host do not overlap with computation, as in ``TrainingJob``.
    """
    for micro in _powers_of_two(model.batch):
        if model.batch % micro or model.batch // micro > _MOST_MICROBATCHES:
            continue
        for offload, again in _TRAINING:
            configuration = Configuration(micro, again, offload)
            nodes = _Training(model, gpu, configuration, context_bytes).nodes()
            profile = JobProfile(configuration, nodes, model.batch)
            if profile.memory_bytes <= gpu.memory_bytes:
                yield profile


def inference_profiles(model: FillModel, gpu: GpuKind, context_bytes: int) -> Iterator[JobProfile]:
    """Yield a profile of each batch inference configuration that fits the GPU alone, the CUDA context included."""
    held = context_bytes + _CAST * model.parameters
    for batch in _powers_of_two(_LARGEST_INFERENCE_BATCH):
        nodes = [
            _node(
                f"{block.name} forward",
                model.forward_s(block, batch, gpu),
                held + batch * (block.working_bytes + block.output_bytes),
            )
            for block in model.blocks
        ]
        profile = JobProfile(Configuration(batch), tuple(nodes), batch)
        if profile.memory_bytes <= gpu.memory_bytes:
            yield profile


class _Training:
    """The nodes of one training step in one configuration."""

    def __init__(self, model: FillModel, gpu: GpuKind, configuration: Configuration, context_bytes: int) -> None:
        self.model, self.gpu, self.configuration = model, gpu, configuration
        state = {Offload.NONE: _WEIGHT + _GRADIENT + _MOMENTS, Offload.OPTIMIZER: _WEIGHT + _GRADIENT}
        self.resident = context_bytes + state.get(configuration.offload, 0) * model.parameters
        self.streams = configuration.offload is Offload.WEIGHTS

    def nodes(self) -> tuple[NodeProfile, ...]:
        """The forward and backward passes of each microbatch, then the optimizer's step with one node per block."""
        passes = tuple(self._passes())
        return passes * (self.model.batch // self.configuration.batch_size) + tuple(self._step())

    def _passes(self) -> Iterator[NodeProfile]:
        again = self.configuration.checkpointing
        blocks = self.model.blocks
        held = 0.0
        for block in blocks:
            now = block.working_bytes + block.output_bytes if again else block.kept_bytes
            yield _node(f"{block.name} forward", self._pass_s(block, 1), self._size(block, held + now))
            held += block.output_bytes if again else block.kept_bytes
        for block in reversed(blocks):
            now = block.kept_bytes if again else 0.0
            seconds = self._pass_s(block, self.model.backward + (1 if again else 0))
            yield _node(f"{block.name} backward", seconds, self._size(block, held + now + 2 * block.output_bytes))
            held -= block.output_bytes if again else block.kept_bytes

    def _size(self, block: Block, activations: float) -> float:
        state = _WEIGHT + _GRADIENT if self.streams else 0
        weights = state * block.parameters + block.cast_bytes
        return self.resident + weights + self.configuration.batch_size * activations

    def _pass_s(self, block: Block, forwards: float) -> float:
        copies = 2 * (_WEIGHT + _GRADIENT) * block.parameters / self.gpu.host_bytes_s if self.streams else 0.0
        return forwards * self.model.forward_s(block, self.configuration.batch_size, self.gpu) + copies

    def _step(self) -> Iterator[NodeProfile]:
        pieces = len(self.model.blocks)
        parameters = self.model.parameters / pieces
        seconds = parameters * _STEP_TRAFFIC / self.gpu.memory_bandwidth + self.model.speed.block_s
        moved = {
            Offload.NONE: 0,
            Offload.OPTIMIZER: _MOMENTS,
            Offload.WEIGHTS: _WEIGHT + _GRADIENT + _MOMENTS,
        }[self.configuration.offload]
        seconds += 2 * moved * parameters / self.gpu.host_bytes_s
        for piece in range(pieces):
            yield _node(f"step {piece}", seconds, self.resident + moved * parameters)


def _node(name: str, seconds: float, size_bytes: float) -> NodeProfile:
    return NodeProfile(name, round(seconds * 1e9), round(size_bytes))


def _powers_of_two(most: int) -> Iterator[int]:
    return (1 << at for at in range(most.bit_length()))
