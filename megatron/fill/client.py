"""A job store for programs: what ``pipefill submit``, ``list``, ``show``, ``cancel`` and ``retry`` do for people.

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
from types import TracebackType
from typing import Any

from pydantic import ValidationError

from megatron.fill.errors import ConfigError
from megatron.fill.given.jobs import JobSpec, load_jobs
from megatron.fill.given.problems import explain
from megatron.fill.store import Job, open_store
from megatron.fill.store.submit import new_job, submitter
from megatron.fill.types import JobState

__all__ = ["Job", "JobState", "Jobs"]


class Jobs:
    """The jobs of one store.

    Args:
        store: as ``--fill-store`` takes it: a URL, a database file or a run folder; made if it is not there.
        search: folders that tasks are imported from besides the installed packages; by default the working directory.

    Raises:
        StoreError: it cannot be opened.  Every method raises it too, when the database cannot be reached.
    """

    def __init__(self, store: str | Path, search: Collection[str | Path] | None = None) -> None:
        folders = [os.getcwd()] if search is None else search
        self._search = [os.path.abspath(folder) for folder in folders]
        self._store = open_store(store)

    def __enter__(self) -> Jobs:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._store.close()

    def submit(self, **fields: Any) -> Job:
        """Put one job into the queue.

        An unfinished job of the same name that is the same is left as it is, and returned.

        Args:
            fields: those of a job in a jobs file, but ``count``: ``name``, ``task`` or ``command``, ``args``, ...

        Raises:
            ConfigError: a field is wrong; the message says which, and what was expected.
            JobError: an unfinished job of that name is another one.
        """
        if "count" in fields:
            raise ConfigError("count is a field of jobs files; expected a call of submit for each job")
        try:
            spec = JobSpec.model_validate(fields)
        except ValidationError as error:
            job = f"job {fields.get('name')!r}"
            raise ConfigError(explain(error, JobSpec, lambda place: (job, place))) from None
        return self._store.submit([new_job(spec, self._search, submitter())])[0]

    def submit_file(self, path: str | Path) -> list[Job]:
        """Put all jobs of a jobs file into the queue, or none.

        Raises:
            ConfigError: it is wrong somewhere.
            JobError: a name is in use by another job.
        """
        search = list(dict.fromkeys([str(Path(path).absolute().parent), *self._search]))
        user = submitter()
        return self._store.submit([new_job(spec, search, user) for spec in load_jobs(path)])

    def get(self, name: str) -> Job:
        """The latest job of that name.

        Raises:
            JobError: there is none; the message names the closest names.
        """
        return self._store.find(name)

    def cancel(self, name: str) -> Job:
        """Cancel a waiting job at once, a running one as soon as its agent hears of it.

        Raises:
            JobError: there is no such job, or it has finished.
        """
        return self._store.cancel(self.get(name).id)

    def retry(self, name: str) -> Job:
        """Put a failed or cancelled job back into the queue; it goes on from its checkpoint.

        Raises:
            JobError: there is no such job, or it has not failed.
        """
        return self._store.retry(self.get(name).id)

    def wait(self, *names: str, timeout_s: float | None = None, every_s: float = 1.0) -> list[Job]:
        """Wait until the latest jobs of these names have finished, however they did; the jobs as they are then.

        Args:
            timeout_s: how long to wait; None for ever.
            every_s: between two looks at the store.

        Raises:
            JobError: there is no such job.
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
        """The jobs in these states (none given: all), in the order of their submission."""
        return self._store.list(states)
