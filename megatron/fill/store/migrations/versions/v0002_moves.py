"""The columns for jobs that move: the device that asked for a job and when, and the jobs that a device refuses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0002"
down_revision = "v0001"


def upgrade() -> None:
    op.add_column("pipefill_jobs", sa.Column("asked_by", sa.Text, nullable=False, server_default=""))
    op.add_column("pipefill_jobs", sa.Column("asked_s", sa.Double))
    op.add_column("pipefill_devices", sa.Column("refuses", sa.Text, nullable=False, server_default="[]"))
