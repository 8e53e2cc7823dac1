"""From the schema of an older Tinsmith to ours, one step a version, with Alembic's operations.

All steps run in the transaction that opens the database: it is migrated whole or left as it was.
"""

from collections.abc import Callable

from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import JSON, Boolean, Column, Connection, Float, Integer, Text, false, text


def migrate(connection: Connection, version: int) -> None:
    """Bring the tables from schema `version` to the newest."""
    operations = Operations(MigrationContext.configure(connection))
    for step in _STEPS[version - 1 :]:
        step(operations)


def _add_checkpoints(op: Operations) -> None:
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


def _add_catalog(op: Operations) -> None:
    op.add_column("sampling_sessions", Column("inflight", Boolean, nullable=False, server_default=false()))
    op.add_column("sampling_sessions", Column("clones", Integer, nullable=False, server_default="0"))
    op.add_column("checkpoints", Column("public", Boolean, nullable=False, server_default=false()))
    op.create_table("discarded", Column("directory", Text, primary_key=True), Column("due_at", Float, nullable=False, index=True))
    op.create_index("ix_checkpoints_directory", "checkpoints", ["directory"])
    op.create_index("ix_models_session_id", "models", ["session_id"])
    op.create_index("ix_sessions_created_at", "sessions", ["created_at"])


def _add_claims(op: Operations) -> None:
    op.add_column("models", Column("applied_seq", Integer))
    op.add_column("commands", Column("resolved", JSON))
    op.drop_index("ix_commands_queued", "commands")
    op.create_index("ix_commands_queued", "commands", ["model_id", "seq_id"], sqlite_where=text("status = 'queued'"))


_STEPS: tuple[Callable[[Operations], None], ...] = (_add_checkpoints, _add_catalog, _add_claims)
"""The step at index n - 1 leads from version n to n + 1."""
