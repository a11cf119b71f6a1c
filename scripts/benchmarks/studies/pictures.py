"""The pictures of ``sim_pipefill.py``: one per part, from the figures that its JSON has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.linux.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

type Rows = Sequence[dict[str, Any]]

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#333333", "#999999")
_WIDTH_IN, _HEIGHT_IN = 10.0, 3.9


def draw(part: str, figures: Any, path: Path) -> None:
    """Draw one part.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), dpi=110, facecolor="white", layout="constrained")
    _PICTURES[part](figure, figures)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _share(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    for colour, noise in zip(_COLOURS, dict.fromkeys(row["noise"] for row in rows), strict=False):
        its = [row for row in rows if row["noise"] == noise and row["share"] is not None]
        predicted = next(row for row in rows if row["noise"] == noise and row["share"] is None)
        shares = [100 * row["share"] for row in its]
        left.plot(
            shares, [100 * row["slowdown"] for row in its], "o-", color=colour, label=f"passes vary by {noise:.0%}"
        )
        left.axhline(100 * predicted["slowdown"], color=colour, linestyle=":", linewidth=1)
        right.plot(shares, [_total(row) for row in its], "o-", color=colour)
        right.axhline(_total(predicted), color=colour, linestyle=":", linewidth=1)
    left.axhline(2, color=_COLOURS[6], linestyle="--", linewidth=1, label="2%: PipeFill's claim is below")
    left.plot([], [], color=_COLOURS[6], linestyle=":", linewidth=1, label="by the runtime's own rule, at any share")
    left.set(xlabel="share of each bubble's mean length that is filled, %", ylabel="slowdown of the main job, %")
    left.legend(fontsize=8, frameon=False)
    right.set(
        xlabel="share of each bubble's mean length that is filled, %", ylabel="TFLOPS per GPU, main and fill jobs"
    )
    right.set_ylim(bottom=0)
    figure.suptitle("5B on 128 GPUs that do not preempt", x=0.01, ha="left", fontsize=11)


def _total(row: dict[str, Any]) -> float:
    return float(row["main_tflops"] + row["fill_tflops"])


def _kinds(figure: Figure, rows: Rows) -> None:
    axes = figure.subplots()
    places = list(dict.fromkeys((row["gpus"], row["gpu"]) for row in rows))
    names = list(dict.fromkeys(row["kind"] for row in rows))
    values = {(row["gpus"], row["gpu"], row["kind"]): row["relative"] for row in rows}
    labels = [f"{gpus:,} {gpu}" for gpus, gpu in places]
    _bars(
        axes,
        [name.replace("-training", "\ntraining").replace("-inference", "\ninference") for name in names],
        labels,
        [[values[(*place, name)] for name in names] for place in places],
    )
    for place, name in enumerate(names):
        if not all(values[(*one, name)] for one in places):
            axes.text(place, 0.02, "does not fit", rotation=90, ha="center", fontsize=7)
    axes.tick_params(axis="x", labelsize=7)
    axes.set(ylabel="a second of bubble, in seconds alone", ylim=(0, 1.18))
    figure.suptitle("40B: each kind of fill job in bubbles against alone", x=0.01, ha="left", fontsize=11)


def _bars(axes: Axes, groups: Sequence[str], labels: Sequence[str], heights: Sequence[Sequence[float]]) -> None:
    width = 0.8 / len(labels)
    for at, (label, row) in enumerate(zip(labels, heights, strict=True)):
        places = [place + (at - (len(labels) - 1) / 2) * width for place in range(len(groups))]
        axes.bar(places, row, width, color=_COLOURS[at], label=label)
    axes.set_xticks(range(len(groups)), groups)
    axes.legend(fontsize=8, frameon=False, ncols=len(labels), loc="upper right")


def _policies(figure: Figure, rows: Rows) -> None:
    for axes, (name, label) in zip(figure.subplots(1, 3), _TIMES, strict=True):
        for colour, policy in zip(_COLOURS, dict.fromkeys(row["policy"] for row in rows), strict=False):
            its = [row for row in rows if row["policy"] == policy]
            axes.plot([row["load"] for row in its], [row[name] / 3600 for row in its], "o-", color=colour, label=policy)
        axes.set(xlabel="load, of what the bubbles can do", ylabel=label)
        axes.set_ylim(bottom=0)
    figure.axes[0].legend(fontsize=8, frameon=False)
    figure.suptitle("5B on 128 GPUs: a day of fill jobs by policy", x=0.01, ha="left", fontsize=11)


_TIMES = (
    ("mean_s", "mean completion time, hours"),
    ("p99_s", "99th percentile, hours"),
    ("makespan_s", "first arrival to last end, hours"),
)


def _trace(figure: Figure, rows: Rows) -> None:
    arrivals = list(dict.fromkeys(row["arrivals"] for row in rows))
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for axes, (key, label) in zip(figure.subplots(1, 3), _TIMES, strict=True):
        values = {(row["arrivals"], row["policy"]): row[key] / 3600 for row in rows}
        _bars(axes, names, arrivals, [[values[one, name] for name in names] for one in arrivals])
        axes.set(ylabel=label)
        axes.set_ylim(top=1.2 * max(values.values()))
    figure.suptitle("5B on 128 GPUs: fill jobs shaped like published traces", x=0.01, ha="left", fontsize=11)


def _described(column: str, label: str, title: str) -> Callable[[Figure, Rows], None]:
    def picture(figure: Figure, rows: Rows) -> None:
        its = [row for row in rows if "impossible" not in row]
        groups = list(dict.fromkeys(row[column] for row in its))
        names = list(dict.fromkeys(row["schedule"] for row in its))
        for axes, (key, scale, what) in zip(figure.subplots(1, 3), _DESCRIBED, strict=True):
            values = {(row[column], row["schedule"]): scale * row[key] for row in its}
            _bars(
                axes,
                [f"{one:,}" for one in groups],
                names,
                [[values.get((one, name), 0.0) for one in groups] for name in names],
            )
            axes.set(xlabel=label, ylabel=what)
            axes.set_ylim(top=1.2 * max(values.values()))
            axes.legend(fontsize=7, frameon=False, ncols=3, loc="upper left", columnspacing=0.8, handlelength=1)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11)

    return picture


