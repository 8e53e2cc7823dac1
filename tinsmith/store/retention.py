"""Forgetting sessions that ended long ago: their operations, sampling sessions, and models without checkpoints.

A model that has checkpoints stays, as the run that they belong to, with its last operation, which says when it was last used.
"""

from sqlalchemy import Connection, and_, bindparam, delete, exists, func, or_, select

from tinsmith.store.schema import checkpoints, commands, models, sampling_sessions, sessions

MOST_COMMANDS = 10_000
"""Operations deleted in one transaction: others wait for it."""

_OVER = select(sessions.c.session_id).where(sessions.c.finished_at < bindparam("before"))
_MODELS_OVER = select(models.c.model_id).where(models.c.session_id.in_(_OVER))
_SAVED = exists().where(checkpoints.c.model_id == commands.c.model_id)
_later = commands.alias()
_LAST = select(func.max(_later.c.seq_id)).where(_later.c.model_id == commands.c.model_id).scalar_subquery()
_OLD_COMMANDS = (
    select(commands.c.id)
    .where(commands.c.model_id.in_(_MODELS_OVER), commands.c.status != "queued", or_(~_SAVED, commands.c.seq_id < _LAST))
    .limit(bindparam("most"))
)
_FORGET_COMMANDS = delete(commands).where(commands.c.id.in_(_OLD_COMMANDS))
_FORGET_SAMPLING = delete(sampling_sessions).where(sampling_sessions.c.session_id.in_(_OVER))
_FORGET_MODELS = delete(models).where(
    models.c.session_id.in_(_OVER),
    ~exists().where(checkpoints.c.model_id == models.c.model_id),
    ~exists().where(commands.c.model_id == models.c.model_id),
    ~exists().where(sampling_sessions.c.model_id == models.c.model_id),
)
_FORGET_SESSIONS = delete(sessions).where(
    and_(sessions.c.finished_at < bindparam("before"), ~exists().where(models.c.session_id == sessions.c.session_id))
)


def forget_ended(connection: Connection, before: float, most: int = MOST_COMMANDS) -> int:
    """Delete the rows of sessions that were finished before then (Unix time), of operations at most `most`; returns how many."""
    steps = (_FORGET_COMMANDS, _FORGET_SAMPLING, _FORGET_MODELS, _FORGET_SESSIONS)
    return sum(connection.execute(step, {"before": before, "most": most}).rowcount for step in steps)
