"""Kinds of fill jobs: analytic ones as in PipeFill's study, and those that ``pipefill profile`` measured.

The models are EfficientNet, BERT-base, BERT-large, Swin-large and XLM-RoBERTa-XL, each in training and in batch
inference: those of ``megatron.fill.models``, which the runtime runs too.  Their times are analytical
(``fillmodel.py``), with two constants fitted to published measurements:

* Transformers: NVIDIA DeepLearningExamples, TensorFlow BERT, V100-16GB, inference of BERT-base with 128 tokens: 206.8,
  376.8, 635 and 962.83 sequences/s at batches of 1, 2, 4 and 8.  That is 4.3 ms per batch and 0.50 ms per sequence.
  The resulting times for BERT-large, in inference and pre-training, with 128 to 512 tokens, are within 17% of the same
  source on V100.  On A100 they are with 128 tokens; with more they are up to 80% too short for its small batches.
* EfficientNet-B4: NVIDIA DeepLearningExamples, PyTorch, V100-16GB, inference: 242 to 847 images/s at batches of 8 to
  256, training 204.  That is bound by memory traffic, or at small batches by the host, whatever the GPU.

For Swin-large and XLM-RoBERTa-XL no measurements on these GPUs were found: BERT's constants are assumed, and for
EfficientNetV2-L those of EfficientNet-B4.  On other GPUs the same constants are assumed: the peaks of compute and
memory differ, and the fixed times do not.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from pathlib import Path

from megatron.fill.errors import ConfigError
from megatron.fill.models import MODELS, Encoder
from megatron.fill.planner.files import load_profiles
from megatron.fill.profiles import JobProfile
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.sim.filljobs.fillmodel import Block, FillModel, Speed, inference_profiles, training_profiles
from megatron.fill.wings.sim.filljobs.freeride import GPU as MEASURED_ON
from megatron.fill.wings.sim.filljobs.freeride import SIDE_TASKS
from megatron.fill.wings.sim.values import FillKind

CONTEXT_BYTES = 512 * 2**20  # memory of a process's CUDA context; an assumption

_TRANSFORMER = Speed(0.36, 0.334e-3)  # fitted to NVIDIA DeepLearningExamples' BERT-base inference on V100
_EFFICIENTNET = Speed(0.36, 0.1e-3, 0.97e-3)  # fitted to their EfficientNet-B4 inference and training on V100
_EFFICIENTNET_PASSES = 10.6  # number of times that each convolution's output is written or read; fitted as above
_EFFICIENTNET_BACKWARD = 3.0  # fitted to 204 images/s in training


def transformer_block(name: str, hidden: int, heads: int, tokens: int, window: int | None = None) -> Block:
    """An encoder layer whose MLP is four times as wide.

    Args:
        tokens: tokens per sample.
        window: number of tokens that a token attends to; None for all.
    """
    reach = tokens if window is None else window
    scores = heads * tokens * reach
    kept = 34 * tokens * hidden + 5 * scores  # Korthikanti et al. 2022, eq. (1)
    return Block(
        name,
        parameters=12 * hidden * hidden + 13 * hidden,
        flops=24 * tokens * hidden * hidden + 4 * tokens * reach * hidden,
        traffic_bytes=2 * kept,
        kept_bytes=kept,
        working_bytes=2 * (8 * tokens * hidden + 2 * scores),
        output_bytes=2 * tokens * hidden,
    )


def encoder(shape: Encoder, tokens: int) -> tuple[Block, ...]:
    """BERT's shape: embeddings of words and positions, and encoder layers.  The head is neglected."""
    hidden, output = shape.hidden, 2 * tokens * shape.hidden
    words = Block("embedding", (shape.vocabulary + shape.positions) * hidden, 0, 3 * output, output, output, output)
    return (words, *(transformer_block(f"layer {at}", hidden, shape.heads, tokens) for at in range(shape.layers)))