_DESCRIBED = (
    ("bubble_share", 100, "bubbles, % of the iteration"),
    ("free_gib_least", 1, "free memory of the fullest stage, GiB"),
    ("gain", 100, "fill work, % of the main job's"),
)


def _sensitivity(figure: Figure, rows: Rows) -> None:
    left, right = figure.subplots(1, 2)
    sizes = [size for size in dict.fromkeys(row["free_gib"] for row in rows) if size in (2, 3, 4, 6, 12)]
    for colour, size in zip(_COLOURS, sizes, strict=False):
        its = [row for row in rows if row["free_gib"] == size]
        lengths = [row["mean_bubble_s"] * 1e3 for row in its]
        left.semilogx(lengths, [row["per_bubble_second"] for row in its], "o-", color=colour, label=f"{size} GiB free")
    left.set(xlabel="mean length of a bubble, ms", ylabel="a second of bubble, in seconds alone", ylim=(0, 1))
    left.legend(fontsize=8, frameon=False)
    now = [row for row in rows if row["length"] == 1]
    right.plot([row["free_gib"] for row in now], [row["gpus_worth"] for row in now], "o-", color=_COLOURS[0])
    for row in now:
        right.annotate(
            f"{row['kinds_that_fit']}",
            (row["free_gib"], row["gpus_worth"]),
            xytext=(0, -13),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    right.set(xlabel="free memory in every bubble, GiB (below: kinds that fit)", ylabel="GPUs' worth of fill work")
    right.set_ylim(bottom=-300)
    figure.suptitle("40B on 8K GPUs: longer and shorter bubbles, more and less memory", x=0.01, ha="left", fontsize=11)


def _loss(figure: Figure, found: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    rows = found["rows"]
    speeds = [row["step_efficiency"] for row in rows]
    left.plot(speeds, [row["gpus_worth"] for row in rows], "o-", color=_COLOURS[0], label="one job per GPU")
    left.plot(speeds, [row["gpus_worth_with_tail"] for row in rows], "o-", color=_COLOURS[1], label="with a tail job")
    left.axhline(found["paper_gpus_worth"], color=_COLOURS[6], linestyle="--", linewidth=1, label="the paper: 2,600")
    left.set(xlabel="speed of a step in a bubble over its speed alone", ylabel="GPUs' worth of fill work")
    left.set_ylim(bottom=0)
    left.legend(fontsize=8, frameon=False)
    right.plot(speeds, [100 * row["gain"] for row in rows], "o-", color=_COLOURS[0], label="one job per GPU")
    right.axhline(63, color=_COLOURS[6], linestyle="--", linewidth=1, label="the paper: up to 63%")
    right.set(xlabel="speed of a step in a bubble over its speed alone", ylabel="fill work, % of the main job's")
    right.set_ylim(bottom=0)
    right.legend(fontsize=8, frameon=False)
    figure.suptitle("40B on 8K GPUs: steps that are slower in bubbles", x=0.01, ha="left", fontsize=11)


_PICTURES: dict[str, Callable[[Figure, Any], None]] = {
    "share": _share,
    "kinds": _kinds,
    "policies": _policies,
    "schedules": _described("gpus", "GPUs", "40B: the main job's schedule"),
    "sensitivity": _sensitivity,
    "trace": _trace,
    "physical": _described("microbatches", "micro-batches", "5B on 128 GPUs: the main job's schedule"),
    "loss": _loss,
}
