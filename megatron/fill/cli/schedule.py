"""``pipefill schedule``: a pipeline schedule, made by name or read from a file, and its bubbles."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from megatron.fill.cli.options import Json, check_writable
from megatron.fill.cli.views import print_json
from megatron.fill.console import console_of
from megatron.fill.display import one_line, plain_table
from megatron.fill.errors import ConfigError
from megatron.fill.pipeline.bubbles import bubble_seconds, bubble_share, peak_activations
from megatron.fill.pipeline.costs import PipelineCosts
from megatron.fill.pipeline.schedule import Schedule
from megatron.fill.pipeline.schedules import NAMES, make_schedule, usual_chunks
from megatron.fill.pipeline.timeline import Timeline, simulate
from megatron.fill.types import PIPELINE_KINDS

_MOST_FORWARDS = 300_000  # of an iteration, on all ranks: about 10 s
_MOST_MS = 1e6
Times = Annotated[
    str,
    Option(
        "--times",
        metavar="F,I,W",
        help="Milliseconds of a microbatch on a rank, all its chunks together: forward, and the parts of the backward "
        "for the input's and the weights' gradients.",
    ),
]
Transfer = Annotated[
    float, Option("--transfer", metavar="MS", min=0, max=_MOST_MS, help="Time of a transfer between ranks.")
]
_NUMBER = re.compile(r"\d+(\.\d*)?|\.\d+")


def schedule(
    which: Annotated[
        str,
        Argument(
            metavar="NAME|FILE.csv",
            help="gpipe, 1f1b, interleaved, looped-bfs, zb-h1, zb-v or dualpipe-v; or a file in torch's CSV form.",
        ),
    ],
    stages: Annotated[int | None, Option(metavar="P", min=1, help="Ranks of the pipeline.")] = None,
    microbatches: Annotated[int | None, Option(metavar="M", min=1, help="Microbatches of an iteration.")] = None,
    chunks: Annotated[
        int | None,
        Option(metavar="V", min=1, help="Stages of the model per rank (default: the least that NAME takes)."),
    ] = None,
    times: Times = "1,1,1",
    transfer_ms: Transfer = 0.0,
    min_bubble_ms: Annotated[
        float,
        Option(
            "--min-bubble",
            metavar="MS",
            min=0,
            max=_MOST_MS,
            help="Shortest bubble that counts as fillable, as the setting min_bubble_us.",
        ),
    ] = 0.0,
    csv: Annotated[Path | None, Option(metavar="OUT", help="Write the schedule in torch's form, compute-only.")] = None,
    as_json: Json = False,
) -> None:
    """Check a pipeline schedule, and show its iteration time and its bubbles per rank and kind.

    All stages take equally long, only receivers wait for transfers, and the optimizer takes no time.  FILLABLE is the
    share of bubbles that are not too short; PEAK is the most activations that a rank holds at once, in microbatches.

    --json prints schedule, stages, microbatches, chunks, iteration_ms, bubble_share, fillable_share, and a list "ranks"
    of: rank, fill_ms, fwd-bwd_ms, interior_ms, drain_ms, bubble_share, fillable_share, bubbles, longest_ms,
    peak_activations.
    """
    from megatron.fill.pipeline.torch_csv import dump_csv

    its = _schedule(which, stages, microbatches, chunks)
    costs = given_costs(its, times, transfer_ms)
    check_writable(csv=csv)
    timeline = simulate(its, costs)
    if csv is not None:
        dump_csv(csv, its)
    found = _found(timeline, min_bubble_ms)
    if as_json:
        print_json(found)
    else:
        _print(found)


def _schedule(which: str, stages: int | None, microbatches: int | None, chunks: int | None) -> Schedule:
    from megatron.fill.given.problems import shown
    from megatron.fill.pipeline.torch_csv import load_csv

    counts = {"--stages": stages, "--microbatches": microbatches, "--chunks": chunks}
    if which.endswith(".csv"):
        for option, count in counts.items():
            if count is not None:
                raise ConfigError(f"{option} is {count}: expected none with a file, which has its own")
        return load_csv(Path(which))
    if which not in NAMES:
        raise ConfigError(f"{shown(which)} is not a schedule: expected {', '.join(NAMES)}, or a file such as own.csv")
    if stages is None or microbatches is None:
        raise ConfigError(f"{which} without {'--stages' if stages is None else '--microbatches'}: expected a number")
    chunks = chunks or usual_chunks(which)
    if stages * microbatches * chunks > _MOST_FORWARDS:
        its = f"{which} with {stages} stages, {microbatches} microbatches and {chunks} chunks"
        raise ConfigError(f"{its} is too large: expected a product of at most {_MOST_FORWARDS:,}")
    try:
        return make_schedule(which, stages, microbatches, chunks)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def given_costs(its: Schedule, times: str, transfer_ms: float) -> PipelineCosts:
    """Return the costs of ``--times`` (three numbers, else ConfigError) and ``--transfer``, the same on all ranks."""
    from megatron.fill.given.problems import shown

    parts = times.split(",")
    numbers = [float(part) for part in map(str.strip, parts) if _NUMBER.fullmatch(part)]
    if not len(numbers) == len(parts) == 3 or not 0.001 <= sum(numbers) <= _MOST_MS:
        expected = f"three numbers, such as 10,12,8.5, with a sum of 0.001 to {_MOST_MS:,.0f} ms"
        raise ConfigError(f"--times is {shown(times)}: expected {expected}")
    forward_ns, input_ns, weight_ns = (round(number * 1e6 / its.chunks) for number in numbers)
    return PipelineCosts.uniform(
        its.stages, forward_ns, input_ns + weight_ns, weight_ns, its.chunks, round(transfer_ms * 1e6)
    )


def _found(timeline: Timeline, min_bubble_ms: float) -> dict[str, Any]:
    its, period_ms = timeline.schedule, timeline.period_ns / 1e6
    peaks = peak_activations(its)
    ranks = []
    for rank, seconds in enumerate(bubble_seconds(timeline)):
        lengths_ms = [wait.duration_ns / 1e6 for wait in timeline.waits[rank]]
        ranks.append(
            {
                "rank": rank,
                **{f"{kind}_ms": seconds[kind] * 1e3 for kind in PIPELINE_KINDS},
                "bubble_share": sum(lengths_ms) / period_ms,
                "fillable_share": sum(ms for ms in lengths_ms if ms >= min_bubble_ms) / period_ms,
                "bubbles": len(lengths_ms),
                "longest_ms": max(lengths_ms, default=0.0),
                "peak_activations": peaks[rank] / its.chunks,
            }
        )
    return {
        "schedule": its.name,
        "stages": its.stages,
        "microbatches": its.microbatches,
        "chunks": its.chunks,
        "iteration_ms": period_ms,
        "bubble_share": bubble_share(timeline),
        "fillable_share": sum(row["fillable_share"] for row in ranks) / its.stages,
        "ranks": ranks,
    }


def _print(found: dict[str, Any]) -> None:
    counts = f"stages {found['stages']}, microbatches {found['microbatches']}, chunks {found['chunks']}"
    shares = f"bubbles {found['bubble_share']:.1%}, fillable {found['fillable_share']:.1%}"
    print(f"{one_line(found['schedule'])}: {counts}\niteration {_ms(found['iteration_ms'])} ms, {shares}")
    kinds = [f">{kind.upper()}\nMS" for kind in PIPELINE_KINDS]
    table = plain_table(">RANK", *kinds, ">BUBBLES", ">FILLABLE", ">LONGEST\nMS", ">PEAK")
    for row in found["ranks"]:
        table.add_row(
            str(row["rank"]),
            *(_ms(row[f"{kind}_ms"]) for kind in PIPELINE_KINDS),
            str(row["bubbles"]),
            f"{row['fillable_share']:.1%}",
            _ms(row["longest_ms"]),
            f"{row['peak_activations']:.3g}",
        )
    console_of().print(table)


def _ms(time_ms: float) -> str:
    return f"{time_ms:,.0f}" if time_ms >= 1000 else f"{time_ms:.4g}"
