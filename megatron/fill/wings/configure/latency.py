"""Duration of an iteration: exactly, by the pipeline's timeline, and from below, by closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.program import eager, rendezvous
from megatron.fill.pipeline.schedule import Op, Pass, Schedule
from megatron.fill.pipeline.schedules import megatrons
from megatron.fill.pipeline.timeline import Compiled, Timeline
from megatron.fill.wings.configure.layout import Layout, StageRoutes
from megatron.fill.wings.configure.links import all_reduce_s
from megatron.fill.wings.configure.overlap import (
    exchanges_hold,
    exposed_s,
    layer_exchange_s,
    transfers_hold,
    with_transfers,
)
from megatron.fill.wings.configure.passes import Passes
from megatron.fill.wings.mainjob.analytic import added, p2p_bytes, tied_embedding_bytes
from megatron.fill.wings.mainjob.hardware import GpuKind
from megatron.fill.wings.mainjob.memory import expert_parameters, stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.order import order_of
from megatron.fill.wings.mainjob.parallel import Parallel
from megatron.fill.wings.mainjob.roofline import LAUNCH_S, STEP_LAUNCHES, layer_parts, stage_cost

# Parameters of a bucket: Megatron-core 0.19, ``DistributedDataParallel``.
_BUCKET, _BUCKET_PER_RANK = 40_000_000, 1_000_000
_OPTIMIZER_BYTES = 38  # memory traffic per parameter, as ``sim.mainjob.MainJob`` counts it


@dataclass(frozen=True, slots=True)
class Iteration:
    """A configuration's times, before they are put together.

    Attributes:
        costs: costs without transfers and reductions.
        transfers_ns: times per differing replica, per stage: of a transfer to the next stage, and of one back.
        reduce_ns: reduction of gradients, per stage.
        rendezvous: a transfer holds both its ends.
        in_turn: two that stages send each other at once go one after the other.
    """

    parallel: Parallel
    costs: PipelineCosts
    transfers_ns: tuple[tuple[tuple[int, int], ...], ...]
    reduce_ns: tuple[int, ...]
    rendezvous: bool = False
    in_turn: bool = False


def iteration(
    model: ModelSpec, gpu: GpuKind, efficiency: float, its: Parallel, layout: Layout, passes: Passes | None = None
) -> Iteration:
    """The times of a configuration on the links of a layout.

    A pass takes its operations, as ``roofline`` has them; what a stage's ranks exchange comes on top, but for what is
    hidden (``overlap.layer_exchange_s``).  Each stage is as fast as its slowest group.  With ``passes``, passes and
    optimizer take what was measured, tensor parallelism included.
    """
    layers, dense = its.layers(model), its.dense_layers(model)
    steps: dict[object, tuple[float, float]] = {}
    reduces, optimizers = [], []
    # by identity: hashing routes for each layer takes longer than all the rest
    distinct = {id(routes): routes for routes in layout.stages}
    parts = layer_parts(model, gpu, its, efficiency) if passes is None else None
    exchange_of = {number: layer_exchange_s(model, its, routes, parts) for number, routes in distinct.items()}
    exchanges = [exchange_of[id(routes)] for routes in layout.stages]
    stages = stage_times(model, gpu, efficiency, its, exchanges, passes)
    embedding_s = all_reduce_s(layout.ends, 2, tied_embedding_bytes(model, its))
    parameter_s = _parameter_s(gpu, its, passes)
    fixed_s = fixed_step_s(its, passes)
    for stage, routes in enumerate(layout.stages):
        held = its.held(stage)
        inner = not {0, len(layers) - 1, its.later_stage}.intersection(held)
        counts = tuple((layers[virtual], dense[virtual]) for virtual in held)
        alike = (sum(every for every, _ in counts), sum(bare for _, bare in counts), id(routes)) if inner else stage
        if alike not in steps:
            forward_s, backward_s = (
                sum(getattr(stages[virtual], name) for virtual in held) / 1e9 for name in ("forward_ns", "backward_ns")
            )
            steps[alike] = _reduce_and_step_s(model, parameter_s, its, stage, routes, (forward_s, backward_s))
        reduce_s, step_s = steps[alike]
        reduces.append(_ns(reduce_s + (0.0 if inner else embedding_s)))
        optimizers.append(_ns(fixed_s + step_s))
    size = p2p_bytes(model, its)
    times = {route: _ns(route.time_s(size)) for row in layout.replicas for pair in row for route in pair}
    if transfers_hold(its, passes is not None):
        stages = with_transfers(its, stages, layout, times)
    return Iteration(
        its,
        PipelineCosts(tuple(stages), 0, (0,) * its.pp, tuple(optimizers)),
        tuple(dict.fromkeys(tuple((times[on], times[back]) for on, back in row) for row in layout.replicas)),
        tuple(reduces),
        layout.rendezvous or exchanges_hold(its, passes is not None),
        layout.rendezvous,
    )


def stage_times(
    model: ModelSpec,
    gpu: GpuKind,
    efficiency: float,
    its: Parallel,
    exchanges: Sequence[tuple[float, float]],
    passes: Passes | None,
) -> list[StageCost]:
    """Cost of a microbatch on each virtual stage.

    Args:
        exchanges: per rank, the seconds that a forward and a backward pass of one layer exchange.
    """
    counts = tuple(zip(its.layers(model), its.dense_layers(model), strict=True))
    last = len(counts) - 1
    known: dict[object, StageCost] = {}
    stages = []
    for at, ((count, dense), rank) in enumerate(zip(counts, its.placement, strict=True)):
        exchange = exchanges[rank]
        later = its.later(model, at)
        key = count, dense, at == 0, at == last, later, exchange
        if key not in known and passes is not None:
            known[key] = passes.stage_cost(model, its, count, (at == 0, at == last), exchange)
        elif key not in known:
            known[key] = stage_cost(model, gpu, its, efficiency, count - dense, at == last, *exchange, dense, later)
            if dense:  # what their ranks exchange for experts counts as if they had some
                bare = stage_cost(model.bare, gpu, its, efficiency, dense, False, *exchange)
                known[key] = added(known[key], bare)
        stages.append(known[key])
    return stages


def step_sizes(
    model: ModelSpec, gpu: GpuKind, its: Parallel, passes: Passes | None
) -> list[tuple[float, float, float]]:
    """Bytes of gradients, of weights, and an optimizer's own seconds, by stage, where experts have no own groups."""
    rows = []
    for stage in range(its.pp):
        ((count, *_), *_) = _parameter_groups(model, its, stage)
        own_s = count * _parameter_s(gpu, its, passes)
        rows.append((count * its.precision.gradient_bytes, count * its.precision.weight_bytes, own_s))
    return rows


