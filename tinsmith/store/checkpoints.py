"""Saved checkpoints in SQL. Each function is part of a transaction.

A checkpoint exists as soon as it has a row. Its files are complete in `directory` before the row is written, and never change. Several rows
may name the same directory: a copy is a row of its own.

No directory is forgotten, whichever process dies when: one is noted as begun before anything is written to it, until it has a row, and as
discarded in the transaction that removes its last row, until its files are deleted.
"""

from collections.abc import Iterable

from sqlalchemy import Connection, bindparam, delete, exists, or_, select, union, update
from sqlalchemy.dialects.sqlite import insert

from tinsmith.store.records import Checkpoint
from tinsmith.store.schema import begun_directories, checkpoints, discarded_directories

COLUMNS = [checkpoints.c[name] for name in Checkpoint.__dataclass_fields__]
ALIVE = or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > bindparam("now"))
"""The condition for rows that have not expired; takes `now`."""

_BY_PATH = checkpoints.c.tinker_path == bindparam("key")
_FIND = select(*COLUMNS).where(_BY_PATH, ALIVE)
_INSERT = insert(checkpoints)
_SET_PUBLIC = update(checkpoints).where(_BY_PATH, ALIVE).values(public=bindparam("value"))
_SET_EXPIRY = update(checkpoints).where(_BY_PATH, ALIVE).values(expires_at=bindparam("value"))
_DROP = delete(checkpoints).where(_BY_PATH, ALIVE).returning(checkpoints.c.directory)
_REPLACE = delete(checkpoints).where(_BY_PATH).returning(checkpoints.c.directory)
_EXPIRED = checkpoints.c.expires_at <= bindparam("now")
_DROP_EXPIRED = delete(checkpoints).where(_EXPIRED).returning(*COLUMNS)
_FIND_EXPIRED = select(*COLUMNS).where(_EXPIRED).order_by(checkpoints.c.expires_at)

_DIRECTORY_OF = select(checkpoints.c.directory).where(_BY_PATH)
_NEWEST_OF = (
    select(checkpoints.c.tinker_path)
    .where(checkpoints.c.model_id == bindparam("model"), ALIVE)
    .order_by(checkpoints.c.created_at.desc())
    .limit(bindparam("limit"))
)
_BEGIN = insert(begun_directories).prefix_with("OR REPLACE")
_DISCARD = insert(discarded_directories).prefix_with("OR REPLACE")
_FORGET = [delete(table).where(table.c.directory == bindparam("key")) for table in (begun_directories, discarded_directories)]
_USED = select(exists().where(checkpoints.c.directory == bindparam("key")))
_LIVING = select(checkpoints.c.directory).where(ALIVE).distinct()
_EVERY = select(*COLUMNS).order_by(checkpoints.c.created_at, checkpoints.c.tinker_path)
_DROP_IN = delete(checkpoints).where(checkpoints.c.directory == bindparam("key"))
_MOVE_IN = update(checkpoints).where(checkpoints.c.directory == bindparam("key")).values(directory=bindparam("to"))
_FORGET_ALL = [delete(begun_directories), delete(discarded_directories)]
_KNOWN = union(select(checkpoints.c.directory), select(begun_directories.c.directory), select(discarded_directories.c.directory))
_DISCARDED = select(discarded_directories.c.directory).order_by(discarded_directories.c.discarded_at)
_LEFT = (
    select(begun_directories.c.directory).where(begun_directories.c.begun_at < bindparam("before")).order_by(begun_directories.c.begun_at)
)


def put(connection: Connection, checkpoint: Checkpoint, now: float) -> None:
    """Add a checkpoint; one of the same path is replaced. If the path has these files already, nothing changes."""
    if connection.execute(_DIRECTORY_OF, {"key": checkpoint.tinker_path}).scalar() == checkpoint.directory:
        return
    replaced = connection.execute(_REPLACE, {"key": checkpoint.tinker_path}).scalars().all()
    connection.execute(_INSERT, vars(checkpoint))
    forget(connection, checkpoint.directory)
    _discard_unused(connection, replaced, now)


