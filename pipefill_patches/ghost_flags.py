"""The flags of ghost stages, and the changes of Megatron's arguments for them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.fill.errors import ConfigError

FLAG = "--fill-real-stage"
_OTHERS = ("world_size", "waits", "forward_ms", "backward_ms", "transfer_ms")


def add_ghost_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("fill-ghosts", "one stage of a pipeline alone on one device (PipeFill)")
    group.add_argument(
        FLAG,
        type=int,
        metavar="N",
        help="train stage N (from 0) alone, in this one process: the other stages are ghosts, which send random "
        "numbers when the schedule's timeline says; the bubbles are real, and what is trained is worth nothing",
    )
    group.add_argument(
        "--fill-ghost-world-size",
        type=int,
        metavar="N",
        help="how many GPUs the whole job has (default: tensor x context x pipeline parallel size)",
    )
    group.add_argument(
        "--fill-ghost-waits",
        choices=("stream", "host"),
        help="stream: as NCCL, a kernel spins on the GPU; host: the host sleeps (default: stream; host on the CPU)",
    )
    for name in ("forward", "backward"):
        group.add_argument(
            f"--fill-ghost-{name}-ms",
            type=float,
            nargs="+",
            metavar="MS",
            help=f"of one microbatch's {name} pass: one value for all virtual stages, or one for each (default: as "
            "this stage's, measured in the first iterations)",
        )
    group.add_argument(
        "--fill-ghost-transfer-ms",
        type=float,
        metavar="MS",
        help="how long a transfer takes when both its ends are ready (default: 0)",
    )


def asked_for(argv: Sequence[str]) -> bool:
    """True if a command line requests ghost stages."""
    return any(argument.partition("=")[0] == FLAG for argument in argv)


@dataclass(frozen=True, slots=True)
class GhostSettings:
    """Settings of ghost stages.

    Attributes:
        stage: number of the real stage, from 0.
        waits: ``stream`` or ``host``.
        forward_ns, backward_ns: durations of a pass by virtual stage, or one for all; empty to measure them.
        transfer_ns: duration of a transfer when both ends are ready.
    """

    stage: int
    waits: str
    forward_ns: tuple[int, ...]
    backward_ns: tuple[int, ...]
    transfer_ns: int

    @classmethod
    def from_args(cls, args: argparse.Namespace, on_cpu: bool) -> GhostSettings:
        """Check the flags, and change Megatron's arguments to those of the real stage's process.

        Raises:
            ConfigError: a flag has a wrong value, or ghosts are impossible in this run.
        """
        _check_run(args)
        stage, stages = args.fill_real_stage, args.pipeline_model_parallel_size
        if stages < 2:
            raise ConfigError(f"{FLAG} with --pipeline-model-parallel-size {stages}: expected at least 2 stages")
        if not 0 <= stage < stages:
            raise ConfigError(f"{FLAG} is {stage}: expected 0 to {stages - 1}, one of the pipeline's stages")
        inner = args.tensor_model_parallel_size * args.context_parallel_size
        world = args.fill_ghost_world_size
        if world is None:
            world = inner * stages
        if world < 1 or world % (inner * stages):
            raise ConfigError(
                f"--fill-ghost-world-size is {world}: expected a multiple of {inner * stages}, the product of the "
                "tensor, context and pipeline parallel sizes"
            )
        if on_cpu and args.fill_ghost_waits == "stream":
            raise ConfigError("--fill-ghost-waits is 'stream': this run has no CUDA device; expected host")
        if (args.fill_ghost_forward_ms is None) != (args.fill_ghost_backward_ms is None):
            raise ConfigError("--fill-ghost-forward-ms and --fill-ghost-backward-ms: expected both, or none of them")
        args.world_size = world
        args.rank = stage * (inner if args.use_tp_pp_dp_mapping else world // stages)
        args.fake_process_group = True
        args.do_train = True  # a middle stage would receive it from the ranks with data
        return cls(
            stage,
            args.fill_ghost_waits or ("host" if on_cpu else "stream"),
            _ns("forward", args.fill_ghost_forward_ms),
            _ns("backward", args.fill_ghost_backward_ms),
            sum(_ns("transfer", None if (ms := args.fill_ghost_transfer_ms) is None else [ms])),
        )


def check_unused(args: argparse.Namespace) -> None:
    """Raise ConfigError if flags of ghosts are given without ghosts."""
    if args.fill_real_stage is not None:
        return
    for name in _OTHERS:
        if getattr(args, f"fill_ghost_{name}") is not None:
            flag = f"--fill-ghost-{name.replace('_', '-')}"
            raise ConfigError(f"{flag} without {FLAG}: expected {FLAG} with the number of the real stage")


def _check_run(args: argparse.Namespace) -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ConfigError(f"{FLAG} runs in one process, WORLD_SIZE is {ranks}: expected to be started without torchrun")
    for name in ("save", "load"):
        if getattr(args, name, None) is not None:
            raise ConfigError(f"{FLAG} trains with random numbers, which is nothing to keep: expected no --{name}")


def _ns(name: str, values: Sequence[float] | None) -> tuple[int, ...]:
    for value in values or ():
        if not (math.isfinite(value) and value >= 0):
            raise ConfigError(f"--fill-ghost-{name}-ms is {value}: expected milliseconds, 0 or more")
    return tuple(round(value * 1e6) for value in values or ())
