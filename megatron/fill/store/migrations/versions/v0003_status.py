"""The status of a job as JSON, in place of its reason as text."""

from __future__ import annotations

import json

import sqlalchemy as sa
from alembic import op

revision = "v0003"
down_revision = "v0002"

_JOBS = sa.table("pipefill_jobs", sa.column("id"), sa.column("status"))


def upgrade() -> None:
    op.execute("ALTER TABLE pipefill_jobs RENAME COLUMN reason TO status")
    connection = op.get_bind()
    change = _JOBS.update().where(_JOBS.c.id == sa.bindparam("job")).values(status=sa.bindparam("cause"))
    # The cause is not known: the text is its detail.
    rows = [
        {"job": row.id, "cause": json.dumps({"detail": row.status} if row.status else {})}
        for row in connection.execute(sa.select(_JOBS))
    ]
    if rows:
        connection.execute(change, rows)