def fixed_step_s(its: Parallel, passes: Passes | None) -> float:
    """Seconds of each rank between iterations besides its optimizer, independent of its parameters."""
    return STEP_LAUNCHES * LAUNCH_S if passes is None else passes.step_s(its.tp)


def _parameter_s(gpu: GpuKind, its: Parallel, passes: Passes | None) -> float:
    """Seconds of the optimizer for a parameter."""
    return _OPTIMIZER_BYTES / gpu.memory_bandwidth if passes is None else passes.step_s_per_parameter(its.tp)


def _parameter_groups(model: ModelSpec, its: Parallel, stage: int) -> tuple[tuple[float, int], tuple[float, int]]:
    """Parameters and the ranks that reduce them together: of what replicas share, and of experts."""
    experts = expert_parameters(model, its, stage)
    dense = stage_parameters(model, its, stage) - experts
    if not its.has_expert_groups:
        dense, experts = dense + experts, 0.0
    return (dense, its.replicas), (experts, round(its.expert_replicas))


def _reduce_and_step_s(
    model: ModelSpec,
    parameter_s: float,
    its: Parallel,
    stage: int,
    routes: StageRoutes,
    passes_s: tuple[float, float],
) -> tuple[float, float]:
    """Gradients over the replicas, and the optimizer; the distributed one scatters, does its part, and gathers.

    What is exchanged in buckets may be hidden, all but one bucket, by the last microbatch's backward passes, or the
    first one's forward passes.  In a pipeline, each virtual stage has one bucket.

    Args:
        parameter_s: seconds of the optimizer for a parameter.
        passes_s: seconds of a microbatch's forward and backward passes on all the rank's virtual stages.
    """
    groups = _parameter_groups(model, its, stage)
    overlaps = model.kernels.overlaps
    reduce_s = step_s = gather_s = 0.0
    for (parameters, ranks), route in zip(groups, (routes.replicas, routes.expert_replicas), strict=True):
        gradients_s = all_reduce_s(route, ranks, parameters * its.precision.gradient_bytes)
        own_s = parameters * parameter_s
        if its.distributed_optimizer:
            reduce_s += gradients_s / 2
            step_s += own_s / ranks
            gather_s += all_reduce_s(route, ranks, parameters * its.precision.weight_bytes) / 2
        else:
            reduce_s += gradients_s
            step_s += own_s
    bucket = max(_BUCKET, _BUCKET_PER_RANK * its.replicas)
    share = min(1.0, bucket / max(1.0, sum(parameters for parameters, _ in groups))) if its.pp == 1 else 1 / its.chunks
    if overlaps.gradients:
        reduce_s = exposed_s(reduce_s, passes_s[1], share)
    if overlaps.weights:
        gather_s = exposed_s(gather_s, passes_s[0], share)
    return reduce_s, step_s + gather_s


