"""``pipefill network``: measures the bandwidth and latency between each pair of ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from megatron.fill.cli.options import check_writable
from megatron.fill.display import plain_table
from megatron.fill.errors import ConfigError, NetworkError

if TYPE_CHECKING:
    from megatron.fill.wings.configure.network import Network
    from megatron.fill.wings.configure.samples import Measured

_SIZES = "8,64KiB,1MiB,16MiB"


def network(
    measured: Annotated[
        Path | None,
        Argument(metavar="MEASURED", help="Instead of measuring: a file of --output, to draw or to compare."),
    ] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", metavar="FILE", help="Write what was measured, as JSON.")
    ] = None,
    png: Annotated[Path | None, Option(metavar="FILE", help="Draw heat maps into this file.")] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", help="Write a line per size of each pair and group.")] = None,
    compare: Annotated[Path | None, Option(metavar="OLD", help="An earlier --output: print what has changed.")] = None,
    sizes: Annotated[str, Option(metavar="N,N", help="Of the messages; the largest gives the bandwidth.")] = _SIZES,
    repeats: Annotated[int, Option(metavar="N", min=1, max=1000, help="Of everything.")] = 3,
    timeout: Annotated[float, Option(metavar="S", min=1, max=1e6, help="How long a rank waits for another.")] = 300.0,
    backend: Annotated[Literal["gloo", "nccl"] | None, Option(help="[default: nccl on GPUs, else gloo]")] = None,
) -> None:
    """Measure bandwidth and latency from each rank to each other one, and all-reduces by group.

    Start it in every rank, as a training is started: torchrun --nproc-per-node 8 .venv/bin/pipefill network --output
    network.json. A host takes part in one transfer at a time. With MEASURED nothing is measured, and no launcher is
    needed.
    """
    if measured is not None:
        if output is not None or csv is not None:
            raise ConfigError("with MEASURED nothing is measured; expected no --output and no --csv with it")
        if png is None and compare is None:
            raise ConfigError("expected --png or --compare with MEASURED")
    elif output is None:
        raise ConfigError("expected --output FILE, or a file that was MEASURED before")
    from megatron.fill.wings.configure.network import Network

    first = measured is not None or os.environ.get("RANK", "0") == "0"
    old = Network.load(compare) if compare is not None and first else None
    if first:
        check_writable(output=output, png=png, csv=csv)
    if measured is not None:
        found = Network.load(measured)
    else:
        samples = _measure(sizes, repeats, timeout, backend)
        if samples is None:
            return
        assert output is not None
        found = _saved(samples, output, csv)
        _print(found, samples)
    if png is not None:
        from megatron.fill.wings.configure.draw import draw_network

        draw_network(png, found)
    if old is not None:
        _print_drift(old, found)


def _measure(sizes: str, repeats: int, timeout_s: float, backend: str | None) -> Measured | None:
    from megatron.fill.given.quantities import parse_bytes
    from megatron.fill.wings.configure.measure import check_ranks, measure

    try:
        parsed = sorted({parse_bytes(size) for size in sizes.split(",")})
    except ValueError as error:
        raise ConfigError(f"--sizes is {sizes!r}: {error}, and more of them") from None
    if len(parsed) < 2:
        raise ConfigError(f"--sizes is {sizes!r}: expected two sizes or more")
    check_ranks()
    return measure(parsed, repeats, timeout_s, backend, lambda text: print(f"PipeFill: {text}", file=sys.stderr))


def _saved(samples: Measured, output: Path, csv: Path | None) -> Network:
    """Write the network that the samples make; samples that make none are kept, since measuring them took long."""
    from megatron.fill.wings.configure.samples import network_of, write_csv

    if csv is not None:
        write_csv(csv, samples)
    try:
        found = network_of(samples)
    except NetworkError as error:
        kept = csv or output.with_name(f"{output.name}.csv")
        if csv is None:
            write_csv(kept, samples)
        raise NetworkError(f"{error}; the times that were measured are in {kept}") from error
    found.save(output)
    return found


def _print(network: Network, samples: Measured) -> None:
    from statistics import median

    from rich.console import Console

    table = plain_table("LINKS", "", "GB/S: LEAST", "MEDIAN", "MOST", "\N{MICRO SIGN}S", "SPREAD")
    everyone = range(len(network.ranks))
    pairs = [(a, b) for a in everyone for b in everyone if a != b]
    for name, inside in (("within a host", True), ("between hosts", False)):
        those = [(a, b) for a, b in pairs if (network.ranks[a].host == network.ranks[b].host) is inside]
        if those:
            rates = [(network.bandwidth_bytes_per_s[a][b] or 0) / 1e9 for a, b in those]
            latency = median(network.latency_s[a][b] for a, b in those) * 1e6
            spread = median(network.spread[a][b] for a, b in those)
            figures = [f"{value:.3g}" for value in (min(rates), median(rates), max(rates), latency)]
            table.add_row(name, str(len(those)), *figures, f"{spread:.1%}")
    console = Console(highlight=False)
    console.print(table)
    largest = max(one.size_bytes for one in samples.reductions)
    for one in samples.reductions:
        if one.size_bytes == largest:
            ranks = ", ".join(str(network.ranks[rank]) for rank in one.ranks[:4])
            more = f" and {len(one.ranks) - 4} more" if len(one.ranks) > 4 else ""
            console.print(f"all-reduce over {ranks}{more}: {one.bus_bytes_per_s / 1e9:.3g} GB/s on each link of a ring")


def _print_drift(old: Network, new: Network) -> None:
    from rich.console import Console

    from megatron.fill.display import counted, time_unit
    from megatron.fill.wings.configure.drift import LIMIT, again_days, drifts

    found = drifts(old, new)
    again_s = 86400 * again_days(old, new, found)
    table = plain_table("FROM", "TO", "GB/S: OLD", "NEW", "CHANGE", "SPREAD")
    for one in found:
        rates = (f"{rate / 1e9:.3g}" for rate in (one.old_bytes_per_s, one.new_bytes_per_s))
        table.add_row(str(one.sender), str(one.receiver), *rates, f"{one.change:+.1%}", f"{one.spread:.1%}")
    console = Console(highlight=False)
    console.print(table)
    drifted = sum(one.surely > LIMIT for one in found)
    text = f"{drifted} of {len(found)} links have changed by more than {LIMIT:.0%} beyond their spread"
    console.print(text + (": choose configuration and order of ranks again" if drifted else ""))
    unit_s, unit, _ = time_unit(again_s)
    again = counted(float(f"{again_s / unit_s:.2g}"), unit)
    console.print(f"Measure again in {again}: before a link changes by {LIMIT:.0%} at the rate of the fastest")
