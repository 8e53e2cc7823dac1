"""Runs, checkpoints and sessions, as the REST part of the API lists and manages them.

Each function is one transaction.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    ColumnElement,
    Connection,
    Row,
    Table,
    Tuple,
    and_,
    bindparam,
    cast,
    delete,
    exists,
    false,
    func,
    literal,
    or_,
    select,
    true,
    tuple_,
    update,
)

from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import checkpoints as rows
from tinsmith.store import ids
from tinsmith.store.dialects import JSONPairs, Texts, insert
from tinsmith.store.records import CLIENT_REASONS, Checkpoint, Model, TrainingRun
from tinsmith.store.schema import (
    begun_directories,
    checkpoints,
    commands,
    discarded_directories,
    models,
    sampling_sessions,
    sessions,
)
from tinsmith.store.sessions import MODEL_COLUMNS, insert_model
from tinsmith.store.store import Store
from tinsmith.wire.paths import CheckpointPath, parse_path

_LAST_REQUEST = (
    select(commands.c.created_at)
    .where(commands.c.model_id == models.c.model_id)
    .order_by(commands.c.seq_id.desc())
    .limit(1)
    .scalar_subquery()
)
_RUNS = select(*MODEL_COLUMNS, sessions.c.tenant, func.coalesce(_LAST_REQUEST, models.c.created_at)).join_from(
    models, sessions
)
_RUN_ORDER = (models.c.created_at.desc(), models.c.model_id)
_NEWEST = (
    select(
        *rows.COLUMNS,
        func.row_number()
        .over(
            partition_by=(checkpoints.c.model_id, checkpoints.c.kind),
            order_by=(checkpoints.c.created_at.desc(), checkpoints.c.name),
        )
        .label("place"),
    )
    .where(checkpoints.c.model_id.in_(bindparam("ids", expanding=True)), rows.ALIVE)
    .subquery()
)
_NEWEST_OF_RUNS = select(*[_NEWEST.c[column.name] for column in rows.COLUMNS]).where(_NEWEST.c.place == 1)
_CHECKPOINTS = (
    select(*rows.COLUMNS).where(rows.ALIVE).order_by(checkpoints.c.created_at.desc(), checkpoints.c.tinker_path)
)

_SESSION_ORDER = (sessions.c.created_at.desc(), sessions.c.session_id.desc())
_SAVED = (
    select(
        models.c.session_id,
        func.count().label("number"),
        cast(func.sum(checkpoints.c.size_bytes), BigInteger).label("bytes"),  # PostgreSQL's sum is a decimal number
    )
    .join_from(checkpoints, models, checkpoints.c.model_id == models.c.model_id)
    .where(rows.ALIVE)
    .group_by(models.c.session_id)
    .subquery()
)


@dataclass(frozen=True)
class Page:
    """Entries of a list."""

    limit: int
    offset: int


def list_runs(
    store: Store, page: Page, project_id: str | None, tenant: str | None = None
) -> tuple[list[TrainingRun], int]:
    """Runs, newest first, and their number; of one project and one tenant if given."""
    condition = and_(_of(sessions.c.tenant, tenant), _of(sessions.c.project_id, project_id))
    with store.reading() as connection:
        found = connection.execute(_RUNS.where(condition).order_by(*_RUN_ORDER).limit(page.limit).offset(page.offset))
        runs = _with_checkpoints(connection, found.all())
        count = select(func.count()).select_from(models.join(sessions)).where(condition)
        return runs, connection.execute(count).scalar_one()


def _of(column: Column[str], value: str | None) -> ColumnElement[bool]:
    return true() if value is None else column == value


def find_run(store: Store, model_id: str) -> TrainingRun:
    """One run. Raises NotFoundError."""
    with store.reading() as connection:
        runs = _with_checkpoints(connection, connection.execute(_RUNS.where(models.c.model_id == model_id)).all())
    if not runs:
        raise NotFoundError(f"training run {model_id!r} does not exist")
    return runs[0]


def _with_checkpoints(connection: Connection, found: Sequence[Row[*tuple[Any, ...]]]) -> list[TrainingRun]:
    parameters = {"ids": [row.model_id for row in found], "now": time.time()}
    newest = {
        (c.model_id, c.kind): c for c in (Checkpoint(*row) for row in connection.execute(_NEWEST_OF_RUNS, parameters))
    }
    return [
        TrainingRun(
            Model(*row[:-2]),
            row[-2],
            row[-1],
            newest.get((row.model_id, "training")),
            newest.get((row.model_id, "sampler")),
        )
        for row in found
    ]


def list_checkpoints(store: Store, page: Page, tenant: str | None = None) -> tuple[list[Checkpoint], int]:
    """All checkpoints, or those of a tenant, newest first, and their number."""
    now, own = {"now": time.time()}, _of(checkpoints.c.tenant, tenant)
    with store.reading() as connection:
        found = connection.execute(_CHECKPOINTS.where(own).limit(page.limit).offset(page.offset), now)
        count = select(func.count()).select_from(checkpoints).where(rows.ALIVE, own)
        total = connection.execute(count, now).scalar_one()
        return [Checkpoint(*row) for row in found], total


def list_run_checkpoints(store: Store, model_id: str) -> list[Checkpoint]:
    """The checkpoints of a run, newest first. Raises NotFoundError if there is neither run nor checkpoint."""
    with store.reading() as connection:
        found = connection.execute(_CHECKPOINTS.where(checkpoints.c.model_id == model_id), {"now": time.time()}).all()
        if not found and not connection.execute(select(exists().where(models.c.model_id == model_id))).scalar():
            raise NotFoundError(f"training run {model_id!r} does not exist")
    return [Checkpoint(*row) for row in found]


def publish_checkpoint(store: Store, tinker_path: str, public: bool) -> None:
    """Make a checkpoint public or private. Raises NotFoundError."""
    _change(store, tinker_path, public=public)


def set_checkpoint_ttl(store: Store, tinker_path: str, ttl_seconds: float | None) -> None:
    """Let a checkpoint expire in `ttl_seconds` from now, or never for None. Raises NotFoundError."""
    _change(store, tinker_path, expires_at=None if ttl_seconds is None else time.time() + ttl_seconds)


def _change(store: Store, tinker_path: str, **values: Any) -> None:
    change = update(checkpoints).where(checkpoints.c.tinker_path == tinker_path, rows.ALIVE).values(values)
    with store.writing_if_there() as connection:
        if connection.execute(change, {"now": time.time()}).rowcount != 1:
            raise rows.absent(connection, tinker_path)


def delete_checkpoint(store: Store, tinker_path: str) -> None:
    """Let a checkpoint not be found any more. Row and files stay for a day. Raises NotFoundError."""
    _change(store, tinker_path, deleted_at=time.time())


def restore_checkpoint(store: Store, tinker_path: str) -> None:
    """Bring a deleted checkpoint back. Raises NotFoundError if there is none, or it is gone."""
    _change_deleted(store, tinker_path, deleted_at=None)


def purge_checkpoint(store: Store, tinker_path: str) -> None:
    """Let a deleted checkpoint go with the next sweep. Raises NotFoundError as `restore_checkpoint`."""
    _change_deleted(store, tinker_path, deleted_at=0.0)


def _change_deleted(store: Store, tinker_path: str, deleted_at: float | None) -> None:
    deleted = checkpoints.c.tinker_path == tinker_path, checkpoints.c.deleted_at.is_not(None), rows.STORED
    change = update(checkpoints).where(*deleted).values(deleted_at=deleted_at)
    with store.writing_if_there() as connection:
        if connection.execute(change, {"now": time.time()}).rowcount != 1:
            raise NotFoundError(
                f"{tinker_path} is no deleted checkpoint that is still there; `tinsmith checkpoints list` shows them"
            )


def copy_checkpoint(store: Store, source: str, session_id: str, model_seq_id: int, ttl_seconds: float | None) -> str:
    """Add a checkpoint of a new run that shares the files of `source`; returns its path. A repeat returns the same.

    Raises NotFoundError for source or session, UserError if the run exists and is no copy of that source.
    """
    now = time.time()
    parts = parse_path(source)
    model_id = ids.model_id(session_id, model_seq_id)
    path = str(CheckpointPath(model_id, parts.kind, parts.name))
    with store.writing_if_there() as connection:
        original = rows.find(connection, source, now)
        if original is None:
            raise rows.absent(connection, source)
        _require_session(connection, session_id)
        run = Model(model_id, session_id, original.base_model, original.lora_config, {"type": "adamw"}, None, "copied")
        if not insert_model(connection, run, now):
            copied = rows.find(connection, path, now)
            if path == source or copied is None or copied.directory != original.directory:
                raise UserError(
                    f"model_seq_id={model_seq_id}: the session has a run of that number already; use another"
                )
            return path
        expires_at = None if ttl_seconds is None else now + ttl_seconds
        copy = replace(
            original,
            tinker_path=path,
            model_id=model_id,
            created_at=now,
            expires_at=expires_at,
            public=False,
            tenant=connection.execute(
                select(sessions.c.tenant).where(sessions.c.session_id == session_id)
            ).scalar_one(),
        )
        rows.put(connection, copy, None)
    return path


def put_uploaded(store: Store, run: Model, description: dict[str, Any], made: Sequence[Checkpoint]) -> None:
    """Add checkpoints of files that a client has uploaded, all of one directory, with a run and an ended session.

    If they are there already, nothing changes but the discarded files.
    """
    now = time.time()
    with store.writing_if_there() as connection:
        session = {"session_id": run.session_id, "created_at": now, "last_seen_at": now, "tenant": made[0].tenant}
        ended = {"finished_at": now, "finish_reason": "success", "finish_detail": "holds an upload"}
        connection.execute(insert(sessions).on_conflict_do_nothing(), session | description | ended)
        if not insert_model(connection, run, now):
            rows.discard_unused(connection, [made[0].directory], now)
            return
        for checkpoint in made:
            rows.put(connection, checkpoint, None)


def every_checkpoint(store: Store) -> list[Checkpoint]:
    """All checkpoints, oldest first, expired and deleted ones included."""
    every = select(*rows.COLUMNS).order_by(checkpoints.c.created_at, checkpoints.c.tinker_path)
    with store.reading() as connection:
        return [Checkpoint(*row) for row in connection.execute(every)]


def drop_checkpoints_in(store: Store, directory: str) -> None:
    """Remove the checkpoints of a directory that does not exist."""
    with store.writing_if_there() as connection:
        connection.execute(delete(checkpoints).where(checkpoints.c.directory == directory))


def move_checkpoints_in(store: Store, directory: str, to: str) -> None:
    """Note that the files of a directory are in another one."""
    with store.writing_if_there() as connection:
        connection.execute(update(checkpoints).where(checkpoints.c.directory == directory).values(directory=to))


def forget_discarded(store: Store) -> None:
    """Forget all begun and discarded directories."""
    with store.writing_if_there() as connection:
        for table in (begun_directories, discarded_directories):
            connection.execute(delete(table))


# ---- Sessions


@dataclass(frozen=True)
class SessionDetail:
    """A session, with its models and sampling sessions."""

    session_id: str
    user_metadata: dict[str, Any] | None
    display_name: str | None
    model_ids: list[str]
    sampling_session_ids: list[str]


@dataclass(frozen=True)
class SessionSummary:
    """A session that a search has found."""

    session_id: str
    created_at: float
    project_id: str | None
    display_name: str | None
    user_metadata: dict[str, Any] | None
    finished_at: float | None
    finish_reason: str | None
    """The client's, or why the server ended it; None while it is open."""
    finish_detail: str | None
    tenant: str
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class SessionFilter:
    """Conditions of a search; None is no condition."""

    session_id: str | None = None
    """Beside `display_name`, either may match."""
    display_name: str | None = None
    """Words that all occur in the name, in any case."""
    project_ids: Sequence[str | None] | None = None
    """None in it means sessions without a project."""
    user_metadata: dict[str, str] | None = None
    statuses: Sequence[tuple[str, Sequence[str] | None]] | None = None
    """("active", None), or ("client_finished", reasons or None for all). Others match nothing."""
    before: tuple[float, str] | None = None
    """Created_at and session_id of the last session on the previous page."""
    tenants: Sequence[str] | None = None
    """Their owners; None for all."""


