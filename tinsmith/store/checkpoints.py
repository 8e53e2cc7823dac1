"""Saved checkpoints.

A checkpoint exists once it has a row. Its files are complete in `directory` before that, and never change. A copy is
another row with the same directory. One that was deleted keeps row and files for a day, and is not found meanwhile.

No directory is forgotten, whichever process dies: it is noted as begun before it is written, until it has a row, and as
discarded when its last row is removed, in that transaction, until its files are deleted.
"""

import math
import time
from collections.abc import Iterable

from sqlalchemy import Connection, Float, and_, bindparam, delete, exists, func, or_, select, union, update

from tinsmith.errors import NotFoundError, UserError
from tinsmith.store.database import Transactions
from tinsmith.store.dialects import insert
from tinsmith.store.files import WRITING_S
from tinsmith.store.records import Checkpoint
from tinsmith.store.schema import begun_directories, checkpoints, commands, discarded_directories, models
from tinsmith.wire.paths import CheckpointKind, parse_path

COLUMNS = [checkpoints.c[name] for name in Checkpoint.__dataclass_fields__]
RECOVERABLE_S = 86400.0
"""How long a deleted checkpoint can be restored."""
_NOW = bindparam("now", type_=Float)
_UNEXPIRED = or_(checkpoints.c.expires_at.is_(None), checkpoints.c.expires_at > _NOW)
ALIVE = and_(_UNEXPIRED, checkpoints.c.deleted_at.is_(None))
"""Condition for rows that have neither expired nor been deleted by `now`."""
STORED = and_(_UNEXPIRED, or_(checkpoints.c.deleted_at.is_(None), checkpoints.c.deleted_at > _NOW - RECOVERABLE_S))
"""Condition for rows whose files stay: those alive, and those that can be restored."""
_GONE = or_(checkpoints.c.expires_at <= _NOW, checkpoints.c.deleted_at <= _NOW - RECOVERABLE_S)
"""Condition for the others."""

_FIND = select(*COLUMNS).where(checkpoints.c.tinker_path == bindparam("key"), ALIVE)
_PUBLIC = select(checkpoints.c.tinker_path).where(
    checkpoints.c.tinker_path == bindparam("key"), checkpoints.c.public, ALIVE
)
_BEGIN, _DISCARD = [
    insert(table).on_conflict_do_update(index_elements=["directory"], set_={column: insert(table).excluded[column]})
    for table, column in ((begun_directories, "begun_at"), (discarded_directories, "discarded_at"))
]
_SAVED_FOR: dict[CheckpointKind, str] = {
    "training": "for training",
    "sampler": "for sampling",
    "external": "to be downloaded",
}
_REMEDY: dict[CheckpointKind, str] = {
    "training": "training goes on from a path of save_state (tinker://MODEL_ID/weights/NAME)",
    "sampler": "sample from a path of save_weights_for_sampler (tinker://MODEL_ID/sampler_weights/NAME)",
    "external": "download a path of save_weights_external (tinker://MODEL_ID/external_weights/NAME)",
}


