"""Tenants: API keys, who owns sessions and checkpoints, and what each has used.

All that is there belongs to the tenant `local`. Imported checkpoints belong to no session; they become public, as new
ones are. No others are: while all belonged to one tenant, publishing let nobody in.
"""

from alembic import op
from sqlalchemy import JSON, Column, Float, Integer, LargeBinary, Text

revision = "6"
down_revision = "5"

_USAGE_KEY = ("hour", "tenant", "base_model", "session_id")
_TOKENS = ("trained", "prefilled", "cached", "sampled")


def upgrade() -> None:
    """Add what revision 6 of `store/schema.py` has."""
    for table in ("sessions", "checkpoints"):
        op.add_column(table, Column("tenant", Text, nullable=False, server_default="local"))
        op.create_index(f"ix_{table}_tenant", table, ["tenant"])
    op.execute("UPDATE checkpoints SET public = (model_id = 'imported')")
    op.create_table(
        "api_keys",
        Column("name", Text, primary_key=True),
        Column("key_id", Text, nullable=False, unique=True),
        Column("digest", LargeBinary, nullable=False),
        Column("tenant", Text, nullable=False),
        Column("role", Text, nullable=False),
        Column("project_id", Text),
        Column("models", JSON(none_as_null=True)),
        Column("max_models", Integer),
        Column("max_parallel", Integer),
        Column("tokens_a_day", Integer),
        Column("gpu_seconds_a_day", Float),
        Column("storage_bytes", Integer),
        Column("created_at", Float, nullable=False),
        Column("expires_at", Float),
        Column("revoked_at", Float),
    )
    op.add_column("commands", Column("tokens", Integer))
    op.add_column("commands", Column("gpu_seconds", Float))
    op.create_table(
        "usage",
        *(Column(name, Integer if name == "hour" else Text, primary_key=True) for name in _USAGE_KEY),
        *(Column(f"{name}_tokens", Integer, nullable=False, server_default="0") for name in _TOKENS),
        Column("gpu_seconds", Float, nullable=False, server_default="0"),
        Column("stored_bytes", Integer, nullable=False, server_default="0"),
    )
