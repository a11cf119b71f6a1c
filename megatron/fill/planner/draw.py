"""A picture of execution plans: the bubbles of a cycle and the nodes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.display import counted
from megatron.fill.planner.plan import ExecutionPlan
from megatron.fill.profiles import BubbleCycle, JobProfile

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_KINDS = {"forward": "#56B4E9", "backward": "#0072B2", "optimizer": "#E69F00"}
_OTHER, _TAIL, _RESERVED = "#009E73", "#CC79A7", "#8F8F8F"
_BUBBLE, _HATCH, _INK = "#FAF8F2", "#CFC8B4", "#333333"
_ROWS = 4  # cycles drawn of a plan, at most
_WIDTH_IN, _ROW_IN, _HEAD_IN, _LEGEND_IN = 13.0, 0.42, 0.6, 0.45
_LANES_IN = 11.8  # about the width of the lanes
_CHARACTER_IN = 0.072
_GAP, _GAPS = 0.006, 0.15  # largest gap between two bubbles, and largest sum of the gaps, as shares of all bubble time
_EDGE_IN = 0.05  # a narrower node would be all edge
_MARGIN = 0.1  # space above and below a lane, as a share of a row

type _Bar = tuple[int, tuple[float, float], str]  # row, start and length in ns, colour


@dataclass(frozen=True, slots=True)
class DrawnJob:
    """A job with its plan."""

    name: str
    plan: ExecutionPlan
    profile: JobProfile


@dataclass(frozen=True, slots=True)
class Panel:
    """The panel of one rank: a job in its bubbles, and a second one in their tails."""

    title: str
    cycle: BubbleCycle
    job: DrawnJob
    tail: DrawnJob | None = None  # with a plan for ``leftover(cycle, job.plan, job.profile)``


def draw_plans(path: Path, panels: Sequence[Panel]) -> None:
    """Draw a PNG with a panel for each plan and a row for each of its first cycles.

    Bubbles are drawn side by side, without the training's compute between them.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    rows = [min(_ROWS, panel.job.plan.cycles) for panel in panels]
    height_in = _ROW_IN * sum(rows) + _HEAD_IN * len(panels) + _LEGEND_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=110, facecolor="white", layout="constrained")
    for axes, panel in zip(figure.subplots(len(panels), height_ratios=rows, squeeze=False).flat, panels, strict=True):
        _draw_panel(axes, panel)
    kinds = dict.fromkeys(_kind(node.name) for panel in panels for node in panel.job.profile.nodes)
    patches = [Patch(facecolor=_KINDS.get(kind, _OTHER), label=kind) for kind in kinds]
    if any(panel.tail for panel in panels):
        patches.append(Patch(facecolor=_TAIL, label="second job, in the tails"))
    if any(panel.job.plan.reserve_ns for panel in panels):
        patches.append(Patch(facecolor=_RESERVED, label="reserved to wake up and pause"))
    patches.append(Patch(facecolor=_BUBBLE, edgecolor=_HATCH, hatch="////", label="left over"))
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches), frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _draw_panel(axes: Axes, panel: Panel) -> None:
    slots, rows = panel.cycle.slots, min(_ROWS, panel.job.plan.cycles)
    gap = min(_GAP, _GAPS / len(slots)) * panel.cycle.bubble_ns
    begins = [0.0, *accumulate(slot.duration_ns + gap for slot in slots)]
    width = begins.pop() - gap
    inches = _LANES_IN / width  # per ns
    filled_to = {(row, bubble): begin for row in range(rows) for bubble, begin in enumerate(begins)}
    bars = _lay(panel.job, filled_to, len(slots), _EDGE_IN / inches)
    if panel.tail:
        bars += [(row, span, _TAIL) for row, span, _ in _lay(panel.tail, filled_to, len(slots), _EDGE_IN / inches)]
    for row in range(rows):
        lane = (row + _MARGIN, 1 - 2 * _MARGIN)
        spans = [(begin, float(slot.duration_ns)) for begin, slot in zip(begins, slots, strict=True)]
        axes.broken_barh(spans, lane, facecolor=_BUBBLE, edgecolor=_HATCH, hatch="////", linewidth=0.5)
        for colour in {colour for at, _, colour in bars if at == row}:
            spans = [span for at, span, its in bars if at == row and its == colour]
            edges = [0.6 if length * inches > _EDGE_IN else 0.0 for _, length in spans]
            axes.broken_barh(spans, lane, facecolor=colour, edgecolor="white", linewidth=edges)
    for begin, slot in zip(begins, slots, strict=True):
        text = f"{slot.kind}\n{slot.duration_ns / 1e6:.3g} ms"
        if slot.duration_ns * inches > max(map(len, text.split("\n"))) * _CHARACTER_IN:
            middle = begin + slot.duration_ns / 2
            axes.text(middle, rows + 0.05, text, ha="center", va="top", fontsize=8, color=_INK)
    axes.set_title(_title(panel), loc="left", fontsize=10, color=_INK)
    axes.set(xlim=(0, width), ylim=(rows, 0), xticks=[])
    axes.set_yticks([row + 0.5 for row in range(rows)], [f"cycle {row + 1}" for row in range(rows)], fontsize=9)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _lay(job: DrawnJob, filled_to: dict[tuple[int, int], float], bubbles: int, narrow_ns: float) -> list[_Bar]:
    """Return a bar for each node in the drawn rows, or one bar for a run of narrow nodes of the same colour.

    ``filled_to``, the end of the bars so far by row and bubble, is advanced.
    """
    bars: list[_Bar] = []
    nodes = job.profile.nodes
    for chunk in job.plan.chunks():
        # A tail's cycle spans all cycles of the first job's plan.
        place = divmod(chunk.cycle * len(job.plan.counts[0]) + chunk.bubble, bubbles)
        if place not in filled_to:
            continue
        at = filled_to[place]
        if job.plan.reserve_ns:
            bars.append((place[0], (at, job.plan.reserve_ns), _RESERVED))
            at += job.plan.reserve_ns
        upcoming = (nodes[(chunk.first + offset) % len(nodes)] for offset in range(chunk.count))
        for (kind, narrow), alike in groupby(upcoming, lambda it: (_kind(it.name), it.duration_ns < narrow_ns)):
            durations_ns = [node.duration_ns for node in alike]
            for duration_ns in [sum(durations_ns)] if narrow else durations_ns:
                bars.append((place[0], (at, duration_ns), _KINDS.get(kind, _OTHER)))
                at += duration_ns
        filled_to[place] = at
    return bars


def _kind(name: str) -> str:
    return next((kind for kind in _KINDS if name.startswith(kind)), "other nodes")


def _title(panel: Panel) -> str:
    plan = panel.job.plan
    title = f"{panel.title}: {panel.job.name} ({plan.configuration}), "
    title += f"{counted(plan.iterations, 'iteration')} in {counted(plan.cycles, 'cycle')}"
    if plan.cycles > _ROWS:
        title += f", of which {_ROWS} are shown"
    return title + (f"; in the tails {panel.tail.name} ({panel.tail.plan.configuration})" if panel.tail else "")