@dataclass(frozen=True)
class CheckpointFilter:
    """Conditions of a search for checkpoints; None is no condition."""

    project_ids: Sequence[str | None] | None = None
    """None in it means runs whose session is in no project."""
    user_metadata: dict[str, str] | None = None
    kind: str | None = None
    base_models: Sequence[str] | None = None
    before: tuple[float, str] | None = None
    """Created_at and path of the last checkpoint on the previous page."""
    tenants: Sequence[str] | None = None
    """Their owners; None for all."""


@dataclass(frozen=True)
class CheckpointEvent:
    """A save or load of the command log."""

    at: float
    tenant: str
    model_id: str
    seq_id: int
    kind: str
    tinker_path: str | None
    """None if the checkpoint is not there any more."""

    @property
    def request_id(self) -> str:
        return ids.request_id(self.model_id, self.seq_id)


@dataclass(frozen=True)
class LoggedOperation:
    """When a training operation was submitted and finished."""

    model_id: str
    seq_id: int
    kind: str
    status: str
    created_at: float
    finished_at: float | None


def list_sessions(store: Store, page: Page, tenant: str | None = None) -> list[str]:
    """Session ids, newest first; of one tenant if given."""
    listed = select(sessions.c.session_id).where(_of(sessions.c.tenant, tenant)).order_by(*_SESSION_ORDER)
    with store.reading() as connection:
        return list(connection.execute(listed.limit(page.limit).offset(page.offset)).scalars())


