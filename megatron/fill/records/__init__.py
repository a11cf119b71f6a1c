"""The raw records of a run, written while it runs, with one folder for each start of its training (a *segment*).

    RUN/records/1/segment.json           the segment's start and end
                 rank0.jsonl             the record of rank 0: a head, then lines that are appended as it trains
                 agent0.jsonl            the record of its jobs: a head, then the lines of each ended attempt
                 agent0.running.jsonl    the progress of the attempts that run
                 agent0.behind           exists while the agent could not write all that it knows
                 account0.json           the account of rank 0's time
                 failed, deleted         a rank has noted that the training failed, that the records were deleted

A line is JSON.  Long lists in it (bubbles, iterations, spans, uses) are tables by column.  A last line that was cut off
with its process is ignored.
"""

from __future__ import annotations

from megatron.fill.records.account import BLIND, AccountRecord, AccountWriter, Traced, read_account, read_accounts
from megatron.fill.records.agent import AgentFile, attempts_text, forgets, read_agent, write_agent
from megatron.fill.records.files import RECORD_VERSION, NothingRecorded
from megatron.fill.records.live import LiveRank, LiveSegment
from megatron.fill.records.rank import RankWriter, add_up, as_bubbles, rank_file, read_rank
from megatron.fill.records.sampling import Sample
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
from megatron.fill.records.slowdown import Estimate, over_blocks, slowdown
from megatron.fill.records.tables import Table, column
from megatron.fill.records.unwritten import Unwritten

__all__ = [
    "BLIND",
    "RECORD_VERSION",
    "AccountRecord",
    "AccountWriter",
    "AgentFile",
    "Estimate",
    "LiveRank",
    "LiveSegment",
    "NoRecords",
    "NothingRecorded",
    "OpenSegment",
    "RankFiles",
    "RankWriter",
    "Sample",
    "Segment",
    "SegmentEnding",
    "Table",
    "Traced",
    "Unwritten",
    "add_up",
    "as_bubbles",
    "attempts_text",
    "begin_segment",
    "column",
    "forgets",
    "last_segment",
    "note_failure",
    "over_blocks",
    "rank_file",
    "read_account",
    "read_accounts",
    "read_agent",
    "read_rank",
    "read_segments",
    "slowdown",
    "write_agent",
]