def find(connection: Connection, tinker_path: str, now: float) -> Checkpoint | None:
    """The checkpoint of this path, if there is one that has not expired."""
    row = connection.execute(_FIND, {"key": tinker_path, "now": now}).first()
    return None if row is None else Checkpoint(*row)


def newest_of(connection: Connection, model_id: str, now: float, limit: int = 3) -> list[str]:
    """The paths of a model's newest checkpoints that have not expired."""
    return list(connection.execute(_NEWEST_OF, {"model": model_id, "now": now, "limit": limit}).scalars())


def set_public(connection: Connection, tinker_path: str, public: bool, now: float) -> bool:
    """Publish or unpublish. False if there is no such checkpoint."""
    return connection.execute(_SET_PUBLIC, {"key": tinker_path, "value": public, "now": now}).rowcount == 1


def set_expiry(connection: Connection, tinker_path: str, expires_at: float | None, now: float) -> bool:
    """Change when a checkpoint expires. False if there is no such checkpoint."""
    return connection.execute(_SET_EXPIRY, {"key": tinker_path, "value": expires_at, "now": now}).rowcount == 1


def drop(connection: Connection, tinker_path: str, now: float) -> bool:
    """Remove a checkpoint. False if there is none."""
    directories = connection.execute(_DROP, {"key": tinker_path, "now": now}).scalars().all()
    _discard_unused(connection, directories, now)
    return bool(directories)


def find_expired(connection: Connection, now: float) -> list[Checkpoint]:
    """The rows of expired checkpoints, oldest first."""
    return [Checkpoint(*row) for row in connection.execute(_FIND_EXPIRED, {"now": now})]


def drop_expired(connection: Connection, now: float) -> list[Checkpoint]:
    """Remove the rows of expired checkpoints and return them."""
    expired = [Checkpoint(*row) for row in connection.execute(_DROP_EXPIRED, {"now": now})]
    _discard_unused(connection, [checkpoint.directory for checkpoint in expired], now)
    return expired


def begin(connection: Connection, directory: str, now: float) -> None:
    """Note that files are going to be written to a directory."""
    connection.execute(_BEGIN, {"directory": directory, "begun_at": now})


def to_delete(connection: Connection, begun_before: float) -> list[str]:
    """The directories to delete: the discarded ones, and those that were begun before then (Unix time) and have no row yet."""
    left = connection.execute(_LEFT, {"before": begun_before}).scalars()
    return [*connection.execute(_DISCARDED).scalars(), *left]


def living(connection: Connection, now: float) -> set[str]:
    """The directories of checkpoints that have not expired."""
    return set(connection.execute(_LIVING, {"now": now}).scalars())


def known(connection: Connection) -> set[str]:
    """The directories that are named by a checkpoint, begun or discarded."""
    return set(connection.execute(_KNOWN).scalars())


def forget(connection: Connection, directory: str) -> None:
    """Note that a directory has a row now, or that its files are deleted."""
    for statement in _FORGET:
        connection.execute(statement, {"key": directory})


def every(connection: Connection) -> list[Checkpoint]:
    """All rows, oldest first, also of those that have expired."""
    return [Checkpoint(*row) for row in connection.execute(_EVERY)]


def drop_in(connection: Connection, directory: str) -> None:
    """Remove all rows that name a directory."""
    connection.execute(_DROP_IN, {"key": directory})


def move_in(connection: Connection, directory: str, to: str) -> None:
    """Let all rows that name a directory name another one."""
    connection.execute(_MOVE_IN, {"key": directory, "to": to})


def forget_all(connection: Connection) -> None:
    """Forget all directories that are begun or discarded."""
    for statement in _FORGET_ALL:
        connection.execute(statement)


def _discard_unused(connection: Connection, directories: Iterable[str], now: float) -> None:
    for directory in set(directories):
        if not connection.execute(_USED, {"key": directory}).scalar():
            connection.execute(_DISCARD, {"directory": directory, "discarded_at": now})
