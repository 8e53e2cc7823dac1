"""The tables. Times are Unix seconds.

A change needs a new REVISION, and a module in `revisions/versions` that migrates from the one before.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    false,
    text,
)

from tinsmith.store.records import LOCAL

REVISION = "12"
"""The newest Alembic revision, a number: an unknown one can be told to be newer."""
BASELINE = "5"
"""The oldest revision to migrate from; older ones were never released."""

Whole = BigInteger().with_variant(Integer, "sqlite")
"""A number of up to 63 bits; SQLite's integers have them, and only an `INTEGER` numbers rows by itself."""

metadata = MetaData()

# Alembic's own table. It is not part of `metadata`, which Alembic compares with what is there.
alembic_version = Table("alembic_version", MetaData(), Column("version_num", String(32), primary_key=True))


def _index_where(condition: str, name: str, *columns: str) -> Index:
    """An index of the rows that meet a condition."""
    return Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))


sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Text, primary_key=True),
    Column("tags", JSON, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Column("sdk_version", Text, nullable=False),
    Column("project_id", Text),
    Column("display_name", Text),
    Column("created_at", Float, nullable=False, index=True),
    # As created_at: the server keeps in memory when it last heard of a session
    Column("last_seen_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("finish_reason", Text),
    Column("finish_detail", Text),
    Column("tenant", Text, nullable=False, server_default=LOCAL, index=True),
)

models = Table(
    "models",
    metadata,
    Column("model_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("lora_config", JSON, nullable=False),
    Column("optimizer_config", JSON, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Column("status", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("applied_seq", Whole),
)

sampling_sessions = Table(
    "sampling_sessions",
    metadata,
    Column("sampling_session_id", Text, primary_key=True),
    Column("session_id", Text, ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("snapshot_id", Text),
    Column("model_path", Text),
    Column("model_id", Text, ForeignKey("models.model_id")),
    Column("gone", Text),
    Column("created_at", Float, nullable=False),
    Column("inflight", Boolean, nullable=False, server_default=false()),
    Column("clones", Whole, nullable=False, server_default="0"),
)

commands = Table(
    "commands",
    metadata,
    Column("id", Whole, primary_key=True),
    Column("model_id", Text, ForeignKey("models.model_id"), nullable=False),
    Column("seq_id", Whole, nullable=False),
    Column("kind", Text, nullable=False),
    Column("payload", LargeBinary),
    Column("image_digests", LargeBinary),
    Column("digest", LargeBinary),
    Column("status", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("result", LargeBinary),
    Column("result_type", Text),
    Column("error", Text),
    Column("category", Text),
    Column("resolved", JSON(none_as_null=True)),
    Column("kept_bytes", Whole),
    Column("tokens", Whole),
    Column("gpu_seconds", Float),
    UniqueConstraint("model_id", "seq_id"),
    Index("ix_commands_run", "model_id", "id"),
    _index_where("status = 'done'", "ix_commands_done", "finished_at"),
    _index_where("status = 'queued'", "ix_commands_queued", "model_id", "seq_id"),
    _index_where("kept_bytes IS NOT NULL", "ix_commands_kept", "id", "kept_bytes"),
    _index_where("status = 'failed'", "ix_commands_failures", "id"),
    _index_where("kind IN ('create_from_checkpoint', 'load_weights')", "ix_commands_loads", "model_id"),
    sqlite_autoincrement=True,
)

# Metrics of operations, in the order in which they ended, as JSON whose numbers may be "nan" or "inf".
run_metrics = Table(
    "run_metrics",
    metadata,
    Column("id", Whole, primary_key=True),
    Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), nullable=False),
    Column("seq_id", Whole, nullable=False),
    Column("at", Float, nullable=False),
    # Of the operation; `forward` for one without gradients
    Column("kind", Text, nullable=False),
    Column("tokens", Whole, nullable=False),
    Column("metrics", Text, nullable=False),
    Index("ix_run_metrics_model_id", "model_id", "id"),
    sqlite_autoincrement=True,
)

# Payloads of each run's first forward and backward passes, without images: what the model saw at first.
first_requests = Table(
    "first_requests",
    metadata,
    Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), primary_key=True),
    Column("seq_id", Whole, primary_key=True),
    Column("payload", LargeBinary, nullable=False),
)

# What a model can be restored from, and what has happened since (`engine/history.py`), as far as outcomes are recorded.
histories = Table(
    "histories",
    metadata,
    Column("model_id", Text, ForeignKey("models.model_id", ondelete="CASCADE"), primary_key=True),
    Column("summary", JSON, nullable=False),
    Column("comebacks", Whole, nullable=False, server_default="0"),
)

history_events = Table(
    "history_events",
    metadata,
    Column("model_id", Text, ForeignKey("histories.model_id", ondelete="CASCADE"), primary_key=True),
    Column("number", Whole, primary_key=True),
    Column("event", JSON, nullable=False),
)

# A row for each start of an engine.
engine_starts = Table(
    "engine_starts",
    metadata,
    Column("number", Whole, primary_key=True),
    Column("started_at", Float, nullable=False),
    # The data directory, in which kept copies lie
    Column("place", Text, nullable=False),
    # Whether it has begun an operation: others end for reasons of their own, and as often as they are started
    Column("has_begun", Boolean, nullable=False),
    sqlite_autoincrement=True,
)

# Which commands need which image. The images themselves are files (`blobs.py`); unused ones are deleted.
command_images = Table(
    "command_images",
    metadata,
    Column("command_id", Whole, ForeignKey("commands.id", ondelete="CASCADE"), primary_key=True),
    Column("sha256", LargeBinary, primary_key=True, index=True),
    Column("size", Whole, nullable=False),
)

# The model may be one that was never here: `tinsmith import`.
checkpoints = Table(
    "checkpoints",
    metadata,
    Column("tinker_path", Text, primary_key=True),
    Column("model_id", Text, nullable=False, index=True),
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    Column("directory", Text, nullable=False, index=True),
    Column("base_model", Text, nullable=False),
    Column("architecture", Text, nullable=False),
    Column("lora_config", JSON, nullable=False),
    Column("has_optimizer", Boolean, nullable=False),
    Column("size_bytes", Whole, nullable=False),
    Column("user_metadata", JSON(none_as_null=True)),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, index=True),
    Column("public", Boolean, nullable=False, server_default=false()),
    Column("tenant", Text, nullable=False, server_default=LOCAL, index=True),
    Column("deleted_at", Float),
)

# Directories of checkpoint files that a save has begun to write and no row names yet.
begun_directories = Table(
    "begun_directories",
    metadata,
    Column("directory", Text, primary_key=True),
    Column("begun_at", Float, nullable=False),
)

# Directories of checkpoint files that the last row has left: they are to be deleted.
discarded_directories = Table(
    "discarded_directories",
    metadata,
    Column("directory", Text, primary_key=True),
    Column("discarded_at", Float, nullable=False),
)

# API keys, of which only digests are kept. A revoked key keeps its row: a server that ever had keys goes on asking.
api_keys = Table(
    "api_keys",
    metadata,
    Column("name", Text, primary_key=True),
    Column("key_id", Text, nullable=False, unique=True),
    Column("digest", LargeBinary, nullable=False),
    Column("tenant", Text, nullable=False),
    Column("role", Text, nullable=False),
    Column("project_id", Text),
    Column("models", JSON(none_as_null=True)),
    Column("max_models", Whole),
    Column("max_parallel", Whole),
    Column("tokens_a_day", Whole),
    Column("gpu_seconds_a_day", Float),
    Column("storage_bytes", Whole),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float),
    Column("revoked_at", Float),
    Column("kept_checkpoints", Whole),
    Column("checkpoint_ttl_s", Float),
)

