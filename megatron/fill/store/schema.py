"""The tables of a job store after the newest migration.

Their names begin with ``pipefill_``, so a PostgreSQL database may hold other tables too.  Values that only PipeFill
reads are JSON in text columns: PostgreSQL's JSON types refuse some values that a job may report (NUL characters, NaN).
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Boolean, Column, Double, Index, Integer, MetaData, Table, Text, text

REVISION = "v0003"  # revision of the newest migration
VERSION_TABLE = "pipefill_schema"
# PostgreSQL's advisory locks are numbers, shared by all programs that use the database: "PIPEFILL" and the next number.
MIGRATION_LOCK = 0x50495045_46494C4C
NAMES_LOCK = MIGRATION_LOCK + 1

metadata = MetaData()

jobs = Table(
    "pipefill_jobs",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("name", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("deadline_s", Double),
    Column("state", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("submitted_s", Double, nullable=False),
    Column("started_s", Double),
    Column("finished_s", Double),
    Column("attempt", Integer, nullable=False),
    Column("owner", Text),
    Column("lease_until_s", Double),
    Column("cancelling", Boolean, nullable=False),
    Column("device", Text, nullable=False),
    Column("directory", Text, nullable=False),
    Column("progress", Text, nullable=False),
    Column("result", Text, nullable=False),
    Column("asked_by", Text, nullable=False),
    Column("asked_s", Double),
)
_UNFINISHED = text("state IN ('QUEUED', 'RUNNING')")
Index(
    "pipefill_jobs_unfinished_name",
    jobs.c.name,
    unique=True,
    sqlite_where=_UNFINISHED,
    postgresql_where=_UNFINISHED,
)
Index("pipefill_jobs_name", jobs.c.name)
Index("pipefill_jobs_state", jobs.c.state, jobs.c.lease_until_s)

devices = Table(
    "pipefill_devices",
    metadata,
    Column("name", Text, primary_key=True),
    Column("run", Text, nullable=False),
    Column("busy_until_s", Double),
    Column("job", Text, nullable=False),
    Column("cycle", Text, nullable=False),
    Column("lease_until_s", Double, nullable=False),
    Column("refuses", Text, nullable=False),
)

profiles = Table(
    "pipefill_profiles",
    metadata,
    Column("key", Text, primary_key=True),
    Column("profile", Text, nullable=False),
    Column("kept_s", Double, nullable=False),
)
