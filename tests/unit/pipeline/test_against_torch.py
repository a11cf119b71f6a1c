"""Generated orders are those of torch's pipelining schedules."""

from __future__ import annotations

import pytest

from megatron.fill.pipeline.schedules import make_schedule

torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")


@pytest.mark.parametrize(
    ("name", "torch_name", "chunks"),
    [
        ("interleaved", "ScheduleInterleaved1F1B", 2),
        ("interleaved", "ScheduleInterleaved1F1B", 3),
        ("looped-bfs", "ScheduleLoopedBFS", 3),
        ("zb-h1", "ScheduleInterleavedZeroBubble", 1),
        ("zb-v", "ScheduleZBVZeroBubble", 2),
        ("dualpipe-v", "ScheduleDualPipeV", 2),
    ],
)
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [2, 3, 4])
def test_the_order_is_that_of_torch(name: str, torch_name: str, chunks: int, stages: int, rounds: int):
    microbatches = rounds * stages
    kind = getattr(torch_schedules, torch_name)
    theirs = kind.__new__(kind)  # its constructor needs a process group
    theirs.pp_group_size, theirs._n_microbatches, theirs.n_local_stages = stages, microbatches, chunks
    theirs.num_stages, theirs._stages = stages * chunks, [None] * chunks
    theirs.microbatches_per_round = stages
    expected, together = [], set()
    for rank in range(stages):
        row: list[str] = []
        for action in theirs._calculate_single_rank_operations(rank):
            if action is not None and action.sub_actions:
                together.add((rank, len(row)))
            row += [] if action is None else map(str, action.sub_actions or (action,))
        expected.append(row)
    ours = make_schedule(name, stages, microbatches, chunks)
    found = [
        [f"{ours.virtual_stage(rank, op)}{op.kind}{op.microbatch}" for op in row] for rank, row in enumerate(ours.order)
    ]
    assert found == expected
    assert ours.together == together
