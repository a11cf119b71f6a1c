"""The script that alembic runs to migrate a store, on the store's connection and in its transaction."""

from __future__ import annotations

from alembic import context

from megatron.fill.store.schema import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
