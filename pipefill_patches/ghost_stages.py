"""Ghost stages: one real stage of a pipeline in one process, the others simulated by their schedule's timeline.

They show on one GPU, or on a CPU, how a stage of a training on many GPUs would be filled.  The real stage computes as
in the whole training, over Megatron's fake process group.  It meets the other stages in the functions that post
transfers and in the first collective after the last backward: there it waits for the timeline's duration
(``pipeline/ghosts.py``), and receives random numbers.  Bubbles are observed outside of that, as with real stages.

In the first iterations there are no waits, and no bubbles are reported: the device warms up, and the durations of
passes are measured unless they are given by flags.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from megatron.fill.errors import ConfigError, PatchError
from megatron.fill.hooks import Callback, Listener, bus
from megatron.fill.pipeline.costs import PipelineCosts, StageCost
from megatron.fill.pipeline.ghosts import GhostWaits, ghost_waits
from megatron.fill.pipeline.schedules import make_schedule
from pipefill_patches import collectives, cpu_backend, ghost_flags, p2p_communicator, training_loop
from pipefill_patches.arguments import PARSE
from pipefill_patches.ghost_flags import GhostSettings
from pipefill_patches.ghost_waits import GhostRequest, HostWaits, StreamWaits
from pipefill_patches.p2p_communicator import POST, POST_BATCHED, TRANSFERS
from pipefill_patches.patch import Call, Patch, Target, around
from pipefill_patches.schedules import BACKWARD, FORWARD

_TRAIN = Target(
    "megatron.training.training:train",
    ("forward_step_func", "model", "optimizer", "opt_param_scheduler", "train_data_iterator", "valid_data_iterator",
     "process_non_loss_data_func", "config"),
)  # fmt: skip
_GATHER = Target("megatron.training.dist_signal_handler:all_gather_item", ("item", "dtype"))
_WARMUP, _MEASURED = 2, 3  # numbers of iterations
_SCALES = {"recv_prev": 0.02, "recv_next": 1e-4}  # standard deviations of the random activations and gradients
# Options of Megatron's configuration that the timeline does not support.
_UNKNOWN = ("overlap_moe_expert_parallel_comm", "variable_seq_lengths", "mtp_standalone", "use_ring_exchange_p2p")


class _Ghosts(Callback):
    """The stages around the real one."""

    def __init__(self, settings: GhostSettings, args: Namespace) -> None:
        self._settings = settings
        self._args = args
        self._waiter = HostWaits() if settings.waits == "host" else StreamWaits()
        self._generator: Any = None
        self._forward_ns, self._backward_ns = settings.forward_ns, settings.backward_ns
        self._passes: dict[str, list[tuple[Any, Any]]] = {"forward": [], "backward": []}
        self._waits: dict[int, GhostWaits] = {}  # by the number of microbatches
        self._next: dict[str, Iterator[int]] = {}  # durations in ns of this iteration's next transfers, by direction
        self._drain_ns: int | None = None  # None if there is no drain, or it is over
        self._iterations = 0
        self._waiting = False
        self._listener: Listener | None = None  # removed from the bus while there are no waits
        self._chunks = 1
        self._group_size: int | None = None

    def begin_training(self, model: list[Any], config: Any) -> None:
        """Read the model's number of chunks and Megatron's configuration; ConfigError without a timeline for it."""
        for unknown in _UNKNOWN:
            if getattr(config, unknown, False):
                raise ConfigError(f"ghosts: there is no timeline for {unknown}; expected a run without it")
        bus.callbacks.append(self)
        self._listener, bus.listener = bus.listener, None
        self._chunks = len(model)
        self._group_size = config.microbatch_group_size_per_vp_stage if self._chunks > 1 else None

    def on_iteration(self) -> None:
        self._iterations += 1
        if not self._waiting and self._iterations > _WARMUP + _MEASURED:
            self._begin_waiting()
        if self._waiting:
            waits = self._of_iteration()
            self._next = {name: iter(row) for name, row in waits.transfers.items()}
            self._drain_ns = waits.drain_ns

    def _begin_waiting(self) -> None:
        self._waiter.prepare()  # it synchronizes, so the events below are complete
        if not self._forward_ns:
            self._forward_ns, self._backward_ns = (
                (round(median(start.elapsed_time(end) for start, end in pairs) * 1e6),)
                for pairs in self._passes.values()
            )
        self._waiting = True
        bus.listener, self._listener = self._listener, None

    def _of_iteration(self) -> GhostWaits:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        microbatches = get_num_microbatches()
        if microbatches not in self._waits:
            self._waits[microbatches] = waits = self._time(microbatches)
            print(f"PipeFill: ghosts: {_told(waits, self._settings)}", flush=True)
        return self._waits[microbatches]

    def _time(self, microbatches: int) -> GhostWaits:
        args = self._args
        stages, chunks = args.pipeline_model_parallel_size, self._chunks
        name = "interleaved" if chunks > 1 else "gpipe" if args.fill_pipeline_schedule == "gpipe" else "1f1b"
        schedule = make_schedule(name, stages, microbatches, chunks, self._group_size)
        rows = []
        for flag, row in (("forward", self._forward_ns), ("backward", self._backward_ns)):
            if len(row) not in (1, stages * chunks):
                raise ConfigError(
                    f"--{flag}-ms has {len(row)} values: expected 1, or {stages * chunks} for "
                    f"{stages} stages of {chunks} chunks"
                )
            rows.append(row * (1 if len(row) > 1 else stages * chunks))
        costs = PipelineCosts(
            tuple(StageCost(*times) for times in zip(*rows, strict=True)),
            self._settings.transfer_ns,
            (0,) * stages,
            (0,) * stages,
        )
        return ghost_waits(schedule, costs, self._settings.stage)

    def timed(self, name: str, run: Call, args: Any, kwargs: Any) -> Any:
        """Run a pass; in the measuring iterations, record its duration on the device."""
        import torch

        if self._forward_ns or self._iterations <= _WARMUP:
            return run(*args, **kwargs)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = run(*args, **kwargs)
        end.record()
        self._passes[name].append((start, end))
        return result

    def post(self, tensors: dict[str, Any]) -> dict[str, GhostRequest]:
        """Post transfers, by direction, and return a request for each; receiving fills the tensors."""
        return {
            name: self._waiter.start(next(self._next.get(name, iter(())), 0), self._arrival(name, tensor))
            for name, tensor in tensors.items()
        }

    def post_batched(self, tensors: dict[str, Any]) -> list[GhostRequest]:
        """Post transfers with one request for all of them, as NCCL does."""
        duration_ns = max((next(self._next.get(name, iter(())), 0) for name in tensors), default=0)
        arrivals = [self._arrival(name, tensor) for name, tensor in tensors.items()]

        def arrive() -> None:
            for arrival in arrivals:
                arrival()

        return [self._waiter.start(duration_ns, arrive)] if arrivals else []

    def _arrival(self, name: str, tensor: Any) -> Callable[[], None]:
        import torch

        if name not in _SCALES:
            return lambda: None
        if self._generator is None:
            self._generator = torch.Generator(tensor.device).manual_seed(self._args.seed)

        def arrive() -> None:
            with torch.no_grad():  # the buffer is a leaf that requires a gradient
                tensor.normal_(0.0, _SCALES[name], generator=self._generator)

        return arrive

    def drain(self) -> None:
        """Wait until all stages would have reached the iteration's first collective across stages."""
        duration_ns, self._drain_ns = self._drain_ns, None  # for the first collective only
        if duration_ns is not None:
            self._waiter.start(duration_ns, lambda: None).wait()

    def told_weights(self, model: list[Any]) -> str:
        """Return a line with a hash of the weights, equal for trainings of this stage with bit-identical results."""
        import torch

        digest = hashlib.sha256()
        for chunk in model:
            for _, weights in sorted(chunk.named_parameters()):
                digest.update(weights.detach().cpu().contiguous().view(torch.uint8).numpy())
        return f"weights after {self._iterations} iterations: sha256 {digest.hexdigest()}"


