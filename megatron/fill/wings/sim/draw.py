"""Pictures of simulations: the use of the devices' time, and the durations of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.display import amount, time_unit
from megatron.fill.linux.files import replacing
from megatron.fill.wings.sim.results import Completion, SimResult, UseOfTime, short_names

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_MAIN, _FILL, _UNUSED, _DOWN, _INK = "#0072B2", "#E69F00", "#E8E4D8", "#D55E00", "#333333"
_MEDIAN, _P95 = "#009E73", "#CC79A7"
_ROW_IN, _HEAD_IN, _FOOT_IN, _WIDTH_IN = 0.36, 0.5, 0.9, 13.0
_MOST_ROWS = 40


def draw_results(path: Path, results: Sequence[SimResult]) -> None:
    """Draw a PNG: a row per result, or per group of devices and kind of job where there is one result.

    Raises:
        ValueError: there is nothing to draw.
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    if not results:
        raise ValueError("expected at least one result to draw")
    if len(results) == 1:
        one = results[0]
        uses = [(use.name, use) for use in (one.total, *one.groups)]
        completions = [("all", one.completion), *((its.kind, its.completion) for its in one.kinds if its.jobs)]
    else:
        labels = [_label(one, results) for one in results]
        uses = [(label, one.total) for label, one in zip(labels, results, strict=True)]
        completions = [(label, one.completion) for label, one in zip(labels, results, strict=True)]
    uses, completions = uses[:_MOST_ROWS], completions[:_MOST_ROWS]
    height_in = _HEAD_IN + _FOOT_IN + _ROW_IN * max(len(uses), len(completions))
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=110, facecolor="white", layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    _draw_use(left, uses)
    _draw_completion(right, completions)
    handles = [handle for axes in (left, right) for handle in axes.get_legend_handles_labels()[0]]
    figure.legend(handles=handles, loc="outside lower left", ncols=len(handles), frameon=False, fontsize=8)
    figure.suptitle(_title(results), x=0.01, ha="left", fontsize=11, color=_INK)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _title(results: Sequence[SimResult]) -> str:
    """The values that all results have in common."""
    first = results[0]
    names = short_names(first.what)
    parts = [f"{names[field]}={value}" for field, value in first.what.items() if not _varies(field, results)]
    if len({one.policy for one in results}) == 1:
        parts.append(f"policy {first.policy}")
    many = f"{len(results)} simulations" if len(results) > 1 else "A simulation"
    return ", ".join([f"{many} of {first.duration_s / 3600:.3g} hours", *parts])


def _label(result: SimResult, results: Sequence[SimResult]) -> str:
    """The values in which this result differs from others."""
    names = short_names(result.what)
    parts = [f"{names[field]}={value}" for field, value in result.what.items() if _varies(field, results)]
    if len({one.policy for one in results}) > 1 or not parts:
        parts.append(result.policy)
    return ", ".join(parts)


def _varies(field: str, results: Sequence[SimResult]) -> bool:
    return len({str(one.what.get(field)) for one in results}) > 1


def _draw_use(axes: Axes, rows: Sequence[tuple[str, UseOfTime]]) -> None:
    places = range(len(rows))
    uses = [use for _, use in rows]
    begins = [0.0] * len(uses)
    parts = (
        ("main job", _MAIN, [use.main for use in uses]),
        ("fill jobs (as if alone)", _FILL, [use.fill for use in uses]),
        ("bubbles not used", _UNUSED, [use.unused for use in uses]),
        ("down", _DOWN, [use.down for use in uses]),
        ("no main job", "white", [use.idle for use in uses]),
    )
    for label, colour, widths in parts:
        if any(width > 0.0005 for width in widths):
            widths_pc = [100 * width for width in widths]
            axes.barh(places, widths_pc, left=begins, color=colour, edgecolor="#999999", linewidth=0.4, label=label)
        begins = [begin + 100 * width for begin, width in zip(begins, widths, strict=True)]
    for place, use in zip(places, uses, strict=True):
        axes.text(101, place, f"{amount(use.gpus_worth)} GPUs' worth", va="center", fontsize=8, color=_INK)
    axes.set(xlim=(0, 100), xlabel="% of the devices' time")
    axes.set_title("Where the time goes", loc="left", fontsize=10, color=_INK)
    _label_rows(axes, rows)


def _draw_completion(axes: Axes, rows: Sequence[tuple[str, Completion | None]]) -> None:
    longest_s = max((its.p95_s for _, its in rows if its), default=1.0)
    scale_s, unit, _ = time_unit(longest_s)
    labelled = False
    for place, (_, its) in enumerate(rows):
        if its is None:
            axes.text(0, place, " none succeeded", va="center", fontsize=8, color=_INK)
            continue
        median, p95 = its.median_s / scale_s, its.p95_s / scale_s
        axes.barh(place, p95, color=_P95, height=0.35, label=None if labelled else "95% are done")
        axes.barh(place, median, color=_MEDIAN, height=0.6, label=None if labelled else "half are done")
        labelled = True
    axes.set(xlabel=f"{unit}s from arrival to success")
    axes.set_xlim(left=0)
    axes.set_title("Completion times of fill jobs", loc="left", fontsize=10, color=_INK)
    _label_rows(axes, rows)


def _label_rows(axes: Axes, rows: Sequence[tuple[str, object]]) -> None:
    axes.set_yticks(range(len(rows)), [label for label, _ in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
