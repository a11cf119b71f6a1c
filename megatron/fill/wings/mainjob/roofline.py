"""Analytical times of a layer's passes, operation by operation.

A matrix product takes the time of its FLOPs at a share of the GPU's peak (``efficiency``), or that of its operands'
traffic if it is longer (the roofline of Williams et al. 2009); what lies between products takes that of its traffic.
A layer's pass is not shorter than launching its kernels, one after the other, takes the host.

A GPU's processors compute a product in tiles of its result, one tile each at a time, so some have nothing to do in the
last round ("wave quantization", NVIDIA's Matrix Multiplication Background User's Guide); and each tile begins and ends
with moving operands and results.  A product with few tiles, or a short sum for each, is slower for it.

The efficiency that ``Cluster`` assumes and the shares that a ``GpuKind`` has are SimuMax's measured kernels'
(``configs/system`` of <https://github.com/MooreThreads/SimuMax>); ``LAUNCH_S`` and ``STEP_LAUNCHES`` are fitted to
NVIDIA's functional tests that are dense, 512 wide, and have neither tensor nor context parallelism.
docs/configure.md compares predictions with the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

from megatron.fill.pipeline.costs import StageCost
from megatron.fill.wings.mainjob.analytic import cost_of, layers_again
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.mainjob.kernels import Kernels
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from megatron.fill.wings.mainjob.tape import Sizes, sizes

LAUNCH_S = 65e-6  # of a kernel, with all that Python and autograd do for it
STEP_LAUNCHES = 950  # between two iterations: optimizer, clipping, loader, logs

# Kernels of a layer's forward pass, local or Transformer Engine's, which take as long; backward twice as many.
_LAYER_KERNELS = 16
_TENSOR_KERNELS = 4  # exchange, and splitting or joining, after attention and MLP; as many in the backward pass
_CONTEXT_KERNELS = 8
_EXPERT_KERNELS = 16  # router, sorting, exchange
_EACH_KERNELS = 3  # of an expert of its own: two products and what is between them
# To find scales and make the numbers of a product's input 8-bit ones, in Transformer Engine's layers without a graph;
# with these, NVIDIA's trainings of Qwen3 in FP8 on 256 GPUs (Megatron-Bridge) take the host as long as was measured.
_FP8_KERNELS = 5
_LATENT_KERNELS = 8  # two products and a norm more for each of both latents, and joining rotated channels to others
_PART_PRODUCTS = 2  # of attention, and of the MLP or the experts
# Of these, in the parts of a layer that a CUDA graph may have: of _LAYER_KERNELS those with the norm before attention,
# and of _EXPERT_KERNELS the norm before the router, it, and what counts and places tokens; the exchange is in none.
_GRAPHED = {"attn": 9, "mlp": 7, "moe": 23, "moe_router": 6, "moe_preprocess": 5}
_DENSE_PARTS, _ROUTED_PARTS = ("attn", "mlp"), ("attn", "moe", "moe_router", "moe_preprocess")
# Of 16-bit numbers': with one scale for a tensor by the data sheets; with one for each block (MXFP8) less, as NVIDIA's
# 405B on as many GPUs and stages of GB200 takes 7.6% longer with it (Megatron-Bridge's docs/performance-summary.md).
_FP8_RATE, _BLOCKS_RATE = 2, 1.8
_LOSS_PASSES = 3  # over logits in single precision
# Bytes moved more for each number that is made an 8-bit one and written twice: 4 if it is read for it, none if a norm
# or an activation gives it, as with most inputs of products and one gradient of four; and 2 to find a scale first.
_QUANTIZED = 3
# SimuMax's measured products of several experts at once (--moe-grouped-gemm) on B200, with 128 to 1,232 rows for each
# expert (configs/system/b200_bf16_ceperm.json): others' time, but as if each expert had so many rows more, and no less
# for each expert than it takes to launch its own, if they are not in a graph.  Off by 11% on average.  What they take
# is made 8-bit numbers expert by expert (Transformer Engine's ``multi_tensor_quantize_impl``).
_GROUPED_ROWS, _GROUPED_S = 200, 9e-6
_ORDERED = 1.33  # times as long as other traffic takes: 0.50 of a B200's bandwidth (SimuMax's permutations, there too)
# Flash attention shares rows of queries out in blocks of 128, and on average each of some 128 processors waits for half
# of the last one, which has all keys: so it takes as long as with so many rows more that have half of them.  With it,
# A100's kernels for 4 to 64 heads of 128 channels (configs/system/a100_pcie.json) are off by 1.7% on average, by 13%
# without; B200's, for 4 to 128 heads, by 9% and 19%.  Heads with 192 channels for keys reach 0.82 of others' share, on
# both.
_LAST_ROWS = 128 * 128
_WIDE, _WIDE_HEAD = 0.82, 128
# Sides of a tile; the products of a sum that take as long as a tile's beginning and end; and the least of a part of a
# sum, as processors share out long sums too.  With these, products reach 0.78 of an A100's peak while processors are
# busy, and the 183 that SimuMax measured (configs/system/a100_pcie.json) are off by 3.6% on average; with one share for
# all, 0.72, by 6.7%.
_TILE, _TILE_ENDS, _TILE_PART = (128, 256), 128, 8192


@dataclass(frozen=True, slots=True)
class Part:
    """Seconds of a part of a layer in its forward and its backward pass, on each of its GPUs."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(self.forward_s + other.forward_s, self.backward_s + other.backward_s)

    def times(self, count: float) -> Part:
        """Return that of as many."""
        return Part(count * self.forward_s, count * self.backward_s)


