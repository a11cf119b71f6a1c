"""Costs of passes as measured in a short run (Pipette's compute profiler), instead of by the analytic model."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, linear_regression, median

from megatron.fill.errors import ConfigError, FillError
from megatron.fill.pipeline.costs import StageCost
from megatron.fill.pipeline.schedule import Pass
from megatron.fill.records.segment import last_segment
from megatron.fill.wings.configure.flags import Training, read_flags
from megatron.fill.wings.configure.space import padded
from megatron.fill.wings.mainjob.analytic import again_flops
from megatron.fill.wings.mainjob.memory import stage_parameters
from megatron.fill.wings.mainjob.model import ModelSpec
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute
from megatron.fill.wings.sim.recorded.busy import IterationSample, RecordedMainJob
from megatron.fill.wings.sim.recorded.groups import read_pipeline

_UNLIKE = 1.5  # counts with such a ratio tell a line; between counts that are alike, noise would draw it
_FIRST = 2  # iterations that are not counted: memory is allocated in them


@dataclass(frozen=True, slots=True)
class Both:
    """A forward and a backward pass of one microbatch, in nanoseconds."""

    forward_ns: float
    backward_ns: float

    def less(self, other: Both, times: float) -> Both:
        """Without so many of another; never below 0."""
        return Both(
            max(0.0, self.forward_ns - times * other.forward_ns), max(0.0, self.backward_ns - times * other.backward_ns)
        )

    def over(self, count: float) -> Both:
        """A part of it."""
        return Both(self.forward_ns / count, self.backward_ns / count)


@dataclass(frozen=True, slots=True)
class Profile:
    """Times of a short run of one replica."""

    tp: int  # layout of the run, with ``microbatch``
    microbatch: int
    layer: Both  # passes of one layer, with what its tensor-parallel ranks exchange
    first: Both  # passes of the first stage without its layers (the embedding), as far as it can be told
    last: Both  # the same of the last stage (the output layer and the loss)
    step_s_per_parameter: float  # seconds between the last pass of an iteration and the first of the next
    # constant part of each pass of a virtual stage, independent of layers and samples, as far as can be told
    fixed: Both = Both(0.0, 0.0)
    # constant seconds between an iteration's last pass and the next one's first, as far as can be told
    step_s: float = 0.0
    # factor on the mean passes that yields the measured iteration.  Of two stages that wait for each other the later
    # one counts, and which one is later differs from pass to pass.
    waits: float = 1.0


class Passes:
    """Profiles, applied to other layouts.

    A layout needs a profile of its tensor parallelism.  Over microbatch sizes, times are interpolated between the two
    profiles that are nearest; with one profile all but the fixed part of a pass is proportional.
    """

    def __init__(self, profiles: Sequence[Profile]) -> None:
        self.profiles = tuple(sorted(profiles, key=lambda one: (one.tp, one.microbatch)))
        self.tensors = sorted({one.tp for one in profiles})

    def step_s_per_parameter(self, tp: int) -> float:
        """Seconds per parameter of the optimizer, from all profiles with this tensor parallelism."""
        return self._mean(tp, "step_s_per_parameter")

    def step_s(self, tp: int) -> float:
        """Constant seconds between iterations, from all profiles with this tensor parallelism."""
        return self._mean(tp, "step_s")

    def stage_cost(
        self, model: ModelSpec, its: Parallel, layers: int, ends: tuple[bool, bool], exchange_s: tuple[float, float]
    ) -> StageCost:
        """Cost of one microbatch on a virtual stage.

        Args:
            ends: True if it is the first, and True if it is the last.
            exchange_s: seconds of context- and expert-parallel exchange in the forward and backward pass of a layer.
        """
        layer, first, last, fixed = (self._at(its, part) for part in ("layer", "first", "last", "fixed"))
        forward, backward = layers * layer.forward_ns, layers * layer.backward_ns
        if its.recompute is Recompute.SELECTIVE:
            backward += forward * again_flops(model, its) / model.layer_flops(its.microbatch)
        elif its.recompute is Recompute.FULL:
            backward += (forward + layers * exchange_s[0] * 1e9) * its.again(layers) / max(1, layers)
        for is_there, end in zip(ends, (first, last), strict=True):
            if is_there:
                forward, backward = forward + end.forward_ns, backward + end.backward_ns
        forward, backward = forward + fixed.forward_ns, backward + fixed.backward_ns
        if its.pp > 1:
            waits = self._mean(its.tp, "waits")
            forward, backward = forward * waits, backward * waits
        return StageCost(round(forward + layers * exchange_s[0] * 1e9), round(backward + layers * exchange_s[1] * 1e9))

    def _mean(self, tp: int, part: str) -> float:
        return fmean(getattr(one, part) for one in self._of(tp))

    def _of(self, tp: int) -> list[Profile]:
        return [one for one in self.profiles if one.tp == tp]

    def _at(self, its: Parallel, part: str) -> Both:
        """Part of a pass for a layout's microbatch; what grows with samples is divided by context parallelism."""
        found = sorted(self._of(its.tp), key=lambda one: abs(one.microbatch - its.microbatch))
        near: Both = getattr(found[0], part)
        other = next((one for one in found if one.microbatch != found[0].microbatch), None)
        if other is None:
            both = near if part == "fixed" else near.over(found[0].microbatch / its.microbatch)
        else:
            far: Both = getattr(other, part)
            share = (its.microbatch - found[0].microbatch) / (other.microbatch - found[0].microbatch)
            both = Both(
                max(0.0, near.forward_ns + share * (far.forward_ns - near.forward_ns)),
                max(0.0, near.backward_ns + share * (far.backward_ns - near.backward_ns)),
            )
        return both if part == "fixed" else both.over(its.cp)


