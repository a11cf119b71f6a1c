"""The account of the ranks' time as bars: what the picture and the page draw of it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.fill.account import UNNAMED
from megatron.fill.report.schema import AccountReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

# Blues compute, yellows are bubbles, purples are collectives; the order is that of the bars.
COLOURS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "gradients": "#3f6f8f",
    "optimizer": "#24506d",
    "evaluation": "#a6d4ee",
    "fill": "#f3e2a0",
    "fwd-bwd": "#e8c95c",
    "interior": "#d4a72c",
    "drain": "#a87c00",
    "evaluation wait": "#efe6c8",
    "tensor group": "#cc79a7",
    "data group": "#a14b80",
    "context group": "#dda9c6",
    "expert group": "#7b2d5e",
    "all ranks": "#c9a3c9",
    "other groups": "#5d3a6e",
    "data loading": "#d55e00",
    "save": "#009e73",
    "load": "#7fcdb5",
    "logging": "#b5dccf",
    "host": "#b8b8b8",
    "training loop": "#9a9a9a",
    "start-up": "#7a7a7a",
    "between starts": "#5a5a5a",
    UNNAMED: "#222222",
}
_OTHER = "#e0e0e0"
_LEAST = 0.002  # of all time; names with less are drawn as one
REST = "others"
_ROW_IN, _BAR, _TITLE_IN, _GAP_IN, _LEGEND_ROW_IN, _COLUMNS = 0.2, 0.8, 0.25, 0.1, 0.185, 7
_NAME = 0.012  # share of the width that a letter of a share takes


@dataclass(frozen=True, slots=True)
class Share:
    """A part of a bar: a name, its time, and its share of the bar's wall time."""

    name: str
    time_s: float
    share: float


def colour(name: str) -> str:
    """Return the colour of a name in the account."""
    return COLOURS.get(name, _OTHER)


def ink(name: str) -> str:
    """Return the colour of text on a name's colour: white on a dark one."""
    red, green, blue = bytes.fromhex(colour(name)[1:])
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 150 else "#333333"


def shown_names(accounts: Sequence[AccountReport]) -> list[str]:
    """Return the names with enough time to be drawn, in the bars' order, and ``REST`` if others have any."""
    whole = accounts[-1]
    names = {one.name for one in whole.times if one.share >= _LEAST}
    order = [name for name in COLOURS if name in names] + sorted(names - COLOURS.keys())
    return order + [REST] * any(one.time_s and one.name not in names for one in whole.times)


def bars(account: AccountReport, names: Collection[str]) -> list[Share]:
    """Return a bar: the time of each of ``names``, the last of which is ``REST`` if others have any."""
    times = {one.name: one.time_s for one in account.times}
    found = [Share(name, times.get(name, 0.0), times.get(name, 0.0) / account.wall_s) for name in names if name != REST]
    if REST in names:
        rest_s = sum(time_s for name, time_s in times.items() if name not in names)
        found.append(Share(REST, rest_s, rest_s / account.wall_s))
    return found


def height_in(accounts: Sequence[AccountReport]) -> float:
    """Return the inches that ``draw_shares`` needs; 0 without an account."""
    if not accounts:
        return 0.0
    rows = -(-len(shown_names(accounts)) // _COLUMNS)
    return _TITLE_IN + _ROW_IN * (len(accounts) - 1) + _GAP_IN + _LEGEND_ROW_IN * rows + 0.1


def draw_shares(figure: Figure, accounts: Sequence[AccountReport], left_in: float, right_in: float) -> None:
    """Draw a bar per rank at the figure's bottom, between these inches left and right of it.

    The last account is that of all ranks; its shares are in the legend.
    """
    from matplotlib.patches import Patch

    width, height = figure.get_size_inches()
    names, rows = shown_names(accounts), len(accounts) - 1
    whole = {one.name: one.share for one in bars(accounts[-1], names)}
    top_in = height_in(accounts) - _TITLE_IN
    left, bottom = left_in / width, (top_in - _ROW_IN * rows) / height
    axes = figure.add_axes((left, bottom, (width - left_in - right_in) / width, _ROW_IN * rows / height))
    for row, account in enumerate(accounts[:-1]):
        start = 0.0
        for one in bars(account, names):
            axes.broken_barh([(start, one.share)], (row + (1 - _BAR) / 2, _BAR), facecolors=colour(one.name))
            text = f"{one.share:.0%}"
            if one.share > _NAME * (len(text) + 1):
                middle = start + one.share / 2
                axes.text(middle, row + 0.5, text, fontsize=7, ha="center", va="center", color=ink(one.name))
            start += one.share
    axes.set_xlim(0, 1)
    axes.set_ylim(rows, 0)
    axes.set_yticks([row + 0.5 for row in range(rows)], [f"rank {one.rank}" for one in accounts[:-1]], fontsize=8)
    axes.tick_params(axis="both", length=0)
    axes.set_xticks([])
    for side in axes.spines.values():
        side.set_visible(False)
    wall_s = sum(one.wall_s for one in accounts[:-1]) / rows
    title = f"Where the time of the whole run went: {wall_s:,.0f} s a rank, {accounts[-1].named_share:.1%} named"
    figure.text(left, (top_in + 0.12) / height, title, fontsize=9, weight="bold", va="center")
    handles = [Patch(facecolor=colour(name), label=f"{name} {whole[name]:.1%}") for name in names]
    place = (left, (top_in - _ROW_IN * rows - _GAP_IN) / height)
    add_legend(figure, handles, place, ncols=_COLUMNS, fontsize=8, labelspacing=0.35)


def add_legend(figure: Figure, handles: Sequence[Patch], place: tuple[float, float], **style: Any) -> None:
    """Add a legend without a frame, whose upper left corner is at this place of the figure."""
    style |= {"frameon": False, "borderaxespad": 0, "borderpad": 0, "columnspacing": 1.6, "handlelength": 1.4}
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=place, bbox_transform=figure.transFigure, **style)
