"""A run's iterations as a trace for Perfetto or chrome://tracing (Trace Event Format, JSON object form)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import write_text
from megatron.fill.report.schema import AccountReport
from megatron.fill.report.window import Window, choose_window, near
from megatron.fill.types import Bubble, BubbleUse, RankRecord, WorkerRecord

_MAIN, _BUBBLES, _SIDE = 1, 2, 3
_THREADS = {_MAIN: "main job", _BUBBLES: "bubbles", _SIDE: "side task"}
_GIB = 2**30


def write_trace(
    path: Path,
    ranks: Sequence[RankRecord],
    workers: Sequence[WorkerRecord],
    iterations: int = 3,
    *,
    what: str = "",
    accounts: Sequence[AccountReport] = (),
) -> None:
    """Write the trace of a few iterations: one process per rank, with threads main job, bubbles and side task.

    The iterations are the last ones with steps of jobs, or the last ones if there are no steps.

    Args:
        iterations: number of iterations to write.
        what: description of the ranks, if not all are written.
        accounts: accounts of the run; those of the ranks that are written go into ``otherData``.
    """
    ranks = sorted(ranks, key=lambda record: record.info.rank)
    window = choose_window(ranks, workers, iterations)
    events = [event for record in ranks for event in _names(record)]
    if window:
        for record in ranks:
            its = [worker for worker in workers if worker.rank == record.info.rank]
            uses = {use.seq: use for worker in its for use in worker.uses}
            timed = [*_main(record, window), *_bubbles(record, uses, window), *_side(its, window)]
            events += sorted(timed, key=lambda event: (event["tid"], event["ts"], -event["dur"]))
    about: dict[str, Any] = {"source": "PipeFill"} | ({"ranks": what} if what else {})
    numbers = {record.info.rank for record in ranks}
    if its_s := {f"rank {one.rank}": _seconds(one) for one in accounts if one.rank in numbers}:
        about["account_s"] = its_s
    content = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    write_text(path, json.dumps(content, separators=(",", ":")) + "\n")


def _seconds(account: AccountReport) -> dict[str, float]:
    return {one.name: round(one.time_s, 6) for one in account.times}


def _names(record: RankRecord) -> Iterator[dict[str, Any]]:
    info = record.info
    yield _metadata(info.rank, "process_name", name=f"rank {info.rank} (stage {info.stage})")
    yield _metadata(info.rank, "process_sort_index", sort_index=info.rank)
    for thread, name in _THREADS.items():
        yield _metadata(info.rank, "thread_name", thread, name=name)
        yield _metadata(info.rank, "thread_sort_index", thread, sort_index=thread)


def _main(record: RankRecord, window: Window) -> Iterator[dict[str, Any]]:
    rank = record.info.rank
    for item in record.iterations:
        if not window.first <= item.iteration <= window.last:
            continue
        args = {"filling": item.filling, "block": item.block}
        yield from _event(window, rank, _MAIN, f"iteration {item.iteration}", item.start_ns, item.end_ns, args)
    for span in near(record.spans, window):
        args = {"iteration": span.iteration}
        yield from _event(window, rank, _MAIN, span.name, span.start_ns, span.end_ns, args)


def _bubbles(record: RankRecord, uses: dict[int, BubbleUse], window: Window) -> Iterator[dict[str, Any]]:
    for bubble in near(record.bubbles, window):
        args = _bubble_args(bubble, uses.get(bubble.seq))
        rank, name = record.info.rank, str(bubble.kind)
        yield from _event(window, rank, _BUBBLES, name, bubble.start_ns, bubble.end_ns, args)


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


def _side(workers: Sequence[WorkerRecord], window: Window) -> Iterator[dict[str, Any]]:
    for worker in workers:
        for start_ns, end_ns in worker.steps:
            yield from _event(window, worker.rank, _SIDE, worker.job, start_ns, end_ns, {})


def _event(
    window: Window, rank: int, thread: int, name: str, start_ns: int, end_ns: int, args: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    placed = window.place(rank, start_ns, end_ns)
    if placed:
        start, duration = placed
        yield {
            "name": name,
            "cat": _THREADS[thread],
            "ph": "X",
            "ts": start / 1e3,
            "dur": duration / 1e3,
            "pid": rank,
            "tid": thread,
            "args": args,
        }


def _metadata(rank: int, kind: str, thread: int = 0, **args: Any) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "ts": 0, "pid": rank, "tid": thread, "args": args}
