"""The jobs of a chaos run: each with its file of marks, put into the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.given.jobs import JobSpec
from megatron.fill.store import JobStore
from megatron.fill.store.submit import new_job
from tests.chaos import plan
from tests.chaos.attacks import brought
from tests.chaos.kind import FaultKind, Source
from tests.chaos.kinds import COMMAND, HONEST
from tests.chaos.marks import prepare
from tests.chaos.verdict import Submitted


class Submitter:
    """Submits jobs, and keeps what is to become of them.

    Args:
        notes: a new folder for their marks; any user may write there.
        disk: the folder that attacks write to.
        machine_network: the inode of the network namespace that is not to be touched.

    Attributes:
        jobs: all that were submitted.
    """

    def __init__(self, store: JobStore, notes: Path, disk: Path, machine_network: int) -> None:
        self.store, self.notes, self.disk = store, notes, disk
        self.machine_network = machine_network
        self.jobs: list[Submitted] = []
        notes.mkdir()
        notes.chmod(0o777)  # a job may run as another user

    def honest(self) -> Submitted:
        """A job without a fault, beside those that are planned."""
        return self.submit(HONEST)

    def task(self, task: str, steps: int) -> Submitted:
        """A job of another task that must do its work once."""
        return self.submit(HONEST, task=task, steps=steps)

    def command(self, name: str) -> Submitted:
        """A command that ends well, one of ``attacks.daemons``."""
        return self.submit(COMMAND, command=brought.command_of(name))

    def submit(
        self,
        kind: FaultKind,
        task: str | None = None,
        steps: int | None = None,
        command: Callable[[Path], list[str]] | None = None,
    ) -> Submitted:
        """A job with this fault.

        Args:
            task, steps: instead of those of the kind.
            command: instead of a task: from its file of marks to its arguments.
        """
        name = f"{kind.name}-{len(self.jobs)}"
        usual, args = plan.task_of(kind)
        if steps is not None:
            args["steps"] = steps
        notes = self.notes / f"{name}.jsonl"
        prepare(notes)
        if kind.source is Source.ATTACK:
            args |= {"folder": str(self.disk), "machine_network": self.machine_network}
        brings: dict[str, Any] = {}
        if kind.source is Source.BROUGHT:
            brings = brought.bring(kind, self.notes / f"{name}-brought", notes)
        elif command is not None:
            brings = {"command": command(notes)}
        fields: dict[str, Any] = {"task": task or usual, "args": {**args, "marks": str(notes)}}
        if "command" in brings:
            fields = {}
        spec = JobSpec(
            name=name,
            memory=kind.memory_bytes,
            priority=int(kind.source is Source.VICTIM),  # the driver waits for it
            **fields,
            **brings,
        )
        job = self.store.submit([new_job(spec, [], "chaos")])[0]
        done = args.get("steps", 0)
        assert isinstance(done, int)
        submitted = Submitted(job.id, name, kind, done, notes)
        self.jobs.append(submitted)
        return submitted