def _swin_large() -> Iterator[Block]:
    """Liu et al. 2021 (arXiv 2103.14030), Table 7: Swin-L, images of 224 x 224, windows of 7 x 7."""
    stages = zip((192, 384, 768, 1536), (6, 12, 24, 48), (56, 28, 14, 7), (2, 2, 18, 2), strict=True)
    for stage, (hidden, heads, side, depth) in enumerate(stages):
        output = 2 * side * side * hidden
        if stage == 0:
            flops, parameters = 2 * side * side * 48 * hidden, 48 * hidden  # patches of 4 x 4 x 3
        else:
            flops, parameters = 4 * side * side * hidden * hidden, 2 * hidden * hidden  # four patches to one
        yield Block(f"merge {stage}", parameters, flops, 4 * output, 2 * output, 2 * output, output)
        for at in range(depth):
            yield transformer_block(f"stage {stage} layer {at}", hidden, heads, side * side, 49)


# Per stage: whether the two convolutions before the squeezing are merged (V2's "fused" blocks), expansion factor,
# kernel, stride, channels, blocks.
_B4 = (  # Tan and Le 2019 (arXiv 1905.11946), Table 1, 1.4 times as wide and 1.8 times as deep
    *((False, 1, 3, 1, 24, 2), (False, 6, 3, 2, 32, 4), (False, 6, 5, 2, 56, 4), (False, 6, 3, 2, 112, 6)),
    *((False, 6, 5, 1, 160, 6), (False, 6, 5, 2, 272, 8), (False, 6, 3, 1, 448, 2)),
)
_V2_L = (  # Tan and Le 2021 (arXiv 2104.00298), as its authors' code has the L model
    *((True, 1, 3, 1, 32, 4), (True, 4, 3, 2, 64, 7), (True, 4, 3, 2, 96, 7), (False, 4, 3, 2, 192, 10)),
    *((False, 6, 3, 1, 224, 19), (False, 6, 3, 2, 384, 25), (False, 6, 3, 1, 640, 7)),
)


