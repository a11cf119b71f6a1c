"""Picture of a plan: the graph of its stages, and the timeline of their passes and bubbles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.display import counted
from megatron.fill.linux.files import replacing
from megatron.fill.pipeline.schedule import Pass
from megatron.fill.wings.graph.plan import Plan
from megatron.fill.wings.graph.timeline import GraphTimeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_FORWARD, _BACKWARD, _REDUCE = "#56B4E9", "#0072B2", "#CC79A7"
_BUBBLE, _HATCH, _INK, _EDGE = "#FAF8F2", "#CFC8B4", "#333333", "#8F8F8F"
_WIDTH_IN, _ROW_IN, _LANE_IN, _HEAD_IN, _FOOT_IN, _LEFT_IN = 13.0, 0.26, 0.62, 0.5, 0.85, 0.95
_BOX_WIDTH, _BOX_HEIGHT = 0.74, 0.74  # as shares of a column and a lane
_CHARACTER_IN = 0.068
_NARROW_IN = 0.05  # a narrower pass would be all edge


def draw_plan(path: Path, timeline: GraphTimeline) -> None:
    """Draw a PNG: a box per stage, from left to right, and below them a row per stage over one iteration."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    plan = timeline.plan
    places = _places(plan)
    lanes = 1 + max(lane for _, lane in places)
    boxes_in, rows_in = max(0.8, lanes * _LANE_IN), len(plan.stages) * _ROW_IN
    height_in = 2 * _HEAD_IN + boxes_in + rows_in + _FOOT_IN
    figure = Figure(figsize=(_WIDTH_IN, height_in), dpi=110, facecolor="white")
    left, width = _LEFT_IN / _WIDTH_IN, 1 - (_LEFT_IN + 0.25) / _WIDTH_IN
    bottom_in = height_in - _HEAD_IN - boxes_in
    _draw_stages(figure.add_axes((0.02, bottom_in / height_in, 0.96, boxes_in / height_in)), plan, places)
    _draw_time(figure.add_axes((left, _FOOT_IN / height_in, width, rows_in / height_in)), timeline)
    patches = [
        Patch(facecolor=_FORWARD, label="forward"),
        Patch(facecolor=_BACKWARD, label="backward"),
        Patch(facecolor=_BUBBLE, edgecolor=_HATCH, hatch="////", label="bubble"),
    ]
    if any(timeline.reduce_ns):
        patches.insert(2, Patch(facecolor=_REDUCE, label="all-reduce"))
    figure.legend(handles=patches, loc="lower left", ncols=len(patches), frameon=False, fontsize=9)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _places(plan: Plan) -> list[tuple[int, int]]:
    """Return a column and a lane for each stage: columns by distance from the end, one lane per branch."""
    count, targets, ahead = len(plan.stages), plan.successors, plan.after
    deepest = max(ahead)
    lanes: list[int] = [-1] * count
    taken: set[tuple[int, int]] = set()
    for stage in reversed(range(count)):
        column = deepest - ahead[stage]
        wanted = [lanes[to] for to in targets[stage] if ahead[to] == ahead[stage] - 1]
        lane = min(wanted, default=0)
        while (column, lane) in taken or (lane not in wanted and any(lane == at for _, at in taken)):
            lane += 1
        taken.add((column, lane))
        lanes[stage] = lane
    firsts = list(dict.fromkeys(lanes))  # the branch of the first stage on top
    return [(deepest - ahead[stage], firsts.index(lanes[stage])) for stage in range(count)]


def _draw_stages(axes: Axes, plan: Plan, places: list[tuple[int, int]]) -> None:
    from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

    columns, lanes = 1 + max(column for column, _ in places), 1 + max(lane for _, lane in places)
    for source, target in plan.edges:
        (x, y), (to_x, to_y) = places[source], places[target]
        begin, end = (x + _BOX_WIDTH / 2, y), (to_x - _BOX_WIDTH / 2, to_y)
        axes.add_patch(FancyArrowPatch(begin, end, arrowstyle="-|>", mutation_scale=9, color=_EDGE, linewidth=0.9))
    characters = int(0.96 * _WIDTH_IN * _BOX_WIDTH / columns / _CHARACTER_IN) - 1
    for number, (stage, (x, y)) in enumerate(zip(plan.stages, places, strict=True)):
        corner = (x - _BOX_WIDTH / 2, y - _BOX_HEIGHT / 2)
        style = "round,pad=0,rounding_size=0.06"
        axes.add_patch(
            FancyBboxPatch(corner, _BOX_WIDTH, _BOX_HEIGHT, boxstyle=style, facecolor="#EAF4FB", edgecolor=_BACKWARD)
        )
        ends = list(dict.fromkeys((stage.operators[0], stage.operators[-1])))
        name = " … ".join(ends)
        if len(name) > characters:
            name = f"{ends[0][: max(3, characters - 1)]}…" if characters > 3 else ""
        sizes = f"{number}: {len(stage.devices)} x {stage.micro_batch // len(stage.devices)}"
        text = f"{sizes}\n{name}" if characters > 6 else f"{number}"
        axes.text(x, y, text, ha="center", va="center", fontsize=7.5, color=_INK)
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(lanes - 0.5, -0.5), xticks=[], yticks=[])
    kind = "sequential pipeline" if plan.sequential else "graph of stages"
    sizes = f"{counted(plan.devices, 'device')}, {counted(plan.batch, 'sample')}"
    title = f"{plan.graph.name}, {kind} on {sizes}: stage, devices x samples on each"
    axes.set_title(title, loc="left", fontsize=10, color=_INK)
    axes.spines[:].set_visible(False)


def _draw_time(axes: Axes, timeline: GraphTimeline) -> None:
    scale, unit = (1e6, "ms") if timeline.period_ns < 2e9 else (1e9, "s")
    inches = (_WIDTH_IN - _LEFT_IN - 0.25) / (timeline.period_ns / scale)
    for row, spans in enumerate(timeline.spans):
        lane = (row + 0.1, 0.8)
        waits = [(wait.start_ns / scale, wait.duration_ns / scale) for wait in timeline.waits[row]]
        axes.broken_barh(waits, lane, facecolor=_BUBBLE, edgecolor=_HATCH, hatch="////", linewidth=0.0)
        for kind, colour in ((Pass.FORWARD, _FORWARD), (Pass.BACKWARD, _BACKWARD)):
            bars = [((s.start_ns) / scale, (s.end_ns - s.start_ns) / scale) for s in spans if s.op.kind is kind]
            edges = [0.5 if length * inches > _NARROW_IN else 0.0 for _, length in bars]
            axes.broken_barh(bars, lane, facecolor=colour, edgecolor="white", linewidth=edges)
        if reduce_ns := timeline.reduce_ns[row]:
            axes.broken_barh([(spans[-1].end_ns / scale, reduce_ns / scale)], lane, facecolor=_REDUCE)
    share = f"{timeline.bubble_share():.0%}"
    axes.set(
        xlim=(0, timeline.period_ns / scale), ylim=(len(timeline.spans), 0), xlabel=f"{unit} from the iteration's start"
    )
    axes.set_title(
        f"One iteration: {timeline.period_ns / scale:.4g} {unit}, bubbles take {share} of the devices' time",
        loc="left",
        fontsize=10,
        color=_INK,
    )
    labels = [f"stage {row} {timeline.bubble_share(row):3.0%}" for row in range(len(timeline.spans))]
    axes.set_yticks([row + 0.5 for row in range(len(labels))], labels, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right"]].set_visible(False)
