"""Lists, searches and describes sessions, as the REST part of the API does. Each function is one transaction."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Row, Tuple, and_, case, exists, false, func, or_, select, tuple_, update

from tinsmith.errors import NotFoundError
from tinsmith.store import checkpoints as rows
from tinsmith.store.catalog import Page
from tinsmith.store.records import CLIENT_REASONS
from tinsmith.store.schema import checkpoints, commands, models, sampling_sessions, sessions
from tinsmith.store.store import Store

_NEWEST_FIRST = (sessions.c.created_at.desc(), sessions.c.session_id.desc())
_SAVED = (
    select(models.c.session_id, func.count().label("number"), func.sum(checkpoints.c.size_bytes).label("bytes"))
    .join_from(checkpoints, models, checkpoints.c.model_id == models.c.model_id)
    .where(rows.ALIVE)
    .group_by(models.c.session_id)
    .subquery()
)


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
    """One session that a search has found."""

    session_id: str
    created_at: float
    project_id: str | None
    display_name: str | None
    user_metadata: dict[str, Any] | None
    finished_at: float | None
    finish_reason: str | None
    """The reason that the client gave, or why the server ended the session; None while it is open."""
    finish_detail: str | None
    checkpoints: int
    checkpoint_bytes: int


@dataclass(frozen=True)
class SessionFilter:
    """The conditions of a search. None, or an empty mapping, is no condition."""

    session_id: str | None = None
    """If `display_name` is given too, sessions that match either are found."""
    display_name: str | None = None
    """Words that must all occur in the name, in upper or lower case."""
    project_ids: Sequence[str | None] | None = None
    """None as an element means sessions without a project."""
    user_metadata: dict[str, str] | None = None
    statuses: Sequence[tuple[str, Sequence[str] | None]] | None = None
    """("active", None), or ("client_finished", reasons), where None stands for all reasons. Any other status matches nothing."""
    before: tuple[float, str] | None = None
    """created_at and session_id of the last session on the previous page."""


@dataclass(frozen=True)
class LoggedOperation:
    """The times at which a training operation was submitted and finished."""

    model_id: str
    seq_id: int
    kind: str
    status: str
    created_at: float
    finished_at: float | None


def list_sessions(store: Store, page: Page) -> list[str]:
    """Session ids, newest first."""
    with store.reading() as connection:
        found = connection.execute(select(sessions.c.session_id).order_by(*_NEWEST_FIRST).limit(page.limit).offset(page.offset))
        return list(found.scalars())


def describe_session(store: Store, session_id: str) -> SessionDetail:
    """One session. Raises NotFoundError."""
    described = select(sessions.c.session_id, sessions.c.user_metadata, sessions.c.display_name).where(sessions.c.session_id == session_id)
    of_session = models.c.session_id == session_id
    with store.reading() as connection:
        row = connection.execute(described).first()
        if row is None:
            raise _unknown(session_id)
        model_ids = connection.execute(select(models.c.model_id).where(of_session).order_by(models.c.created_at)).scalars().all()
        drawn = select(sampling_sessions.c.sampling_session_id).where(sampling_sessions.c.session_id == session_id)
        sampler_ids = connection.execute(drawn.order_by(sampling_sessions.c.created_at)).scalars().all()
    return SessionDetail(*row, list(model_ids), list(sampler_ids))


def assign_project(store: Store, session_id: str, project_id: str) -> None:
    """Put a session into a project. Raises NotFoundError."""
    with store.writing() as connection:
        moved = connection.execute(update(sessions).where(sessions.c.session_id == session_id).values(project_id=project_id))
        if moved.rowcount != 1:
            raise _unknown(session_id)


def search_sessions(store: Store, wanted: SessionFilter, limit: int, now: float) -> list[SessionSummary]:
    """At most `limit` sessions that match, newest first."""
    columns = [sessions.c[name] for name in list(SessionSummary.__dataclass_fields__)[:8]]
    saved = [func.coalesce(_SAVED.c.number, 0), func.coalesce(_SAVED.c.bytes, 0)]
    found = (
        select(*columns, *saved)
        .join_from(sessions, _SAVED, sessions.c.session_id == _SAVED.c.session_id, isouter=True)
        .where(*_conditions(wanted))
        .order_by(*_NEWEST_FIRST)
        .limit(limit)
    )
    with store.reading() as connection:
        return [SessionSummary(*row) for row in connection.execute(found, {"now": now})]


def _conditions(wanted: SessionFilter) -> list[ColumnElement[bool]]:
    conditions: list[ColumnElement[bool]] = []
    named: list[ColumnElement[bool]] = []
    if wanted.session_id is not None:
        named.append(sessions.c.session_id == wanted.session_id)
    if wanted.display_name is not None:
        words = wanted.display_name.split()
        named.append(and_(*[sessions.c.display_name.icontains(word, autoescape=True) for word in words]) if words else false())
    if named:
        conditions.append(or_(*named))
    if wanted.project_ids is not None:
        named_projects = [project for project in wanted.project_ids if project is not None]
        # One list, not a term for each: SQLite takes an expression of up to 1,000 levels.
        among = sessions.c.project_id.in_(select(func.json_each(json.dumps(named_projects)).table_valued("value").c.value))
        conditions.append(or_(among, sessions.c.project_id.is_(None)) if None in wanted.project_ids else among)
    conditions += [_has(key, value) for key, value in (wanted.user_metadata or {}).items()]
    if wanted.statuses is not None:
        conditions.append(or_(*[_is(kind, reasons) for kind, reasons in wanted.statuses]))
    if wanted.before is not None:
        conditions.append(tuple_(sessions.c.created_at, sessions.c.session_id) < _place(*wanted.before))
    return conditions


def _place(created_at: float, session_id: str) -> Tuple:
    """A position in the order of sessions. The client's created_at is rounded to microseconds, so the one of the session is used."""
    exact = select(sessions.c.created_at).where(sessions.c.session_id == session_id).scalar_subquery()
    return tuple_(func.coalesce(exact, created_at), session_id)


def _has(key: str, value: str) -> ColumnElement[bool]:
    # Older versions accepted NaN, so what they stored may not be JSON.
    readable = case((func.json_valid(sessions.c.user_metadata), sessions.c.user_metadata))
    pairs = func.json_each(readable).table_valued("key", "value")
    return exists(select(1).select_from(pairs).where(pairs.c.key == key, pairs.c.value == value))


def _is(kind: str, reasons: Sequence[str] | None) -> ColumnElement[bool]:
    if kind == "active":
        return sessions.c.finished_at.is_(None)
    if kind == "client_finished":
        return sessions.c.finish_reason.in_(CLIENT_REASONS if reasons is None else reasons)
    return false()


def session_operations(store: Store, session_id: str) -> list[LoggedOperation]:
    """The training operations of a session in the order they came in. Raises NotFoundError."""
    columns = [commands.c[name] for name in LoggedOperation.__dataclass_fields__]
    logged = select(*columns).join_from(commands, models).where(models.c.session_id == session_id).order_by(commands.c.id)
    known = select(sessions.c.session_id).where(sessions.c.session_id == session_id)
    with store.reading() as connection:
        if connection.execute(known).first() is None:
            raise _unknown(session_id)
        found: Sequence[Row[*tuple[Any, ...]]] = connection.execute(logged).all()
    return [LoggedOperation(*row) for row in found]


def _unknown(session_id: str) -> NotFoundError:
    return NotFoundError(f"session {session_id!r} does not exist")