def _efficientnet(
    pixels: int, before: int, stages: Sequence[tuple[bool, int, int, int, int, int]], head: int
) -> Iterator[Block]:
    """Yield a stem of ``before`` channels, stages, and a head of ``head`` channels for 1,000 classes."""
    side = pixels // 2
    yield _convolutions(
        "stem", 9 * 3 * before, side * side * 9 * 3 * before, side * side * before, side * side * before
    )
    for stage, (fused, expand, kernel, stride, channels, depth) in enumerate(stages):
        for at in range(depth):
            after = -(-side // stride) if at == 0 else side
            wide, squeezed = before * expand, max(1, before // 4)
            if fused:
                last = wide * channels if expand > 1 else 0
                weights = kernel**2 * before * (wide if expand > 1 else channels) + last
                products = after**2 * weights
                elements = after**2 * ((wide if expand > 1 else 0) + channels)
            else:
                first = before * wide if expand > 1 else 0
                weights = first + kernel**2 * wide + 2 * wide * squeezed + wide * channels
                products = side**2 * first + after**2 * (kernel**2 * wide + wide * channels)
                elements = (side**2 * wide if expand > 1 else 0) + after**2 * (wide + channels)
            yield _convolutions(f"stage {stage} block {at}", weights, products, elements, after**2 * channels)
            side, before = after, channels
    yield _convolutions("head", before * head + head * 1000, side**2 * before * head, side**2 * head, 1000)


def _convolutions(name: str, weights: int, products: int, elements: int, output: int) -> Block:
    """A block of convolutions, each normalized and activated.

    Args:
        products: multiply-adds per sample.
        elements: elements of all convolutions' outputs per sample; each is kept before and after normalization and
            activation.
    """
    size = 2 * elements
    return Block(name, weights, 2 * products, _EFFICIENTNET_PASSES * size, 3 * size, 2 * size, 2 * output)


def _text(name: str) -> FillModel:
    model = MODELS[name]
    assert model.shape is not None
    return FillModel(name, encoder(model.shape, model.length), _TRANSFORMER)


def _image(name: str, before: int, stages: Sequence[tuple[bool, int, int, int, int, int]], head: int) -> FillModel:
    blocks = tuple(_efficientnet(MODELS[name].length, before, stages, head))
    return FillModel(name, blocks, _EFFICIENTNET, _EFFICIENTNET_BACKWARD)


_MODELS = (
    _image("efficientnet-b4", 48, _B4, 1792),
    _text("bert-base"),
    _text("bert-large"),
    FillModel("swin-large", tuple(_swin_large()), _TRANSFORMER),  # assumed to be as fast as BERT, like the next
    _text("xlm-roberta-xl"),
    _image("efficientnet-v2-l", 32, _V2_L, 1280),  # assumed to be as fast as EfficientNet-B4
)
# The default models; of the EfficientNets, only the one with a published throughput.
_MIX = tuple(model.name for model in _MODELS if model.name != "efficientnet-v2-l")


# Each kind's model, and the function that makes its profiles.
CATALOG = {
    f"{model.name}-{use}": (model, profiles)
    for model in _MODELS
    for use, profiles in (("training", training_profiles), ("inference", inference_profiles))
}


def catalog_kind(name: str, gpu: GpuKind) -> FillKind:
    """A kind of the catalog on a GPU; work is in samples.

    Raises:
        ValueError: the kind does not exist, or the GPU cannot hold it.
    """
    if name not in CATALOG:
        raise ValueError(f"{name!r} is not a kind of fill job; expected one of {', '.join(CATALOG)}")
    profiles = _profiles(name, gpu)
    if not profiles:
        raise ValueError(f"{name} fits the {gpu.memory_bytes / 2**30:.0f} GiB of {gpu.name} in no configuration")
    return FillKind(name, "samples", profiles, best_rate(profiles))


def _profiles(name: str, gpu: GpuKind) -> tuple[JobProfile, ...]:
    model, profiles = CATALOG[name]
    return tuple(profiles(model, gpu, CONTEXT_BYTES))


def catalog_kinds(
    gpu: GpuKind, names: Sequence[str] | None = None, models: Container[str] = _MIX
) -> tuple[FillKind, ...]:
    """Kinds on a GPU: those of the catalog, and FreeRide's side tasks on the GPU where they were measured.

    Args:
        names: names of kinds; None for all of ``models`` that the GPU can hold.
        models: names of models; by default EfficientNet-B4 is the only EfficientNet.

    Raises:
        ValueError: a kind does not exist on this GPU, or the GPU cannot hold it.
    """
    measured = SIDE_TASKS if gpu.name == MEASURED_ON else {}
    if names is not None:
        return tuple(measured.get(name) or catalog_kind(name, gpu) for name in names)
    held = [name for name, (model, _) in CATALOG.items() if model.name in models and _profiles(name, gpu)]
    return (*(catalog_kind(name, gpu) for name in held), *measured.values())


def best_rate(profiles: Sequence[JobProfile]) -> float:
    """Work per second on an otherwise idle device, in the best configuration; ValueError if a profile takes no time."""
    for profile in profiles:
        if profile.duration_ns == 0:
            raise ValueError(f"{profile.configuration}: all nodes take 0 ns; expected a measured profile")
    return max(profile.work / profile.duration_ns * 1e9 for profile in profiles)


def measured_kinds(path: str | Path) -> tuple[FillKind, ...]:
    """Read the jobs of a file written by ``pipefill profile --output``, for the device where they were measured.

    ConfigError, with file, job and the expected content, if the file is invalid.
    """
    found = load_profiles(path)
    if not found:
        raise ConfigError(f"{path}: found nothing; expected a list of profiles per job name")
    kinds = []
    for name, profiles in found.items():
        try:
            rate = best_rate(profiles)
        except ValueError as error:
            raise ConfigError(f"{path}: job {name!r}: {error}; expected a list of profiles per job name") from error
        kinds.append(FillKind(name, "work", profiles, rate))
    return tuple(kinds)