@dataclass(frozen=True, slots=True)
class _Roofline:
    """The FLOP/s and bytes per second that bound a kernel, and the bytes of a number and of a gradient.

    Products with weights have ``faster`` times as many FLOP/s; if that is not 1, their inputs are made smaller numbers.
    Each takes at least ``least_s``; its tiles are shared out among ``processors``, of which with 0 all have work.
    """

    rate: float
    bandwidth: float
    number: int
    gradient: int
    faster: float = 1.0
    least_s: float = 0.0
    processors: int = 0

    def product(self, rows: float, columns: float, inner: float) -> Part:
        """Return the times of a product with weights, ``inner x columns``, whose gradient is added to a sum."""
        flops_s = 2 * rows * columns * inner / (self.rate * self.faster)
        activations = self.number * rows * (inner + columns)
        weights = inner * columns
        moved_s = (activations + self.number * weights) / self.bandwidth
        added_s = (activations + 2 * self.gradient * weights) / self.bandwidth
        own_s, inputs_s, weights_s = (
            max(flops_s / busy_share(self.processors, *sides), traffic_s, self.least_s)
            for sides, traffic_s in (
                ((rows, columns, inner), moved_s),
                ((rows, inner, columns), moved_s),
                ((inner, columns, rows), added_s),
            )
        )
        if self.faster == 1:
            return Part(own_s, inputs_s + weights_s)
        smaller = self.traffic(_QUANTIZED * rows * inner, _QUANTIZED * rows * columns)
        forward_s, backward_s = (max(its_s, self.least_s) for its_s in (smaller.forward_s, smaller.backward_s))
        return Part(own_s + forward_s, inputs_s + weights_s + backward_s)

    def traffic(self, forward_bytes: float, backward_bytes: float) -> Part:
        """Return the times of reading and writing."""
        return Part(forward_bytes / self.bandwidth, backward_bytes / self.bandwidth)


