"""A picture of a run's iterations: each rank's compute, its bubbles, and the steps of jobs in them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.fill.linux.files import replacing
from megatron.fill.report.schema import AccountReport, Summary
from megatron.fill.report.shares import add_legend, draw_shares, height_in
from megatron.fill.report.window import Shown, Window
from megatron.fill.types import Bubble, Iteration, RankInfo, RankRecord, Span, WorkerRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, which colour-blind readers can tell apart: blues for the training, the rest for jobs.
_FORWARD, _BACKWARD, _OTHER = "#56B4E9", "#0072B2", "#8F8F8F"
_BUBBLE, _BUBBLE_HATCH, _INK = "#FAF8F2", "#CFC8B4", "#333333"
_JOBS, _OTHER_JOBS = ("#E69F00", "#009E73", "#CC79A7", "#D55E00"), "#F0E442"
_ITERATIONS = 2  # that are drawn
_DPI = 150
_WIDTH_IN, _LEFT_IN, _RIGHT_IN, _TOP_IN, _BOTTOM_IN, _ROW_IN = 13.0, 0.95, 0.25, 0.78, 1.0, 0.66
_AXES_IN = _WIDTH_IN - _LEFT_IN - _RIGHT_IN
_LEGEND_IN = 0.47  # its top, from the figure's bottom
_LANE_TOP, _LANE, _SIDE_TOP, _SIDE = 0.08, 0.5, 0.62, 0.26  # in rows; a row is one rank
_CHARACTER_IN = 0.075  # width of a letter of a bubble's label
_VISIBLE_EDGE_IN = 0.04  # a narrower bar would be all edge
_OVERRUN_ALPHA = 0.3  # a step outside of bubbles: on a CPU it mostly waits for the core there
_JOIN_IN = 0.012  # steps less than a pixel apart are drawn as one
_NUMBER_IN = 0.95  # width of an iteration's number
_NAME_LENGTH = 26
_TITLE = 105  # letters of a title in full size


type Bar = tuple[float, float]  # start and width


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The bars of one rank, in ms from the window's start."""

    iterations: list[tuple[int, Bar]] = field(default_factory=list)
    passes: defaultdict[str, list[tuple[Bar, str]]] = field(default_factory=lambda: defaultdict(list))  # by name
    bubbles: list[tuple[Bar, str]] = field(default_factory=list)
    steps: defaultdict[str, list[Bar]] = field(default_factory=lambda: defaultdict(list))  # by job

    @property
    def other(self) -> list[Bar]:
        """The rest of the iterations."""
        known = [*self.passes["forward"], *self.passes["backward"], *self.bubbles]
        return subtract([bar for _, bar in self.iterations], [bar for bar, _ in known])


