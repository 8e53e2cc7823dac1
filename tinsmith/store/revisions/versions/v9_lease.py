"""The lease of the engine that may write."""

from alembic import op
from sqlalchemy import BigInteger, Column, Float, Integer, Text

revision = "9"
down_revision = "8"

_WHOLE = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    """Add what revision 9 of `store/schema.py` has."""
    op.create_table(
        "lease",
        Column("number", _WHOLE, primary_key=True, autoincrement=False),
        Column("holder", Text, nullable=False),
        Column("taken_at", Float, nullable=False),
    )
