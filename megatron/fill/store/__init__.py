"""The durable job store: its values, its operations, and their SQL.

Importing this package is cheap; SQLAlchemy is imported by ``open_store``.
"""

from __future__ import annotations

from pathlib import Path

from megatron.fill.store.queue import JobStore
from megatron.fill.store.values import Claim, DeviceEntry, Job, Progress, Standing
from megatron.fill.work import NewJob

__all__ = ["Claim", "DeviceEntry", "Job", "JobStore", "NewJob", "Progress", "Standing", "open_store"]


def open_store(where: str | Path, *, create: bool = True) -> JobStore:
    """Open a job store.

    A file is for the processes of one machine (SQLite locks it, which is unreliable on network file systems); several
    nodes share a PostgreSQL database.

    Args:
        where: SQLAlchemy URL (``sqlite:///FILE``, ``postgresql+psycopg://USER@HOST/DATABASE``), database file, or run
            folder, whose store is its ``jobs.db``.
        create: True to create the file (and its folder) or the tables if they are missing.

    Raises:
        StoreError: ``where`` is none of these, cannot be reached, or has other tables; the message has no password.
    """
    from megatron.fill.store.sql import SqlStore

    return SqlStore(where, create=create)
