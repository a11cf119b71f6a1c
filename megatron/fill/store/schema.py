"""The tables of a job store.

Their names begin with ``pipefill_``, so a PostgreSQL database may hold other tables too.  Values that only PipeFill
reads are JSON in text columns: PostgreSQL's JSON types refuse some values that a job may report (NUL characters, NaN).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Double,
    Engine,
    Function,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    func,
    insert,
    inspect,
    select,
    text,
)

from megatron.fill.errors import StoreError

VERSION = "v0003"  # increased with every change of the tables
# PostgreSQL's advisory locks are numbers, shared by all programs that use the database: "PIPEFILL" and the next number.
TABLES_LOCK = 0x50495045_46494C4C
NAMES_LOCK = TABLES_LOCK + 1

metadata = MetaData()

version = Table("pipefill_schema", metadata, Column("version_num", Text, primary_key=True))

# The defaults are the values of a new job.
jobs = Table(
    "pipefill_jobs",
    metadata,
    Column("id", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
    Column("name", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("user", Text, nullable=False),
    Column("priority", BigInteger, nullable=False),
    Column("deadline_s", Double),
    Column("state", Text, nullable=False, default="QUEUED"),
    Column("status", Text, nullable=False, default="{}"),
    Column("submitted_s", Double, nullable=False),
    Column("started_s", Double),
    Column("finished_s", Double),
    Column("attempt", Integer, nullable=False, default=0),
    Column("owner", Text),
    Column("lease_until_s", Double),
    Column("cancelling", Boolean, nullable=False, default=False),
    Column("device", Text, nullable=False, default=""),
    Column("directory", Text, nullable=False, default=""),
    Column("progress", Text, nullable=False),
    Column("result", Text, nullable=False, default="{}"),
    Column("asked_by", Text, nullable=False, default=""),
    Column("asked_s", Double),
)
_UNFINISHED = text("state IN ('QUEUED', 'RUNNING')")
_WHERE: dict[str, Any] = {"sqlite_where": _UNFINISHED, "postgresql_where": _UNFINISHED}
Index("pipefill_jobs_unfinished_name", jobs.c.name, unique=True, **_WHERE)
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


def make_tables(engine: Engine, where: str, create: bool) -> None:
    """Make the tables of the store ``where`` if they are missing, also while others open it.

    Raises:
        StoreError: the tables are of another version, or missing and ``create`` is False.
    """
    with engine.begin() as connection:
        found = _version(connection)
    if found is None:
        with engine.execution_options(writing=True).begin() as connection:
            if connection.dialect.name == "postgresql":
                connection.execute(select(func.pg_advisory_xact_lock(TABLES_LOCK)))
            found = _version(connection)
            if found is None and create:
                metadata.create_all(connection)
                connection.execute(insert(version).values(version_num=VERSION))
                return
    if found is None:
        raise StoreError(f"{where} has no job store in it; expected a database that PipeFill made")
    _check_version(found, where)


def check_usable(engine: Engine, where: str) -> None:
    """Check that this user of PostgreSQL may use the tables, or make them; nothing is changed.

    Raises:
        StoreError: it lacks a right, or the tables are of another version.
    """
    with engine.begin() as connection:
        found = _version(connection)
        if found is None:
            may = func.has_schema_privilege(func.current_schema(), "CREATE")
            _require(connection, may, "CREATE ON SCHEMA, to make the tables")
            return
        _check_version(found, where)
        for table in (jobs, devices, profiles):
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                _require(connection, func.has_table_privilege(table.name, right), f"{right} ON {table.name}")
        numbers = f"{jobs.name}_id_seq"
        _require(connection, func.has_sequence_privilege(numbers, "USAGE"), f"USAGE ON SEQUENCE {numbers}")


def _require(connection: Connection, may: Function[Any], right: str) -> None:
    if not connection.scalar(select(may)):
        raise StoreError(f"this user lacks a right; expected GRANT {right}")


def _check_version(found: str, where: str) -> None:
    if found != VERSION:
        expected = "expected the PipeFill that made it, or a new store"
        raise StoreError(f"{where} has the schema {found}, and this PipeFill {VERSION}; {expected}")


def _version(connection: Connection) -> str | None:
    """The version of the tables; None if there are none."""
    return connection.scalar(select(version)) if inspect(connection).has_table(version.name) else None
