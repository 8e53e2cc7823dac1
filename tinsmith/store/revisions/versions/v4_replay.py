"""Add what a later replay of the log needs: what an operation resolved, and which one a model has applied."""

from alembic import op
from sqlalchemy import JSON, Column, Integer, text

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """From schema version 3, the last one of Tinsmiths that looked for it in `schema_version`: they refuse a number above their own."""
    op.execute("UPDATE schema_version SET version = 4")
    op.add_column("models", Column("applied_seq", Integer))
    op.add_column("commands", Column("resolved", JSON))
    op.drop_index("ix_commands_queued", "commands")
    op.create_index("ix_commands_queued", "commands", ["model_id", "seq_id"], sqlite_where=text("status = 'queued'"))