def busy_share(processors: int, rows: float, columns: float, inner: float) -> float:
    """Return the share of their time in which processors add products up.

    Args:
        processors: number of them; 0 if they have work at all times.
        rows: number of rows of the product's result; ``columns``: likewise.
        inner: number of products in each sum.
    """
    if not processors:
        return 1.0
    tiles = min(ceil(rows / tall) * ceil(columns / wide) for tall, wide in (_TILE, _TILE[::-1]))
    shares = []
    for parts in range(1, max(1, min(processors, int(inner) // _TILE_PART)) + 1):
        places = ceil(tiles * parts / processors) * processors
        sums = rows * columns * parts / (places * _TILE[0] * _TILE[1])
        shares.append(sums * inner / (inner + parts * _TILE_ENDS))
    return max(shares)


@lru_cache(maxsize=16)  # all stages of a layout ask for them
def layer_parts(model: ModelSpec, gpu: GpuKind, its: Parallel, efficiency: float) -> Mapping[str, Part]:
    """Return a layer's parts: ``rest``, and those that selective recomputation may name; ``moe`` has ``moe_act``."""
    roof, size = _roofline(gpu, its, efficiency, model.kernels), sizes(model, its)
    tokens = its.microbatch * model.sequence / its.cp
    dropout = 3 * size.residual + size.mask  # its input, the residual stream, and their sum
    rotated = 0.0 if model.positions else 2 * size.query + size.keys
    latents = 4 * (size.queries_latent + size.keys_latent)
    between = 2 * dropout + 2 * (size.query + size.keys) + rotated + latents
    rest, up = _projections(model, its, roof, tokens)
    rest += roof.product(tokens, model.hidden, model.mixed_width / its.tp)
    parts = {
        "rest": rest + roof.traffic(between, 2 * between),
        "core_attn": _core(model, its, roof, size, gpu.flash_attention),
        "layernorm": roof.traffic(4 * size.residual, 8 * size.residual),
        "mla_up_proj": up,
    }
    if not model.experts:
        return parts | {"mlp": _mlp(model, roof, tokens, model.ffn / its.tp)}
    local, width = model.experts / its.ep, its.expert_width
    rows = tokens * model.experts_per_token * width / its.tp / local
    at_once = model.kernels.grouped and local > 1
    grouped = roof
    if at_once:
        least_s = 0.0 if "iteration" in model.kernels.graphs else _GROUPED_S
        grouped = replace(roof, rate=roof.rate / (1 + _GROUPED_ROWS / rows), least_s=least_s, processors=0)
    # Of each token, in and out: one is read and k are written in the order of their ranks, k and k in that of the
    # experts on these; and back in the same way.  So it is 2 (1 + k) + 4 k.  What is sent once to each rank is read and
    # written by what sends it, as far as it takes; put in the order of the experts are these, and k.
    chosen = model.experts_per_token
    sent = its.ep * model.chosen_share(1 / its.ep)
    copies = 2 * (sent + chosen) if model.kernels.dispatcher else 2 * (1 + 3 * chosen)
    moved = roof.number * tokens / its.tp * model.hidden * copies
    ordered = roof.traffic(_ORDERED * moved, _ORDERED * moved)
    parts["moe"] = _mlp(model, grouped, rows, model.ffn / width).times(local) + ordered
    activation = local * roof.number * rows * model.ffn / width * (3 if model.swiglu else 2)
    parts["moe_act"] = roof.traffic(activation, 0.0)
    if model.shared_width:
        parts["shared_experts"] = _mlp(model, roof, tokens, model.shared_width / its.tp)
    return parts


def _roofline(gpu: GpuKind, its: Parallel, efficiency: float, kernels: Kernels | None = None) -> _Roofline:
    """Return the bounds of kernels, whose products are in FP8 if ``kernels`` say so; of 16-bit ones without them."""
    numbers = its.precision.weight_bytes, its.precision.gradient_bytes
    faster = 1.0
    if kernels is not None and kernels.fp8:
        faster = _FP8_RATE if kernels.fp8_per_tensor else _BLOCKS_RATE
    rate, bandwidth = gpu.peak_flops * efficiency * gpu.sustained, gpu.memory_bandwidth * gpu.traffic
    return _Roofline(rate, bandwidth, *numbers, faster, processors=gpu.processors)


def _projections(model: ModelSpec, its: Parallel, roof: _Roofline, tokens: float) -> tuple[Part, Part]:
    """Return the products from the residual stream to queries, keys and values, and those from their latents."""
    latent, wide = model.latent, model.query_width / its.tp
    if latent is None:
        return roof.product(tokens, wide + model.keys_width / its.tp, model.hidden), Part()
    own = tokens / its.tp if its.sequence_parallel else tokens
    down = roof.product(own, latent.query + latent.keys + latent.rotated, model.hidden)
    values = model.heads * (latent.head + latent.value) / its.tp
    up = roof.product(tokens, wide, latent.query or model.hidden) + roof.product(tokens, values, latent.keys)
    return down, up


def _mlp(model: ModelSpec, roof: _Roofline, rows: float, width: float) -> Part:
    gated = width * (2 if model.swiglu else 1)
    activation = roof.number * rows * (gated + width)
    products = roof.product(rows, gated, model.hidden) + roof.product(rows, model.hidden, width)
    return products + roof.traffic(activation, 2 * activation)


def _core(model: ModelSpec, its: Parallel, roof: _Roofline, size: Sizes, flash: float) -> Part:
    """Return the attention's core: two products, and softmax and dropout of the scores between them.

    Flash attention computes the scores' unmasked half, once more in the backward pass (Dao 2023, arXiv 2307.08691,
    section 4.1: 2.5 times the forward pass), and ends with processors that wait for the last rows.
    """
    flops_s = model.attention_flops(its.microbatch) / (its.tp * its.cp * roof.rate)
    if model.kernels.flash:
        reached = flash * (_WIDE if model.head > _WIDE_HEAD else 1)
        rows = model.heads / (its.tp * its.cp) * its.microbatch * model.sequence
        forward_s = flops_s / 2 * (1 + _LAST_ROWS / rows) / reached
        return Part(forward_s, 2.5 * forward_s) + _joined(its, roof, size)
    product_s = max(flops_s / 2, (size.scores + size.query + size.mixed) / roof.bandwidth)
    softmax = size.scores * (2 if model.kernels.fused_softmax else 6)  # scaled, masked and cast one by one if not fused
    dropout = 2 * size.scores + size.score_mask if model.attention_dropout else 0.0
    return Part(2 * product_s, 4 * product_s) + roof.traffic(softmax + dropout, 3 * size.scores + dropout)


def _joined(its: Parallel, roof: _Roofline, size: Sizes) -> Part:
    """Return the adding up of what context-parallel ranks' parts of the keys give, part by part.

    Outputs are added in single precision, gradients in that of the numbers; of the parts after a rank's own, half of
    its tokens see none (Transformer Engine's ``attention/dot_product_attention/context_parallel.py``).
    """
    if its.cp == 1:
        return Part()
    seen = (3 * its.cp + 1) / 4
    single = 4 * size.query / roof.number
    return roof.traffic(seen * (size.query + 2 * single), seen * 3 * (size.query + size.keys))


def launches(model: ModelSpec, its: Parallel) -> tuple[int, int]:
    """Return the number of kernels that a layer's forward and backward pass launch, a CUDA graph as one."""
    graphs = model.kernels.graphs
    if "iteration" in graphs:
        return 0, 0
    if "layer" in graphs:
        return 1, 1
    more = _CONTEXT_KERNELS * (its.cp > 1) + _EXPERT_KERNELS * (model.experts > 0)
    more += _LATENT_KERNELS * (model.latent is not None)
    if model.experts and not model.kernels.grouped:  # one after the other
        more += _EACH_KERNELS * (model.experts // its.ep - 1)
    if model.kernels.fp8:
        mlp = "moe" if model.experts else "mlp"
        more += _FP8_KERNELS * _PART_PRODUCTS * sum(name not in graphs for name in ("attn", mlp))
    tensor = _TENSOR_KERNELS * (its.tp > 1)
    there = _ROUTED_PARTS if model.experts else _DENSE_PARTS
    layer = _LAYER_KERNELS + more - sum(_GRAPHED[name] - 1 for name in graphs if name in there)
    return layer + tensor, 2 * layer + tensor


def stage_cost(
    model: ModelSpec,
    gpu: GpuKind,
    its: Parallel,
    efficiency: float,
    layers: int,
    is_last: bool,
    forward_exchange_s: float,
    backward_exchange_s: float,
    before: int = 0,
    later: int = 0,
) -> StageCost:
    """Return the times of one microbatch's passes on a virtual stage; arguments as ``analytic.stage_cost`` has them."""
    parts = layer_parts(model, gpu, its, efficiency)
    whole = sum((part for name, part in parts.items() if name != "moe_act"), Part())  # it is a part of the experts
    forward_kernels, backward_kernels = launches(model, its)
    forward = max(whole.forward_s + forward_exchange_s, forward_kernels * LAUNCH_S)
    backward = max(whole.backward_s + backward_exchange_s, backward_kernels * LAUNCH_S)
    again_s = layers_again(its, before, layers, later) * forward
    layers += later
    if its.recompute is Recompute.SELECTIVE:
        again_s = layers * _again_s(parts, its, forward_exchange_s)
    ends = Part()
    if is_last:
        ends = _output(model, gpu, its, efficiency).times(1 + model.predicted)
    if later:
        joined = _roofline(gpu, its, efficiency).product(
            its.microbatch * model.sequence / its.cp, model.hidden / its.tp, 2 * model.hidden
        )
        ends += joined.times(later)
    weights_s = layers * (whole.forward_s - parts["core_attn"].forward_s) + ends.forward_s
    return cost_of(layers * forward + ends.forward_s, layers * backward + again_s + ends.backward_s, weights_s)


def _again_s(parts: Mapping[str, Part], its: Parallel, exchange_s: float) -> float:
    """Return the seconds of what selective recomputation computes again; the shared experts are a part of ``moe``."""
    inner = its.computes_again("moe" if "moe" in parts else "mlp")
    named = {name for name in parts if its.computes_again(name)} | ({"shared_experts"} if inner else set())
    # the exchange of the attention is not done again
    return sum(its_part.forward_s for name, its_part in parts.items() if name in named) + inner * exchange_s / 2


def _output(model: ModelSpec, gpu: GpuKind, its: Parallel, efficiency: float) -> Part:
    """Return the output layer and the loss."""
    if not model.vocabulary:
        return Part()
    tokens, columns = its.microbatch * model.sequence / its.cp, model.vocabulary / its.tp
    roof = _roofline(gpu, its, efficiency, model.kernels if model.kernels.fp8_output else None)
    logits = _LOSS_PASSES * 4 * tokens * columns
    return roof.product(tokens, columns, model.hidden) + roof.traffic(logits, logits)