def load_passes(folders: Sequence[Path], training: Training) -> Passes:
    """Load the profiles of the runs in some folders.

    Args:
        training: training to be configured; the runs' model is the same but for its number of layers.

    Raises:
        ConfigError: naming the folder, and what was expected.
    """
    profiles: list[Profile] = []
    for folder in folders:
        found = _load(folder, training)
        if any((one.tp, one.microbatch) == (found.tp, found.microbatch) for one in profiles):
            raise ConfigError(
                f"{folder}: is another profile of tensor parallelism {found.tp} and micro-batches of "
                f"{found.microbatch}; expected one of each"
            )
        profiles.append(found)
    return Passes(profiles)


def _load(folder: Path, training: Training) -> Profile:
    try:
        segment = last_segment(folder)
        records, schedule = read_pipeline(folder)
    except FillError as error:
        text = str(error)
        raise ConfigError(f"{text if str(folder) in text else f'{folder}: {text}'} (with --profile)") from error
    ran = flags_of_run(folder, segment.command)
    _check_same(folder, ran, training)
    its = layout_of_run(folder, ran, segment.ranks)
    try:
        job = RecordedMainJob(records, schedule, rendezvous=records[0].info.device == "cpu")
        samples = [one for one in job.samples if not one.filling]
        if not samples:
            raise ValueError("jobs filled all its iterations")
        return profile_of(job, padded(ran, its.tp), its, samples[_FIRST:] or samples)
    except ValueError as error:
        head = str(error).splitlines()[0]
        raise ConfigError(
            f"{folder}: {head}; expected a run with --fill-profile-only and --fill-settings "
            "'{trace_iterations: 10}' or more"
        ) from error


def flags_of_run(folder: Path, command: str) -> Training:
    """Read a run's training from its command line; ConfigError naming the folder and the flag."""
    tokens = shlex.split(command)
    first = next((at for at, token in enumerate(tokens) if token.startswith("--")), len(tokens))
    try:
        return read_flags(tokens[first:], ran=True)
    except ConfigError as error:
        raise ConfigError(f"{folder}: the command of the run: {error}") from error


def _check_same(folder: Path, ran: Training, training: Training) -> None:
    """The models are the same but for the number of layers."""
    for name in sorted(ModelSpec.__dataclass_fields__, key="ffn_hidden".__eq__):  # it may follow from the others
        there, here = getattr(ran.model, name), getattr(training.model, name)
        if name != "layers" and there != here:
            raise ConfigError(f"{folder}: the run's model has {name} {there}; expected {here}, as in the flags")
    if ran.model.dense_layers or ran.model.predicted:
        raise ConfigError(f"{folder}: the run's layers are of several kinds; expected one kind, as each takes as long")
    eights = [any(flag.startswith("--fp8-format") for flag in one.others) for one in (ran, training)]
    if eights[0] is not eights[1]:
        raise ConfigError(
            f"{folder}: the run is {'' if eights[0] else 'not '}in FP8; expected the same as in the flags"
        )
    if ran.precision is not training.precision:
        raise ConfigError(f"{folder}: the run is in {ran.precision}; expected {training.precision}, as in the flags")


