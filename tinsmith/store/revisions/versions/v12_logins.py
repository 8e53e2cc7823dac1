"""Logins that end on the server, and indexes for searches of a long log."""

from alembic import op
from sqlalchemy import Column, Float, LargeBinary, Text, text

revision = "12"
down_revision = "11"


def upgrade() -> None:
    """Add what revision 12 of `store/schema.py` has."""
    op.create_table(
        "logins",
        Column("digest", LargeBinary, primary_key=True),
        Column("key_id", Text, nullable=False),
        Column("began_at", Float, nullable=False),
    )
    op.create_index("ix_logins_key_id", "logins", ["key_id", "began_at"])
    op.create_index("ix_commands_run", "commands", ["model_id", "id"])
    failed = text("status = 'failed'")
    op.drop_index("ix_commands_failed", "commands")
    op.create_index("ix_commands_failures", "commands", ["id"], sqlite_where=failed, postgresql_where=failed)
