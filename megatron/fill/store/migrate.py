"""Bring a store's schema up to date when it is opened, whoever else opens it at the same time."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Connection, Engine, func, inspect, select, text

from megatron.fill.errors import StoreError
from megatron.fill.store.schema import MIGRATION_LOCK, REVISION, VERSION_TABLE

_SCRIPTS = Path(__file__).with_name("migrations")


def migrate(reading: Engine, writing: Engine, where: str, create: bool) -> None:
    """Run the migrations that the database lacks, in one transaction.

    Args:
        reading, writing: the engine as it is, and as it begins transactions that write.
        where: the store's name in messages.
        create: also make the tables where there are none.

    Raises:
        StoreError: the schema is of a version that this code does not know, or there is none and ``create`` is False.
    """
    with reading.begin() as connection:
        if revision(connection) == REVISION:
            return
    with writing.begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        found = revision(connection)
        if found is None and not create:
            raise StoreError(f"{where} has no job store in it; expected a database that PipeFill made")
        if found != REVISION:
            _upgrade(connection, found, where)


def revision(connection: Connection) -> str | None:
    """The migration that the database is at; None if it has none of our tables."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))


def _upgrade(connection: Connection, found: str | None, where: str) -> None:
    # Here and not above: it is slow to import, and rarely needed.
    from alembic import command
    from alembic.config import Config
    from alembic.script import ScriptDirectory

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if found is not None and found not in known:
        raise StoreError(
            f"{where} has the schema {found} of a newer PipeFill; this one knows up to {REVISION}: expected an upgrade"
        )
    command.upgrade(config, "head")