# Browsers in which somebody has logged in with a key, as digests of their cookies.
logins = Table(
    "logins",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("key_id", Text, nullable=False),
    Column("began_at", Float, nullable=False),
    Index("ix_logins_key_id", "key_id", "began_at"),
)

# Whose engine may write, in one row. Each engine gets a higher number, and transactions of earlier ones are refused.
lease = Table(
    "lease",
    metadata,
    Column("number", Whole, primary_key=True, autoincrement=False),
    Column("holder", Text, nullable=False),
    Column("taken_at", Float, nullable=False),
)

# The last transaction that each thread of each process has committed, on PostgreSQL (`postgresql.py`), and the last
# amounts that each server has added to `usage`.
last_commits = Table(
    "last_commits",
    metadata,
    Column("writer", Text, primary_key=True),
    Column("number", Whole, nullable=False),
    Column("noted_at", Float, nullable=False),
)

# Sums of an hour, which begins at a multiple of 3,600 s. Storage belongs to no session: there it is empty.
usage = Table(
    "usage",
    metadata,
    Column("hour", Whole, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("base_model", Text, primary_key=True),
    Column("session_id", Text, primary_key=True),
    Column("trained_tokens", Whole, nullable=False, server_default="0"),
    Column("prefilled_tokens", Whole, nullable=False, server_default="0"),
    Column("cached_tokens", Whole, nullable=False, server_default="0"),
    Column("sampled_tokens", Whole, nullable=False, server_default="0"),
    Column("gpu_seconds", Float, nullable=False, server_default="0"),
    Column("stored_bytes", Whole, nullable=False, server_default="0"),
)
