"""The durable job store: one port, SQL behind it, and an in-memory twin for tests.

Importing this package is cheap; SQLAlchemy is imported by ``open_store``.
"""

from __future__ import annotations

from pathlib import Path

from megatron.fill.store.port import Claim, DeviceEntry, Job, JobStore, NewJob, Progress, Standing

__all__ = ["Claim", "DeviceEntry", "Job", "JobStore", "NewJob", "Progress", "Standing", "open_store"]


def open_store(where: str | Path, *, create: bool = True) -> JobStore:
    """Open a job store, and bring its schema up to date.

    A file serves the processes of one machine (SQLite locks it, which network file systems do not do well); several
    nodes share a PostgreSQL database.

    Args:
        where: an SQLAlchemy URL (``sqlite:///FILE``, ``postgresql+psycopg://USER@HOST/DATABASE``), a database file, or
            a run folder, whose store is its ``jobs.db``.
        create: make the file (and its folder) or the tables if they are not there.

    Raises:
        StoreError: it is none of these, cannot be reached, or is of a newer version; never with a password in it.
    """
    from megatron.fill.store.sql import SqlStore

    return SqlStore(where, create=create)
