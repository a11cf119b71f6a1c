"""The ``--fill-*`` group in Megatron's own parser, shown by ``--help`` and checked before training starts."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import os
import re
from typing import Any, NoReturn

from megatron.fill.hooks import bus
from pipefill_patches.registry import Patch, Target, replace

_ADD = Target("megatron.training.arguments:add_megatron_arguments", ("parser",))
_PARSE = Target("megatron.training.arguments:parse_args", ("extra_args_provider", "ignore_unknown_args"))


def add_fill_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("fill", "run other work in the pipeline bubbles (PipeFill)")
    group.add_argument("--fill-jobs", metavar="FILE", help="jobs file (YAML): what to run in the bubbles")
    group.add_argument(
        "--fill-store",
        metavar="URL",
        help="job store to take jobs from, and to put those of --fill-jobs into: an SQLite file, a run folder, or "
        "postgresql+psycopg://USER@HOST/DATABASE, which several nodes can share (default: $PIPEFILL_STORE, else "
        "jobs.db in the run folder)",
    )
    group.add_argument(
        "--fill-policy",
        default="priority",
        metavar="POLICY",
        help="which job is next: fifo, sjf, makespan, deadline, priority, fair, a weighted sum such as "
        "0.7*sjf+0.3*deadline, or module:function (default: priority)",
    )
    group.add_argument(
        "--fill-checkpoint-seconds",
        type=float,
        default=300.0,
        metavar="S",
        help="how often resumable jobs are saved, so what a crash costs them at most (default: 300)",
    )
    group.add_argument(
        "--fill-lease-seconds",
        type=float,
        default=30.0,
        metavar="S",
        help="how long the store keeps a job for an agent that is silent (default: 30)",
    )
    group.add_argument(
        "--fill-offload-optimizer",
        action="store_true",
        help="keep the main job's optimizer state in host memory between optimizer steps, where that pays",
    )
    group.add_argument(
        "--fill-report",
        metavar="DIR",
        help="run folder: report.json, trace.json, timeline.png and the jobs' output (default: runs/pipefill-TIME, "
        "under SLURM runs/pipefill-JOB); unfinished jobs of an earlier run in the same folder go on",
    )
    group.add_argument(
        "--fill-resubmit",
        action="store_true",
        help="submit the jobs of --fill-jobs anew; without it, those that an earlier run in the same folder has "
        "submitted are not, whatever became of them",
    )
    group.add_argument(
        "--fill-profile-only",
        action="store_true",
        help="run no jobs; write every rank's bubble cycle to bubbles.json in the run folder and print it",
    )
    group.add_argument(
        "--fill-pipeline-schedule",
        choices=("megatron", "gpipe"),
        default="megatron",
        help="gpipe: all forwards, then all backwards (default: Megatron's own choice, 1F1B or interleaved)",
    )
    group.add_argument(
        "--fill-paired-blocks",
        type=int,
        default=0,
        metavar="N",
        help="N iterations with filling and N without, each first in turn, to measure the slowdown (0: off)",
    )
    group.add_argument(
        "--fill-warmup-iterations",
        type=int,
        default=5,
        metavar="N",
        help="how often a bubble is observed before it is predicted and filled (default: 5)",
    )
    group.add_argument(
        "--fill-guard-us",
        type=float,
        default=0.0,
        metavar="US",
        help="keep the last microseconds of every predicted bubble free (default: 0)",
    )
    group.add_argument(
        "--fill-overrun",
        type=float,
        default=0.5,
        metavar="PERCENT",
        help="by how much side tasks may make the training slower, in expectation, with steps that run on after their "
        "bubble: the more, the further bubbles are filled whose end is not certain (default: 0.5; 0: none is)",
    )
    group.add_argument(
        "--fill-emulate",
        choices=["completion", "slices"],
        help="on the CPU, for benchmarks: a side task's step cannot be interrupted, as what runs on a GPU cannot; it "
        "runs to completion, or takes turns of 2 ms with the training (it takes the right to real-time priorities)",
    )
    group.add_argument(
        "--fill-min-bubble-us",
        type=float,
        default=1000.0,
        metavar="US",
        help="leave bubbles alone that are predicted to be shorter (default: 1000)",
    )
    group.add_argument(
        "--fill-grace-ms",
        type=float,
        default=500.0,
        metavar="MS",
        help="how long a step may run on after its bubble before its process is paused (default: 500)",
    )
    group.add_argument(
        "--fill-max-overruns",
        type=int,
        default=3,
        metavar="N",
        help="how often that may happen before the job is stopped as FAILED (default: 3)",
    )
    group.add_argument(
        "--fill-max-output-mib",
        type=float,
        default=64.0,
        metavar="MIB",
        help="a job that prints more than this is stopped as FAILED; the first and last 512 KiB are kept (default: 64)",
    )
    group.add_argument(
        "--fill-max-slowdown",
        type=float,
        default=1.0,
        metavar="PERCENT",
        help="stop filling for a while when it slows the training by more than this (default: 1; 0: never stop)",
    )
    group.add_argument(
        "--fill-memory-margin-mib",
        type=float,
        default=1024.0,
        metavar="MIB",
        help="device memory that the jobs leave free beyond the main job's peak (default: 1024)",
    )
    group.add_argument(
        "--fill-sharing",
        choices=("auto", "mps", "timeslice"),
        default="auto",
        help="how main job and jobs share a GPU: mps is faster, but a job's illegal access can end the training "
        "(default: auto, the mode that contains faults: timeslice)",
    )
    group.add_argument(
        "--fill-mps-pipe",
        metavar="DIR",
        help="with --fill-sharing mps: use the MPS daemon of this pipe directory instead of starting one",
    )
    group.add_argument(
        "--fill-sm-percentage",
        type=int,
        default=100,
        metavar="PERCENT",
        help="the share of a GPU's multiprocessors that a job may use at most (default: 100)",
    )
    group.add_argument(
        "--fill-user",
        metavar="USER",
        help="run the jobs as this user (needs root; default: nobody where the training is root's)",
    )
    group.add_argument(
        "--fill-bind",
        nargs="+",
        default=(),
        metavar="PATH[:rw]",
        help="places that jobs may use besides their own folders: they see most files anyway but can write none, and "
        "see nothing of /tmp and /run or of folders that are closed to their user; with :rw they may write there",
    )
    group.add_argument(
        "--fill-network",
        action="store_true",
        help="let jobs use the machine's network (default: they have none but a localhost of their own)",
    )
    group.add_argument(
        "--fill-strict",
        action="store_true",
        help="do not train at all where one of the walls around jobs cannot be built (default: say which, and go on)",
    )
    group.add_argument(
        "--fill-allow",
        nargs="+",
        default=(),
        metavar="PATTERN",
        help="run only tasks whose module:Class matches one of these, such as 'megatron.fill.sidetask.*'; the word "
        "command stands for commands, env:NAME for a variable that tasks may set (default: everything)",
    )
    group.add_argument(
        "--fill-max-processes",
        type=int,
        default=256,
        metavar="N",
        help="a job with more processes and threads than this is stopped as FAILED (default: 256)",
    )
    group.add_argument(
        "--fill-max-files", type=int, default=1024, metavar="N", help="open files per process of a job (default: 1024)"
    )
    group.add_argument(
        "--fill-baseline-seconds",
        type=float,
        default=0.0,
        metavar="S",
        help="after the last iteration, run each rank's jobs alone for S seconds to measure the fill efficiency; on "
        "the CPU the ranks of a node take turns (default: 0)",
    )
    group.add_argument(
        "--fill-price",
        metavar="main=M,side=S",
        help="what an hour costs, in any currency, for the saving in the report: of all that the training runs on, and "
        "of one of the cheaper devices that the jobs would otherwise run on",
    )
    group.add_argument(
        "--fill-trace-iterations",
        type=int,
        default=3,
        metavar="N",
        help="how many of the last iterations trace.json holds (default: 3)",
    )
    group.add_argument(
        "--fill-cpu-backend",
        action="store_true",
        help="run on the CPU over gloo even where there is a CUDA device (without one, this is what happens anyway)",
    )
    return parser


def _mend_help(parser: argparse.ArgumentParser) -> None:
    """Escape what argparse would take for a format: one such help text of Megatron 0.19 makes all of --help fail."""
    formatter = argparse.HelpFormatter(parser.prog)
    for action in parser._actions:
        try:
            formatter._expand_help(action) if action.help else None
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def tell_briefly(parser: argparse.ArgumentParser) -> None:
    """Have it say what is wrong with the flags in a line, once: each rank would print Megatron's 700 lines of usage."""

    def error(message: str) -> NoReturn:
        unknown = re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []
        flags = parser._option_string_actions
        close = [found for flag in unknown for found in difflib.get_close_matches(flag, flags, 1)]
        hint = f"did you mean {', '.join(close)}?" if close else "--help lists the flags"
        rank_0 = os.environ.get("RANK", "0") == "0"
        parser.exit(2, f"{parser.prog}: error: {message}; {hint}\n" if rank_0 else None)

    parser.error = error  # type: ignore[method-assign]


def _install(stack: contextlib.ExitStack) -> None:
    holder, name = _ADD.resolve()
    add = getattr(holder, name)

    @functools.wraps(add)
    def add_with_fill(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        add_fill_arguments(add(parser))
        _mend_help(parser)
        tell_briefly(parser)
        return parser

    replace(stack, holder, name, add_with_fill)

    holder, name = _PARSE.resolve()
    parse = getattr(holder, name)

    @functools.wraps(parse)
    def parse_and_check(*args: Any, **kwargs: Any) -> argparse.Namespace:
        parsed = parse(*args, **kwargs)
        bus.parsed(parsed)
        return parsed

    replace(stack, holder, name, parse_and_check)


PATCH = Patch("arguments", "one function builds Megatron's parser, one uses it", _install, (_ADD, _PARSE))
