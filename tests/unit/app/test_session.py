"""The end of a rank's session."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

from megatron.fill.app import session
from tests.support.hopping import all_ended, hopping


def test_a_warden_that_does_not_end_is_killed_with_a_job_that_leaves_its_parents(monkeypatch, caplog):
    monkeypatch.setattr(session, "_WARDEN_END_S", 0.1)
    with hopping() as warden:
        its: Any = SimpleNamespace(warden=warden, info=SimpleNamespace(rank=0))
        session.Session._wait_for_warden(its)
        assert warden.poll() == -signal.SIGKILL
        assert all_ended(warden)
    assert "rank 0: its fill agent did not end within 0.1 s; it is killed" in caplog.text
