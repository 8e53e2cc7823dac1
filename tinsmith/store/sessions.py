"""Sessions, their models and sampling sessions in SQL. Each function is part of a transaction."""

from typing import Any

from sqlalchemy import Connection, bindparam, select, update
from sqlalchemy.dialects.sqlite import insert

from tinsmith.store import endings
from tinsmith.store.records import CLIENT_REASONS, Model, SamplingSession, Session
from tinsmith.store.schema import models, sampling_sessions, sessions

_SESSION = select(sessions.c.session_id, sessions.c.created_at, sessions.c.finished_at).where(sessions.c.session_id == bindparam("key"))
_FINISH = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("key"), sessions.c.finished_at.is_(None))
    .values(finished_at=bindparam("now"), finish_reason=bindparam("reason"), finish_detail=bindparam("detail"))
)
_OPEN = select(sessions.c.session_id).where(sessions.c.finished_at.is_(None))
_END_SAMPLING = (
    update(sampling_sessions)
    .where(sampling_sessions.c.session_id == bindparam("key"), sampling_sessions.c.gone.is_(None))
    .values(gone="its session is finished")
)
_INSERT_MODEL = insert(models).on_conflict_do_nothing()
_MODEL = select(
    models.c.model_id,
    models.c.session_id,
    models.c.base_model,
    models.c.lora_config,
    models.c.optimizer_config,
    models.c.user_metadata,
    models.c.status,
    models.c.applied_seq,
).where(models.c.model_id == bindparam("key"))
_INSERT_SAMPLING = insert(sampling_sessions).on_conflict_do_nothing()
_SAMPLING = select(
    sampling_sessions.c.sampling_session_id,
    sampling_sessions.c.session_id,
    sampling_sessions.c.base_model,
    sampling_sessions.c.snapshot_id,
    sampling_sessions.c.model_id,
    sampling_sessions.c.model_path,
    sampling_sessions.c.gone,
    sampling_sessions.c.inflight,
).where(sampling_sessions.c.sampling_session_id == bindparam("key"))

_JOIN = (
    update(sampling_sessions)
    .where(sampling_sessions.c.sampling_session_id == bindparam("key"))
    .values(clones=sampling_sessions.c.clones + 1)
    .returning(sampling_sessions.c.clones)
)


def create_session(connection: Connection, session_id: str, description: dict[str, Any], now: float) -> None:
    """Add a session. `description` holds tags, user_metadata, sdk_version, project_id and display_name."""
    row = {"session_id": session_id, "created_at": now, "last_seen_at": now}
    connection.execute(sessions.insert(), row | description)


def session(connection: Connection, session_id: str) -> Session | None:
    """The session with this id."""
    row = connection.execute(_SESSION, {"key": session_id}).first()
    return None if row is None else Session(*row)


def finish_session(connection: Connection, session_id: str, reason: str, detail: str | None, now: float) -> bool:
    """End a session and its sampling sessions, and its models if its client ends it. False if it was finished before or is unknown.

    If the server ends the session, the engine saves its models and then unloads them.
    """
    finished = connection.execute(_FINISH, {"key": session_id, "now": now, "reason": reason, "detail": detail}).rowcount == 1
    if finished:
        connection.execute(_END_SAMPLING, {"key": session_id})
        if reason in CLIENT_REASONS:
            endings.finish(connection, session_id)
    return finished


def open_sessions(connection: Connection) -> list[str]:
    """The ids of the sessions that are not finished."""
    return list(connection.execute(_OPEN).scalars())


def insert_model(connection: Connection, new: Model, now: float) -> bool:
    """Add a model. False, and nothing is changed, if its id exists."""
    return connection.execute(_INSERT_MODEL, vars(new) | {"created_at": now}).rowcount == 1


def model(connection: Connection, model_id: str) -> Model | None:
    """The model with this id."""
    row = connection.execute(_MODEL, {"key": model_id}).first()
    return None if row is None else Model(*row)


def insert_sampling_session(connection: Connection, new: SamplingSession, now: float) -> bool:
    """Add a sampling session. False, and nothing is changed, if its id exists."""
    return connection.execute(_INSERT_SAMPLING, vars(new) | {"created_at": now}).rowcount == 1


def sampling_session(connection: Connection, sampling_session_id: str) -> SamplingSession | None:
    """The sampling session with this id."""
    row = connection.execute(_SAMPLING, {"key": sampling_session_id}).first()
    return None if row is None else SamplingSession(*row)


def join_sampling_session(connection: Connection, sampling_session_id: str) -> int | None:
    """A number for one more client of a sampling session, from 1 on and never given twice; None if there is no such session."""
    return connection.execute(_JOIN, {"key": sampling_session_id}).scalar()