def layout_of_run(folder: Path, ran: Training, ranks: int) -> Parallel:
    """Return the layout of a run's training; ConfigError if a profile cannot be taken from it."""
    fixed = ran.fixed
    tp, pp, chunks = (fixed.get(name, 1) for name in ("tp", "pp", "chunks"))
    if pp == 1:
        raise ConfigError(f"{folder}: the run has one stage; expected two or more: only waits take passes apart")
    if ranks != tp * pp:
        raise ConfigError(
            f"{folder}: the run has {ranks} ranks for {tp} tensor-parallel ranks of {pp} stages; expected one replica"
        )
    if "recompute" in fixed:
        raise ConfigError(f"{folder}: the run recomputes activations; expected one that does not")
    if "stage_layers" in fixed:
        raise ConfigError(f"{folder}: the run has a layout by hand; expected layers that Megatron divides")
    name = "interleaved" if chunks > 1 else "1f1b"
    try:
        its = Parallel(
            tp=tp,
            pp=pp,
            chunks=chunks,
            microbatch=fixed.get("microbatch", 1),
            global_batch=ran.global_batch,
            schedule=name,
            sequence_parallel=fixed.get("sequence_parallel", False),
            precision=ran.precision,
            first_layers=fixed.get("first_layers"),
            last_layers=fixed.get("last_layers"),
        )
        its.check(ran.model)
    except ValueError as error:
        raise ConfigError(f"{folder}: the command of the run: {error}") from error
    return its


def profile_of(job: RecordedMainJob, model: ModelSpec, its: Parallel, samples: Sequence[IterationSample]) -> Profile:
    """Derive a profile from some iterations of a run.

    With three virtual stages or more, those between the first and the last tell what a layer takes; if some of these
    have half as many layers again as others, also what each pass takes beside them.  With two, all of the first one
    counts as its layers.  In the same way, ranks with unlike numbers of parameters tell what a step takes beside them.

    Args:
        model: with the vocabulary as Megatron pads it.
        its: layout of the run.
    """
    stages = [_stage(job, samples, stage) for stage in range(job.schedule.virtual_stages)]
    counts = its.layers(model)
    if len(stages) > 2:
        fixed, layer = _inner(stages[1:-1], counts[1:-1])
        first, last = (stages[at].less(fixed, 1).less(layer, counts[at]) for at in (0, -1))
    else:
        layer = stages[0].over(counts[0])
        fixed, first, last = Both(0.0, 0.0), Both(0.0, 0.0), stages[1].less(layer, counts[1])
    ranks = range(its.pp)
    betweens_ns = [
        median(sample.ranks[rank].reduced_ns + sample.ranks[rank].after_ns for sample in samples) for rank in ranks
    ]
    step_ns, parameter_ns = _line([stage_parameters(model, its, rank) for rank in ranks], betweens_ns)
    transfer_ns = median([sample.p2p_ns for sample in samples if sample.p2p_ns > 0] or [0])
    return Profile(
        its.tp,
        its.microbatch,
        layer,
        first,
        last,
        step_s_per_parameter=parameter_ns / 1e9,
        fixed=fixed,
        step_s=step_ns / 1e9,
        waits=_waits(job, samples, stages, int(transfer_ns)),
    )


def _waits(job: RecordedMainJob, samples: Sequence[IterationSample], stages: Sequence[Both], transfer_ns: int) -> float:
    """Factor on the stages' passes with which the schedule yields the measured iteration; at least 1."""
    means = tuple(StageCost(round(one.forward_ns), round(one.backward_ns)) for one in stages)
    costs = replace(job.costs(samples), stages=means, p2p_ns=transfer_ns)
    said_ns = job.timeline(costs).period_ns
    rest_ns = job.timeline(replace(costs, stages=(StageCost(0, 0),) * len(stages))).period_ns
    found_ns = median(sample.period_ns for sample in samples)
    return max(1.0, (found_ns - rest_ns) / (said_ns - rest_ns)) if said_ns > rest_ns else 1.0


def _inner(stages: Sequence[Both], counts: Sequence[int]) -> tuple[Both, Both]:
    """Time of a pass without its layers, and of a layer, from stages that are neither the first nor the last."""
    forward = _line(counts, [one.forward_ns for one in stages])
    backward = _line(counts, [one.backward_ns for one in stages])
    return Both(forward[0], backward[0]), Both(forward[1], backward[1])


def _line(counts: Sequence[float], times_ns: Sequence[float]) -> tuple[float, float]:
    """The start and the slope of the line that is nearest; without a start where it would be below 0 or is not told."""
    if max(counts) >= _UNLIKE * min(counts):
        slope, start = linear_regression(counts, times_ns)
        if start >= 0 and slope > 0:
            return start, slope
    return 0.0, sum(times_ns) / sum(counts)


def _stage(job: RecordedMainJob, samples: Sequence[IterationSample], stage: int) -> Both:
    """A virtual stage's passes: the medians over iterations of the mean over an iteration's microbatches."""
    rank = stage % job.schedule.stages
    row = job.schedule.order[rank]
    found = {}
    for kind in (Pass.FORWARD, Pass.BACKWARD):
        places = [at for at, op in enumerate(row) if op.kind is kind and job.schedule.virtual_stage(rank, op) == stage]
        found[kind] = median(fmean(sample.ranks[rank].passes_ns[at] for at in places) for sample in samples)
    return Both(found[Pass.FORWARD], found[Pass.BACKWARD])
