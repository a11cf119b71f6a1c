"""The migration of a store's schema when the store is opened, safe against others that open it at the same time."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sqlalchemy import Connection, Engine, func, inspect, select, text

from megatron.fill.errors import StoreError
from megatron.fill.store.schema import MIGRATION_LOCK, REVISION, VERSION_TABLE

if TYPE_CHECKING:
    from alembic.config import Config

_SCRIPTS = Path(__file__).with_name("migrations")


def migrate(engine: Engine, where: str, create: bool) -> None:
    """Run the migrations that the database lacks, in one transaction.

    Raises:
        StoreError: the schema has a version that this code does not know, or is missing and ``create`` is False.
    """
    with engine.begin() as connection:
        if revision(connection) == REVISION:
            return
    _migrations()  # before the lock: an agent, which has the lowest priority, may take seconds to import alembic
    with engine.execution_options(writing=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(select(func.pg_advisory_xact_lock(MIGRATION_LOCK)))
        found = revision(connection)
        if found is None and not create:
            raise StoreError(f"{where} has no job store in it; expected a database that PipeFill made")
        if found != REVISION:
            _upgrade(connection, found, where)


def revision(connection: Connection) -> str | None:
    """The current migration of the database; None if it has no tables of ours."""
    if not inspect(connection).has_table(VERSION_TABLE):
        return None
    return connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))


@functools.cache
def _migrations() -> tuple[Callable[[Config, str], None], frozenset[str]]:
    """The function that runs migrations, and the known revisions."""
    # Imported here, since alembic is slow to import and rarely needed.
    from alembic.command import upgrade
    from alembic.script import ScriptDirectory

    scripts = ScriptDirectory.from_config(_config())
    return upgrade, frozenset(script.revision for script in scripts.walk_revisions())


def _upgrade(connection: Connection, found: str | None, where: str) -> None:
    upgrade, known = _migrations()
    if found is not None and found not in known:
        raise StoreError(
            f"{where} has the schema {found} of a newer PipeFill; this one knows up to {REVISION}: expected an upgrade"
        )
    upgrade(_config(connection=connection), "head")


def _config(**attributes: Any) -> Config:
    from alembic.config import Config

    config = Config(attributes=attributes)
    config.set_main_option("script_location", str(_SCRIPTS).replace("%", "%%"))
    return config
