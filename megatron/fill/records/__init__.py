"""The raw records of a run: written while it runs, one folder for each time that it was started (a *segment*).

    RUN/records/1/segment.json           what was started, and how it ended
                 rank0.jsonl             what rank 0 saw: a head, then lines that are added as it trains
                 agent0.jsonl            what its side tasks did: a head, then a line for each that has ended
                 agent0.running.jsonl    and what those that run have done so far

A line is JSON.  Long lists in it (bubbles, iterations, spans, uses) are tables by column.  A last line that was cut off
with its process is passed over.
"""

from __future__ import annotations

from megatron.fill.records.agent import AgentFile, read_agent, write_agent
from megatron.fill.records.files import RECORD_VERSION, NothingRecorded
from megatron.fill.records.rank import RankWriter, add_up, as_bubbles, rank_file, read_rank, write_rank
from megatron.fill.records.segment import (
    OpenSegment,
    RankFiles,
    Segment,
    SegmentEnding,
    begin_segment,
    last_segment,
    note_failure,
    read_segments,
)
from megatron.fill.records.tables import Table, column

__all__ = [
    "RECORD_VERSION",
    "AgentFile",
    "NothingRecorded",
    "OpenSegment",
    "RankFiles",
    "RankWriter",
    "Segment",
    "SegmentEnding",
    "Table",
    "add_up",
    "as_bubbles",
    "begin_segment",
    "column",
    "last_segment",
    "note_failure",
    "rank_file",
    "read_agent",
    "read_rank",
    "read_segments",
    "write_agent",
    "write_rank",
]
