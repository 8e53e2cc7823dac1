"""Add what a later replay of the log needs, move images from rows to files, and tell directories that are begun from discarded ones.

A replay needs what an operation resolved, which one a model has applied, and payloads and images that may stay when their operation ends.
"""

import time
from pathlib import Path

from alembic import op
from sqlalchemy import JSON, Column, Float, ForeignKey, Integer, LargeBinary, Text, text

from tinsmith.store.blobs import BlobFiles

revision = "4"
down_revision = "3"


def upgrade() -> None:
    """From schema version 3, the last one of Tinsmiths that looked for it in `schema_version`: they refuse a number above their own."""
    op.execute("UPDATE schema_version SET version = 4")
    op.add_column("models", Column("applied_seq", Integer))
    op.add_column("commands", Column("resolved", JSON))
    op.add_column("commands", Column("image_digests", LargeBinary))
    op.add_column("commands", Column("kept_bytes", Integer))
    op.create_index("ix_commands_kept", "commands", ["id", "kept_bytes"], sqlite_where=text("kept_bytes IS NOT NULL"))
    op.drop_index("ix_commands_queued", "commands")
    op.create_index("ix_commands_queued", "commands", ["model_id", "seq_id"], sqlite_where=text("status = 'queued'"))
    _move_images_out()
    _tell_directories_apart()


def _move_images_out() -> None:
    """Turn rows into files, which are all written before any row goes.

    Commands that are queued keep their images. They get no `image_digests`: nobody runs them, the next server fails them.
    """
    connection = op.get_bind()
    database = connection.engine.url.database
    assert database is not None
    files = BlobFiles(Path(database).parent)
    for sha256, data in connection.exec_driver_sql("SELECT sha256, data FROM blobs"):
        files.write({sha256: data})
    op.rename_table("command_images", "old_command_images")
    op.create_table(
        "command_images",
        Column("command_id", Integer, ForeignKey("commands.id", ondelete="CASCADE"), primary_key=True),
        Column("sha256", LargeBinary, primary_key=True),
        Column("size", Integer, nullable=False),
    )
    op.execute("INSERT INTO command_images SELECT command_id, sha256, length(data) FROM old_command_images JOIN blobs USING (sha256)")
    op.drop_table("old_command_images")
    op.drop_table("blobs")
    op.create_index("ix_command_images_sha256", "command_images", ["sha256"])


def _tell_directories_apart() -> None:
    """Split `discarded`: a directory that was being written was due a day after it was begun, one to delete was due at once."""
    op.create_table("begun_directories", Column("directory", Text, primary_key=True), Column("begun_at", Float, nullable=False))
    op.create_table("discarded_directories", Column("directory", Text, primary_key=True), Column("discarded_at", Float, nullable=False))
    now = {"now": time.time()}
    connection = op.get_bind()
    connection.execute(text("INSERT INTO begun_directories SELECT directory, due_at - 86400 FROM discarded WHERE due_at > :now"), now)
    connection.execute(text("INSERT INTO discarded_directories SELECT directory, due_at FROM discarded WHERE due_at <= :now"), now)
    op.drop_table("discarded")
