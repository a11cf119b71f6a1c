"""The options of ghost stages, and the changes of Megatron's arguments for them."""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass

from megatron.fill.errors import ConfigError

requested: argparse.Namespace | None = None  # the options of ``python -m pipefill_patches.ghosts``, if it runs


def ghost_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m pipefill_patches.ghosts",
        allow_abbrev=False,
        usage="python -m pipefill_patches.ghosts --stage N [options] SCRIPT ARGS...",
        description="Train one stage of a pipeline alone, in one process: the other stages are ghosts, which send "
        "random numbers when the schedule's timeline says. The bubbles are real, and what is trained is worth nothing.",
    )
    parser.add_argument("--stage", type=int, required=True, metavar="N", help="the real stage, from 0")
    parser.add_argument(
        "--world-size",
        type=int,
        metavar="N",
        help="number of GPUs of the whole job (default: tensor x context x pipeline parallel size)",
    )
    parser.add_argument(
        "--waits",
        choices=("stream", "host"),
        help="stream: as NCCL, a kernel spins on the GPU; host: the host sleeps (default: stream; host on the CPU)",
    )
    for name in ("forward", "backward"):
        parser.add_argument(
            f"--{name}-ms",
            type=_times,
            metavar="MS,...",
            help=f"time of one microbatch's {name} pass: one value for all virtual stages, or one for each (default: "
            "this stage's, measured in the first iterations)",
        )
    parser.add_argument(
        "--transfer-ms",
        type=_time,
        default=0,
        metavar="MS",
        help="time of a transfer when both its ends are ready (default: 0)",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a Megatron-LM training script, such as pretrain_gpt.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="its flags, with --fill-jobs")
    return parser


def _time(text: str) -> int:
    """Return the time in ns of a text such as ``0.5``, in ms."""
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r}: expected one time in milliseconds, 0 or more")
    return _times(text)[0]


def _times(text: str) -> tuple[int, ...]:
    """Return times in ns of a text such as ``20`` or ``20,40.5``, in ms."""
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = [-1.0]
    if not all(math.isfinite(ms) and ms >= 0 for ms in times):
        raise argparse.ArgumentTypeError(f"{text!r}: expected milliseconds, 0 or more, with commas between")
    return tuple(round(ms * 1e6) for ms in times)


@dataclass(frozen=True, slots=True)
class GhostSettings:
    """Settings of ghost stages."""

    stage: int  # number of the real stage, from 0
    waits: str  # ``stream`` or ``host``
    forward_ns: tuple[int, ...]  # durations of a pass by virtual stage, or one for all; empty to measure them
    backward_ns: tuple[int, ...]
    transfer_ns: int  # duration of a transfer when both ends are ready

    @classmethod
    def from_args(cls, options: argparse.Namespace, args: argparse.Namespace, on_cpu: bool) -> GhostSettings:
        """Check the options (ConfigError), and change Megatron's arguments to those of the real stage's process."""
        _check_run(args)
        stage, stages = options.stage, args.pipeline_model_parallel_size
        if stages < 2:
            raise ConfigError(f"--stage with --pipeline-model-parallel-size {stages}: expected at least 2 stages")
        if not 0 <= stage < stages:
            raise ConfigError(f"--stage is {stage}: expected 0 to {stages - 1}, one of the pipeline's stages")
        inner = args.tensor_model_parallel_size * args.context_parallel_size
        world = options.world_size
        if world is None:
            world = inner * stages
        if world < 1 or world % (inner * stages):
            raise ConfigError(
                f"--world-size is {world}: expected a multiple of {inner * stages}, the product of the "
                "tensor, context and pipeline parallel sizes"
            )
        if on_cpu and options.waits == "stream":
            raise ConfigError("--waits is 'stream': this run has no CUDA device; expected host")
        if (options.forward_ms is None) != (options.backward_ms is None):
            raise ConfigError("--forward-ms and --backward-ms: expected both, or none of them")
        args.world_size = world
        args.rank = stage * (inner if args.use_tp_pp_dp_mapping else world // stages)
        args.fake_process_group = True
        args.do_train = True  # a middle stage would receive it from the ranks with data
        return cls(
            stage,
            options.waits or ("host" if on_cpu else "stream"),
            options.forward_ms or (),
            options.backward_ms or (),
            options.transfer_ms,
        )


def _check_run(args: argparse.Namespace) -> None:
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1":
        raise ConfigError(
            f"a stage beside ghosts runs in one process, WORLD_SIZE is {ranks}: expected to be started without torchrun"
        )
    for name in ("save", "load"):
        if getattr(args, name, None) is not None:
            raise ConfigError(
                f"a stage beside ghosts trains with random numbers, which is nothing to keep: expected no --{name}"
            )
