"""Run folders as trainings leave them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.fill.linux.files import replacing
from megatron.fill.records.agent import AgentFile
from megatron.fill.records.rank import RankWriter, rank_file
from megatron.fill.records.segment import OpenSegment, SegmentEnding, begin_segment
from megatron.fill.types import JobRecord, RankRecord, WorkerRecord


def write_rank(path: Path, record: RankRecord) -> None:
    """The whole record of one rank, in place of an earlier one."""
    with replacing(path) as temporary:
        assert RankWriter(temporary, record.info, most_bytes=sys.maxsize).close(record, 60.0)


def write_segment(
    run_dir: Path,
    records: Sequence[RankRecord],
    attempts: Iterable[tuple[JobRecord, WorkerRecord]] = (),
    running: Mapping[int, list[tuple[JobRecord, WorkerRecord]]] | None = None,
    ending: SegmentEnding | None = SegmentEnding.WELL,
    **about: Any,
) -> OpenSegment:
    """A segment with the records of these ranks and of their agents.

    Args:
        running: by rank, the attempts that were not seen to end.
        ending: None while it runs.
        about: as ``begin_segment`` takes it.
    """
    opened = begin_segment(run_dir, **{"command": "train", "ranks": len(records), **about})
    folder = opened.segment.folder
    for record in records:
        write_rank(rank_file(folder, record.info.rank), record)
    for job, worker in attempts:
        AgentFile(folder, worker.rank).add(job, worker)
    for rank, its in (running or {}).items():
        AgentFile(folder, rank).show(its)
    if ending is not None:
        opened.end(ending)
    return opened
