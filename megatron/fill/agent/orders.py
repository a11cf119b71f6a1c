"""Reasons from outside to end a running job: the store, the operator, the end of the training, the job's timeout."""

from __future__ import annotations

import math
import time

from megatron.fill.agent.claims import HeldClaim
from megatron.fill.agent.ending import Ending, How
from megatron.fill.agent.station import Station
from megatron.fill.pages.control import RunState
from megatron.fill.pages.phases import Saving
from megatron.fill.pages.steplog import StepLog
from megatron.fill.status import Cause
from megatron.fill.store.port import Standing


class Orders:
    """Watches one job for requests to end it (Watcher).

    Args:
        held: the claim, in which the thread of ``Claims`` records the store's answers.
        started_ns: start of the attempt, CLOCK_MONOTONIC.
    """

    def __init__(self, station: Station, held: HeldClaim, log: StepLog, started_ns: int) -> None:
        self._station = station
        self._held = held
        self._log = log
        self._timeout_s = held.claim.job.work.timeout_s or math.inf
        self._until_ns = started_ns + self._timeout_s * 1e9

    def look(self) -> Ending | None:
        if self._held.standing is Standing.LOST:
            return Ending(How.CUT, Cause.CLAIM_LOST)
        if self._station.control.state is RunState.KILLED:
            return Ending(How.CUT, Cause.KILLED)
        if self._station.over:
            return Ending(How.STOP, Cause.TRAINING_ENDED)
        if self._held.standing is Standing.CANCELLED:
            return Ending(How.STOP, Cause.CANCELLED)
        if time.monotonic_ns() > self._until_ns:
            return Ending(How.STOP, Cause.TIMEOUT, f"{self._timeout_s:g}")
        return Ending(How.STOP, Cause.MOVES) if self._may_move() else None

    def _may_move(self) -> bool:
        """True if another rank has asked for the job and it has been saved since, so that a move costs no work."""
        log = self._log
        if self._held.standing is not Standing.MOVE:
            log.saving = Saving.NONE
        elif log.saving is Saving.NONE:
            log.saving = Saving.WANTED
        return log.saving is Saving.SAVED
