"""``pipefill configure`` and ``pipefill pays``: the best layouts of a training, and the value of its bubbles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from megatron.fill.cli.options import Json, check_writable
from megatron.fill.display import counted, plain_table
from megatron.fill.errors import ConfigError

if TYPE_CHECKING:
    from megatron.fill.wings.configure.choose import Choice
    from megatron.fill.wings.configure.cluster import Cluster
    from megatron.fill.wings.configure.flags import Training
    from megatron.fill.wings.configure.passes import Profile
    from megatron.fill.wings.configure.room import Margins
    from megatron.fill.wings.configure.search import Proposal
    from megatron.fill.wings.configure.value import Objective, Valued
    from megatron.fill.wings.mainjob.hardware import GpuKind

_PAYS = 0.02  # share of the GPUs that fill work must be worth for filling to pay
_OPEN = (
    "--deterministic-mode without --attention-backend leaves open which attention runs; the upper end of memory has "
    "unfused attention. Give the flag if you know it."
)

Flags = Annotated[
    list[str], Argument(metavar="-- FLAGS...", help="Megatron's flags; those of the layout that are given hold.")
]


def configure(
    context: typer.Context,
    cluster: Annotated[Path, Argument(metavar="CLUSTER", help="A YAML file: docs/configure.md.")],
    flags: Flags,
    objective: Annotated[
        str, Option(metavar="NAME", help="main (fastest), combined (with fill work), or cost.")
    ] = "main",
    top: Annotated[int, Option(metavar="N", min=1, max=1000, help="How many to show.")] = 10,
    fill: Annotated[Path | None, Option(metavar="JOBS", help="A jobs file, named as kinds of the catalog.")] = None,
    seed: Annotated[int, Option(metavar="N", min=0, help="Of the search for a rank order.")] = 0,
    moves: Annotated[int, Option(metavar="N", min=0, max=10**9, help="Of that search, for each configuration.")] = 3000,
    profile: Annotated[
        list[Path] | None, Option(metavar="RUN", help="A run folder of --fill-profile-only; may be repeated.")
    ] = None,
    json_path: Annotated[Path | None, Option("--json", metavar="FILE", help="Write the results here.")] = None,
    png: Annotated[Path | None, Option(metavar="FILE", help="Draw them and their bubbles into this file.")] = None,
    memory_model: Annotated[Path | None, Option(metavar="FILE", help="What pipefill memory-model has learned.")] = None,
    launch: Annotated[Path | None, Option(metavar="FILE", help="Write a script that starts the best one.")] = None,
) -> None:
    """Find the best layouts of a training on a cluster, before a GPU-hour is spent.

    All layouts that Megatron starts and that fit the GPUs' memory are compared. A row has a layout with its best number
    of virtual stages (VPP); others that tie with it are named below. BUBBLE SHARE is that of the GPUs' time, FILL the
    number of GPUs that the jobs would need for the same work without bubbles. Rows of one rank (1=) differ by less than
    predictions err; of these, ones that leave more memory free are first. On a measured network, ranks are placed for
    the shortest iteration. With --profile, passes take as long as in that run.

    --json writes "configurations", "timed", the flags "ignored" and "least_known", and a list "best", each with its
    layout, rank order, flags and figures, and with "tied": the same of its other numbers of virtual stages.
    """
    from rich.console import Console

    from megatron.fill.wings.configure.choose import choose
    from megatron.fill.wings.configure.cluster import load_cluster
    from megatron.fill.wings.configure.correction import Correction
    from megatron.fill.wings.configure.flags import read_flags
    from megatron.fill.wings.configure.launch import write_launch
    from megatron.fill.wings.configure.passes import load_passes
    from megatron.fill.wings.configure.ranked import ERROR, MODEL_ERROR, why
    from megatron.fill.wings.configure.search import Evaluator
    from megatron.fill.wings.configure.value import Objective, fill_kinds

    if objective not in list(Objective):
        raise ConfigError(f"--objective is {objective!r}: expected one of {', '.join(Objective)}")
    training, there = read_flags(flags, own=_own(context)), load_cluster(cluster)
    if objective == Objective.COST and there.price_per_gpu_hour is None:
        raise ConfigError(f"{cluster}: price_per_gpu_hour is missing; expected it with --objective cost")
    links = there.links(cluster.resolve().parent)
    check_writable(json=json_path, png=png, launch=launch)
    kinds = fill_kinds(there.gpu, fill)
    passes = load_passes(profile, training) if profile else None
    correction = None if memory_model is None else Correction.load(memory_model)
    error = MODEL_ERROR if passes is None else ERROR
    evaluator = Evaluator(training, there, links, passes, correction)
    choice = choose(evaluator, kinds, Objective(objective), top, seed, moves, error)
    _print_choice(choice, there, Objective(objective), error)
    if len(choice.best) > 1:
        first, second = choice.best[:2]
        reasons = why(first, second, evaluator, by_time=objective == Objective.MAIN)
        Console(highlight=False).print(f"Why row 1 before row 2: {reasons}.")
    _print_ignored(training, there.gpu)
    for one in passes.profiles if passes else ():
        _print_untold(one)
    if json_path is not None:
        _write_json(json_path, choice, there, training)
    if png is not None:
        from megatron.fill.wings.configure.picture import draw_best

        draw_best(png, choice.best)
    if launch is not None:
        order = write_launch(launch, training, there, choice.best[0].proposal)
        print(f"{launch} starts the first of them{f' in the order of {order}' if order else ''}.")


def pays(
    context: typer.Context,
    flags: Flags,
    gpus: Annotated[
        int | None, Option(metavar="N", min=1, help="Of the training (default: one replica's, in full nodes).")
    ] = None,
    gpu: Annotated[str, Option(metavar="NAME", help="Which kind.")] = "a100-80gb",
    network: Annotated[str, Option(metavar="NAME", help="Which kind of nodes.")] = "dgx-a100",
    schedule: Annotated[
        Path | None, Option(metavar="FILE", help="Instead of Megatron's: a CSV file, docs/schedules.md.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the value of a training's bubbles, or that filling does not pay; without GPUs, in a second.

    The layout is that of the flags, by Megatron's defaults where they say nothing. --json prints gpus, iteration_s,
    bubble_share, memory_bytes, memory_interval_bytes, gpus_worth, pays, and flags as ignored and least_known.
    """
    from megatron.fill.cli.views import print_json
    from megatron.fill.wings.configure.flags import check_whole, read_flags
    from megatron.fill.wings.configure.pays import figures
    from megatron.fill.wings.mainjob.hardware import GPUS

    training = read_flags(flags, own=_own(context))
    check_whole(training, flags)
    found = figures(training, gpus, gpu, network, schedule)
    worth = found.gpus_worth / found.proposal.parallel.gpus
    if as_json:
        print_json(_figures(found) | {"pays": worth >= _PAYS, **_said(training)})
        return
    its = found.proposal
    there = counted(its.parallel.gpus, "GPU")
    print(f"An iteration takes {its.iteration_s:.3g} s on {there}; {its.bubble_share:.1%} is bubbles.")
    if worth >= _PAYS:
        print(f"Inference of BERT-base in them does the work of {found.gpus_worth:.2f} GPUs ({worth:.1%}).")
    else:
        print(f"Filling does not pay: inference of BERT-base would do the work of {found.gpus_worth:.2f} GPUs in them.")
        if its.parallel.pp == 1:
            print("A pipeline of one stage has no bubbles.")
        elif schedule is None and (its.parallel.chunks > 1 or its.bubble_share < _PAYS):
            print("With virtual stages or many micro-batches, too little time is left between passes.")
    _print_ignored(training, GPUS[gpu])