class CheckpointStore(Transactions):
    """Checkpoints and their directories. Each method is one transaction."""

    def announce_checkpoint(self, directory: str) -> None:
        """Note that files will be written to a directory. Without a row they are deleted a day later."""
        with self.writing() as connection:
            connection.execute(_BEGIN, {"directory": directory, "begun_at": time.time()})

    def put_checkpoint(self, checkpoint: Checkpoint, kept: int | None = None) -> None:
        """Add a checkpoint whose files are complete, in the place of one of the same path.

        Of its run and kind the newest `kept` stay, and published ones; others are deleted. A repeat with the same
        directory, such as after StoreUnavailableError, changes nothing.
        """
        with self.writing_if_there() as connection:
            put(connection, checkpoint, kept)

    def checkpoint(self, tinker_path: str) -> Checkpoint | None:
        """The living checkpoint of this path."""
        with self.reading() as connection:
            return find(connection, tinker_path, time.time())

    def is_public(self, tinker_path: str) -> bool:
        """Whether there is such a checkpoint for all tenants to read."""
        return self._first(_PUBLIC, key=tinker_path, now=time.time()) is not None

    def require_checkpoint(self, tinker_path: str, kind: CheckpointKind | None = None) -> Checkpoint:
        """The checkpoint of this path.

        Raises UserError: malformed, or not of this `kind`. Raises NotFoundError: never saved, or expired.
        """
        saved_for = parse_path(tinker_path).kind
        if kind is not None and saved_for != kind:
            raise UserError(f"{tinker_path}: these weights were saved {_SAVED_FOR[saved_for]}; {_REMEDY[kind]}")
        checkpoint = self.checkpoint(tinker_path)
        if checkpoint is None:
            with self.reading() as connection:
                raise absent(connection, tinker_path)
        return checkpoint

    def require_unused(self, tinker_paths: Iterable[str]) -> None:
        """Raise UserError if a checkpoint has one of these paths."""
        taken = [path for path in tinker_paths if self.checkpoint(path) is not None]
        if taken:
            raise UserError(
                f"{' and '.join(taken)} exist already; import under another name, or delete what is there first"
            )

    def gone_checkpoints(self) -> list[Checkpoint]:
        """Checkpoints that have expired, or were deleted a day ago."""
        gone = select(*COLUMNS).where(_GONE).order_by(checkpoints.c.created_at, checkpoints.c.tinker_path)
        with self.reading() as connection:
            return [Checkpoint(*row) for row in connection.execute(gone, {"now": time.time()})]

    def drop_gone_checkpoints(self) -> list[Checkpoint]:
        """Remove and return them; discard their files."""
        now = time.time()
        drop = delete(checkpoints).where(_GONE).returning(*COLUMNS)
        with self.writing_if_there() as connection:
            gone = [Checkpoint(*row) for row in connection.execute(drop, {"now": now})]
            discard_unused(connection, [checkpoint.directory for checkpoint in gone], now)
        return gone

    def discarded_directories(self) -> list[str]:
        """Directories to delete: no checkpoint names them, and no save of the last day writes to them."""
        discarded = select(discarded_directories.c.directory).order_by(discarded_directories.c.discarded_at)
        begun_at = begun_directories.c.begun_at
        left = select(begun_directories.c.directory).where(begun_at < time.time() - WRITING_S).order_by(begun_at)
        with self.reading() as connection:
            return [*connection.execute(discarded).scalars(), *connection.execute(left).scalars()]

    def stored_directories(self) -> set[str]:
        """Directories of checkpoints that are not gone."""
        return set(self._column(select(checkpoints.c.directory).where(STORED), now=time.time()))

    def known_directories(self) -> set[str]:
        """Directories of checkpoints, and begun or discarded ones."""
        known = union(*[select(table.c.directory) for table in (checkpoints, begun_directories, discarded_directories)])
        return set(self._column(known))

    def forget_directory(self, directory: str) -> None:
        with self.writing() as connection:
            _forget(connection, directory)


# ---- Parts of transactions


def put(connection: Connection, checkpoint: Checkpoint, kept: int | None) -> None:
    """Add a checkpoint as `CheckpointStore.put_checkpoint`. If that has these files already, nothing changes."""
    now = time.time()
    own = checkpoints.c.tinker_path == checkpoint.tinker_path
    if connection.execute(select(checkpoints.c.directory).where(own)).scalar() == checkpoint.directory:
        return
    replaced = connection.execute(delete(checkpoints).where(own).returning(checkpoints.c.directory)).scalars().all()
    connection.execute(insert(checkpoints), vars(checkpoint))
    _forget(connection, checkpoint.directory)
    discard_unused(connection, replaced, now)
    if kept is not None:
        _delete_older(connection, checkpoint, kept, now)


