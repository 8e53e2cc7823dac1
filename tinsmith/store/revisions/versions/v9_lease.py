"""The lease of the engine that may write, and what was committed last."""

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
    op.create_table(
        "last_commits",
        Column("writer", Text, primary_key=True),
        Column("number", _WHOLE, nullable=False),
        Column("noted_at", Float, nullable=False),
    )