def _own(context: typer.Context) -> set[str]:
    """Return the names of the command's own options."""
    return {name for option in context.command.params for name in option.opts}


def _print_ignored(training: Training, gpu: GpuKind) -> None:
    """Print the flags that the figures leave out, and those with which they are known least."""
    from megatron.fill.wings.configure.details import detailed
    from megatron.fill.wings.configure.room import least_known
    from megatron.fill.wings.configure.search import decided

    if training.ignored:
        print(f"Not weighed, though they change time or memory: {', '.join(training.ignored)}.")
    known = least_known(training.others)
    if known:
        print(f"Memory is known least with: {', '.join(_unsure(flag, its) for flag, its in known.items())}.")
    if decided(detailed(training.model, training.others), gpu).kernels.undecided:
        print(_OPEN)


def _unsure(flag: str, its: Margins) -> str:
    if (its.low, its.high) == (1, 1):
        return f"{flag} (never measured alone)"
    return f"{flag} (the interval's ends are {its.low:g} and {its.high:g} times as far)"


def _said(training: Training) -> dict[str, Any]:
    """Return the flags that the figures leave out, and those with which memory is known least."""
    from megatron.fill.wings.configure.room import least_known

    return {"ignored": training.ignored, "least_known": list(least_known(training.others))}


def _figures(one: Valued) -> dict[str, Any]:
    its = one.proposal
    return {
        "gpus": its.parallel.gpus,
        "iteration_s": its.iteration_s,
        "bubble_share": its.bubble_share,
        "memory_bytes": its.peak_bytes,
        "memory_interval_bytes": its.interval_bytes,
        "gpus_worth": one.gpus_worth,
    }


