"""Add what the catalog of runs and sessions needs: copies, publishing, clients that share a sampling session, indexes for lists."""

from alembic import op
from sqlalchemy import Boolean, Column, Float, Integer, Text, false

revision = "3"
down_revision = "2"


def upgrade() -> None:
    """From schema version 2."""
    op.add_column("sampling_sessions", Column("inflight", Boolean, nullable=False, server_default=false()))
    op.add_column("sampling_sessions", Column("clones", Integer, nullable=False, server_default="0"))
    op.add_column("checkpoints", Column("public", Boolean, nullable=False, server_default=false()))
    op.create_table("discarded", Column("directory", Text, primary_key=True), Column("due_at", Float, nullable=False, index=True))
    op.create_index("ix_checkpoints_directory", "checkpoints", ["directory"])
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("ix_sessions_created_at", "sessions", ["created_at"])
