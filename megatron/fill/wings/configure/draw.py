"""A picture of a network: a heat map of its bandwidths, and one of its latencies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.linux.files import replacing
from megatron.fill.wings.configure.network import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _OWN = "#333333", "#E8E4D8"
_FEW = 16  # ranks whose cells have numbers
_MOST_LABELS = 64
_LEAST_IN, _CELL_IN, _MOST_IN = 4.5, 0.5, 12.0


def draw_network(path: Path, network: Network) -> None:
    """Draw a PNG: two matrices, row by row what a rank sends; OSError if the file cannot be written."""
    from matplotlib.figure import Figure

    side_in = min(_MOST_IN, max(_LEAST_IN, _CELL_IN * len(network.ranks) + 1.5))
    figure = Figure(figsize=(2.3 * side_in, side_in + 0.6), dpi=110, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2)
    gigabytes = [[None if value is None else value / 1e9 for value in row] for row in network.bandwidth_bytes_per_s]
    microseconds = [[value * 1e6 or None for value in row] for row in network.latency_s]
    _draw(left, network, gigabytes, "Bandwidth in GB/s", "viridis")
    _draw(right, network, microseconds, "Latency in \N{MICRO SIGN}s", "viridis_r")
    title = f"{len(network.ranks)} ranks over {network.backend}, {network.measured_at}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=_INK)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw(axes: Axes, network: Network, rows: Sequence[Sequence[float | None]], title: str, colours: str) -> None:
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    found = [value for row in rows for value in row if value is not None]
    scale = LogNorm(min(found) / 1.05, max(found) * 1.05)  # one value alone has a scale too
    cells = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axes.imshow(cells, norm=scale, cmap=colormaps[colours].with_extremes(bad=_OWN))
    axes.figure.colorbar(image, ax=axes, shrink=0.8)
    if len(rows) <= _FEW:
        for sender, row in enumerate(rows):
            for receiver, value in enumerate(row):
                if value is not None:
                    dark = (scale(value) < 0.5) == (colours == "viridis")
                    ink = "white" if dark else _INK
                    axes.text(receiver, sender, f"{value:.3g}", ha="center", va="center", fontsize=7, color=ink)
    step = -(-len(rows) // _MOST_LABELS)
    places = range(0, len(rows), step)
    labels = [str(network.ranks[place]) for place in places]
    axes.set_xticks(places, labels, rotation=90, fontsize=7)
    axes.set_yticks(places, labels, fontsize=7)
    axes.set(xlabel="to", ylabel="from")
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
