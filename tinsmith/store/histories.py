"""Histories of models in the database, and the engines that write them.

A history changes in the transaction of the outcome that the change belongs to. So after any crash, what operations are
recorded to have done is in it, and nothing of the others but passes that they share.

Which engine may write is the business of `fence.py`; here it is counted how often engines were started in vain.
"""

import time
from collections.abc import Collection, Iterable
from typing import Any

from sqlalchemy import Connection, bindparam, delete, exists, func, insert, select, update

from tinsmith.store.database import Transactions
from tinsmith.store.records import REJECTED, CommandKind, HistoryChange
from tinsmith.store.schema import commands, engine_starts, histories, history_events, models, sessions

MOST_ENDS = 3
"""A model is lost, and an operation fails, when processes have ended so many times while it was under way."""

MOST_IDLE_STARTS = 5
"""Operations fail when so many engines have begun some, one after the other, and ended before any was done."""

_INSERT = insert(histories)
_INSERT_EVENT = insert(history_events)
_UPDATE = update(histories).where(histories.c.model_id == bindparam("model"))
_SUMMARY = _UPDATE.values(summary=bindparam("new_summary"))
_COMEBACKS = _UPDATE.values(comebacks=bindparam("new_comebacks"))
_DELETE = delete(histories).where(histories.c.model_id == bindparam("model"))
_DELETE_EVENT = delete(history_events).where(
    history_events.c.model_id == bindparam("model"), history_events.c.number == bindparam("event_number")
)
_SUMMARY_OF = select(histories.c.summary).where(histories.c.model_id == bindparam("model"))
_IS_THERE = select(exists().where(histories.c.model_id == bindparam("model")))
_NEWEST = select(func.max(engine_starts.c.number))
_BEGIN = update(engine_starts).where(engine_starts.c.number == _NEWEST.scalar_subquery()).values(has_begun=True)
_LIVING = (
    select(histories.c.model_id, histories.c.comebacks)
    .join_from(histories, models, histories.c.model_id == models.c.model_id)
    .where(models.c.status == "ready")
)
_STORED = (
    select(histories.c.model_id, histories.c.summary, histories.c.comebacks, sessions.c.finished_at.is_not(None))
    .join_from(histories, models, histories.c.model_id == models.c.model_id)
    .join(sessions, models.c.session_id == sessions.c.session_id)
    .where(models.c.status == "ready")
    .order_by(models.c.created_at)
)
_EVENTS = (
    select(history_events.c.number, history_events.c.event)
    .where(history_events.c.model_id == bindparam("model"))
    .order_by(history_events.c.number)
)


def write(connection: Connection, change: HistoryChange) -> None:
    """Write a change, unless it is of a model that is not there any more."""
    model = {"model": change.model_id}
    if change.ends:
        connection.execute(_DELETE, model)
    if change.begins:
        connection.execute(_INSERT, {"model_id": change.model_id, "summary": change.summary})
    elif not connection.execute(_IS_THERE, model).scalar():
        return
    elif change.summary is not None:
        connection.execute(_SUMMARY, model | {"new_summary": change.summary})
    if change.comebacks is not None:
        connection.execute(_COMEBACKS, model | {"new_comebacks": change.comebacks})
    if change.removed:
        connection.execute(_DELETE_EVENT, [model | {"event_number": number} for number in change.removed])
    if change.added:
        events = [{"model_id": change.model_id, "number": number, "event": event} for number, event in change.added]
        connection.execute(_INSERT_EVENT, events)


def spoil(connection: Connection, model_id: str, failed: Iterable[tuple[int, CommandKind]], reason: str) -> None:
    """Leave a model in a known state after operations (seq_id, kind) that fail without an engine, in order.

    The next step is refused if a contribution to it has failed, and gradients are dropped, as an engine does it.
    """
    summary = dict(connection.execute(_SUMMARY_OF, {"model": model_id}).scalar_one())
    drops = False
    for seq_id, kind in failed:
        if kind in ("forward_backward", REJECTED):
            drops, summary["spoiled"] = True, f"seq_id {seq_id}: {reason}"
        elif kind == "optim_step":
            drops, summary["spoiled"], summary["stepped"] = True, None, seq_id
    passes = [
        number
        for number, event in events(connection, model_id).items()
        if drops and event["kind"] == "passed" and event["state"] == summary["state"]
    ]
    write(connection, HistoryChange(model_id, summary, removed=passes))


def forget(connection: Connection, model_ids: Iterable[str]) -> None:
    """Delete the histories of models that do not come back."""
    for model_id in model_ids:
        connection.execute(_DELETE, {"model": model_id})


def living(connection: Connection) -> dict[str, int]:
    """Return the models that have a history, and how often the recovery of each has begun and not ended."""
    return {row.model_id: row.comebacks for row in connection.execute(_LIVING)}


def stored(connection: Connection) -> list[tuple[str, dict[str, Any], int, bool]]:
    """Return model, summary, comebacks, and whether the session is over, oldest model first."""
    return [(row[0], row[1], row[2], bool(row[3])) for row in connection.execute(_STORED)]


def events(connection: Connection, model_id: str) -> dict[int, dict[str, Any]]:
    """Return the events of a model by their numbers, in order."""
    return {row.number: row.event for row in connection.execute(_EVENTS, {"model": model_id})}


# ---- Engines


def keep_only(connection: Connection, names: Collection[str]) -> dict[str, int] | None:
    """Forget the histories of models that have ended, and return `living`; forget all if they are of another place.

    `names` are those of this place.

    None if some were.
    """
    newest = select(engine_starts.c.place).where(engine_starts.c.number == _NEWEST.scalar_subquery())
    kept = living(connection)
    is_here = not kept or connection.execute(newest).scalar() in names
    every = connection.execute(select(histories.c.model_id)).scalars().all()
    forget(connection, [model_id for model_id in every if not is_here or model_id not in kept])
    return kept if is_here else None


def forget_engines(store: Transactions) -> None:
    """Let no model come back, as in a copy of a data directory, where its files are not."""
    with store.writing() as connection:
        connection.execute(delete(engine_starts))


def note_start(connection: Connection, place: str) -> bool:
    """Note that an engine is going to start; whether too many have begun operations, and ended before any was done."""
    done_at = select(func.coalesce(func.max(commands.c.finished_at), 0.0)).where(commands.c.error.is_(None))
    since = engine_starts.c.started_at > done_at.scalar_subquery()
    idle = connection.execute(select(func.count()).where(engine_starts.c.has_begun, since)).scalar_one()
    start = {"started_at": time.time(), "place": place, "has_begun": False}
    connection.execute(insert(engine_starts), start)
    oldest = connection.execute(_NEWEST).scalar_one() - 2 * MOST_IDLE_STARTS
    connection.execute(delete(engine_starts).where(engine_starts.c.number < oldest))
    return bool(idle >= MOST_IDLE_STARTS)


def note_begun(connection: Connection) -> None:
    """Note that the engine which was started last begins its first operation."""
    connection.execute(_BEGIN)
