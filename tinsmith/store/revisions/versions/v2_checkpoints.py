"""Add checkpoints, and sampling sessions of a checkpoint."""

from alembic import op
from sqlalchemy import JSON, Boolean, Column, Float, Integer, Text, text

revision = "2"
down_revision = None


def upgrade() -> None:
    """From schema version 1, which had no checkpoints."""
    op.create_table(
        "checkpoints",
        Column("tinker_path", Text, primary_key=True),
        Column("model_id", Text, nullable=False, index=True),
        Column("kind", Text, nullable=False),
        Column("name", Text, nullable=False),
        Column("directory", Text, nullable=False),
        Column("base_model", Text, nullable=False),
        Column("architecture", Text, nullable=False),
        Column("lora_config", JSON, nullable=False),
        Column("has_optimizer", Boolean, nullable=False),
        Column("size_bytes", Integer, nullable=False),
        Column("user_metadata", JSON),
        Column("created_at", Float, nullable=False),
        Column("expires_at", Float, index=True),
    )
    op.create_index("ix_commands_done", "commands", ["finished_at"], sqlite_where=text("status = 'done'"))
    op.add_column("sampling_sessions", Column("model_path", Text))