def _told(waits: GhostWaits, settings: GhostSettings) -> str:
    timeline = waits.timeline
    schedule, stages = timeline.schedule, timeline.costs.stages
    kinds: dict[str, int] = {}
    for wait in timeline.waits[settings.stage]:
        kinds[wait.kind] = kinds.get(wait.kind, 0) + wait.duration_ns
    bubbles = ", ".join(f"{kind} {time_ns / 1e6:.1f}" for kind, time_ns in kinds.items() if time_ns)
    times = [
        f"{min(each) / 1e6:.2f}" + (f" to {max(each) / 1e6:.2f}" if min(each) < max(each) else "")
        for each in ([stage.forward_ns for stage in stages], [stage.backward_ns for stage in stages])
    ]
    how = "given" if settings.forward_ns else "measured"
    return (
        f"stage {settings.stage} of {schedule.stages} is real ({settings.waits} waits), {schedule.name} with "
        f"{schedule.microbatches} microbatches; a forward takes {times[0]} ms, a backward {times[1]} ms ({how}); "
        f"expected bubbles, in ms of {timeline.period_ns / 1e6:.1f}: {bubbles or 'none'}"
    )


def _install(stack: contextlib.ExitStack) -> None:
    if p2p_communicator.PATCH.applied or training_loop.PATCH.applied:
        raise PatchError("patch 'ghost_stages' must be applied before 'p2p_communicator' and 'training_loop'")
    ghosts: list[_Ghosts] = []  # has one element once the flags are parsed

    def parsing(parse: Call, /, *args: Any, **kwargs: Any) -> Namespace:
        parsed = parse(*args, **kwargs)
        assert ghost_flags.requested is not None  # else the patch is not applied
        settings = GhostSettings.from_args(ghost_flags.requested, parsed, cpu_backend.PATCH.applied)
        ghosts[:] = [_Ghosts(settings, parsed)]
        return parsed

    def training(train: Call, /, *args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(train).bind(*args, **kwargs).arguments
        ghosts[0].begin_training(given["model"], given["config"])
        try:
            result = train(*args, **kwargs)
        finally:
            bus.callbacks.remove(ghosts[0])
        print(f"PipeFill: ghosts: {ghosts[0].told_weights(given['model'])}", flush=True)
        return result

    def timed(compute: Call, kind: str, /, *args: Any, **kwargs: Any) -> Any:
        return ghosts[0].timed(kind, compute, args, kwargs)

    def posting(_: Call, method: str, /, **kwargs: Any) -> Any:
        tensors = {name.removeprefix("tensor_"): kwargs[name] for name in TRANSFERS if kwargs.get(name) is not None}
        return getattr(ghosts[0], method)(tensors)

    def draining(call: Call, name: str) -> Call:
        def run(group: Any, *args: Any, **kwargs: Any) -> Any:
            if ghosts and bus.in_drain and collectives.blocks(name, args, kwargs) and collectives.spans_stages(group):
                ghosts[0].drain()
            return call(group, *args, **kwargs)

        return run

    around(stack, *PARSE.resolve(), parsing)
    around(stack, *_TRAIN.resolve(), training)
    # --exit-signal-handler gathers the signals of all ranks.
    around(stack, *_GATHER.resolve(), lambda _, item, *args, **kwargs: [item])
    around(stack, *FORWARD.resolve(), timed, "forward")
    around(stack, *BACKWARD.resolve(), timed, "backward")
    around(stack, *POST.resolve(), posting, "post")
    around(stack, *POST_BATCHED.resolve(), posting, "post_batched")
    collectives.wrap_calls(stack, draining)


PATCH = Patch("ghost_stages", _install, (PARSE, _TRAIN, _GATHER, POST, POST_BATCHED, FORWARD, BACKWARD))
