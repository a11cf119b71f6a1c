"""Exchanges beside computation: what they add to it, and which flags for it Megatron starts a layout with."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megatron.fill.pipeline.costs import StageCost
from megatron.fill.wings.configure.layout import Layout, StageRoutes
from megatron.fill.wings.configure.links import Route, all_reduce_s
from megatron.fill.wings.mainjob.analytic import ALL_REDUCES, boundary_bytes
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Precision, Recompute
from megatron.fill.wings.mainjob.roofline import Part

_EXPERTS = "--overlap-moe-expert-parallel-comm"
_AT_STEP = "--overlap-param-gather-with-optimizer-step"
# Share of a GPU's processors that an exchange beside computing holds: 16 of 132 to 148, by default (Megatron-Bridge's
# performance guide).
HELD = 0.12
_EIGHT_BITS = 0.75  # of tensor parallelism's bytes: what is gathered is half as large, what is reduced is not
# Collectives of a node's ranks, where others reach 0.7 of its links (``Cluster.intra_node_share``).  vTrain's
# all-reduces of 32 MiB and more (trace/a100, two to eight A100) take as long as sending 2 (n-1) / n + 0.56 times the
# data with all of a link, as ranks copy what they begin and end with.  SimuMax's on eight B200 reach 0.742, where by
# this it is 0.76; what gathers and scatters 0.673, an all-to-all 0.597; and each takes 22 us to begin
# (configs/system/b200_bf16_ceperm.json).
_REACHED, _COPIED, _GATHERED, _SENT, _BEGIN_S = 0.7, 0.56, 0.673, 0.597, 22e-6


# Share of what tensor-parallel ranks exchange in a forward pass that nothing hides: the last of four pieces in which
# Transformer Engine scatters (Megatron-Bridge's ``comm_overlap.py``, ``PipelineOverlapCfg.num_splits``), which is half
# of all.  What is gathered comes in rings that begin with a rank's own part, and backward beside other products.
_LAST_PIECE = 1 / 8
_BESIDE_NO_TENSOR = "core_attn", "moe", "moe_act"  # parts without products that hide what tensor parallelism exchanges


def expert_problem(model: ModelSpec, its: Parallel) -> str:
    """Return what Megatron expects of a layout for its experts' dispatcher, and for hiding it; "" if it has that.

    As in Megatron-core 0.19, ``MoEFlexTokenDispatcher`` and ``TransformerConfig``.
    """
    if model.experts and model.kernels.dispatcher == "deepep" and its.ep * its.expert_width == 1:
        return "with --moe-flex-dispatcher-backend deepep, --expert-model-parallel-size or the experts' tp is above 1"
    if not model.kernels.overlaps.experts:
        return ""
    if its.ep == 1:
        return f"with {_EXPERTS}, --expert-model-parallel-size is above 1"
    if its.pp > 1 and its.chunks == 1:
        return f"with {_EXPERTS}, several stages (--pipeline-model-parallel-size) have virtual stages"
    if its.recompute is Recompute.FULL or its.computes_again("moe"):
        return f"with {_EXPERTS}, neither whole layers nor moe are recomputed"
    if its.precision is Precision.FP32 or model.predicted > 1:
        return f"with {_EXPERTS}, numbers have 16 bits and --mtp-num-layers is at most 1"
    return ""


def recomputations(model: ModelSpec, fixed: Mapping[str, Any]) -> tuple[Recompute, ...]:
    """Return the kinds of recomputation that a training may have, the least first; ``fixed`` is as in ``Training``."""
    if "recompute" in fixed:
        return (fixed["recompute"],)
    if not model.kernels.overlaps.experts:
        return tuple(Recompute)
    inner = "moe" in fixed.get("recompute_modules", ())
    return (Recompute.NONE,) if inner else (Recompute.NONE, Recompute.SELECTIVE)


def startable(flags: Sequence[str], its: Parallel) -> list[str]:
    """Return flags without those that would overlap what a layout does not exchange.

    As Megatron's ``validate_args`` has it, tensor parallelism's exchange overlaps with sequence parallelism alone, and
    that of weights with the distributed optimizer.
    """
    without = set() if its.sequence_parallel else {"--tp-comm-overlap"}
    without |= set() if its.distributed_optimizer else {"--overlap-param-gather", _AT_STEP}
    without |= set() if its.chunks > 1 else {_AT_STEP}
    return [flag for flag in flags if flag not in without]


def connections(flags: Sequence[str], its: Parallel) -> list[str]:
    """Return a script's lines that set a GPU's hardware queues, which decide what goes on beside what up to Hopper."""
    hidden = _EXPERTS in flags
    exchanges = its.tp > 1 or its.cp > 1
    note = "# 1 for tensor and context parallelism; 32 hides more of what experts exchange, and Megatron takes it too."
    count = 32 if hidden and not exchanges else 1
    set_it = f"export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-{count}}}"
    return [note, set_it] if hidden and exchanges else [set_it]


def exposed_s(exchange_s: float, beside_s: float, share: float) -> float:
    """Return the seconds that an exchange adds to the computing beside it; a share of it is never hidden.

    The processors that it holds while it is hidden are not there to compute.
    """
    left_s = max(exchange_s * share, exchange_s - beside_s)
    return left_s + HELD * (exchange_s - left_s)


def tensor_exchange_s(model: ModelSpec, its: Parallel, route: Route) -> float:
    """Return the seconds of what tensor-parallel ranks exchange in one pass of one layer, hidden or not.

    Experts that they do not divide take the tokens that each rank has, and leave that of the attention alone, and of
    shared experts (Megatron-core 0.19, ``transformer/moe/token_dispatcher.py``).
    """
    if its.tp == 1:
        return 0.0
    reduces = 1 if model.experts and its.expert_width == 1 and not model.shared_width else ALL_REDUCES
    ring = 2 * (its.tp - 1) / its.tp
    collectives, more = (2, _REACHED / _GATHERED) if its.sequence_parallel else (1, _REACHED * (1 + _COPIED / ring))
    gathered = _EIGHT_BITS if model.kernels.fp8 and its.sequence_parallel else 1.0
    size = more * gathered * boundary_bytes(model, its)
    return reduces * (collectives * _BEGIN_S + all_reduce_s(route, its.tp, size))


def layer_exchange_s(
    model: ModelSpec, its: Parallel, routes: StageRoutes, parts: Mapping[str, Part] | None
) -> tuple[float, float]:
    """Return the seconds of exchange in the forward and in the backward pass of one layer that are not hidden.

    Tensor parallelism reduces twice (with sequence parallelism it scatters and gathers, which takes as long); in
    pieces, products that it comes before and after may hide it, which experts' are not, in the forward pass all but
    ``_LAST_PIECE``.  Context parallelism passes keys and
    values round, and in the backward pass their gradients too, while it computes the attention to those before.
    Experts are sent their tokens, and send them back (``dispatch_s``); with a second microbatch under way, its passes
    hide it (``expert_problem``).

    Args:
        parts: the layer's; None to count no tensor parallelism and hide nothing, as passes are measured.
    """
    size, overlaps = boundary_bytes(model, its), model.kernels.overlaps
    keys_s = 0.0
    if its.cp > 1:
        keys = size * model.keys_width / model.hidden / its.tp
        keys_s = routes.context.time_s(keys * (its.cp - 1), its.cp - 1)
    experts_s = 2 * dispatch_s(model, its, routes)
    if parts is None:
        return keys_s + experts_s, 2 * keys_s + experts_s
    reduce_s = tensor_exchange_s(model, its, routes.tensor)
    tensor = overlaps.tensor and its.sequence_parallel
    if overlaps.experts and not expert_problem(model, its):
        experts_s = _hidden_dispatches_s(its, experts_s / 2, parts) / 2
    found = []
    for ring_s, name, last in ((keys_s, "forward_s", _LAST_PIECE), (2 * keys_s, "backward_s", 0.0)):
        attention_s = getattr(parts["core_attn"], name)
        beside_s = sum(getattr(part, name) for key, part in parts.items() if key not in _BESIDE_NO_TENSOR)
        tensor_s = exposed_s(reduce_s, beside_s, last) if tensor else reduce_s
        context_s = exposed_s(ring_s, attention_s * (its.cp - 1) / its.cp, 0.0)
        found.append(tensor_s + context_s + experts_s)
    return found[0], found[1]


def _hidden_dispatches_s(its: Parallel, one_s: float, parts: Mapping[str, Part]) -> float:
    """Return the seconds that sending tokens four times adds to the passes of two microbatches, one forward, one back.

    Megatron runs a layer of each at once.  What comes back in the backward pass is beside the attention of the other's
    forward pass, both ways to the experts are beside these, and what comes back in the forward pass is beside the
    attention's backward pass (Megatron-core 0.19, ``models/common/model_chunk_schedule_plan.py``).

    Args:
        one_s: seconds of sending them once.
    """
    computed = {"routed": Part(), "rest": Part()}
    for name, part in parts.items():
        if name != "moe_act":  # a part of the experts
            computed["routed" if name in ("moe", "shared_experts") else "rest"] += part
    routed, rest = computed["routed"], computed["rest"]
    beside = ((1, rest.forward_s), (2, routed.forward_s + routed.backward_s), (1, rest.backward_s))
    return sum(exposed_s(times * one_s, beside_s, 1 / its.microbatches) for times, beside_s in beside)


def dispatch_s(model: ModelSpec, its: Parallel, routes: StageRoutes) -> float:
    """Return the seconds in which ranks send the tokens of one pass of one layer to their experts, or back.

    In an all-to-all, a token goes to each of its experts.  The others (``Kernels.dispatcher``) send it once to each
    node with experts of it, to the rank of the same place, which passes it on to ranks of its node while others arrive.
    """
    if its.ep == 1:
        return 0.0
    size = boundary_bytes(model, its) / its.tp  # with experts, sequence parallelism is on
    if not model.kernels.dispatcher:
        more = _REACHED / _SENT if routes.spread.nodes == 1 else 1.0
        return sum(route.time_s(more * size * model.experts_per_token / its.ep) for route in routes.experts)
    there = routes.spread
    between = size * (there.nodes - 1) * model.chosen_share(1 / there.nodes)
    within = size * there.nodes * (there.ranks - 1) * model.chosen_share(1 / its.ep)
    return max(there.between.time_s(between), there.within.time_s(within))


def exchanges_hold(its: Parallel, measured: bool) -> bool:
    """Return True if a stage goes on only when what it sends has arrived; measured passes have that in them.

    Without virtual stages Megatron waits for both ways of an exchange (Megatron-core 0.19,
    ``pipeline_parallel/p2p_communication.py``: ``wait_on_reqs`` and ``batch_p2p_sync``), and NCCL sends what is larger
    than its buffers only once it is awaited.
    """
    return its.chunks == 1 and its.pp > 1 and not measured


def transfers_hold(its: Parallel, measured: bool) -> bool:
    """Return True if transfers are beside passes and take of their processors; measured passes have that in them."""
    return its.chunks > 1 and not measured


def with_transfers(
    its: Parallel, stages: Sequence[StageCost], layout: Layout, times: Mapping[Route, int]
) -> list[StageCost]:
    """Return passes with what transfers beside them take of their processors; each receives and sends one thing."""
    pp, placement = its.pp, its.placement
    sent = [0] * (len(stages) + 1)  # to each virtual stage from the one before it
    for at, (source, rank) in enumerate(itertools.pairwise(placement), 1):
        if source != rank:
            link, back = (source, 0) if (source + 1) % pp == rank else (rank, 1)
            sent[at] = max(times[row[link][back]] for row in layout.replicas)
    found = []
    for cost, before, behind in zip(stages, sent, sent[1:], strict=False):
        held = round(HELD * (before + behind))
        found.append(replace(cost, forward_ns=cost.forward_ns + held, backward_ns=cost.backward_ns + held))
    return found