def draw_timeline(
    path: Path, shown: Shown, summary: Summary | None = None, accounts: Sequence[AccountReport] = ()
) -> None:
    """Draw a PNG with two lanes per rank: the training with its bubbles, and the jobs' steps; below, the whole run.

    The title has figures of the summary.  The last account is that of all ranks, of which the shown ones are drawn.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks, window = shown.ranks, shown.window(_ITERATIONS)
    numbers = {None, *(record.info.rank for record in ranks)}
    its_accounts = [one for one in accounts if one.rank in numbers]
    its_accounts = its_accounts if window and len(its_accounts) > 1 else []
    below = height_in(its_accounts)
    height = _TOP_IN + _BOTTOM_IN + _ROW_IN * (len(ranks) if window else 0) + below
    figure = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI)
    FigureCanvasAgg(figure)
    if window is None:
        figure.text(0.5, 0.5, "No iteration was recorded on all ranks.", ha="center", va="center")
    else:
        lanes = [_lanes(record, shown.workers, window) for record in ranks]
        colours, legend = _job_colours(lanes)
        bottom, tall = (_BOTTOM_IN + below) / height, _ROW_IN * len(ranks) / height
        axes = figure.add_axes((_LEFT_IN / _WIDTH_IN, bottom, _AXES_IN / _WIDTH_IN, tall))
        for row, its in enumerate(lanes):
            _draw_main(axes, row, its, window)
            _draw_side(axes, row, its, colours, window)
        _dress_axes(axes, [record.info for record in ranks], lanes[0], window)
        _add_legend(figure, legend, below)
        if its_accounts:
            draw_shares(figure, its_accounts, _LEFT_IN, _RIGHT_IN)
        title = _title(window, summary, shown.what)
        size = min(12, 12 * _TITLE / len(title))
        figure.text(_LEFT_IN / _WIDTH_IN, 1 - 0.28 / height, title, fontsize=size, weight="bold", va="center")
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _lanes(record: RankRecord, workers: Sequence[WorkerRecord], window: Window) -> _Lanes:
    """Return a rank's bars; of one chunk, passes are labelled with their microbatch's number."""
    lanes, counts = _Lanes(), Counter[tuple[str, int]]()
    numbered = record.schedule is None or record.schedule.chunks == 1
    for one, start_ns, duration_ns in window.events(record, workers):
        bar = start_ns / 1e6, duration_ns / 1e6
        match one:
            case Iteration():
                lanes.iterations.append((one.iteration, bar))
            case Span():
                counts[one.name, one.iteration] += 1
                lanes.passes[one.name].append((bar, str(counts[one.name, one.iteration]) if numbered else ""))
            case Bubble():
                lanes.bubbles.append((bar, f"eval {one.kind}" if one.forward_only else str(one.kind)))
            case _:
                lanes.steps[one.job].append(bar)
    return lanes


def _draw_main(axes: Axes, row: int, lanes: _Lanes, window: Window) -> None:
    lane = (row + _LANE_TOP, _LANE)
    _bars(axes, lanes.other, lane, window, facecolors=_OTHER)
    for name, colour in (("forward", _FORWARD), ("backward", _BACKWARD)):
        passes = lanes.passes[name]
        bars = [bar for bar, _ in passes]
        _bars(axes, bars, lane, window, facecolors=colour)
        most = max((len(label) for _, label in passes), default=0) + 0.5
        if all(width * _scale(window) > most * _CHARACTER_IN for _, width in bars):  # all numbers or none
            for bar, label in passes:
                _write(axes, row, bar, label, color="white")
    waits = [bar for bar, _ in lanes.bubbles]
    axes.broken_barh(waits, lane, facecolors=_BUBBLE, edgecolors=_BUBBLE_HATCH, hatch="////", linewidth=0.4)
    box = {"boxstyle": "round,pad=0.12", "facecolor": _BUBBLE, "edgecolor": "none"}
    for bar, label in lanes.bubbles:
        if bar[1] * _scale(window) > (len(label) + 1.5) * _CHARACTER_IN:
            _write(axes, row, bar, label, color=_INK, bbox=box)
    for _, (start, width) in lanes.iterations:
        top, bottom = row + _LANE_TOP, row + _SIDE_TOP + _SIDE
        axes.vlines([start, start + width], top, bottom, colors=_INK, linewidth=0.9, clip_on=False)


def _write(axes: Axes, row: int, bar: Bar, label: str, **style: Any) -> None:
    at = (bar[0] + bar[1] / 2, row + _LANE_TOP + _LANE / 2)
    axes.text(*at, label, fontsize=7.5, ha="center", va="center", **style)


def _draw_side(axes: Axes, row: int, lanes: _Lanes, colours: dict[str, str], window: Window) -> None:
    lane = (row + _SIDE_TOP, _SIDE)
    waits = [bar for bar, _ in lanes.bubbles]
    for job, steps in lanes.steps.items():
        bars = join(steps, _JOIN_IN / _scale(window))
        overruns = subtract(bars, waits)
        for part, alpha in ((subtract(bars, overruns), 1.0), (overruns, _OVERRUN_ALPHA)):
            _bars(axes, part, lane, window, facecolors=colours[job], alpha=alpha)


def _scale(window: Window) -> float:
    """Inches per millisecond."""
    return _AXES_IN / (window.duration_ns / 1e6)


def _bars(axes: Axes, bars: Sequence[Bar], lane: Bar, window: Window, **style: Any) -> None:
    narrowest = min((width for _, width in bars), default=0.0)
    edge = 0.5 if narrowest * _scale(window) > _VISIBLE_EDGE_IN else 0.0
    axes.broken_barh(bars, lane, edgecolors="white", linewidth=edge, **style)


def _job_colours(lanes: Iterable[_Lanes]) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """Return the colour of each visible job and the legend's entries; only the busiest jobs have their own colours."""
    busy: defaultdict[str, float] = defaultdict(float)
    for its in lanes:
        for job, steps in its.steps.items():
            busy[job] += sum(width for _, width in steps)
    jobs = sorted(busy, key=lambda job: (-busy[job], job))
    colours = dict(zip(sorted(jobs[: len(_JOBS)]), _JOBS, strict=False))
    legend = [(f"side task: {_shorten(job)}", colour) for job, colour in colours.items()]
    if len(jobs) > len(_JOBS):
        legend.append((f"{len(jobs) - len(_JOBS)} other side tasks", _OTHER_JOBS))
    return dict.fromkeys(jobs, _OTHER_JOBS) | colours, legend


