"""Megatron's flags: what they say of the model and fix of its layout, and a layout as flags."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.fill.errors import ConfigError
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute

_MODEL = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--num-attention-heads": "heads",
    "--seq-length": "sequence",
    "--vocab-size": "vocabulary",
    "--ffn-hidden-size": "ffn_hidden",
    "--num-query-groups": "query_groups",
    "--num-experts": "experts",
    "--moe-router-topk": "experts_per_token",
}
_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")
_LAYOUT = {
    "--tensor-model-parallel-size": "tp",
    "--pipeline-model-parallel-size": "pp",
    "--context-parallel-size": "cp",
    "--expert-model-parallel-size": "ep",
    "--micro-batch-size": "microbatch",
    "--num-virtual-stages-per-pipeline-rank": "chunks",
    "--num-layers-per-virtual-pipeline-stage": "chunk_layers",
}
_ENDS = {"--decoder-first-pipeline-num-layers": "first_layers", "--decoder-last-pipeline-num-layers": "last_layers"}
_SWITCHES = {"--sequence-parallel": "sequence_parallel", "--use-distributed-optimizer": "distributed_optimizer"}
_RECOMPUTE = ("--recompute-granularity", "--recompute-method", "--recompute-num-layers")
# What changes costs or memory in ways that are not modelled.
_REFUSED = {
    "--kv-channels": "heads times channels other than the hidden size",
    "--moe-ffn-hidden-size": "experts of another width than --ffn-hidden-size",
    "--moe-layer-freq": "layers without experts between those with them",
    "--expert-tensor-parallel-size": "experts divided otherwise than --tensor-model-parallel-size",
    "--pipeline-model-parallel-layout": "a layout given by hand",
    **dict.fromkeys(_ENDS, "layers given by hand"),
    "--fp8-format": "FP8",
    "--use-torch-fsdp2": "FSDP",
    "--use-megatron-fsdp": "FSDP",
    "--multi-latent-attention": "multi-latent attention",
}
_DIVISOR = 128  # Megatron's default of --make-vocab-size-divisible-by


@dataclass(frozen=True, slots=True)
class Training:
    """A training as Megatron's flags describe it.

    Attributes:
        fixed: fields of ``Parallel`` that the flags already decide.
        others: all flags but those of the layout, as they were.
    """

    model: ModelSpec
    global_batch: int
    precision: Precision
    fixed: Mapping[str, Any]
    others: tuple[str, ...]

    def padded(self, tp: int) -> int:
        """The vocabulary as Megatron pads it."""
        unit = _DIVISOR * tp
        return -(-self.model.vocabulary // unit) * unit


def read_flags(tokens: Sequence[str], ends: bool = False) -> Training:
    """Read a training from Megatron's flags.

    Args:
        ends: True if they may set the layers of the first and the last stage, as for a training that ran.

    Raises:
        ConfigError: naming the flag, its value, and what was expected.
    """
    values: dict[str, int] = {}
    fixed: dict[str, Any] = {}
    others: list[str] = []
    given = _pairs(tokens)
    layout = _LAYOUT | _ENDS if ends else _LAYOUT
    for flag, value in given:
        if flag in _REFUSED and flag not in layout:
            raise ConfigError(f"{flag}: {_REFUSED[flag]} is not weighed; expected it to be left out")
        if flag in _MODEL or flag == "--global-batch-size":
            values[flag] = _number(flag, value)
        elif flag in layout:
            fixed[layout[flag]] = _number(flag, value)
            continue
        elif flag in _SWITCHES:
            fixed[_SWITCHES[flag]] = True
            continue
        elif flag in _RECOMPUTE:
            if flag == "--recompute-granularity":
                fixed["recompute"] = _recompute(value)
            continue
        others += [flag] if value is None else [flag, *value]
    for flag in (*_NEEDED, "--global-batch-size"):
        if flag not in values:
            raise ConfigError(f"{flag} is missing; expected Megatron's flags of the model and --global-batch-size")
    names = {flag for flag, _ in given}
    fields: dict[str, Any] = {name: values[flag] for flag, name in _MODEL.items() if flag in values}
    if "experts" in fields:
        fields.setdefault("experts_per_token", min(2, fields["experts"]))  # Megatron's default
    if "chunk_layers" in fixed:
        per_chunk = fixed.pop("chunk_layers")
        stages = fixed.get("pp")
        if stages is None or fields["layers"] % (stages * per_chunk):
            raise ConfigError(
                f"--num-layers-per-virtual-pipeline-stage is {per_chunk}: expected --pipeline-model-parallel-size with "
                "it, and both to divide --num-layers"
            )
        fixed["chunks"] = fields["layers"] // (stages * per_chunk)
    try:
        model = ModelSpec(
            **fields,
            swiglu="--swiglu" in names,
            tied_embeddings="--untie-embeddings-and-output-weights" not in names,
        )
    except ValueError as error:
        raise ConfigError(f"the flags describe no model: {error}") from error
    precision = Precision.BF16 if "--bf16" in names else Precision.FP16 if "--fp16" in names else Precision.FP32
    return Training(model, values["--global-batch-size"], precision, fixed, tuple(others))


def layout_flags(parallel: Parallel) -> list[str]:
    """A layout as Megatron's flags; every other one of the training stays as it was."""
    flags = [
        *("--tensor-model-parallel-size", str(parallel.tp)),
        *("--pipeline-model-parallel-size", str(parallel.pp)),
        *("--context-parallel-size", str(parallel.cp)),
        *("--micro-batch-size", str(parallel.microbatch)),
    ]
    if parallel.ep > 1:
        flags += ["--expert-model-parallel-size", str(parallel.ep)]
    if parallel.chunks > 1:
        flags += ["--num-virtual-stages-per-pipeline-rank", str(parallel.chunks)]
    for flag, name in _ENDS.items():
        if (count := getattr(parallel, name)) is not None:
            flags += [flag, str(count)]
    flags += [flag for flag, name in _SWITCHES.items() if getattr(parallel, name)]
    if parallel.recompute is not Recompute.NONE:
        flags += ["--recompute-granularity", parallel.recompute.value]
    if parallel.recompute is Recompute.FULL:
        flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    return flags


def _pairs(tokens: Sequence[str]) -> list[tuple[str, list[str] | None]]:
    """Each flag with its values, None for a switch."""
    pairs: list[tuple[str, list[str] | None]] = []
    for token in tokens:
        if token.startswith("--"):
            flag, equals, value = token.partition("=")
            pairs.append((flag, [value] if equals else None))
        elif not pairs:
            raise ConfigError(f"{token!r} belongs to no flag; expected Megatron's flags after --")
        else:
            flag, values = pairs[-1]
            pairs[-1] = flag, [*(values or ()), token]
    return pairs


def _number(flag: str, value: list[str] | None) -> int:
    text = " ".join(value or ())
    if not (text.isdecimal() and text.isascii() and 0 < int(text) < 1 << 31):
        raise ConfigError(f"{flag} is {text[:60]!r}: expected a whole number above 0")
    return int(text)


def _recompute(value: list[str] | None) -> Recompute:
    text = " ".join(value or ())
    if text not in ("selective", "full"):
        raise ConfigError(f"--recompute-granularity is {text[:60]!r}: expected selective or full")
    return Recompute(text)
