"""How long checkpoints are kept: deleted ones for a day, and as many and as long as a tenant's keys say."""

from alembic import op
from sqlalchemy import BigInteger, Column, Float, Integer

revision = "8"
down_revision = "7"

_WHOLE = BigInteger().with_variant(Integer, "sqlite")


def upgrade() -> None:
    """Add what revision 8 of `store/schema.py` has."""
    op.add_column("checkpoints", Column("deleted_at", Float))
    op.add_column("api_keys", Column("kept_checkpoints", _WHOLE))
    op.add_column("api_keys", Column("checkpoint_ttl_s", Float))