def _shorten(name: str) -> str:
    """Shorten a long name in its middle: names often differ in their last characters only."""
    half = _NAME_LENGTH // 2
    return name if len(name) <= _NAME_LENGTH else f"{name[:half]}…{name[-half + 1 :]}"


def _dress_axes(axes: Axes, infos: Sequence[RankInfo], first: _Lanes, window: Window) -> None:
    axes.set_xlim(0, window.duration_ns / 1e6)
    axes.set_ylim(len(infos), 0)
    middles = [row + _LANE_TOP + (_LANE + _SIDE) / 2 for row in range(len(infos))]
    axes.set_yticks(middles, [f"rank {info.rank}\nstage {info.stage}" for info in infos], fontsize=9)
    axes.set_xlabel(f"ms from the start of iteration {window.first}", fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=9)
    axes.grid(axis="x", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    above: dict[str, Any] = {"xytext": (0, 3), "textcoords": "offset points"}
    for number, (start, width) in first.iterations:
        if width * _scale(window) >= _NUMBER_IN:
            axes.annotate(f"iteration {number}", (start + width / 2, 0), **above, ha="center", fontsize=9, color=_INK)


def _add_legend(figure: Figure, jobs: Iterable[tuple[str, str]], below_in: float) -> None:
    from matplotlib.patches import Patch

    entries = {"forward": _FORWARD, "backward": _BACKWARD, "other compute": _OTHER}
    handles = [Patch(facecolor=colour, label=label) for label, colour in entries.items()]
    handles.append(Patch(facecolor=_BUBBLE, edgecolor=_BUBBLE_HATCH, hatch="////", label="bubble"))
    handles += [Patch(facecolor=colour, label=label) for label, colour in jobs]
    if handles[-1].get_label() != "bubble":
        handles.append(Patch(facecolor=_INK, alpha=_OVERRUN_ALPHA, label="pale: a step outside of bubbles"))
    place = (_LEFT_IN / _WIDTH_IN, (_LEGEND_IN + below_in) / figure.get_figheight())
    columns = len(handles) if len(handles) <= 6 else (len(handles) + 1) // 2
    add_legend(figure, handles, place, ncols=columns, fontsize=9)


def _title(window: Window, summary: Summary | None, what: str) -> str:
    several = window.last > window.first
    parts = [f"Iterations {window.first} to {window.last}" if several else f"Iteration {window.first}"]
    if what:
        parts.append(what)
    if summary and summary.harvest_ratio is not None:
        parts.append(f"bubble time used in the run {summary.harvest_ratio:.1%}")
    if summary and summary.slowdown:
        low, high = summary.slowdown.ci95
        parts.append(f"main job slowdown {summary.slowdown.mean:+.2%} [{low:+.2%}, {high:+.2%}]")
    return "   ·   ".join(parts)


def subtract(bars: Iterable[Bar], taken: Iterable[Bar]) -> list[Bar]:
    """Subtract the intervals in ``taken`` from ``bars``."""
    holes = sorted((start, start + width) for start, width in taken)
    rest = []
    for start, width in bars:
        at, end = start, start + width
        for hole_start, hole_end in holes:
            if at < hole_start < end:
                rest.append((at, hole_start - at))
            if hole_start < end:
                at = max(at, hole_end)
        if at < end:
            rest.append((at, end - at))
    return rest


def join(bars: Iterable[Bar], gap: float) -> list[Bar]:
    """Merge narrow bars (below ``3 * gap``) into the bar before them where less than ``gap`` separates the two."""
    joined: list[Bar] = []
    for start, width in sorted(bars):
        if joined and width < 3 * gap and start - sum(joined[-1]) < gap:
            begin = joined[-1][0]
            joined[-1] = (begin, start + width - begin)
        else:
            joined.append((start, width))
    return joined
