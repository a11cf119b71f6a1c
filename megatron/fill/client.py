"""A job store for programs: ``pipefill submit``, ``list``, ``show``, ``cancel`` and ``retry`` as methods.

For example:

    from megatron.fill.client import Jobs

    with Jobs("runs/first") as jobs:
        seeds = [jobs.submit(name=f"lstm-{seed}", task="tasks:Lstm", args={"seed": seed}) for seed in range(8)]
        for job in jobs.wait(*(seed.name for seed in seeds)):
            print(job.name, job.state, job.result)
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, load_jobs, submitter
from megatron.fill.given.problems import explain
from megatron.fill.store import Job, open_store
from megatron.fill.types import JobState

__all__ = ["Job", "JobState", "Jobs"]


class Jobs:
    """The jobs of one store.

    Args:
        store: a value of ``--fill-store``: a URL, a database file or a run folder; created if it does not exist.
        search: folders that tasks are imported from, in addition to the installed packages; by default the working
            directory.

    Raises:
        StoreError: the store cannot be opened.  Every method raises it too, if the database cannot be reached.
    """

    def __init__(self, store: str | Path, search: Collection[str | Path] | None = None) -> None:
        folders = [os.getcwd()] if search is None else search
        self._search = [os.path.abspath(folder) for folder in folders]
        self._store = open_store(store)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._store.close()

    def submit(self, **fields: Any) -> Job:
        """Put a job into the queue.

        If an unfinished job has the same name and the same work, it is left as it is, and returned.

        Args:
            fields: fields of a job in a jobs file, except ``count``: ``name``, ``task`` or ``command``, ``args``, ...

        Raises:
            ConfigError: a field is wrong; the message names it, and what was expected.
            JobError: an unfinished job of that name has other work.
        """
        if "count" in fields:
            raise ConfigError("count is a field of jobs files; expected a call of submit for each job")
        try:
            spec = JobSpec.model_validate(fields)
        except ValidationError as error:
            job = f"job {fields.get('name')!r}"
            raise ConfigError(explain(error, JobSpec, lambda place: (job, place))) from None
        return self._store.submit([spec.to_submit(self._search, submitter())])[0]

    def submit_file(self, path: str | Path) -> list[Job]:
        """Put all jobs of a jobs file into the queue, or none.

        Raises:
            ConfigError: the file is invalid.
            JobError: a name is in use by another job.
        """
        search = list(dict.fromkeys([str(Path(path).absolute().parent), *self._search]))
        user = submitter()
        return self._store.submit([spec.to_submit(search, user) for spec in load_jobs(path)])

    def get(self, name: str) -> Job:
        """Return the latest job of that name; JobError, with the closest names, if there is none."""
        return self._store.find(name)

    def cancel(self, name: str) -> Job:
        """Cancel a job: a waiting one at once, a running one as soon as its agent notices.

        Raises:
            JobError: the job does not exist, or has finished.
        """
        return self._store.cancel(self.get(name).id)

    def retry(self, name: str) -> Job:
        """Put a failed or cancelled job back, which resumes from its checkpoint; JobError if it is neither."""
        return self._store.retry(self.get(name).id)

    def wait(self, *names: str, timeout_s: float | None = None, every_s: float = 1.0) -> list[Job]:
        """Wait until the latest jobs of these names have finished, in any way; return them.

        Args:
            timeout_s: timeout; None for no limit.
            every_s: interval between two polls of the store.

        Raises:
            JobError: a job does not exist.
            TimeoutError: some have not finished in time; the message names them.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        numbers = [self.get(name).id for name in names]
        while True:
            found = [self._store.get(number) for number in numbers]
            rest = [job.name for job in found if not job.state.finished]
            if not rest:
                return found
            if end_s is not None and time.monotonic() >= end_s:
                raise TimeoutError(f"not finished within {timeout_s:g} s: {', '.join(rest)}")
            time.sleep(every_s)

    def list(self, *states: JobState) -> list[Job]:
        """Return the jobs in these states (without any: all jobs), in the order of their submission."""
        return self._store.list(states)
