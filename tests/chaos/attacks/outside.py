"""The kinds of faults that the driver commits in several steps; ``chaos.outside`` has the code."""

from __future__ import annotations

from tests.chaos.kind import DISK, FaultKind, Source

_WEIGHT = 0.05  # each takes many seconds


def _driven(name: str, what: str, needs: str = "", *, alone: bool = False) -> FaultKind:
    return FaultKind(name, what, Source.DRIVER, weight=_WEIGHT, needs=needs, alone=alone)


KINDS = (
    _driven("stop-both", "warden and agent both stopped for five seconds"),
    _driven("stop-both-end", "both stopped, and the training ends"),
    _driven("store-away-long", "the job store's file moved away for 20 s"),
    _driven("store-truncated", "half a store in the job store's place for 3 s"),
    _driven("store-future", "a store of a later version in its place for 3 s"),
    _driven("store-damaged", "commands with damaged and closed stores"),
    _driven("yaml-bomb", "jobs files that grow, nest and refer to themselves"),
    _driven("hostile-name", "a job with escapes and newlines as its name"),
    _driven("operator", "pause, resume, kill, resume: all acknowledged"),
    _driven("paused-daemons", "a command's daemons while the operator has paused"),
    _driven("second-run", "a second training in the same run folder", alone=True),
    _driven("second-training", "a second training on the same store", alone=True),
    _driven("grow-shrink", "the main job grows; a task gives memory back", DISK),
    _driven("grow-stop", "the main job grows; a task that cannot shrink", DISK),
)
