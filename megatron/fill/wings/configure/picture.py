"""A picture of the best configurations: the time of each, by stage, with the bubbles in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.fill.linux.files import replacing
from megatron.fill.types import BubbleKind
from megatron.fill.wings.configure.value import Valued
from megatron.fill.wings.mainjob.parallel import Parallel, Recompute

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _BUSY, _STEP = "#333333", "#4C78A8", "#B8C4D0"
_BUBBLES = {
    BubbleKind.FILL: "#F2A541",
    BubbleKind.FWD_BWD: "#E4572E",
    BubbleKind.INTERIOR: "#F6D55C",
    BubbleKind.DRAIN: "#C98A2B",
}
_MOST_STAGES = 16  # of one configuration; of more, some are left out
_GAP = 0.35  # between configurations, of their height
_ROW_IN, _WIDE_IN = 0.55, 11.0


def draw_best(path: Path, best: Sequence[Valued]) -> None:
    """Draw a PNG: a row for each configuration, with a line for each of its stages, in seconds of one iteration.

    Raises:
        OSError: the file cannot be written.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(_WIDE_IN, 1.4 + _ROW_IN * len(best)), dpi=110, facecolor="white", layout="constrained")
    axes = figure.subplots()
    for row, one in enumerate(best):
        _draw(axes, row, one)
    longest_s = max(one.proposal.iteration_s for one in best)
    axes.set(ylim=(len(best) - _GAP / 2, -_GAP / 2), xlim=(0, 1.42 * longest_s))
    axes.set_yticks([row + (1 - _GAP) / 2 for row in range(len(best))], [_name(one.proposal.parallel) for one in best])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.set_xlabel("seconds; a line for each stage", color=_INK)
    axes.spines[["top", "right", "left"]].set_visible(False)
    patches = [Patch(color=_BUSY, label="passes"), Patch(color=_STEP, label="optimizer, reduction")]
    patches += [Patch(color=colour, label=f"bubble: {kind}") for kind, colour in _BUBBLES.items()]
    figure.legend(handles=patches, loc="outside upper left", ncols=len(patches), fontsize=8, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png")


def _draw(axes: Axes, row: int, one: Valued) -> None:
    its = one.proposal
    line = its.timeline
    step = -(-len(line.spans) // _MOST_STAGES)
    stages = range(0, len(line.spans), step)
    high = (1 - _GAP) / len(stages)
    for place, stage in enumerate(stages):
        where = row + place * high, 0.9 * high
        first, last = line.spans[stage][0].start_ns, line.spans[stage][-1].end_ns
        axes.broken_barh([(0, line.period_ns / 1e9)], where, color=_STEP, linewidth=0)
        axes.broken_barh([(first / 1e9, (last - first) / 1e9)], where, color=_BUSY, linewidth=0)
        for kind, colour in _BUBBLES.items():
            waits = [(wait.start_ns / 1e9, wait.duration_ns / 1e9) for wait in line.waits[stage] if wait.kind is kind]
            axes.broken_barh(waits, where, color=colour, linewidth=0)
    text = f"{its.iteration_s:.3g} s, {its.bubble_share:.1%} bubbles, fill {one.gpus_worth:.3g}, "
    text += f"{its.peak_bytes / 2**30:.1f} GiB"
    middle = row + (1 - _GAP) / 2
    axes.annotate(text, (its.iteration_s, middle), (6, 0), textcoords="offset points", va="center", fontsize=8)


def _name(its: Parallel) -> str:
    """The sizes that are not 1."""
    sizes = {"tp": its.tp, "pp": its.pp, "vpp": its.chunks, "dp": its.dp, "cp": its.cp, "ep": its.ep}
    parts = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    parts.append(f"mb {its.microbatch}")
    if its.recompute is not Recompute.NONE:
        parts.append(f"{its.recompute} recompute")
    return ", ".join(parts)
