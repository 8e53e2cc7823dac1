"""Finds the newest weights that a training run has saved for sampling."""

import json
import time

from sqlalchemy import bindparam, select

from tinsmith.store import ids
from tinsmith.store.checkpoints import ALIVE
from tinsmith.store.database import Transactions
from tinsmith.store.schema import checkpoints, commands, sampling_sessions

_SAVE = (
    select(commands.c.seq_id, commands.c.result, commands.c.resolved)
    .where(
        commands.c.model_id == bindparam("key"),
        commands.c.kind == "save_weights_for_sampler",
        commands.c.status.in_(("done", "dropped")),
    )
    .order_by(commands.c.seq_id.desc())
    .limit(1)
)
_SNAPSHOT = select(sampling_sessions.c.sampling_session_id).where(
    sampling_sessions.c.model_id == bindparam("key"), sampling_sessions.c.snapshot_id == bindparam("save")
)
_SAVED = select(checkpoints.c.tinker_path).where(
    checkpoints.c.model_id == bindparam("key"), checkpoints.c.directory == bindparam("directory")
)
_CHECKPOINT = (
    select(checkpoints.c.tinker_path)
    .where(checkpoints.c.model_id == bindparam("key"), checkpoints.c.kind == "sampler", ALIVE)
    .order_by(checkpoints.c.created_at.desc())
    .limit(1)
)


def newest_weights(store: Transactions, model_id: str) -> str | None:
    """The sampling session, or the path, of the last `save_weights_for_sampler` that succeeded; None if none has.

    The order is that of the operations: what was saved last was trained longest.
    """
    with store.reading() as connection:
        save = connection.execute(_SAVE, {"key": model_id}).first()
        if save is not None:
            key = {"key": model_id, "save": ids.request_id(model_id, save.seq_id)}
            snapshot = connection.execute(_SNAPSHOT, key).scalar()
            if snapshot is not None:
                return str(snapshot)
            if save.result is not None:
                return str(json.loads(save.result)["path"])
            # Never an older one where this one was deleted
            saved = {"key": model_id, "directory": (save.resolved or {}).get("directory")}
            return connection.execute(_SAVED, saved).scalar()
        return connection.execute(_CHECKPOINT, {"key": model_id, "now": time.time()}).scalar()
