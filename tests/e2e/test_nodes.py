"""Jobs of a training over several nodes, in one PostgreSQL, while nodes are cut off and the database is restarted."""

from __future__ import annotations

import pytest

from tests.e2e.network import why_no_network
from tests.e2e.nodes import survive
from tests.e2e.training import processes
from tests.support.postgres import NoPostgres

pytest.importorskip("psycopg", reason="needs the extra postgres")


@pytest.mark.skipif(bool(why_no_network()), reason=why_no_network())
def test_no_job_is_lost_or_finishes_twice_while_nodes_are_cut_off(tmp_path):
    tmp_path.chmod(0o755)
    try:
        found = survive(tmp_path, jobs=4, longest_s=4.0, compared=5)
    except NoPostgres as error:
        pytest.skip(str(error))
    assert (found.jobs, found.lost, found.twice, found.overlapped, found.main_failures) == (4, 0, 0, 0, 0)
    assert found.losses_compared >= 5
    assert found.cuts
    assert not processes(str(tmp_path))