def describe_session(store: Store, session_id: str) -> SessionDetail:
    """One session. Raises NotFoundError."""
    described = select(sessions.c.session_id, sessions.c.user_metadata, sessions.c.display_name).where(
        sessions.c.session_id == session_id
    )
    parts = [
        select(id_column).where(id_column.table.c.session_id == session_id).order_by(id_column.table.c.created_at)
        for id_column in (models.c.model_id, sampling_sessions.c.sampling_session_id)
    ]
    with store.reading() as connection:
        _require_session(connection, session_id)
        row = connection.execute(described).one()
        return SessionDetail(*row, *[list(connection.execute(part).scalars()) for part in parts])


def find_sessions(store: Store, session_ids: Collection[str]) -> dict[str, tuple[str | None, dict[str, Any] | None]]:
    """Project and metadata of those sessions that are there."""
    found = select(sessions.c.session_id, sessions.c.project_id, sessions.c.user_metadata).where(
        sessions.c.session_id.op("IN")(Texts(bindparam("ids", type_=JSON)))
    )
    with store.reading() as connection:
        there = connection.execute(found, {"ids": [*session_ids]})
        return {row.session_id: (row.project_id, row.user_metadata) for row in there}


def assign_project(store: Store, session_id: str, project_id: str) -> None:
    """Put a session into a project. Raises NotFoundError."""
    with store.writing() as connection:
        _require_session(connection, session_id)
        connection.execute(update(sessions).where(sessions.c.session_id == session_id).values(project_id=project_id))


