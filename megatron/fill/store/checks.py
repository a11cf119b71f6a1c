"""What any database can hold: jobs and values are made so, or refused, before they come to one."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from megatron.fill.errors import JobError
from megatron.fill.store.port import NewJob

_MAX_ID = 2**63 - 1


def checked(job: NewJob) -> NewJob:
    """The job as any database can hold it.

    Raises:
        JobError: there is something in it that none can.
    """
    for field, text in (("name", job.name), ("user", job.user)):
        if text != storable(text) or (field == "name" and not text):
            raise JobError(f"the {field} of a job is {text!r}; expected printable text")
    if not -_MAX_ID <= job.priority <= _MAX_ID:
        raise JobError(f"job {job.name!r}: priority is {job.priority}; expected a number of 64 bits")
    return replace(job, spec=plain("spec", job.spec))


def identity(spec: dict[str, Any]) -> str:
    """What makes a job the job that it is, besides its name."""
    # As text: NaN is not equal to itself.  Where a task is imported from depends on where one stands; which instance it
    # is (of how many by now) its name says; and what its work would take elsewhere is only for the report.
    kept = {name: value for name, value in spec.items() if name != "side_throughput"}
    return json.dumps({**kept, "search": None, "array": None}, sort_keys=True)


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two specs are of the same job."""
    return identity(one) == identity(other)


def plain(what: str, value: dict[str, Any]) -> dict[str, Any]:
    """A copy of it that is JSON data.

    Raises:
        JobError: there is something in it that JSON cannot say.
    """
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise JobError(f"the {what} is {value!r:.60}, which is no JSON data: {error}") from None


def storable(text: str) -> str:
    """Without what no database takes: lone surrogates, and NUL characters."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def possible(job_id: int) -> bool:
    """Whether a job could have that number."""
    return 0 < job_id <= _MAX_ID


def check_lease(lease_s: float) -> None:
    """Raises JobError unless it has an end."""
    if not 0 < lease_s < float("inf"):
        raise JobError(f"a lease of {lease_s} s; expected more than 0, and an end")
