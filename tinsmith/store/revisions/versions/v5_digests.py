"""Add the digest of what an operation was sent with, which tells a repeat from another operation under the same key."""

from alembic import op
from sqlalchemy import Column, LargeBinary

revision = "5"
down_revision = "4"


def upgrade() -> None:
    """From schema version 4. Operations of that time have no digest, and are compared by their kind alone."""
    op.execute("UPDATE schema_version SET version = 5")
    op.add_column("commands", Column("digest", LargeBinary))