def bound_ns(its: Iteration) -> int:
    """Lower bound on the iteration in ns: no timeline of ``timeline`` is shorter.

    Let virtual stages be counted along the model.  The first pass of rank r waits for the first microbatch to pass the
    r virtual stages before it, and its last pass is a backward pass on its first chunk, which then passes them back: so

        optimizer of rank 0 + way to r + all passes of rank r + way back from r + reduction of rank 0

    is a path through the timeline, for each r; and so is the same without the way back, with r's own reduction.

    With 1F1B rank 0 holds at most pp microbatches, so forward i + pp comes after backward i (Pipette's hidden critical
    path): ``floor((m - 1) / pp) + 1`` round trips through all stages follow each other on rank 0.
    """
    para = its.parallel
    pp, m = para.pp, para.microbatches
    stages, optimizer_ns = its.costs.stages, its.costs.optimizer_ns
    passes = [stage.forward_ns + stage.backward_ns for stage in stages]
    work = [m * sum(passes[rank::pp]) for rank in range(pp)]
    longest = 0
    for transfers in its.transfers_ns:
        there = back_again = 0
        for rank in range(pp):
            begun = max(optimizer_ns[0] + there, optimizer_ns[rank])
            longest = max(longest, begun + work[rank] + max(its.reduce_ns[rank], back_again + its.reduce_ns[0]))
            if rank + 1 < pp:
                there += stages[rank].forward_ns + transfers[rank][0]
                back_again += stages[rank].backward_ns + transfers[rank][1]
        if para.schedule == "1f1b" and para.chunks == 1 and pp > 1:
            trip = sum(passes) + sum(map(sum, transfers[:-1]))
            trips, rest = divmod(m - 1, pp)
            path = (trips + 1) * trip + rest * stages[0].forward_ns
            longest = max(longest, optimizer_ns[0] + path + its.reduce_ns[0])
    return longest


