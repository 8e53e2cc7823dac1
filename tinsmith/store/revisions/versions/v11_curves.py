"""Metrics and first requests of each run, and indexes for pages that show failures and where runs come from."""

from alembic import op
from sqlalchemy import BigInteger, Column, Float, ForeignKey, Integer, LargeBinary, Text, text

revision = "11"
down_revision = "10"

_WHOLE = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    """Add what revision 11 of `store/schema.py` has."""
    op.create_table(
        "run_metrics",
        Column("id", _WHOLE, primary_key=True),
        Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), nullable=False),
        Column("seq_id", _WHOLE, nullable=False),
        Column("at", Float, nullable=False),
        Column("kind", Text, nullable=False),
        Column("tokens", _WHOLE, nullable=False),
        Column("metrics", Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_run_metrics_model_id", "run_metrics", ["model_id", "id"])
    op.create_table(
        "first_requests",
        Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), primary_key=True),
        Column("seq_id", _WHOLE, primary_key=True),
        Column("payload", LargeBinary, nullable=False),
    )
    failed = text("status = 'failed'")
    op.create_index("ix_commands_failed", "commands", ["finished_at"], sqlite_where=failed, postgresql_where=failed)
    loads = text("kind IN ('create_from_checkpoint', 'load_weights')")
    op.create_index("ix_commands_loads", "commands", ["model_id"], sqlite_where=loads, postgresql_where=loads)
