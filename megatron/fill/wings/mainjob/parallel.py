"""The layout of a model over GPUs: its parallelism, precision and recomputation, with Megatron's rules."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.order import held_by, placement_of


class Recompute(StrEnum):
    """The activations recomputed in the backward pass (Korthikanti et al. 2022, section 5)."""

    NONE = "none"
    SELECTIVE = "selective"  # those of some modules: by default the attention's core, which flash does not keep either
    FULL = "full"  # all but each layer's input


class Precision(StrEnum):
    """Precision of passes and gradients, with Adam; bytes as in Megatron's guide to its distributed optimizer."""

    BF16 = "bf16"  # gradients are kept and reduced in single precision
    BF16_GRADIENTS = "bf16-gradients"  # gradients are kept and reduced in half precision, as the weights
    FP16 = "fp16"  # gradients are kept and reduced in half precision
    FP32 = "fp32"

    @property
    def weight_bytes(self) -> int:
        """Bytes per parameter, and per activation between layers."""
        return 4 if self is Precision.FP32 else 2

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients per parameter."""
        return 2 if self in (Precision.FP16, Precision.BF16_GRADIENTS) else 4

    @property
    def optimizer_bytes(self) -> int:
        """Bytes per parameter of Adam's moments and single-precision copies (weights; of half gradients too)."""
        return {Precision.BF16: 12, Precision.FP32: 8}.get(self, 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """The layout of one training over its GPUs."""

    tp: int = 1  # tensor-parallel ranks
    pp: int  # pipeline-parallel ranks
    dp: int = 1  # data-parallel ranks
    cp: int = 1  # context-parallel ranks; each has a part of every sequence
    ep: int = 1  # expert-parallel ranks; each has a part of the experts
    expert_tp: int | None = None  # tensor-parallel ranks of an expert; None for ``tp``
    chunks: int = 1  # virtual stages per rank
    microbatch: int = 1  # samples per microbatch
    global_batch: int  # samples per iteration, over all data-parallel ranks
    schedule: str = "1f1b"  # name for ``pipeline.schedules.make_schedule``, or absolute path of a schedule's file
    group_size: int | None = None  # microbatches in a group of the interleaved schedule; None for ``pp``
    sequence_parallel: bool = False  # activations that tensor parallelism replicates are divided along the sequence
    recompute: Recompute = Recompute.NONE
    # Modules that selective recomputation computes again, of core_attn, mlp, moe, shared_experts, layernorm, moe_act
    # and mla_up_proj (Megatron-core 0.19, ``TransformerConfig.recompute_modules``).
    recompute_modules: tuple[str, ...] = ("core_attn",)
    # First layers of each virtual stage that full recomputation computes again (--recompute-method block), or all.
    recomputed: int | None = None
    precision: Precision = Precision.BF16
    # Bytes per parameter of the optimizer's state, if it keeps that in other precisions; None for the usual ones.
    optimizer_bytes: int | None = None
    distributed_optimizer: bool = False  # the optimizer's state is divided over the data-parallel ranks
    first_layers: int | None = None  # layers of the first rank, in all its chunks; None for that of the other ranks
    last_layers: int | None = None  # layers of the last rank, likewise
    embedding_is_layer: bool = False  # the embedding counts as a layer of the first virtual stage
    loss_is_layer: bool = False  # the loss counts as a layer of the last virtual stage
    # Layers of each virtual stage, along the model, which may be 0; None to divide them by the fields above.
    stage_layers: tuple[int, ...] | None = None
    later_stage: int | None = None  # virtual stage of the layers that predict later tokens; None for the last
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a configuration file, a misspelt field is an error

    def __post_init__(self) -> None:
        counts = "tp", "pp", "dp", "cp", "ep", "chunks", "microbatch", "global_batch", "group_size", "expert_tp"
        for name in (*counts, "recomputed", "optimizer_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; expected at least 1")
        for name, kind in (("recompute", Recompute), ("precision", Precision)):
            if getattr(self, name) not in list(kind):
                raise ValueError(f"{name} is {getattr(self, name)!r}; expected one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(getattr(self, name)))
        if self.global_batch % (self.microbatch * self.dp):
            raise ValueError(
                f"global_batch is {self.global_batch}; expected a multiple of microbatch * dp, "
                f"{self.microbatch} * {self.dp}"
            )
        if self.later_stage is not None and not 0 <= self.later_stage < self.pp * self.chunks:
            raise ValueError(f"later_stage is {self.later_stage}; expected 0 to {self.pp * self.chunks - 1}")
        for name in ("first_layers", "last_layers"):
            value = getattr(self, name)
            if value is not None and value % self.chunks:
                raise ValueError(f"{name} is {value}; expected a multiple of chunks, {self.chunks}")

    def again(self, layers: int) -> int:
        """Return how many of a virtual stage's layers, the first ones, full recomputation computes again."""
        if self.recompute is not Recompute.FULL:
            return 0
        return layers if self.recomputed is None else min(layers, self.recomputed)

    def computes_again(self, module: str) -> bool:
        """Return True if selective recomputation has this module."""
        return self.recompute is Recompute.SELECTIVE and module in self.recompute_modules

    @property
    def microbatches(self) -> int:
        """The number of microbatches per data-parallel rank and iteration."""
        return self.global_batch // (self.microbatch * self.dp)

    @property
    def gpus(self) -> int:
        """The number of GPUs of the training."""
        return self.tp * self.pp * self.replicas

    @property
    def replicas(self) -> int:
        """The number of ranks with the same attention weights, which reduce their gradients together."""
        return self.dp * self.cp

    @property
    def expert_width(self) -> int:
        """The number of tensor-parallel ranks of an expert."""
        return self.expert_tp or self.tp

    @property
    def has_expert_groups(self) -> bool:
        """True if other ranks have the same experts than have the same attention weights."""
        return self.ep > 1 or self.expert_width != self.tp

    @property
    def expert_replicas(self) -> float:
        """The number of ranks with the same experts, which reduce their gradients together."""
        return self.tp * self.replicas / (self.expert_width * self.ep)

    @property
    def placement(self) -> tuple[int, ...]:
        """The rank of each virtual stage, along the model: ``0 1 0 1`` in Megatron's schedules, ``0 1 1 0`` in a V."""
        return placement_of(self.schedule, self.pp, self.microbatches, self.chunks)

    @property
    def state_bytes(self) -> int:
        """The optimizer's bytes per parameter, those that only exist in its step included."""
        return self.precision.optimizer_bytes if self.optimizer_bytes is None else self.optimizer_bytes

    def predicts(self, virtual: int) -> bool:
        """Return True if a virtual stage has the layers that predict later tokens, if the model has some."""
        return virtual == (self.pp * self.chunks - 1 if self.later_stage is None else self.later_stage)

    def later(self, model: ModelSpec, virtual: int) -> int:
        """Return the number of layers on a virtual stage that predict later tokens."""
        return model.predicted if self.predicts(virtual) else 0

    def held(self, rank: int) -> tuple[int, ...]:
        """The virtual stages of a rank, in order."""
        return held_by(self.schedule, self.pp, self.microbatches, self.chunks)[rank]

    def check(self, model: ModelSpec) -> None:
        """Check that the model can be divided over this layout.

        Raises:
            ValueError: it cannot; the message names the field, its value, and what was expected.
        """
        divided = {
            "heads": model.heads,
            "query_groups": model.groups,
            "ffn_hidden": model.ffn,
            "dense_ffn": model.dense_ffn,
            "shared_width": model.shared_width,
        }
        for name, value in divided.items():
            if value % self.tp:
                raise ValueError(f"tp is {self.tp}; expected a divisor of the model's {name}, {value}")
        if self.sequence_parallel and model.sequence % self.tp:
            raise ValueError(f"tp is {self.tp}; expected a divisor of the model's sequence, {model.sequence}")
        if self.cp > 1 and model.sequence % (2 * self.cp):
            raise ValueError(f"cp is {self.cp}; expected a divisor of half the model's sequence, {model.sequence}")
        ranks = self.tp * self.replicas
        if ranks % self.expert_width or (model.experts and model.ffn % self.expert_width):
            raise ValueError(
                f"expert_tp is {self.expert_width}; expected a divisor of tp * cp * dp, {ranks}, and of ffn_hidden, "
                f"{model.ffn}"
            )
        among = ranks // self.expert_width
        if self.ep > 1 and (among % self.ep or not model.experts or model.experts % self.ep):
            given = self.expert_width != self.tp
            ways = f"the {among} ranks of experts" if given else f"dp * cp, {self.dp} * {self.cp}"
            raise ValueError(
                f"ep is {self.ep}; expected a divisor of {ways}, and of the model's experts, {model.experts}"
            )
        if model.experts and self.tp > 1 and not self.sequence_parallel:
            raise ValueError(f"tp is {self.tp} with experts; expected sequence_parallel, as Megatron does")
        self.layers(model)

    def layers(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of layers of each virtual stage, along the model.

        Raises:
            ValueError: the layers cannot be divided evenly, or ``stage_layers`` are those of another layout or model.
        """
        if self.stage_layers is not None:
            return self._given_layers(model)
        first, last = self.first_layers, self.last_layers
        if first is None and last is None:
            stages, counted = self.pp * self.chunks, model.layers + self.embedding_is_layer + self.loss_is_layer
            if counted % stages:
                raise ValueError(
                    f"pp * chunks is {self.pp} * {self.chunks}; expected a divisor of the model's {counted} "
                    "layers, or first_layers and last_layers"
                )
            each = [counted // stages] * stages
            each[0] -= self.embedding_is_layer
            each[-1] -= self.loss_is_layer
            if min(each) < 0:
                raise ValueError(f"layers is {model.layers}; expected more, as embedding or loss are layers too")
            return tuple(each)
        given = {name: count for name, count in (("first_layers", first), ("last_layers", last)) if count is not None}
        most = model.layers - (self.pp > 1)
        for name, value in given.items():
            if not 0 < value <= most:
                raise ValueError(f"{name} is {value}; expected 1 to {most}")
        between, rest = self.pp - len(given), model.layers - sum(given.values())
        parts = between * self.chunks
        if between < 0 or rest < parts or (rest % parts if parts else rest):
            among = f"{max(0, between)} of {self.pp} stages" + (f" in {self.chunks} chunks" if self.chunks > 1 else "")
            raise ValueError(
                f"{' and '.join(f'{name} is {count}' for name, count in given.items())}; expected layers left that "
                f"divide evenly among {among}, not {rest} of {model.layers}"
            )
        head, tail = [first] if first else [], [last] if last else []
        ranks = head + [rest // between if between else 0] * between + tail
        return tuple(ranks[rank] // self.chunks for rank in self.placement)

    def dense_layers(self, model: ModelSpec) -> tuple[int, ...]:
        """Return the number of ``layers`` without experts where others have some, of each virtual stage."""
        if not model.dense_layers:
            return (0,) * (self.pp * self.chunks)
        found, left = [], model.dense_layers
        for count in self.layers(model):
            found.append(min(left, count))
            left -= found[-1]
        return tuple(found)

    def _given_layers(self, model: ModelSpec) -> tuple[int, ...]:
        given = self.stage_layers or ()
        if self.first_layers or self.last_layers or self.embedding_is_layer or self.loss_is_layer:
            raise ValueError(f"stage_layers is {given}; expected no other field that divides the layers")
        if len(given) != self.pp * self.chunks or min(given) < 0 or sum(given) != model.layers:
            raise ValueError(
                f"stage_layers is {given}; expected {self.pp * self.chunks} numbers, as pp * chunks is, that add up to "
                f"{model.layers} layers"
            )
        return given
