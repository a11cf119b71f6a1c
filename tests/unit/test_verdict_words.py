"""The reasons of jobs: whatever meets, nothing is said twice in one line."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

from hypothesis import given
from hypothesis import strategies as st

from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.orders import _KILLED, _LOST
from megatron.fill.agent.verdict import MOVES, OVER, TIMEOUT, End, Judge
from megatron.fill.store.port import Standing
from megatron.fill.types import JobState
from megatron.fill.worker.command import BEGINS_AGAIN
from megatron.fill.worker.spec import Outcome
from megatron.fill.worker.taskrun import unfinished

MEMORY = "the main job needs the memory: 1 MiB free of a margin of 2 MiB"
STOPS = [OVER, MOVES, TIMEOUT, MEMORY, "it was cancelled"]
LEFT = [BEGINS_AGAIN, *(unfinished(kept, measured) for kept in (False, True) for measured in (False, True))]

stops = st.builds(Ending, st.just(How.STOP), st.sampled_from(STOPS))
lates = st.sampled_from(STOPS).map(
    lambda why: Ending(How.LATE, f"stop() did not return within 10 s of the stop: {why}", why)
)
cuts = st.builds(Ending, st.just(How.CUT), st.sampled_from([_LOST, _KILLED, MEMORY]), st.sampled_from(["", *STOPS]))
fails = st.builds(Ending, st.just(How.FAIL), st.just("it held 3 MiB, over its cap of 2 MiB"))
outcomes = st.one_of(
    st.builds(Outcome, st.just(JobState.QUEUED), st.sampled_from(LEFT), crowded=st.booleans()),
    st.builds(Outcome, st.just(JobState.QUEUED), st.just("node 3 is too long for bubble 1"), unfit=st.just(True)),
    st.builds(Outcome, st.just(JobState.FAILED), st.just("ValueError: no in run_next_step()")),
    st.builds(Outcome, st.just(JobState.SUCCEEDED), st.just("")),
)


def a_job(retries: int) -> Any:
    job = Mock(id=1)
    job.progress.failures, job.work.retries, job.work.timeout_s = 0, retries, 60
    return job


@given(
    outcomes,
    st.one_of(st.none(), stops, lates, cuts, fails),
    st.booleans(),
    st.sampled_from(Standing),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", MEMORY]),
    st.integers(0, 2),
)
def test_no_part_of_a_reason_is_said_twice(outcome, ending, crashed, standing, saved, kept, over, request_, retries):
    if ending is not None and ending.how > How.STOP:  # as the watch has it
        outcome, crashed = Outcome(JobState.FAILED, ending.why), False
    end = End(outcome, crashed, ending, standing, saved, kept, request_, over)
    judge, job = Judge(), a_job(retries)
    for _ in range(4):
        parts = judge.verdict(job, end).reason.split("; ")
        assert len(set(parts)) == len(parts)
        assert sum("begins again" in part or "goes on from" in part for part in parts) <= 1
        assert sum(OVER in part for part in parts) <= 1
