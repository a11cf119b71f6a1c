"""What alembic runs to migrate a store: on the connection, and in the transaction, that the store gives it."""

from __future__ import annotations

from alembic import context

from megatron.fill.store.schema import VERSION_TABLE

context.configure(connection=context.config.attributes["connection"], version_table=VERSION_TABLE)
context.run_migrations()
