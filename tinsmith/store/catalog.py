"""Lists and manages runs and checkpoints, as the REST part of the API does. Each function is one transaction."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, Row, bindparam, func, select, true

from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import checkpoints as rows
from tinsmith.store import ids, sessions
from tinsmith.store.records import Checkpoint, Model, TrainingRun
from tinsmith.store.schema import checkpoints, commands, models
from tinsmith.store.schema import sessions as session_table
from tinsmith.store.store import Store, absent
from tinsmith.wire.paths import CheckpointPath, parse_path

_MODEL_COLUMNS = [models.c[name] for name in Model.__dataclass_fields__]
_LAST_REQUEST = (
    select(commands.c.created_at)
    .where(commands.c.model_id == models.c.model_id)
    .order_by(commands.c.seq_id.desc())
    .limit(1)
    .scalar_subquery()
)
_RUNS = select(*_MODEL_COLUMNS, func.coalesce(_LAST_REQUEST, models.c.created_at)).join_from(models, session_table)
_NEWEST_FIRST = (models.c.created_at.desc(), models.c.model_id)
_NEWEST = (
    select(
        *rows.COLUMNS,
        func.row_number()
        .over(partition_by=(checkpoints.c.model_id, checkpoints.c.kind), order_by=(checkpoints.c.created_at.desc(), checkpoints.c.name))
        .label("place"),
    )
    .where(checkpoints.c.model_id.in_(bindparam("ids", expanding=True)), rows.ALIVE)
    .subquery()
)
_NEWEST_OF_RUNS = select(*[_NEWEST.c[column.name] for column in rows.COLUMNS]).where(_NEWEST.c.place == 1)
_CHECKPOINTS = select(*rows.COLUMNS).where(rows.ALIVE).order_by(checkpoints.c.created_at.desc(), checkpoints.c.tinker_path)


@dataclass(frozen=True)
class Page:
    """A part of a list: `limit` entries from number `offset` on."""

    limit: int
    offset: int


def list_runs(store: Store, page: Page, project_id: str | None) -> tuple[list[TrainingRun], int]:
    """Runs, newest first, and how many there are; with `project_id` only those of that project's sessions."""
    condition: ColumnElement[bool] = true() if project_id is None else session_table.c.project_id == project_id
    with store.reading() as connection:
        found = connection.execute(_RUNS.where(condition).order_by(*_NEWEST_FIRST).limit(page.limit).offset(page.offset))
        runs = _with_checkpoints(connection, found.all())
        count = select(func.count()).select_from(models.join(session_table)).where(condition)
        return runs, connection.execute(count).scalar_one()


def find_run(store: Store, model_id: str) -> TrainingRun:
    """One run. Raises NotFoundError."""
    with store.reading() as connection:
        runs = _with_checkpoints(connection, connection.execute(_RUNS.where(models.c.model_id == model_id)).all())
    if not runs:
        raise NotFoundError(f"training run {model_id!r} does not exist")
    return runs[0]


def _with_checkpoints(connection: Connection, found: Sequence[Row[*tuple[Any, ...]]]) -> list[TrainingRun]:
    parameters = {"ids": [row.model_id for row in found], "now": time.time()}
    newest = {(c.model_id, c.kind): c for c in (Checkpoint(*row) for row in connection.execute(_NEWEST_OF_RUNS, parameters))}
    return [
        TrainingRun(Model(*row[:-1]), row[-1], newest.get((row.model_id, "training")), newest.get((row.model_id, "sampler")))
        for row in found
    ]


def list_checkpoints(store: Store, page: Page) -> tuple[list[Checkpoint], int]:
    """The checkpoints of all runs, newest first, and how many there are."""
    now = {"now": time.time()}
    with store.reading() as connection:
        found = connection.execute(_CHECKPOINTS.limit(page.limit).offset(page.offset), now)
        count = connection.execute(select(func.count()).select_from(checkpoints).where(rows.ALIVE), now).scalar_one()
        return [Checkpoint(*row) for row in found], count


def list_run_checkpoints(store: Store, model_id: str) -> list[Checkpoint]:
    """The checkpoints of one run, newest first. Raises NotFoundError if there is neither such a run nor a checkpoint of that name."""
    with store.reading() as connection:
        found = connection.execute(_CHECKPOINTS.where(checkpoints.c.model_id == model_id), {"now": time.time()}).all()
        if not found and sessions.model(connection, model_id) is None:
            raise NotFoundError(f"training run {model_id!r} does not exist")
    return [Checkpoint(*row) for row in found]


def publish_checkpoint(store: Store, tinker_path: str, public: bool) -> None:
    """Make a checkpoint public or private. Raises NotFoundError."""
    with store.writing_durably() as connection:
        if not rows.set_public(connection, tinker_path, public, time.time()):
            raise absent(connection, tinker_path)


def set_checkpoint_ttl(store: Store, tinker_path: str, ttl_seconds: float | None) -> None:
    """Let a checkpoint expire in `ttl_seconds` from now, or never for None. Raises NotFoundError."""
    now = time.time()
    with store.writing_durably() as connection:
        if not rows.set_expiry(connection, tinker_path, None if ttl_seconds is None else now + ttl_seconds, now):
            raise absent(connection, tinker_path)


def delete_checkpoint(store: Store, tinker_path: str) -> None:
    """Remove a checkpoint. Its files are discarded, unless a copy uses them. Raises NotFoundError."""
    with store.writing_durably() as connection:
        if not rows.drop(connection, tinker_path, time.time()):
            raise absent(connection, tinker_path)


def copy_checkpoint(store: Store, source: str, session_id: str, model_seq_id: int, ttl_seconds: float | None) -> str:
    """Add a checkpoint that shares the files of `source` and belongs to a new run of a session; returns its path.

    A repeat of the same copy returns the same path. Raises NotFoundError: no such source or session. Raises UserError: malformed path,
    or the run exists and is no copy of that source.
    """
    now = time.time()
    parts = parse_path(source)
    model_id = ids.model_id(session_id, model_seq_id)
    path = str(CheckpointPath(model_id, parts.kind, parts.name))
    with store.writing_durably() as connection:
        original = rows.find(connection, source, now)
        if original is None:
            raise absent(connection, source)
        if sessions.session(connection, session_id) is None:
            raise NotFoundError(f"session {session_id!r} does not exist")
        run = Model(model_id, session_id, original.base_model, original.lora_config, {"type": "adamw"}, None, "copied")
        if not sessions.insert_model(connection, run, now):
            copied = rows.find(connection, path, now)
            if path == source or copied is None or copied.directory != original.directory:
                raise UserError(f"model_seq_id={model_seq_id}: the session has a run of that number already; use another")
            return path
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        copy = replace(original, tinker_path=path, model_id=model_id, created_at=now, expires_at=expires_at, public=False)
        rows.put(connection, copy, now)
    return path


def every_checkpoint(store: Store) -> list[Checkpoint]:
    """All checkpoints, oldest first, including those that have expired and are not deleted yet."""
    with store.reading() as connection:
        return rows.every(connection)


def drop_checkpoints_in(store: Store, directory: str) -> None:
    """Remove the checkpoints of a directory that does not exist."""
    with store.writing_durably() as connection:
        rows.drop_in(connection, directory)


def move_checkpoints_in(store: Store, directory: str, to: str) -> None:
    """Note that the files of a directory are in another one now."""
    with store.writing_durably() as connection:
        rows.move_in(connection, directory, to)


def forget_discarded(store: Store) -> None:
    """Forget all directories that saves have begun or that are to be deleted."""
    with store.writing_durably() as connection:
        rows.forget_all(connection)
