"""Pictures of FreeRide's study: savings by task, by batch size and by training, and the use of bubble time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.linux.files import replacing
from scripts.benchmarks.studies.freeride.study import saving

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Rows = Sequence[Mapping[str, Any]]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_BY = {
    "ours": ("our rule, simulated", "#0072B2"),
    "freeride_rule": ("FreeRide's rule, simulated", "#E69F00"),
    "artifact": ("FreeRide's artifact, printed", "#009E73"),
}
_SIMULATED = ("ours", "freeride_rule")
_PARTS = {
    "steps": ("in steps", "#009E73"),
    "runtime": ("runtime: polling, sleeping, waking up", "#D55E00"),
    "short": ("too little time left", "#F0E442"),
    "memory": ("too little memory", "#BBBBBB"),
}
_WIDTH = 0.27  # width of a bar


def draw_study(folder: Path, found: Mapping[str, Any]) -> None:
    """Draw ``freeride-tasks.png``, ``-batches``, ``-sizes`` and ``-time`` into a folder.

    Raises:
        OSError: a file cannot be written.
    """
    compared = [row for row in found["tasks"] if row["artifact"]]
    for name, figure in (
        ("tasks", _tasks(compared)),
        ("batches", _batches(found["batches"])),
        ("sizes", _sizes(found["tasks"])),
        ("time", _time(compared)),
    ):
        with replacing(folder / f"freeride-{name}.png") as temporary:
            figure.savefig(temporary, format="png")


def _figure(width_in: float, height_in: float, title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), dpi=110, facecolor="white", layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    return figure


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)


def _tasks(rows: _Rows) -> Figure:
    figure = _figure(9.5, 3.8, "Savings by side task: 3.6B, 4 micro-batches")
    axes = figure.subplots()
    for at, (by, (label, colour)) in enumerate(_BY.items()):
        places = [place + (at - 1) * _WIDTH for place in range(len(rows))]
        bars = axes.bar(places, [100 * saving(row, by) for row in rows], _WIDTH, color=colour, label=label)
        axes.bar_label(bars, fmt="%.1f", fontsize=7)
    axes.set_xticks(range(len(rows)), [row["task"] for row in rows])
    axes.set(ylabel="saving, % of the training's cost")
    axes.legend(frameon=False, fontsize=8)
    _plain(axes)
    return figure


def _batches(rows: _Rows) -> Figure:
    names = list(dict.fromkeys(row["task"] for row in rows))
    figure = _figure(11.0, 3.6, "Savings by batch size: 3.6B, 4 micro-batches; above: stages with enough memory")
    panels = figure.subplots(1, len(names), sharey=True)
    for axes, name in zip(panels, names, strict=True):
        its = [row for row in rows if row["task"] == name]
        places = range(len(its))
        for by in _SIMULATED:
            label, colour = _BY[by]
            axes.plot(places, [100 * saving(row, by) for row in its], "o-", color=colour, markersize=4, label=label)
        for place, row in zip(places, its, strict=True):
            stages = sum(task is not None for task in row["runs"])
            axes.text(place, 1.0, str(stages), transform=axes.get_xaxis_transform(), ha="center", fontsize=8)
        axes.set_xticks(places, [str(row["batch"]) for row in its], fontsize=8)
        axes.set(xlabel=f"{name}: images in a step")
        axes.set_ylim(bottom=0)
        _plain(axes)
    panels[0].set(ylabel="saving, % of the training's cost")
    panels[-1].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def _sizes(rows: _Rows) -> Figure:
    figure = _figure(9.5, 3.6, "Savings by model and micro-batches")
    panels = figure.subplots(1, 2, sharey=True)
    cases = list(dict.fromkeys((row["size"], row["microbatches"]) for row in rows))
    for axes, mixed in zip(panels, (False, True), strict=True):
        for at, by in enumerate(_SIMULATED):
            label, colour = _BY[by]
            heights = []
            for case in cases:
                of_case = [row for row in rows if (row["size"], row["microbatches"]) == case]
                its = [100 * saving(row, by) for row in of_case if (row["task"] == "mix") is mixed]
                heights.append(sum(its) / len(its))
            places = [place + (at - 0.5) * 1.4 * _WIDTH for place in range(len(cases))]
            bars = axes.bar(places, heights, 1.4 * _WIDTH, color=colour, label=label)
            axes.bar_label(bars, fmt="%.0f", fontsize=7)
        axes.set_xticks(range(len(cases)), [f"{size}\n{microbatches}" for size, microbatches in cases], fontsize=8)
        axes.set(xlabel="model, micro-batches")
        axes.set_title("mixed workload" if mixed else "mean of the six side tasks", loc="left", fontsize=10)
        _plain(axes)
    panels[0].set(ylabel="saving, % of the training's cost")
    panels[1].legend(frameon=False, fontsize=8)
    return figure


def _time(rows: _Rows) -> Figure:
    figure = _figure(10.0, 4.6, "Where bubble time goes: 3.6B, 4 micro-batches (above: our rule; below: FreeRide's)")
    axes = figure.subplots()
    height = 0.36
    for at, by in enumerate(_SIMULATED):
        places = [place + (at - 0.5) * 1.1 * height for place in range(len(rows))]
        begins = [0.0] * len(rows)
        for part, (label, colour) in _PARTS.items():
            widths = [100 * row[by]["bubble_time"][part] for row in rows]
            axes.barh(places, widths, height, left=begins, color=colour, label=None if at else label)
            begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [row["task"] for row in rows])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set(xlim=(0, 100), xlabel="% of the bubble time of all four stages")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(_PARTS), frameon=False, fontsize=8)
    return figure
