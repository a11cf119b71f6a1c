"""The jobs of a chaos run: each with a file for its marks, submitted to the store."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron.fill.given.jobs import JobSpec
from megatron.fill.store import JobStore
from tests.chaos import plan
from tests.chaos.attacks import brought
from tests.chaos.kind import FaultKind, Source
from tests.chaos.kinds import COMMAND, HONEST
from tests.chaos.marks import prepare
from tests.chaos.verdict import Submitted


class Submitter:
    """Submits jobs, and keeps what each must come to.

    Args:
        notes: new folder for their marks, writable for every user.
        disk: folder that attacks write to.
        machine_network: inode of the network namespace that must not be touched.

    Attributes:
        jobs: all submitted jobs.
    """

    def __init__(self, store: JobStore, notes: Path, disk: Path, machine_network: int) -> None:
        self.store, self.notes, self.disk = store, notes, disk
        self.machine_network = machine_network
        self.jobs: list[Submitted] = []
        notes.mkdir()
        notes.chmod(0o777)  # a job may run as another user

    def honest(self) -> Submitted:
        """Submit a job without a fault, in addition to the planned ones."""
        return self.submit(HONEST)

    def task(self, task: str, steps: int) -> Submitted:
        """Submit a job with another task, which must do its work exactly once."""
        return self.submit(HONEST, task=task, steps=steps)

    def command(self, name: str) -> Submitted:
        """Submit a command of ``attacks.daemons`` that ends well."""
        return self.submit(COMMAND, command=brought.command_of(name))

    def submit(
        self,
        kind: FaultKind,
        task: str | None = None,
        steps: int | None = None,
        command: Callable[[Path], list[str]] | None = None,
    ) -> Submitted:
        """Submit a job with this fault.

        Args:
            task, steps: replace those of the kind.
            command: replaces the task: a function from the file of marks to the arguments.
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
        job = self.store.submit([spec.to_submit([], "chaos")])[0]
        done = args.get("steps", 0)
        assert isinstance(done, int)
        submitted = Submitted(job.id, name, kind, done, notes)
        self.jobs.append(submitted)
        return submitted
