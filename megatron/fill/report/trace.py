"""A run's iterations as a trace for Perfetto or chrome://tracing (Trace Event Format, JSON object form)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import write_text
from megatron.fill.report.schema import AccountReport
from megatron.fill.report.window import Event, Shown, Step
from megatron.fill.types import Bubble, BubbleUse, Iteration, RankRecord, Span

_MAIN, _BUBBLES, _SIDE = 1, 2, 3
_THREADS = {_MAIN: "main job", _BUBBLES: "bubbles", _SIDE: "side task"}
_GIB = 2**30


def write_trace(path: Path, shown: Shown, accounts: Sequence[AccountReport] = ()) -> None:
    """Write the trace of a few iterations: one process per rank, with threads main job, bubbles and side task.

    Of the run's ``accounts``, those of the ranks that are written go into ``otherData``.
    """
    window = shown.window(shown.iterations)
    events = [event for record in shown.ranks for event in _names(record)]
    for record in shown.ranks:
        if window is None:
            break
        rank, timed = record.info.rank, list[dict[str, Any]]()
        uses = {use.seq: use for worker in shown.workers if worker.rank == rank for use in worker.uses}
        for one, start_ns, duration_ns in window.events(record, shown.workers):
            thread, name, args = _described(one, uses)
            named = {"name": name, "cat": _THREADS[thread], "ph": "X"}
            when = {"ts": start_ns / 1e3, "dur": duration_ns / 1e3}
            timed.append({**named, **when, "pid": rank, "tid": thread, "args": args})
        events += sorted(timed, key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    about: dict[str, Any] = {"source": "PipeFill"} | ({"ranks": shown.what} if shown.what else {})
    numbers = {record.info.rank for record in shown.ranks}
    if its_s := {
        f"rank {one.rank}": {its.name: round(its.time_s, 6) for its in one.times}
        for one in accounts
        if one.rank in numbers
    }:
        about["account_s"] = its_s
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_text(path, json.dumps(content, separators=(",", ":")) + "\n")


def _names(record: RankRecord) -> Iterator[dict[str, Any]]:
    info = record.info
    yield _metadata(info.rank, "process_name", name=f"rank {info.rank} (stage {info.stage})")
    yield _metadata(info.rank, "process_sort_index", sort_index=info.rank)
    for thread, name in _THREADS.items():
        yield _metadata(info.rank, "thread_name", thread, name=name)
        yield _metadata(info.rank, "thread_sort_index", thread, sort_index=thread)


def _described(one: Event, uses: Mapping[int, BubbleUse]) -> tuple[int, str, dict[str, Any]]:
    """Return the thread, name and arguments of an event; ``uses`` are those of bubbles, by their numbers."""
    match one:
        case Iteration():
            return _MAIN, f"iteration {one.iteration}", {"filling": one.filling, "block": one.block}
        case Span():
            return _MAIN, one.name, {"iteration": one.iteration}
        case Bubble():
            return _BUBBLES, str(one.kind), _bubble_args(one, uses.get(one.seq))
        case Step():
            return _SIDE, one.job, {}


def _bubble_args(bubble: Bubble, use: BubbleUse | None) -> dict[str, Any]:
    args: dict[str, Any] = {
        "iteration": bubble.iteration,
        "index": bubble.index,
        "predicted_ms": bubble.predicted_ns / 1e6,
        "seq": bubble.seq,
        "filling": bubble.filling,
        "evaluation": bubble.forward_only,
        "free_gib": round(bubble.free_bytes / _GIB, 3),
    }
    if bubble.seq and use:
        args |= {"steps": use.steps, "harvested_ms": use.harvested_ns / 1e6, "overrun_us": use.overrun_ns / 1e3}
        if use.latency_ns >= 0:
            args["open_to_step_us"] = use.latency_ns / 1e3
    return args


def _metadata(rank: int, kind: str, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": args}