def timeline(its: Iteration) -> Timeline:
    """The iteration of the replica that is last; the others wait for it where they reduce."""
    compiled, edges = compiled_schedule(its.parallel, its.rendezvous, its.in_turn)
    lines = []
    for transfers in its.transfers_ns:
        times = [
            [max(sum(transfers[link][back] for link, back in pair) for pair in wait) for wait in row] for row in edges
        ]
        lines.append((times, compiled.run(its.costs, transfers=times)))
    lasts = [[row[-1].end_ns for row in line.spans] for _, line in lines]
    latest = [max(ends) for ends in zip(*lasts, strict=True)]
    ends = [max(map(sum, zip(last, its.reduce_ns, strict=True))) for last in lasts]
    slowest = max(range(len(lines)), key=ends.__getitem__)
    # reductions begin when the last replica is there
    reduce = tuple(
        late - last + reduce_ns for late, last, reduce_ns in zip(latest, lasts[slowest], its.reduce_ns, strict=True)
    )
    return compiled.run(replace(its.costs, reduce_ns=reduce), transfers=lines[slowest][0])


type Waits = tuple[tuple[tuple[tuple[tuple[int, bool], ...], ...], ...], ...]


def compiled_schedule(its: Parallel, rendezvous: bool = False, in_turn: bool = False) -> tuple[Compiled, Waits]:
    """The schedule ready to be timed; and per rank and wait the links waited for, each as what goes in turn.

    A link is named by the stage before it, and by whether it is the way back.  Where transfers hold both their ends,
    two stages send each other something in one exchange, both ways at once with NCCL.  Over gloo (``in_turn``) the one
    that comes last sends at once, but that it is ready to receive is told behind what it sends: so it waits for one way
    after the other, and the other stage for what it receives only.  In 1F1B, mostly the later stage comes last; so it
    is taken here.
    """
    return _compiled(_order(its), rendezvous, in_turn)


def schedule_of(its: Parallel) -> Schedule:
    """The schedule, made or read once; errors as for ``order_of``."""
    return _ordered(*_order(its))


type _Order = tuple[str, int, int, int, int | None]  # arguments of ``order_of``


def _order(its: Parallel) -> _Order:
    name = "interleaved" if its.chunks > 1 and its.schedule == "1f1b" else its.schedule
    return name, its.pp, its.microbatches, its.chunks, its.group_size


_ordered = lru_cache(maxsize=128)(order_of)


@lru_cache(maxsize=128)
def _compiled(order: _Order, both_wait: bool, in_turn: bool) -> tuple[Compiled, Waits]:
    schedule = _ordered(*order)
    # an order that Megatron does not run has no exchanges of Megatron's to wait for
    both_wait = both_wait and (in_turn or megatrons(schedule) is not None)
    rows = []
    for program in (rendezvous if both_wait else eager)(schedule):
        waits = []
        for step in program.steps:
            links: dict[int, dict[bool, None]] = {}
            for rank, op in step.transfers:
                link, back = _link(schedule, rank, op)
                links.setdefault(link, {})[back] = None
            if links and in_turn:
                waits.append(tuple(_in_turn(link, tuple(ways), program.rank) for link, ways in links.items()))
            elif links:
                waits.append(tuple(((link, back),) for link, ways in links.items() for back in ways))
        rows.append(tuple(waits))
    return Compiled(schedule, both_wait), tuple(rows)


def _link(schedule: Schedule, rank: int, op: Op) -> tuple[int, bool]:
    """The link over which a rank receives what a pass takes, as in ``compiled_schedule``."""
    stage, there = schedule.virtual_stage(rank, op), op.kind is Pass.FORWARD
    source = schedule.placement[stage - 1 if there else stage + 1]
    ways = [(source, False), (rank, True)] if there else [(rank, True), (source, False)]
    for link, back in ways:
        if (link + 1) % schedule.stages == (source if back else rank):
            return link, back
    raise ConfigError(
        f"{schedule.name}: stage {stage} is on rank {rank}, next to rank {source}'s: expected neighbours, as links are"
    )


def _in_turn(link: int, ways: tuple[bool, ...], rank: int) -> tuple[tuple[int, bool], ...]:
    """Waits of a rank on one link, one after the other."""
    return ((link, True),) if len(ways) > 1 and link == rank else tuple((link, back) for back in ways)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
