"""Whom a rank waited for, in trainings in which another rank, its host or the transfer is late."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.fill.report import compose
from tests.e2e.late import LATE_S
from tests.e2e.training import SCRIPT, train

ITERATIONS = 10


@pytest.mark.parametrize(("what", "cause"), [("peer", "computed_s"), ("host", "host_s"), ("link", "transfer_s")])
def test_a_wait_is_split_by_what_was_late(what: str, cause: str, tmp_path: Path):
    script = ("-m", "pipefill_patches", "tests/e2e/late.py", what, SCRIPT)
    run = "--fill-profile-only --fill-report {folder}/run"
    trained = train(tmp_path, run, ITERATIONS, script=script)
    report = compose(tmp_path / "run")
    (found,) = (one for one in report.waits if (one.rank, one.peer) == (1, 0))
    seconds = {name: getattr(found, name) for name in ("computed_s", "host_s", "transfer_s")}
    assert found.iterations == ITERATIONS
    assert seconds[cause] > 0.9 * ITERATIONS * LATE_S  # at least the first of the two microbatches is waited for
    assert seconds[cause] == max(seconds.values())
    for rank in report.ranks:  # no time of a bubble is left out
        waited_s = sum(one.computed_s + one.host_s + one.transfer_s for one in report.waits if one.rank == rank.rank)
        assert waited_s == pytest.approx(sum(rank.bubble_s.values()))
    assert "Waits for other stages" in trained.output
