"""A stand-in for a training that only waits: PipeFill's part of one rank, with equal bubbles (``pipefill try``).

It computes nothing, so its core is free between bubbles too: a job that runs on after a bubble is not slowed down, as
next to a training on a GPU.  It ends when its standard input does.
"""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron.fill.app.runfolder import make_run_folder
from megatron.fill.app.sandboxing import find_sandbox
from megatron.fill.app.session import Session
from megatron.fill.app.share import share
from megatron.fill.config import FillSettings
from megatron.fill.errors import FillError
from megatron.fill.hooks import Listener
from megatron.fill.records.segment import SegmentEnding, begin_segment
from megatron.fill.trial.spec import StandInSpec
from megatron.fill.types import BubbleKind, CycleKey, RankInfo

_SCHEDULE = CycleKey("waiting", 1)


def wait_in_bubbles(listener: Listener, bubble_s: float, period_s: float, over: Callable[[float], bool]) -> None:
    """Report iterations with one bubble at the end of each, until ``over``, which sleeps so long, returns True."""
    number, ended = 0, False
    while not ended:
        number += 1
        listener.iteration_started(number, time.monotonic_ns())
        listener.cycle_started(_SCHEDULE, time.monotonic_ns())
        ended = over(period_s - bubble_s)
        listener.bubble_opened(BubbleKind.FWD_BWD, 0, time.monotonic_ns())
        time.sleep(bubble_s)
        listener.bubble_closed(time.monotonic_ns())
        listener.iteration_ended(time.monotonic_ns())


def main() -> None:
    """Serve the store's jobs by the spec in the first line of the standard input; exit with a message on an error."""
    try:
        _serve(StandInSpec.from_json(sys.stdin.readline()))
    except FillError as error:
        sys.exit(str(error))


def _serve(spec: StandInSpec) -> None:
    run_dir = Path(spec.run_dir)
    settings = FillSettings(store=spec.store, report=spec.run_dir, max_slowdown=0.0, **spec.settings)
    on_cpu = spec.device == "cpu"
    mps = share(settings, on_cpu)
    sandbox = find_sandbox(settings, mps, spec.search, on_gpu=not on_cpu)
    make_run_folder(run_dir, sandbox.seen)
    segment = begin_segment(run_dir, "pipefill try", ranks=1)
    info = RankInfo(0, 1, 0, 1, 0, 1, stage=0, stages=1, device=spec.device)
    session = Session(settings, info, run_dir, segment.segment.folder, spec.store, [], mps, sandbox)
    try:
        wait_in_bubbles(session.listening.listener, spec.bubble_s, spec.period_s, _told_to_end)
    except BaseException:
        session.abort()
        segment.end(SegmentEnding.FAILED)
        raise
    try:
        session.finish()
    finally:
        session.close()
    segment.end(SegmentEnding.WELL)


def _told_to_end(seconds: float) -> bool:
    return bool(select.select([sys.stdin], [], [], seconds)[0])
