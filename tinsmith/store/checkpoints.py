"""Saved checkpoints in SQL. Each function is part of a transaction.

A row is what makes a checkpoint exist: its files lie complete under `directory` before the row is written, and nothing changes them.
"""

from sqlalchemy import Connection, bindparam, delete, or_, select
from sqlalchemy.dialects.sqlite import insert

from tinsmith.store.records import Checkpoint
from tinsmith.store.schema import checkpoints

_COLUMNS = [checkpoints.c[name] for name in Checkpoint.__dataclass_fields__]
_ALIVE = or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > bindparam("now"))
_FIND = select(*_COLUMNS).where(checkpoints.c.tinker_path == bindparam("key"), _ALIVE)
_INSERT = insert(checkpoints).prefix_with("OR REPLACE")
_DROP_EXPIRED = delete(checkpoints).where(checkpoints.c.expires_at <= bindparam("now")).returning(*_COLUMNS)
_DIRECTORIES = select(checkpoints.c.directory)


def put(connection: Connection, checkpoint: Checkpoint) -> None:
    """Add a checkpoint; one of the same path is replaced."""
    connection.execute(_INSERT, vars(checkpoint))


def find(connection: Connection, tinker_path: str, now: float) -> Checkpoint | None:
    """The checkpoint of this path, if there is one that has not expired."""
    row = connection.execute(_FIND, {"key": tinker_path, "now": now}).first()
    return None if row is None else Checkpoint(*row)


def drop_expired(connection: Connection, now: float) -> list[Checkpoint]:
    """Remove the rows whose time is over and return them."""
    return [Checkpoint(*row) for row in connection.execute(_DROP_EXPIRED, {"now": now})]


def directories(connection: Connection) -> set[str]:
    """The directory names that belong to a checkpoint."""
    return set(connection.execute(_DIRECTORIES).scalars())
