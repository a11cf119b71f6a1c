"""The charts of a run's page, as Vega-Lite specifications; colours suit light and dark."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from megatron.fill.report.schema import Report
from megatron.fill.report.series import Bin
from megatron.fill.report.shares import COLOURS, bars, colour, shown_names
from megatron.fill.report.timeuse import TimeUse
from megatron.fill.report.window import Shown, Step, Window
from megatron.fill.types import Bubble, Span

type Chart = dict[str, Any]

MOST_MARKS = 12_000  # rectangles of the timeline: a browser draws them in a fraction of a second
_COLOURS = {
    "forward": COLOURS["forward"],
    "backward": COLOURS["backward"],
    **{f"{kind} bubble": COLOURS[kind] for kind in ("fill", "fwd-bwd", "interior", "drain")},
    "rest": "#999999",
    "step of a job": "#009e73",
}
_CAUSES = {"it computed": "#0072b2", "its host was late": "#e69f00", "transfer": "#cc79a7"}
_MOST_WAITS = 40  # pairs of ranks, those that waited longest
_ZOOM: Chart = {"name": "zoom", "select": {"type": "interval", "encodings": ["x"]}, "bind": "scales"}


def timeline(shown: Shown) -> Chart | None:
    """Return the last iterations with steps of jobs, as far as marks allow; None if there is none."""
    for count in range(shown.iterations, 0, -1):
        window = shown.window(count)
        marks = [] if window is None else _marks(window, shown)
        if len(marks) <= MOST_MARKS or count == 1:
            break
    if window is None or not marks:
        return None
    rows = {"field": "rank", "type": "nominal", "sort": None, "title": None}
    x = {"field": "from", "type": "quantitative", "title": "ms", "scale": {"domain": [0, window.duration_ns / 1e6]}}
    color = _color([name for name in _COLOURS if name != "rest"])
    tooltip = [{"field": name} for name in ("what", "job", "iteration")]
    tooltip.append({"field": "ms", "format": ".3f"})
    layers = [
        {
            "transform": [{"filter": f"datum.what {relation} 'step of a job'"}],
            "mark": {"type": "bar", "height": {"band": band}, "clip": True},
            "encoding": {"y": rows, "x": x, "x2": {"field": "to"}, "color": color, "tooltip": tooltip},
            **({"params": [_ZOOM]} if band == 0.9 else {}),
        }
        for relation, band in (("!=", 0.9), ("==", 0.45))
    ]
    return {"data": {"values": marks[:MOST_MARKS]}, "height": 34 * len(shown.ranks), "layer": layers}


def _marks(window: Window, shown: Shown) -> list[Chart]:
    found = []
    for record in shown.ranks:
        row = f"rank {record.info.rank}, stage {record.info.stage}"
        for one, start_ns, duration_ns in window.events(record, shown.workers):
            about: Chart
            match one:
                case Span():
                    what, about = one.name, {"iteration": one.iteration}
                case Bubble():
                    what, about = f"{one.kind} bubble", {"iteration": one.iteration}
                case Step():
                    what, about = "step of a job", {"job": one.job}
                case _:
                    continue
            edges = {"from": round(start_ns / 1e6, 4), "to": round(start_ns / 1e6 + duration_ns / 1e6, 4)}
            found.append({"rank": row, "what": what, **edges, "ms": round(duration_ns / 1e6, 4), **about})
    return found


def iteration_parts(parts: Sequence[tuple[int, str, float]]) -> Chart | None:
    """Return the milliseconds of a mean iteration by stage and part; None without any."""
    rows = [{"stage": f"stage {stage}", "what": name, "ms": round(ms, 3)} for stage, name, ms in parts]
    return _stacked(rows, "ms", "ms of an iteration", _color([name for name in _COLOURS if "job" not in name]))


def time_uses(report: Report) -> Chart | None:
    """Return the use of fillable bubble time by stage, in seconds; None if nothing was fillable."""
    rows = [
        {"stage": f"stage {stage.stage}", "what": use, "s": round(stage.time_use_ns[use] / 1e9, 3)}
        for stage in report.stages
        for use in TimeUse
        if stage.time_use_ns.get(use)
    ]
    return _stacked(rows, "s", "s of fillable bubbles", _color(list(TimeUse), {use: use.colour for use in TimeUse}))


def _stacked(rows: list[Chart], field: str, title: str, color: Chart) -> Chart | None:
    if not rows:
        return None
    names = list(color["scale"]["domain"])
    for row in rows:
        row["order"] = names.index(row["what"])
    encoding = {
        "y": {"field": "stage", "type": "nominal", "title": None, "sort": None},
        "x": {"field": field, "type": "quantitative", "title": title},
        "order": {"field": "order"},
        "color": color,
        "tooltip": [{"field": "stage"}, {"field": "what"}, {"field": field}],
    }
    height = 26 * len({row["stage"] for row in rows})
    return {"data": {"values": rows}, "height": height, "mark": "bar", "encoding": encoding}


def waits(report: Report) -> Chart | None:
    """Return whom each rank waited for in its pipeline, and why, in seconds; None if that is not known."""
    rows = [
        {"stage": f"rank {one.rank} for rank {one.peer}", "what": what, "s": round(s, 4)}
        for one in report.waits[:_MOST_WAITS]
        for what, s in zip(_CAUSES, (one.computed_s, one.host_s, one.transfer_s), strict=True)
    ]
    return _stacked(rows, "s", "s of waits", _color(list(_CAUSES), _CAUSES))


def account(report: Report, ranks: Collection[int]) -> Chart | None:
    """Return the shares of each of these ranks' wall time, and of all ranks; None without an account."""
    if not report.account:
        return None
    names = shown_names(report.account)
    rows = [
        {
            "stage": "all ranks" if its.rank is None else f"rank {its.rank}, stage {its.stage}",
            "what": one.name,
            "share": round(one.share, 5),
            "s": round(one.time_s, 3),
        }
        for its in report.account
        if its.rank is None or its.rank in ranks
        for one in bars(its, names)
    ]
    color = _color(names, {name: colour(name) for name in names})
    chart = _stacked(rows, "share", "share of the wall time", color)
    if chart is not None:
        chart["encoding"]["x"] |= {"axis": {"format": "%"}, "scale": {"domain": [0, 1]}}
        chart["encoding"]["tooltip"].append({"field": "s"})
    return chart


