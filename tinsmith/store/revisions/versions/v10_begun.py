"""Engines count against operations if they have begun some, and no more if some were queued when they started."""

from alembic import op
from sqlalchemy import Boolean, Column, MetaData, Table, false, update

revision = "10"
down_revision = "9"


def upgrade() -> None:
    """Change what revision 10 of `store/schema.py` names otherwise."""
    op.alter_column("engine_starts", "left_work", new_column_name="has_begun")
    starts = Table("engine_starts", MetaData(), Column("has_begun", Boolean))
    op.execute(update(starts).values(has_begun=false()))  # of earlier engines nobody knows
