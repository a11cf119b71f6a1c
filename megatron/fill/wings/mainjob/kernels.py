"""The kernels of a training's layers and loss, as far as they decide its memory or the time of its attention.

Sources: Dao et al. 2022 (arXiv 2205.14135), section 3, for what flash attention keeps; Transformer Engine's
``attention/dot_product_attention`` for the choice of a backend; Megatron's ``tensor_parallel/layers.py`` for the
deferred gradient.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlaps:
    """The exchanges that are under way while something else is computed."""

    tensor: bool = False  # those between tensor-parallel ranks, in pieces, with the products beside them
    gradients: bool = False  # the reduction of a bucket of gradients, with the backward pass of layers before it
    weights: bool = False  # the gathering of a bucket of weights, with the forward pass of layers before it
    experts: bool = False  # the exchange of one microbatch's tokens, with another's computation


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """The kernels of a training; the defaults are Megatron's local layers."""

    transformer_engine: bool = False  # True for Transformer Engine's layers
    flash: bool = False  # True if attention keeps its softmax's statistics and no scores
    fused_softmax: bool = True  # True if unfused attention scales and masks scores in its softmax
    wide_softmax: bool = False  # True if its softmax takes and keeps scores in single precision
    fused_gate: bool = True  # True if a gate's activation and product are one function, which keeps its input alone
    # True if attention's output is copied into the layers' order, and kept twice, as FlashAttention's library does for
    # more than one sample
    turned: bool = False
    masked: bool = True  # True if the data loader makes a causal mask for each microbatch
    fused_loss: bool = False  # True for Megatron's fused cross entropy, whose gradient is not in place of the logits
    # True for Transformer Engine's fused cross entropy, which takes logits in their own precision and puts their
    # gradient in their place (its ``triton/cross_entropy.py``)
    engine_loss: bool = False
    # True if a product adds the gradient of its weights to the buffer itself.  Then none is made, but autograd wants
    # one: Transformer Engine's ``get_dummy_wgrad`` keeps a tensor for each shape of weights.
    accumulated: bool = False
    # microbatches whose gradient of the output layer's weights waits for the end; None for all of them
    deferred: int | None = 0
    deterministic: bool = False  # True for ``--deterministic-mode``, with which cuBLAS has a large workspace
    # True if matrix products take 8-bit numbers: Transformer Engine keeps their inputs as such, and copies of the
    # weights, which the passes of an iteration share (its ``module/base.py``)
    fp8: bool = False
    fp8_weights: bool = False  # True if weights are 8-bit numbers themselves, ``fp8_copies`` times, with no others
    fp8_output: bool = False  # True if the output layer's product takes 8-bit numbers too
    fp8_per_tensor: bool = False  # True if 8-bit numbers have one scale for a whole tensor
    # number of 8-bit copies of a weight: 2, one for each order in which it is read; 1 where products read it in both
    # and it has one scale (Transformer Engine's ``nvte_is_non_tn_fp8_gemm_supported``)
    fp8_copies: int = 2
    grouped: bool = False  # True if the products of all experts of a rank are made at once
    # sender of tokens to their experts, ``deepep`` or ``hybridep``; "" for an all-to-all.  Those two send a token once
    # to each node that has experts of it, whose ranks pass it on, and once to each of the ranks
    # (<https://github.com/deepseek-ai/DeepEP>)
    dispatcher: str = ""
    # parts of a layer whose kernels are launched as one CUDA graph: ``attn``, ``mlp``, ``moe``, ``moe_router`` and
    # ``moe_preprocess`` (Megatron-core 0.19, ``CudaGraphModule``), all of them as one with ``layer``; with
    # ``iteration``, the passes of a whole iteration are one
    graphs: tuple[str, ...] = ()
    # True if Transformer Engine may take unfused attention instead, as its flash kernels are not all deterministic
    undecided: bool = False
    overlaps: Overlaps = Overlaps()  # the exchanges that do not stop the kernels


LOCAL = Kernels()
