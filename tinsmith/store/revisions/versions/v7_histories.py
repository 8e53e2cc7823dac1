"""Histories of models, from which the next engine brings them back."""

from alembic import op
from sqlalchemy import JSON, BigInteger, Boolean, Column, Float, ForeignKey, Integer, Text

revision = "7"
down_revision = "6"

_WHOLE = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    """Add what revision 7 of `store/schema.py` has."""
    op.create_table(
        "histories",
        Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), primary_key=True),
        Column("summary", JSON, nullable=False),
        Column("comebacks", _WHOLE, nullable=False, server_default="0"),
    )
    op.create_table(
        "history_events",
        Column("model_id", Text, ForeignKey("histories.model_id", ondelete="CASCADE"), primary_key=True),
        Column("number", _WHOLE, primary_key=True),
        Column("event", JSON, nullable=False),
    )
    op.create_table(
        "engine_starts",
        Column("number", _WHOLE, primary_key=True),
        Column("started_at", Float, nullable=False),
        Column("place", Text, nullable=False),
        Column("left_work", Boolean, nullable=False),
        sqlite_autoincrement=True,
    )
