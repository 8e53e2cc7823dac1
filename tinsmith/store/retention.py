"""Deletes what has passed its limit in bytes, oldest first, and sessions that ended long ago.

With a session go its operations, its sampling sessions and its models without checkpoints. A model that has checkpoints stays as the run
that they belong to, and with it its last operation, whose time says when it was last used.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from sqlalchemy import Connection, and_, bindparam, delete, exists, func, or_, select

from tinsmith.store.schema import checkpoints, command_images, commands, models, sampling_sessions, sessions

Key = TypeVar("Key")

MOST_COMMANDS = 10_000
"""Maximum number of operations that one transaction deletes, because other transactions wait for it."""

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
_IMAGES_OVER = select(command_images.c.sha256).join_from(command_images, commands).where(commands.c.model_id.in_(_MODELS_OVER)).distinct()
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


def oldest_beyond(most_bytes: int, all_bytes: int, oldest_first: Iterable[tuple[Key, int]]) -> Iterator[Key]:
    """Keys of the oldest entries, as many as have to go so that at most `most_bytes` are left. Entries are (key, bytes).

    `all_bytes` is the sum over all entries.
    """
    for key, size in oldest_first:
        if all_bytes <= most_bytes:
            return
        all_bytes -= size
        yield key


def images_of_ended(connection: Connection, before: float) -> list[bytes]:
    """Digests of the images of all operations of sessions that were finished before then (Unix time)."""
    return list(connection.execute(_IMAGES_OVER, {"before": before}).scalars())


def forget_ended(connection: Connection, before: float, most: int = MOST_COMMANDS) -> int:
    """Delete rows of sessions that were finished before then (Unix time), of operations at most `most`; returns how many were deleted."""
    steps = (_FORGET_COMMANDS, _FORGET_SAMPLING, _FORGET_MODELS, _FORGET_SESSIONS)
    return sum(connection.execute(step, {"before": before, "most": most}).rowcount for step in steps)