def search_sessions(store: Store, wanted: SessionFilter, limit: int, now: float) -> list[SessionSummary]:
    """Matching sessions, newest first."""
    columns = [sessions.c[name] for name in list(SessionSummary.__dataclass_fields__)[:9]]
    saved = [func.coalesce(_SAVED.c.number, 0), func.coalesce(_SAVED.c.bytes, 0)]
    found = (
        select(*columns, *saved)
        .join_from(sessions, _SAVED, sessions.c.session_id == _SAVED.c.session_id, isouter=True)
        .where(*_conditions(wanted))
        .order_by(*_SESSION_ORDER)
        .limit(limit)
    )
    with store.reading() as connection:
        return [SessionSummary(*row) for row in connection.execute(found, {"now": now})]


def search_checkpoints(store: Store, wanted: CheckpointFilter, limit: int, now: float) -> list[Checkpoint]:
    """Matching checkpoints, newest first."""
    order = checkpoints.c.created_at, checkpoints.c.tinker_path
    own = true() if wanted.tenants is None else checkpoints.c.tenant.in_(wanted.tenants)
    conditions = [rows.ALIVE, own, _of(checkpoints.c.kind, wanted.kind)]
    conditions += [_has(checkpoints, key, value) for key, value in (wanted.user_metadata or {}).items()]
    if wanted.base_models is not None:
        conditions.append(checkpoints.c.base_model.in_(wanted.base_models))
    if wanted.project_ids is not None:
        of_runs = select(models.c.model_id).join_from(models, sessions).where(_in_projects(wanted.project_ids))
        conditions.append(checkpoints.c.model_id.in_(of_runs))
    if wanted.before is not None:
        created_at, path = wanted.before
        exact = select(checkpoints.c.created_at).where(checkpoints.c.tinker_path == path, own).scalar_subquery()
        conditions.append(tuple_(*order) < tuple_(func.coalesce(exact, created_at), path))
    found = select(*rows.COLUMNS).where(*conditions).order_by(*(column.desc() for column in order)).limit(limit)
    with store.reading() as connection:
        return [Checkpoint(*row) for row in connection.execute(found, {"now": now})]


def _in_projects(project_ids: Sequence[str | None]) -> ColumnElement[bool]:
    named = [project for project in project_ids if project is not None]
    # One list, not a term for each: SQLite takes an expression of up to 1,000 levels.
    among = sessions.c.project_id.op("IN")(Texts(literal(named, JSON)))
    return or_(among, sessions.c.project_id.is_(None)) if None in project_ids else among


