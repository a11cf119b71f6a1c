"""The first schema: jobs, devices, profiles."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "pipefill_jobs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer, "sqlite"), primary_key=True),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("user", sa.Text, nullable=False),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("deadline_s", sa.Double),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("submitted_s", sa.Double, nullable=False),
        sa.Column("started_s", sa.Double),
        sa.Column("finished_s", sa.Double),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("owner", sa.Text),
        sa.Column("lease_until_s", sa.Double),
        sa.Column("cancelling", sa.Boolean, nullable=False),
        sa.Column("device", sa.Text, nullable=False),
        sa.Column("directory", sa.Text, nullable=False),
        sa.Column("progress", sa.Text, nullable=False),
        sa.Column("result", sa.Text, nullable=False),
    )
    unfinished = sa.text("state IN ('QUEUED', 'RUNNING')")
    op.create_index(
        "pipefill_jobs_unfinished_name",
        "pipefill_jobs",
        ["name"],
        unique=True,
        sqlite_where=unfinished,
        postgresql_where=unfinished,
    )
    op.create_index("pipefill_jobs_name", "pipefill_jobs", ["name"])
    op.create_index("pipefill_jobs_state", "pipefill_jobs", ["state", "lease_until_s"])
    op.create_table(
        "pipefill_devices",
        sa.Column("name", sa.Text, primary_key=True),
        sa.Column("run", sa.Text, nullable=False),
        sa.Column("busy_until_s", sa.Double),
        sa.Column("job", sa.Text, nullable=False),
        sa.Column("cycle", sa.Text, nullable=False),
        sa.Column("lease_until_s", sa.Double, nullable=False),
    )
    op.create_table(
        "pipefill_profiles",
        sa.Column("key", sa.Text, primary_key=True),
        sa.Column("profile", sa.Text, nullable=False),
        sa.Column("kept_s", sa.Double, nullable=False),
    )
