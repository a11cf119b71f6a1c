"""From a job of a jobs file to a job of the store."""

from __future__ import annotations

import getpass
import os

from megatron.fill.given.jobs import JobSpec
from megatron.fill.store.port import NewJob
from megatron.fill.work import Work


def submitter() -> str:
    """Who calls: the user's name, or in a container that has no names the number."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def new_job(spec: JobSpec, search: list[str], user: str) -> NewJob:
    """The job as ``JobStore.submit`` takes it.

    Args:
        search: absolute folders that the task is imported from, besides the installed packages.
        user: who submits it: whose it is if it does not say so itself.
    """
    return NewJob(
        name=spec.name,
        work=Work(
            task=spec.task,
            command=spec.command,
            args=spec.args,
            memory_bytes=spec.memory,
            env=spec.env,
            search=tuple(search),
            array=spec.array,
            timeout_s=spec.timeout,
            retries=spec.retries,
            after=spec.after,
            side_throughput=spec.side_throughput,
        ),
        user=spec.user or user,
        priority=spec.priority,
        deadline_s=spec.deadline,
    )