def _delete_older(connection: Connection, newest: Checkpoint, kept: int, now: float) -> None:
    own = checkpoints.c.model_id == newest.model_id, checkpoints.c.kind == newest.kind
    others = (
        select(checkpoints.c.tinker_path)
        .where(*own, ~checkpoints.c.public, checkpoints.c.tinker_path != newest.tinker_path, ALIVE)
        .order_by(checkpoints.c.created_at.desc(), checkpoints.c.tinker_path)
    )
    older = connection.execute(others, {"now": now}).scalars().all()[kept - 1 :]
    connection.execute(update(checkpoints).where(checkpoints.c.tinker_path.in_(older)).values(deleted_at=now))


def recoverable_until(deleted: Checkpoint) -> float:
    """Until when (Unix time) a deleted checkpoint can be restored: for a day, or until it expires."""
    assert deleted.deleted_at is not None
    return min(deleted.deleted_at + RECOVERABLE_S, math.inf if deleted.expires_at is None else deleted.expires_at)


def find(connection: Connection, tinker_path: str, now: float) -> Checkpoint | None:
    """The living checkpoint of this path."""
    row = connection.execute(_FIND, {"key": tinker_path, "now": now}).first()
    return None if row is None else Checkpoint(*row)


def discard_unused(connection: Connection, directories: Iterable[str], now: float) -> None:
    """Discard directories that no checkpoint names."""
    for directory in set(directories):
        if not connection.execute(select(exists().where(checkpoints.c.directory == directory))).scalar():
            connection.execute(_DISCARD, {"directory": directory, "discarded_at": now})


def _forget(connection: Connection, directory: str) -> None:
    for table in (begun_directories, discarded_directories):
        connection.execute(delete(table).where(table.c.directory == directory))


def absent(connection: Connection, tinker_path: str) -> NotFoundError:
    """The error for a path of no checkpoint, with the reason if it is known."""
    model_id = parse_path(tinker_path).model_id
    own = checkpoints.c.tinker_path == tinker_path
    deleted = connection.execute(select(*COLUMNS).where(own, ~ALIVE, STORED), {"now": time.time()}).first()
    if deleted is not None:
        until = time.strftime("%Y-%m-%d %H:%M", time.gmtime(recoverable_until(Checkpoint(*deleted))))
        return NotFoundError(
            f"{tinker_path} does not exist any more: it was deleted, or newer ones took its place; until {until} UTC "
            f"`tinsmith checkpoints restore {tinker_path}` beside the server brings it back"
        )
    row = find(connection, tinker_path, now=0.0)
    if row is not None and row.expires_at is not None:
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(row.expires_at))
        return NotFoundError(
            f"{tinker_path} does not exist any more: it expired at {ended} UTC; save with a longer ttl_seconds, or none"
        )
    is_queued_save = commands.c.model_id == model_id, commands.c.status == "queued", commands.c.kind.like("save%")
    if saves := connection.execute(select(func.count()).select_from(commands).where(*is_queued_save)).scalar_one():
        queued = "1 save of its model is" if saves == 1 else f"{saves} saves of its model are"
        return NotFoundError(f"{tinker_path} does not exist yet: {queued} queued; wait for the result of its save")
    newest = (
        select(checkpoints.c.tinker_path)
        .where(checkpoints.c.model_id == model_id, ALIVE)
        .order_by(checkpoints.c.created_at.desc())
    )
    others = connection.execute(newest.limit(3), {"now": time.time()}).scalars().all()
    if not others and not connection.execute(select(exists().where(models.c.model_id == model_id))).scalar():
        return NotFoundError(
            f"{tinker_path} does not exist: there is no model {model_id!r} here; correct the path, or ask its server"
        )
    there = f"there are {', '.join(others)}" if others else "its model has no checkpoint"
    return NotFoundError(f"{tinker_path} does not exist: it was never saved, was deleted, or expired long ago; {there}")
