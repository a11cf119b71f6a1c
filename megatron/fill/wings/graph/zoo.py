"""Analytic models with branches: those of GraphPipe's evaluation, and one with two towers.

Sizes in bytes assume half precision.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron.fill.wings.graph.model import ModelGraph, Operator
from megatron.fill.wings.mainjob.memory import layer_activation_bytes
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel

_BYTES = 2  # per number
_TABLE_BYTES = 4  # per number of an embedding table


def _layer(name: str, inputs: tuple[str, ...], spec: ModelSpec) -> Operator:
    layout = Parallel(tp=1, pp=1, dp=1, microbatch=1, global_batch=1)
    return Operator(
        name=name,
        inputs=inputs,
        forward_flops=spec.layer_flops(1),
        parameters=spec.layer_parameters,
        output_bytes=spec.sequence * spec.hidden * _BYTES,
        kept_bytes=layer_activation_bytes(spec, layout),
    )


def _tower(
    name: str, layers: int, hidden: int, heads: int, sequence: int, first: tuple[str, ...] = ()
) -> list[Operator]:
    """Layers of a transformer, without an embedding."""
    spec = ModelSpec(layers=layers, hidden=hidden, heads=heads, sequence=sequence, vocabulary=0)
    found: list[Operator] = []
    for at in range(layers):
        found.append(_layer(f"{name}.{at}", (found[-1].name,) if found else first, spec))
    return found


def _linear(name: str, inputs: tuple[str, ...], width_in: int, width: int, tokens: int = 1) -> Operator:
    """A linear layer, for each token of a sample."""
    return Operator(
        name=name,
        inputs=inputs,
        forward_flops=2.0 * tokens * width_in * width,
        parameters=(width_in + 1) * width,
        output_bytes=tokens * width * _BYTES,
        kept_bytes=tokens * (width_in + width) * _BYTES,
    )


def _dense(name: str, layers: int, width: int) -> list[Operator]:
    found: list[Operator] = []
    for at in range(layers):
        found.append(_linear(f"{name}.{at}", (found[-1].name,) if found else (), width, width))
    return found


def mmt(branches: int = 4, layers: int = 8, joined: bool = True) -> ModelGraph:
    """The multi-modal transformer: a tower for each modality.

    Args:
        joined: True if the towers' outputs go into one linear layer; otherwise each has a loss of its own.
    """
    hidden = 1024
    towers = [_tower(f"modality{at}", layers, hidden, 16, 256) for at in range(branches)]
    found = [operator for tower in towers for operator in tower]
    if joined:
        ends = tuple(tower[-1].name for tower in towers)
        found.append(_linear("head", ends, branches * hidden, hidden))
    return ModelGraph("mmt", tuple(found))


def dlrm(dense: int = 7, tables: int = 7, layers: int = 4, width: int = 4096) -> ModelGraph:
    """The recommendation model: branches of dense layers, and embedding tables whose entries are summed over a bag."""
    dimension, bag, rows = 64, 100, 1_000_000
    found = [operator for at in range(dense) for operator in _dense(f"dense{at}", layers, width)]
    ends = [f"dense{at}.{layers - 1}" for at in range(dense)]
    for at in range(tables):
        ends.append(f"table{at}")
        found.append(
            Operator(
                name=ends[-1],
                forward_flops=bag * dimension,
                parameters=rows * dimension,
                lookup=True,
                moved_bytes=bag * dimension * _TABLE_BYTES,
                output_bytes=dimension * _BYTES,
            )
        )
    joined = dense * width + tables * dimension
    found += [_linear("top.0", tuple(ends), joined, width), _linear("top.1", ("top.0",), width, 1)]
    return ModelGraph("dlrm", tuple(found))


def candle(branches: int = 7, layers: int = 4, joined: bool = True) -> ModelGraph:
    """CANDLE-Uno: a branch of dense layers for each kind of feature of drugs and cells."""
    width = 4096
    found = [operator for at in range(branches) for operator in _dense(f"feature{at}", layers, width)]
    if joined:
        ends = tuple(f"feature{at}.{layers - 1}" for at in range(branches))
        found += [_linear("top.0", ends, branches * width, width), _linear("top.1", ("top.0",), width, 1)]
    return ModelGraph("candle", tuple(found))


def two_tower() -> ModelGraph:
    """A vision tower and an audio tower of unequal length, into a language model of GPT-2 medium's width."""
    vision = _tower("vision", 12, 1024, 16, 576)
    audio = _tower("audio", 6, 768, 12, 512)
    project = [
        _linear("vision.projector", (vision[-1].name,), 1024, 1024, tokens=576),
        _linear("audio.projector", (audio[-1].name,), 768, 1024, tokens=512),
    ]
    language = _tower("language", 24, 1024, 16, 1536, tuple(its.name for its in project))
    return ModelGraph("two-tower", (*vision, *audio, *project, *language))


MODELS: dict[str, Callable[[], ModelGraph]] = {"mmt": mmt, "dlrm": dlrm, "candle": candle, "two-tower": two_tower}