def _write_json(path: Path, choice: Choice, cluster: Cluster, training: Training) -> None:
    import json
    from dataclasses import asdict

    from megatron.fill.linux.files import write_text
    from megatron.fill.wings.configure.flags import layout_flags

    def entry(one: Valued) -> dict[str, Any]:
        its = one.proposal
        flags = layout_flags(its.parallel, training.model.predicted)
        figures = _figures(one) | {"cost": _cost(one, cluster), "parallel": asdict(its.parallel)}
        return figures | {"flags": flags, "order": list(its.order)}

    best = [entry(row[0]) | {"tied": [entry(one) for one in row[1:]]} for row in choice.rows]
    data = {"configurations": choice.configurations, "timed": choice.timed, **_said(training), "best": best}
    write_text(path, json.dumps(data, indent=2) + "\n")


def _cost(one: Valued, cluster: Cluster) -> float | None:
    """Return the price of an iteration minus that of its fill work on separate GPUs; None without a price."""
    price = cluster.price_per_gpu_hour
    return None if price is None else one.net_gpu_s / 3600 * price


def _print_untold(one: Profile) -> None:
    """Print the times that a profile does not contain; they count as 0."""
    from megatron.fill.wings.configure.passes import Both

    untold = ["what a pass takes beside its layers"] if one.fixed == Both(0.0, 0.0) else []
    untold += ["what a step takes beside its parameters"] if one.step_s == 0.0 else []
    if untold:
        run = f"The run with tensor parallelism {one.tp} and micro-batches of {one.microbatch}"
        print(f"{run} does not tell {' or '.join(untold)}.")


def _gib(its: Proposal, places: int) -> str:
    shown, low, high = (end / 2**30 for end in (its.peak_bytes, *its.interval_bytes))
    if high < 1 and not places:
        return "<1"
    places = 0 if high >= 100 else places + (high < 1) + (high < 0.1)
    return f"{shown:.{places}f} ({low:.{places}f}-{high:.{places}f})"


def _print_choice(choice: Choice, cluster: Cluster, objective: Objective, error: float) -> None:
    from rich.console import Console

    from megatron.fill.wings.configure.ranked import ranks

    priced = cluster.price_per_gpu_hour is not None
    alike = len({one.proposal.parallel.gpus for one in choice.best}) == 1
    headings = ["#", *([] if alike else ["GPUS"]), "TP", "PP", "VPP", "DP", "CP", "EP", "MB", "RECOMPUTE"]
    headings += ["TIME\nS", "MEMORY\nGIB", "BUBBLE\nSHARE", "FILL\nGPUS", *(["COST\n/ITER"] if priced else [])]
    table = plain_table(*(f"{'<' if heading == 'RECOMPUTE' else '>'}{heading}" for heading in headings), gap=1)
    main = objective == "main"
    ranked = ranks([one.proposal.iteration_s if main else one.net_gpu_s for one in choice.best], error)
    for rank, one in zip(ranked, choice.best, strict=True):
        its, para = one.proposal, one.proposal.parallel
        sizes = [para.tp, para.pp, para.chunks, para.dp, para.cp, para.ep, para.microbatch]
        sizes = sizes if alike else [para.gpus, *sizes]
        row = [f"{rank}{'=' if ranked.count(rank) > 1 else ' '}", *map(str, sizes), para.recompute.value]
        row += [f"{its.iteration_s:.4g}", _gib(its, int(alike)), f"{its.bubble_share:.1%}", f"{one.gpus_worth:.2f}"]
        table.add_row(*row, *([f"{_cost(one, cluster):.3g}"] if priced else []))
    Console(width=80).print(table)
    if len(set(ranked)) < len(ranked):
        print(f"= marks ties: rows within {error:.1%} of a rank's fastest, whose order is not known.")
    others = []
    for number, found in enumerate(choice.rows, 1):
        own, *more = (one.proposal.parallel.chunks for one in found)
        if counts := sorted(set(more) - {own}):
            others.append(f"row {number}: {', '.join(map(str, counts))}")
    if others:
        Console(width=80, highlight=False).print(f"VPP that tie with a row's own: {'; '.join(others)}.")
    for number, one in enumerate(choice.best, 1):
        first, last = one.proposal.parallel.first_layers, one.proposal.parallel.last_layers
        if first is not None or last is not None:
            given = (("first", first), ("last", last))
            ends = [f"the {name} has {counted(count, 'layer')}" for name, count in given if count]
            print(f"Row {number}: of its stages, {', '.join(ends)}.")
        if (split := one.proposal.parallel.stage_layers) is not None:
            print(f"Row {number}: its virtual stages have {min(split)} to {max(split)} layers, the last {split[-1]}.")
    on = f" on {counted(choice.best[0].proposal.parallel.gpus, 'GPU')}" if alike else ""
    print(f"The best of {choice.configurations} configurations{on}, {choice.timed} of which were timed.")
