"""The raw records of a run: written while it runs, one folder for each time that it was started (a *segment*).

    RUN/records/1/segment.json           what was started, and how it ended
                 rank0.jsonl             what rank 0 saw: a head, then lines that are added as it trains
                 agent0.jsonl            what its side tasks did: a head, then a line for each that has ended
                 agent0.running.jsonl    and what those that run have done so far
                 agent0.behind           is there while it could not write what they did
                 failed, deleted         a rank has said so of the training, of the records

A line is JSON.  Long lists in it (bubbles, iterations, spans, uses) are tables by column.  A last line that was cut off
with its process is passed over.
"""

from __future__ import annotations

from megatron.fill.records.agent import AgentFile, attempts_text, read_agent, write_agent
from megatron.fill.records.files import RECORD_VERSION, NothingRecorded
from megatron.fill.records.rank import RankWriter, add_up, as_bubbles, rank_file, read_rank, write_rank
from megatron.fill.records.segment import (
    NoRecords,
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
from megatron.fill.records.unwritten import Unwritten

__all__ = [
    "RECORD_VERSION",
    "AgentFile",
    "NoRecords",
    "NothingRecorded",
    "OpenSegment",
    "RankFiles",
    "RankWriter",
    "Segment",
    "SegmentEnding",
    "Table",
    "Unwritten",
    "add_up",
    "as_bubbles",
    "attempts_text",
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