def harvest(bins: Sequence[Bin]) -> Chart | None:
    """Return the harvest ratio over the run; None if nothing was fillable."""
    rows = [asdict(one) for one in bins if one.harvest is not None]
    y = {"field": "harvest", "type": "quantitative", "title": "harvest ratio", "axis": {"format": "%"}}
    return _lines(rows, {"y": y, "color": {"value": "#009e73"}})


def iteration_times(bins: Sequence[Bin]) -> Chart | None:
    """Return the mean iteration time over the run, with filling and without; None without iterations."""
    rows = [
        {"iteration": one.iteration, "what": what, "ms": ms}
        for one in bins
        for what, ms in (("filled", one.filled_ms), ("not filled", one.unfilled_ms))
        if ms is not None
    ]
    y = {"field": "ms", "type": "quantitative", "title": "ms of an iteration", "scale": {"zero": False}}
    colour = {
        "field": "what",
        "type": "nominal",
        "title": None,
        "legend": {"orient": "bottom"},
        "scale": {"domain": ["filled", "not filled"], "range": ["#009e73", "#e69f00"]},
    }
    return _lines(rows, {"y": y, "color": colour})


def _lines(rows: list[Chart], encoding: Chart) -> Chart | None:
    if not rows:
        return None
    x = {"field": "iteration", "type": "quantitative", "title": "iteration", "scale": {"nice": False, "zero": False}}
    mark = {"type": "line", "point": len(rows) < 3, "clip": True}
    return {"data": {"values": rows}, "height": 180, "mark": mark, "params": [_ZOOM], "encoding": {"x": x, **encoding}}


def predictions(cells: Sequence[tuple[float, float, float, float, int]]) -> Chart | None:
    """Return measured durations of bubbles over predicted ones; None without predictions."""
    if not cells:
        return None
    names = ("from", "to", "low", "high")
    rows = []
    for *edges, count in cells:
        row: Chart = {name: float(f"{edge:.4g}") for name, edge in zip(names, edges, strict=True)}
        rows.append(row | {"bubbles": count})
    ends = [min(row["from"] for row in rows), max(row["high"] for row in rows)]
    log = {"type": "log", "domain": ends, "nice": False}
    axis = {"type": "quantitative", "scale": log, "axis": {"tickCount": 5, "format": "~g"}}
    cell_layer: Chart = {
        "mark": {"type": "rect"},
        "encoding": {
            "x": {"field": "from", "title": "predicted ms", **axis},
            "x2": {"field": "to"},
            "y": {"field": "low", "title": "measured ms", **axis},
            "y2": {"field": "high"},
            "color": {
                "field": "bubbles",
                "type": "quantitative",
                "scale": {"type": "log", "range": ["#9ecae1", "#08519c"]},
                "legend": None,
            },
            "tooltip": [{"field": name} for name in (*names, "bubbles")],
        },
    }
    line: Chart = {
        "data": {"values": [{"from": end, "low": end} for end in ends]},
        "mark": {"type": "line", "color": "#d55e00", "strokeDash": [4, 3]},
        "encoding": {"x": {"field": "from", **axis}, "y": {"field": "low", **axis}},
    }
    return {"data": {"values": rows}, "height": 260, "layer": [cell_layer, line]}


def _color(names: Sequence[str], colours: Mapping[str, str] = _COLOURS) -> Chart:
    return {
        "field": "what",
        "type": "nominal",
        "title": None,
        "scale": {"domain": list(names), "range": [colours[name] for name in names]},
        "legend": {"orient": "bottom", "columns": {"expr": "width < 500 ? 2 : 5"}, "labelLimit": 140},
    }