def _conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    named: list[ColumnElement[bool]] = []
    if wanted.session_id is not None:
        named.append(sessions.c.session_id == wanted.session_id)
    if wanted.display_name is not None:
        words = wanted.display_name.split()
        named.append(
            and_(*[sessions.c.display_name.icontains(word, autoescape=True) for word in words]) if words else false()
        )
    if named:
        conditions.append(or_(*named))
    if wanted.project_ids is not None:
        conditions.append(_in_projects(wanted.project_ids))
    conditions += [_has(sessions, key, value) for key, value in (wanted.user_metadata or {}).items()]
    if wanted.statuses is not None:
        conditions.append(or_(*[_is(kind, reasons) for kind, reasons in wanted.statuses]))
    own = true() if wanted.tenants is None else sessions.c.tenant.in_(wanted.tenants)
    if wanted.before is not None:
        conditions.append(tuple_(sessions.c.created_at, sessions.c.session_id) < _place(*wanted.before, own))
    return [*conditions, own]


def _place(created_at: float, session_id: str, own: ColumnElement[bool]) -> Tuple:
    """A position in the order of sessions. Clients round created_at to microseconds; this is exact, of an own one."""
    exact = select(sessions.c.created_at).where(sessions.c.session_id == session_id, own).scalar_subquery()
    return tuple_(func.coalesce(exact, created_at), session_id)


def _has(table: Table, key: str, value: str) -> ColumnElement[bool]:
    pairs = JSONPairs(table.c.user_metadata).table_valued("key", "value")
    return exists(select(1).select_from(pairs).where(pairs.c.key == key, pairs.c.value == value))


def _is(kind: str, reasons: Sequence[str] | None) -> ColumnElement[bool]:
    if kind == "active":
        return sessions.c.finished_at.is_(None)
    if kind == "client_finished":
        return sessions.c.finish_reason.in_(CLIENT_REASONS if reasons is None else reasons)
    return false()


def session_operations(store: Store, session_id: str) -> list[LoggedOperation]:
    """The training operations of a session, in order. Raises NotFoundError."""
    columns = [commands.c[name] for name in LoggedOperation.__dataclass_fields__]
    logged = (
        select(*columns).join_from(commands, models).where(models.c.session_id == session_id).order_by(commands.c.id)
    )
    with store.reading() as connection:
        _require_session(connection, session_id)
        return [LoggedOperation(*row) for row in connection.execute(logged)]


def stored_by_project(store: Store, tenant: str | None) -> dict[tuple[str, str | None], tuple[int, int]]:
    """Number and bytes of checkpoints by tenant and project; of one tenant if given.

    Copies share their bytes. Deleted ones count while they can be restored.
    """
    joined = checkpoints.outerjoin(models, checkpoints.c.model_id == models.c.model_id).outerjoin(sessions)
    columns = checkpoints.c.tenant, sessions.c.project_id, checkpoints.c.directory, checkpoints.c.size_bytes
    found = select(*columns).select_from(joined).where(rows.STORED, _of(checkpoints.c.tenant, tenant))
    counts: Counter[tuple[str, str | None]] = Counter()
    sizes: defaultdict[tuple[str, str | None], dict[str, int]] = defaultdict(dict)
    with store.reading() as connection:
        for owner, project, directory, size in connection.execute(found, {"now": time.time()}):
            counts[owner, project] += 1
            sizes[owner, project][directory] = size
    return {key: (count, sum(sizes[key].values())) for key, count in counts.items()}


def checkpoint_events(store: Store, start: float, length_s: float, tenant: str | None) -> list[CheckpointEvent]:
    """Saves and loads that succeeded in `length_s` seconds from `start` on, oldest first; of one tenant if given."""
    path = (
        select(checkpoints.c.tinker_path)
        .where(checkpoints.c.directory == commands.c.resolved["directory"].as_string())
        .limit(1)
        .scalar_subquery()
    )
    found = (
        select(commands.c.finished_at, sessions.c.tenant, commands.c.model_id, commands.c.seq_id, commands.c.kind, path)
        .join_from(commands, models)
        .join(sessions)
        .where(
            commands.c.status.in_(("done", "dropped")),
            commands.c.finished_at >= start,
            commands.c.finished_at < start + length_s,
            commands.c.resolved["directory"].as_string().is_not(None),
            _of(sessions.c.tenant, tenant),
        )
        .order_by(commands.c.finished_at)
    )
    with store.reading() as connection:
        return [CheckpointEvent(*row) for row in connection.execute(found)]


def _require_session(connection: Connection, session_id: str) -> None:
    if not connection.execute(select(exists().where(sessions.c.session_id == session_id))).scalar():
        raise NotFoundError(f"session {session_id!r} does not exist")
