"""The shape of a GPT-like model, and the parameters and floating-point operations that follow from it.

Parameters are counted as ``megatron.training.theoretical_memory_usage`` counts them: without biases and position
embeddings, with the scale and shift of each layer norm.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import ClassVar

from megatron.fill.wings.mainjob.kernels import LOCAL, Kernels

_LAYER_NORM = 2  # parameters per hidden unit: scale and shift
_MAY_BE_NONE = ("vocabulary", "experts", "positions", "shared_width", "dense_layers", "dense_ffn", "predicted")


@dataclass(frozen=True, slots=True, kw_only=True)
class Latent:
    """Multi-latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1): widths of what passes between products.

    Attributes:
        query: width of the queries' latent; 0 where they are projected from the residual stream.
        keys: width of the latent of keys and values.
        head: channels of a head's query and key without rotation.
        rotated: their channels with rotation; all heads share those of the key.
        value: channels of a head's value.
    """

    query: int
    keys: int
    head: int
    rotated: int
    value: int

    def __post_init__(self) -> None:
        for item in fields(self):
            least = 0 if item.name == "query" else 1
            if getattr(self, item.name) < least:
                raise ValueError(f"latent.{item.name} is {getattr(self, item.name)}; expected at least {least}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A transformer decoder.

    Attributes:
        hidden: width of the residual stream.
        sequence: tokens per sample.
        vocabulary: padded vocabulary size; 0 for a model without embedding and output layer, as in FreeRide.
        ffn_hidden: width inside the MLP; None for ``4 * hidden``.
        query_groups: number of query groups of grouped-query attention; None for the number of heads.
        channels: channels of a head; None for ``hidden / heads``.
        latent: multi-latent attention; None for queries, keys and values that are projected at once.
        swiglu: True if the MLP has a gate, which makes it 1.5 times as large.
        tied_embeddings: True if the output layer uses the embedding's weights.
        experts: number of MLPs of each layer, from which a router chooses; 0 for one MLP without a router.
        experts_per_token: number of experts that a token passes through.
        shared_width: width inside the shared experts, which are one MLP that every token passes through beside those
            that the router chooses (Megatron-core 0.19, ``transformer/moe/shared_experts.py``); 0 for none.
        dense_layers: number of the first layers, which have one MLP without a router where the others have experts.
        dense_ffn: width inside that MLP; 0 for that of an expert.
        predicted: number of layers that predict later tokens (multi-token prediction, DeepSeek-AI 2024, arXiv
            2412.19437, section 2.2); they come after the last one, each with a loss of its own.
        positions: number of learned position embeddings; 0 for rotary or unknown ones.
        hidden_dropout: True if the residual stream has dropout, and keeps its masks.
        attention_dropout: likewise of the attention scores.
        word_head: True for BERT's head: a dense layer, GELU and a norm before the output layer, which has biases
            (Megatron-core 0.19, ``models/bert/bert_lm_head.py``).
        pair_head: True for BERT's pooler and its output of two numbers per sample (``models/bert/pooler.py``).
        kernels: the kernels of its layers and its loss.
        source: origin of the shape.
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int
    ffn_hidden: int | None = None
    query_groups: int | None = None
    channels: int | None = None
    latent: Latent | None = None
    swiglu: bool = False
    tied_embeddings: bool = True
    experts: int = 0
    experts_per_token: int = 1
    shared_width: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    predicted: int = 0
    positions: int = 0
    hidden_dropout: bool = True
    attention_dropout: bool = True
    word_head: bool = False
    pair_head: bool = False
    kernels: Kernels = LOCAL
    source: str = ""
    __pydantic_config__: ClassVar = {"extra": "forbid"}  # in a configuration file, a misspelt field is an error

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            least = 0 if item.name in _MAY_BE_NONE else 1
            if isinstance(value, int) and not isinstance(value, bool) and value < least:
                raise ValueError(f"{item.name} is {value}; expected at least {least}")
        if self.hidden % self.heads and self.channels is None and self.latent is None:
            raise ValueError(f"heads is {self.heads}; expected a divisor of hidden, {self.hidden}")
        if self.heads % self.groups:
            raise ValueError(f"query_groups is {self.groups}; expected a divisor of heads, {self.heads}")
        if self.shared_width and not self.experts:
            raise ValueError(f"shared_width is {self.shared_width} without experts; expected 0")
        if self.dense_layers > (self.layers if self.experts else 0):
            most = f"at most layers, {self.layers}" if self.experts else "0 without experts"
            raise ValueError(f"dense_layers is {self.dense_layers}; expected {most}")
        if self.experts_per_token > max(1, self.experts):
            most = f"at most experts, {self.experts}" if self.experts else "1 without experts"
            raise ValueError(f"experts_per_token is {self.experts_per_token}; expected {most}")

    @property
    def groups(self) -> int:
        """The number of heads of keys and values."""
        return self.heads if self.query_groups is None else self.query_groups

    @property
    def ffn(self) -> int:
        """The width inside the MLP."""
        return 4 * self.hidden if self.ffn_hidden is None else self.ffn_hidden

    def chosen_share(self, part: float) -> float:
        """Return the share of tokens that have an expert in a part of the experts, if experts are chosen evenly.

        Args:
            part: share of the experts.
        """
        others = self.experts * (1 - part)
        none = 1.0
        for at in range(self.experts_per_token):
            none *= max(0.0, others - at) / (self.experts - at)
        return 1 - none

    @property
    def bare(self) -> ModelSpec:
        """The model of its first layers, those without experts; itself if it has no experts."""
        return _bare(self) if self.experts else self

    @property
    def head(self) -> int:
        """The channels of a head's query, and of its key."""
        if self.latent is not None:
            return self.latent.head + self.latent.rotated
        return self.hidden // self.heads if self.channels is None else self.channels

    @property
    def value_head(self) -> int:
        """The channels of a head's value, and of its part of the attention's output."""
        return self.head if self.latent is None else self.latent.value

    @property
    def query_width(self) -> int:
        """The width of the queries of all heads."""
        return self.heads * self.head

    @property
    def keys_width(self) -> int:
        """The width of the keys and values of all groups."""
        return self.groups * (self.head + self.value_head)

    @property
    def mixed_width(self) -> int:
        """The width of the attention's output before its projection."""
        return self.heads * self.value_head

    @property
    def down_parameters(self) -> int:
        """The number of parameters of one layer's projections to latents, which Transformer Engine does not divide."""
        if self.latent is None:
            return 0
        return self.hidden * (self.latent.query + self.latent.keys + self.latent.rotated)

    @property
    def attention_parameters(self) -> int:
        """The number of parameters of one layer's attention matrices."""
        out = self.hidden * self.mixed_width
        if self.latent is None:
            return self.hidden * (self.query_width + self.keys_width) + out
        values = self.latent.keys * self.heads * (self.latent.head + self.latent.value)
        return self.down_parameters + (self.latent.query or self.hidden) * self.query_width + values + out

    @property
    def mlp_parameters(self) -> int:
        """The number of parameters of the matrices of one MLP, or of one expert."""
        return (3 if self.swiglu else 2) * self.hidden * self.ffn

    @property
    def expert_parameters(self) -> int:
        """The number of parameters of all experts of one layer, which expert parallelism divides."""
        return self.experts * self.mlp_parameters

    @property
    def shared_parameters(self) -> int:
        """The number of parameters of one layer's shared experts, which tensor parallelism alone divides."""
        return (3 if self.swiglu else 2) * self.hidden * self.shared_width

    @property
    def matrix_parameters(self) -> int:
        """The number of parameters of one layer's matrices without a router's, which tensor parallelism divides."""
        return self.attention_parameters + (self.expert_parameters or self.mlp_parameters) + self.shared_parameters

    @property
    def passed_parameters(self) -> int:
        """The number of parameters of one layer's matrices that one token passes through."""
        return self.attention_parameters + self.experts_per_token * self.mlp_parameters + self.shared_parameters

    @property
    def norm_parameters(self) -> int:
        """The number of parameters of one layer's two layer norms, which every tensor-parallel rank has."""
        return 2 * _LAYER_NORM * self.hidden

    @property
    def final_norm_parameters(self) -> int:
        """The number of parameters of the layer norm before the output layer."""
        return _LAYER_NORM * self.hidden

    @property
    def layer_parameters(self) -> int:
        """The number of parameters of one layer."""
        return self.matrix_parameters + self.norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """The number of parameters of the embedding; an untied output layer has as many."""
        return self.vocabulary * self.hidden

    @property
    def head_parameters(self) -> int:
        """The number of parameters of BERT's heads, biases among them, which every tensor-parallel rank has whole."""
        words = self.hidden * (self.hidden + 1 + _LAYER_NORM) if self.word_head else 0
        pairs = self.hidden * (self.hidden + 1) + 2 * (self.hidden + 1) if self.pair_head else 0
        return words + pairs

    @property
    def parameters(self) -> int:
        """The number of parameters of the whole model."""
        embeddings = self.embedding_parameters * (1 if self.tied_embeddings else 2)
        layers = (self.layers - self.dense_layers) * self.layer_parameters
        layers += self.dense_layers * self.bare.layer_parameters
        layers += self.predicted * (self.layer_parameters + self.joined_parameters)
        return layers + self.final_norm_parameters + embeddings + self.head_parameters

    @property
    def joined_parameters(self) -> int:
        """The number of parameters that join a token's embedding to the stream where a later token is predicted."""
        return 2 * self.hidden * self.hidden

    def matrix_flops(self, microbatch: int) -> int:
        """Return the FLOPs of one layer's forward pass in products with weights: 2 per parameter and token.

        With ``ffn_hidden = 4 * hidden`` that is ``24 b s h^2`` (Narayanan et al. 2021, appendix).
        """
        return 2 * microbatch * self.sequence * self.passed_parameters

    def attention_flops(self, microbatch: int) -> int:
        """Return the FLOPs of one layer's forward pass in products of activations, with masked ones.

        With heads that are as wide together as the residual stream that is ``4 b s^2 h``.
        """
        return 2 * microbatch * self.sequence**2 * self.heads * (self.head + self.value_head)

    def layer_flops(self, microbatch: int) -> int:
        """Return the FLOPs of one layer's forward pass (Narayanan et al. 2021, appendix)."""
        return self.matrix_flops(microbatch) + self.attention_flops(microbatch)

    def output_flops(self, microbatch: int) -> int:
        """Return the FLOPs of the output layer's forward pass: ``2 b s h V``."""
        return 2 * microbatch * self.sequence * self.embedding_parameters


