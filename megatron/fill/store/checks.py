"""Checks that every database can hold the jobs and values that are passed to it."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

from megatron.fill.errors import JobError
from megatron.fill.spec import typed
from megatron.fill.work import NewJob, Work

_MAX_ID = 2**63 - 1


def checked(job: NewJob) -> NewJob:
    """Return a job in a form that every database can hold; JobError if it has a value that none can hold."""
    for field, text in (("name", job.name), ("user", job.user)):
        if text != storable(text) or (field == "name" and not text):
            raise JobError(f"the {field} of a job is {text!r}; expected printable text")
    if not -_MAX_ID <= job.priority <= _MAX_ID:
        raise JobError(f"job {job.name!r}: priority is {job.priority}; expected a number of 64 bits")
    return replace(job, work=typed(Work, plain("work", asdict(job.work))))


def plain(what: str, value: dict[str, Any]) -> dict[str, Any]:
    """Copy a value as JSON data; JobError if the value cannot be written as JSON."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError) as error:
        raise JobError(f"the {what} is {value!r:.60}, which is not JSON data: {error}") from None


def storable(text: str) -> str:
    """Replace lone surrogates and NUL characters, which databases refuse."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def possible(job_id: int) -> bool:
    """True if ``job_id`` is a valid job number."""
    return 0 < job_id <= _MAX_ID


def check_lease(lease_s: float) -> None:
    """Raise a JobError unless a lease is positive and finite."""
    if not 0 < lease_s < float("inf"):
        raise JobError(f"a lease of {lease_s} s; expected more than 0, and an end")
