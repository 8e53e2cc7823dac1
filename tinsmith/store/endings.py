"""The endings of models, in SQL, and the errors for clients that still use one. Each function is part of a transaction.

finished  its client has ended its session
unloaded  the server has unloaded it, and kept its weights as a checkpoint: its session was idle, or the server was stopped
lost      its worker or the engine ended under it; what is left are the checkpoints that were saved before
"""

from sqlalchemy import Connection, bindparam, select, update

from tinsmith.errors import NotFoundError
from tinsmith.store import checkpoints as rows
from tinsmith.store.records import CLIENT_REASONS, Category
from tinsmith.store.schema import checkpoints, models, sessions

_LIVING = models.c.status.in_(("creating", "ready"))
_OWNER = select(models.c.status, sessions.c.finish_reason).join_from(models, sessions).where(models.c.model_id == bindparam("model_id"))
_NEWEST = (
    select(checkpoints.c.tinker_path)
    .where(checkpoints.c.model_id == bindparam("model_id"), checkpoints.c.kind == "training", rows.ALIVE)
    .order_by(checkpoints.c.created_at.desc())
    .limit(1)
)
_CREATED = (
    update(models).where(models.c.model_id == bindparam("model"), models.c.status == "creating").values(status=bindparam("new_status"))
)
_UNLOADED = update(models).where(models.c.model_id == bindparam("model"), _LIVING).values(status="unloaded")
_FINISHED = update(models).where(models.c.session_id == bindparam("session"), _LIVING).values(status="finished")
_CLIENT_ENDED = select(sessions.c.session_id).where(sessions.c.finish_reason.in_(CLIENT_REASONS))
_FINISHED_LONG_AGO = update(models).where(_LIVING, models.c.session_id.in_(_CLIENT_ENDED)).values(status="finished")
_LOST = update(models).where(_LIVING).values(status="lost")
_ONE_LOST = update(models).where(models.c.model_id == bindparam("model"), _LIVING).values(status="lost")


def end_creation(connection: Connection, model_id: str, succeeded: bool) -> None:
    """Note how the creation of a model ended. If its session was finished in the meantime, the model stays finished."""
    connection.execute(_CREATED, {"model": model_id, "new_status": "ready" if succeeded else "failed"})


def unload(connection: Connection, model_id: str) -> None:
    """Note that a model was saved as a checkpoint and removed from the engine."""
    connection.execute(_UNLOADED, {"model": model_id})


def finish(connection: Connection, session_id: str) -> None:
    """Note that the client has ended a session, and with it all its models."""
    connection.execute(_FINISHED, {"session": session_id})


def lose(connection: Connection) -> None:
    """Note that the engine has ended, and with it every model that had not ended otherwise."""
    connection.execute(_FINISHED_LONG_AGO)  # by a server that noted this with the session only
    connection.execute(_LOST)


def lose_model(connection: Connection, model_id: str) -> None:
    """The worker that had a model is gone, and with it the model, if that has not ended otherwise."""
    connection.execute(_FINISHED_LONG_AGO)
    connection.execute(_ONE_LOST, {"model": model_id})


def refusal(connection: Connection, model_id: str, now: float) -> tuple[str, Category] | None:
    """Error and category for an operation on a model that has ended; None if the model has not. Raises NotFoundError: no such model."""
    owner = connection.execute(_OWNER, {"model_id": model_id}).first()
    if owner is None:
        raise NotFoundError(f"model {model_id!r} does not exist")
    if owner.status == "failed":
        return f"model {model_id} could not be created; see the error of its create_model", "user"
    if owner.status == "copied":
        return f"model {model_id} holds copied weights only; load them into a new model to train it", "user"
    hint = how_to_go_on(connection, model_id, now)
    if owner.status == "lost":
        return f"model {model_id} was lost when its worker or the engine stopped; {hint}", "server"
    if owner.status == "finished" or owner.finish_reason in CLIENT_REASONS:
        return f"model {model_id} is finished: its session is finished; {hint}", "user"
    if owner.finish_reason is not None:
        return f"model {model_id} is unloaded: its session is finished, because it showed no sign of life; {hint}", "user"
    if owner.status == "unloaded":
        return f"model {model_id} is unloaded: the server was stopped; {hint}", "user"
    return None


def how_to_go_on(connection: Connection, model_id: str, now: float) -> str:
    """The end of a message: the newest checkpoint to continue from, or, if there is none, how to have one next time."""
    path = connection.execute(_NEWEST, {"model_id": model_id, "now": now}).scalar()
    if path is None:
        return "it has no checkpoint to go on from: create a new model, and call save_state from time to time"
    return f"go on from its newest checkpoint, {path}, with create_training_client_from_state_with_optimizer"
