"""``pipefill chaos``: injects faults into jobs and the runtime, and checks that no training is affected."""

from __future__ import annotations

import json
import shlex
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron.fill.cli.options import check_writable


def chaos(
    faults: Annotated[int, typer.Option("--faults", "-n", min=1, help="How many to inject.")] = 1000,
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the outcome here, as JSON.")
    ] = None,
    kinds: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Inject these kinds only (docs/chaos.md lists them).")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the order in which they come.")] = 0,
    keep: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Keep logs, run folders and job store in this new folder.")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(min=150, help="Of each training.  [default: 500, or 1200 for many faults]")
    ] = None,
    controls: Annotated[
        bool, typer.Option("--controls", help="Run the attacks' controls only: each must succeed without its walls.")
    ] = False,
    script: Annotated[Path | None, typer.Option(metavar="PATH", help="The training script, pretrain_gpt.py.")] = None,
) -> None:
    """Train a small GPT under injected faults, and compare its losses with a training that had no jobs.

    Takes two cores for about a second per fault. Exits with 0 if all faults were injected, every loss is the same to
    the bit, no training failed, stood still or was slowed, no job was lost and no process was left, and every attack
    was tried and has succeeded without the isolation layers that stop it; else with 1.
    """
    from rich.console import Console

    from megatron.fill.chaos.printed import print_controls, print_result
    from megatron.fill.chaos.run import ChaosOptions, control, run

    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.0f} s  {line}", file=sys.stderr, flush=True)

    if output is not None:
        check_writable("--json", output)
    names = tuple(name.strip() for name in kinds.split(",")) if kinds else ()
    if controls:
        found = control(names, say)
        print_controls(found, Console())
        if output is not None:
            output.write_text(json.dumps([asdict(one) for one in found], indent=2) + "\n", encoding="utf-8")
        if any(one.wrong and not one.impossible for one in found):
            raise typer.Exit(1)
        return
    result = run(ChaosOptions(faults, names, seed, keep, iterations, script), say)
    print_result(result, Console())
    if output is not None:
        command = shlex.join(["pipefill", *sys.argv[1:]])
        output.write_text(json.dumps(result.as_dict(command), indent=2) + "\n", encoding="utf-8")
    if not result.passed:
        raise typer.Exit(1)