_VOCABULARY = 51200  # GPT-2's 50257 tokens, padded by Megatron to 128 times eight tensor-parallel ranks
_NARAYANAN = "Narayanan et al. 2021 (arXiv 2104.04473), Table 1, the model of {} parameters"
_FREERIDE = "FreeRide's artifact, src1/train_simplegpt2.py: neither embedding nor output layer"

MODELS: dict[str, ModelSpec] = {
    "gpt-40b": ModelSpec(
        layers=48,
        hidden=8192,
        heads=64,
        sequence=2048,
        vocabulary=_VOCABULARY,
        source=_NARAYANAN.format("39.1 billion") + "; 48 layers divide by 16 stages",
    ),
    "gpt-5b": ModelSpec(
        layers=24,
        hidden=4096,
        heads=32,
        sequence=2048,
        vocabulary=_VOCABULARY,
        source="assumed: GPT-3's 24 layers of width 4096, 5.0 billion parameters; they divide by 8 stages",
    ),
    "freeride-1.2b": ModelSpec(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=0, source=_FREERIDE),
    "freeride-3.6b": ModelSpec(layers=72, hidden=2048, heads=16, sequence=1024, vocabulary=0, source=_FREERIDE),
    "freeride-6b": ModelSpec(layers=120, hidden=2048, heads=16, sequence=1024, vocabulary=0, source=_FREERIDE),
}


@lru_cache(maxsize=64)  # a search asks for it for each stage of each layout
def _bare(model: ModelSpec) -> ModelSpec:
    width = model.dense_ffn or model.ffn_hidden
    fields: dict[str, int] = {"experts": 0, "experts_per_token": 1, "shared_width": 0, "dense_layers": 0}
    return replace(model, **fields, ffn_hidden=width)  # type: ignore[arg-type]
