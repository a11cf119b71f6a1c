"""The benchmark of waits by stage reads a row of timers for each rank."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.errors import ConfigError
from scripts.benchmarks.configure_waits import measure_waits, read_waits

# Of two stages: 4 microbatches of 10 ms and 20 ms each, sent in 3 ms.
TIMERS = {
    0: {
        "time": 200.0,
        "forward-compute": 40.0,
        "forward-send": 3.0,
        "forward-send-backward-recv": 40.0,
        "backward-compute": 80.0,
        "backward-recv": 7.0,
        "backward-params-all-reduce": 4.0,
        "backward-embedding-all-reduce": 5.0,
        "optimizer": 2.0,
    },
    1: {
        "time": 200.0,
        "forward-compute": 40.0,
        "forward-recv": 20.0,
        "backward-compute": 80.0,
        "backward-send": 3.0,
        "backward-send-forward-recv": 20.0,
        "backward-params-all-reduce": 4.0,
        "backward-embedding-all-reduce": 25.0,
        "optimizer": 2.0,
    },
}


def write(folder: Path, stage: int, rank: int, **other: float) -> None:
    row = TIMERS[stage] | other
    path = folder / f"OPT-350_2-4-1-2-1_stage{stage}_rank{rank}.csv"
    path.write_text(f"{','.join(row)}\n{','.join(map(str, row.values()))}\n", encoding="utf-8")


def test_ranks_are_averaged_and_waits_in_collectives_count(tmp_path: Path) -> None:
    write(tmp_path, 0, 0, **{"forward-send": 2.0})
    write(tmp_path, 0, 1, **{"forward-send": 4.0})
    write(tmp_path, 1, 2)
    (tmp_path / "OPT-350_1-4-1-1-1_stage0_rank0.csv").write_text("time\n1\n", encoding="utf-8")  # of one stage

    (found,) = read_waits(tmp_path)

    assert (found.parallel.pp, found.parallel.dp, found.parallel.tp, found.parallel.microbatches) == (2, 1, 4, 4)
    # the last stage waits for the first one in the embedding's reduction, which takes 5 ms
    assert found.idle == pytest.approx([(3 + 40 + 7) / 200, (20 + 3 + 20 + 20) / 200])
    assert found.by_link_ms() == [3.0, 0.0]


def test_blocking_exchanges_are_waited_for_by_both_stages(tmp_path: Path) -> None:
    for stage in TIMERS:
        write(tmp_path, stage, stage)
    (found,) = read_waits(tmp_path)

    waits, iteration = found.predicted(found.by_link_ms(), blocking=True)

    # the first pass, all passes of the last stage with an exchange around each microbatch, and the last pass
    passes_ms = 10 + 4 * 30 + 5 * 3 + 20
    assert iteration * 200 == pytest.approx(2 + passes_ms + 4 + 5)
    assert waits[0] * 200 == pytest.approx(passes_ms - 120)
    assert found.predicted(found.by_link_ms(), blocking=False)[1] < iteration


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected OPT-350"):
        measure_waits(tmp_path)
    write(tmp_path, 1, 1)
    with pytest.raises(ConfigError, match=r"stages \[1\]"):
        read_waits(tmp_path)
