"""What the agent hands a worker, as a file, and what the worker leaves in the job's folder."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.fill.device.port import Limits, Sharing
from megatron.fill.runtime import safefile
from megatron.fill.types import JobState

_OUTCOME = "outcome.json"


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """One worker's job.  Exactly one of ``task`` and ``command`` is set.

    Attributes:
        board_fd: where the rank shows its bubble cycle.
        control_fd: whether filling is on at all.
        baton_fd: what the resident job and the tail job share.
        tail: this is the tail job: it gets what the resident job leaves of each bubble.
        cycle: the bubbles to plan for, as JSON, instead of those on the board; given to a tail job.
        profiles: the job's profiles as JSON, one per configuration; None if it has to be measured.
        checkpoint_s: how often a resumable task is saved, in seconds.
    """

    name: str
    directory: str
    gate_fd: int
    log_fd: int
    board_fd: int
    control_fd: int
    baton_fd: int
    parent: int
    tail: bool = False
    cycle: dict[str, Any] | None = None
    profiles: list[dict[str, Any]] | None = None
    checkpoint_s: float = 300.0
    device: str = "cpu"
    cpus: list[int] = field(default_factory=list)
    task: str | None = None
    command: list[str] | None = None
    args: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    sharing: Sharing = Sharing.TIMESLICE
    search: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        data = json.loads(text)
        return cls(**data | {"limits": Limits(**data["limits"]), "sharing": Sharing(data["sharing"])})


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a worker says that its job ended.

    Attributes:
        state: QUEUED when the main job ended first, or when the job does not fit here (``unfit``).
    """

    state: JobState
    reason: str
    unfit: bool = False
    unit: str = "steps"
    total_work: float | None = None
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def plausible(self) -> bool:
        """Whether every field has its type: a job can write whatever it likes into its folder."""
        numbers = self.total_work is None or isinstance(self.total_work, int | float)
        texts = isinstance(self.reason, str) and isinstance(self.unit, str)
        return numbers and texts and isinstance(self.unfit, bool) and isinstance(self.result, dict)

    def write(self, directory: Path) -> None:
        scratch = directory / (_OUTCOME + ".part")
        scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(scratch, directory / _OUTCOME)

    @classmethod
    def read(cls, directory: Path) -> Outcome | None:
        """What the worker left; None if it left nothing, or nothing that can be read."""
        try:
            data = json.loads(safefile.read_text(directory / _OUTCOME))
            outcome = cls(**data | {"state": JobState(data["state"])})
            return outcome if outcome.plausible else None
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @staticmethod
    def discard(directory: Path) -> None:
        (directory / _OUTCOME).unlink(missing_ok=True)
