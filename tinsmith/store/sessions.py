"""Sessions, their models and sampling sessions, and how they end.

A model ends in one of three ways, of which clients that still use it are told (`refusal`):

finished  its client has ended its session
unloaded  the server has saved and unloaded it: its session was idle, or the server was stopped
lost      its worker or the engine ended under it

Long after its end, a session is forgotten with its operations, sampling sessions and models. A model that has
checkpoints stays as their run, and with it its last operation, whose time says when it was last used.
"""

import time
from typing import Any

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Text,
    bindparam,
    delete,
    exists,
    func,
    or_,
    select,
    union_all,
    update,
)

from tinsmith.errors import NotFoundError
from tinsmith.store import ids
from tinsmith.store.checkpoints import ALIVE
from tinsmith.store.database import Transactions
from tinsmith.store.dialects import insert
from tinsmith.store.records import CLIENT_REASONS, LOCAL, Category, Model, SamplingSession, Session
from tinsmith.store.schema import checkpoints, command_images, commands, models, sampling_sessions, sessions

MODEL_COLUMNS = [models.c[name] for name in Model.__dataclass_fields__]
MOST_COMMANDS = 10_000
"""Most operations that one transaction deletes."""


def is_of(owner: Column[str]) -> ColumnElement[bool]:
    """Condition for rows of the tenant `tenant`, a parameter; None stands for all."""
    return or_(owner == bindparam("tenant"), bindparam("tenant", type_=Text).is_(None))


_SESSION = select(*[sessions.c[name] for name in Session.__dataclass_fields__]).where(
    sessions.c.session_id == bindparam("key")
)
_TENANT = select(sessions.c.tenant).where(sessions.c.session_id == bindparam("key"))
_OWNS = union_all(
    select(sessions.c.session_id).where(sessions.c.session_id == bindparam("session"), is_of(sessions.c.tenant)),
    select(checkpoints.c.model_id).where(checkpoints.c.model_id == bindparam("own"), is_of(checkpoints.c.tenant)),
).limit(1)
_MODEL = select(*MODEL_COLUMNS).where(models.c.model_id == bindparam("key"))
_SAMPLING = select(*[sampling_sessions.c[name] for name in SamplingSession.__dataclass_fields__]).where(
    sampling_sessions.c.sampling_session_id == bindparam("key")
)
_INSERT_MODEL, _INSERT_SAMPLING = [
    insert(table).on_conflict_do_nothing().execution_options(preserve_rowcount=True)
    for table in (models, sampling_sessions)
]
_LIVING = models.c.status.in_(("creating", "ready"))
_ENDED_BY_CLIENT = select(sessions.c.session_id).where(sessions.c.finish_reason.in_(CLIENT_REASONS))
_FINISH_WITH_CLIENT = update(models).where(_LIVING, models.c.session_id.in_(_ENDED_BY_CLIENT)).values(status="finished")
"""A model may have come when its client had just ended the session."""
_OWNER = (
    select(models.c.status, sessions.c.finish_reason)
    .join_from(models, sessions)
    .where(models.c.model_id == bindparam("key"))
)
_NEWEST = (
    select(checkpoints.c.tinker_path)
    .where(checkpoints.c.model_id == bindparam("key"), checkpoints.c.kind == "training", ALIVE)
    .order_by(checkpoints.c.created_at.desc())
    .limit(1)
)
_OVER = select(sessions.c.session_id).where(sessions.c.finished_at < bindparam("before"))
_MODELS_OVER = select(models.c.model_id).where(models.c.session_id.in_(_OVER))
_later = commands.alias()
_LAST = select(func.max(_later.c.seq_id)).where(_later.c.model_id == commands.c.model_id).scalar_subquery()
_OLD_COMMANDS = (
    select(commands.c.id)
    .where(
        commands.c.model_id.in_(_MODELS_OVER),
        commands.c.status != "queued",
        or_(~exists().where(checkpoints.c.model_id == commands.c.model_id), commands.c.seq_id < _LAST),
    )
    .limit(bindparam("most"))
)
_IMAGES_OVER = (
    select(command_images.c.sha256)
    .join_from(command_images, commands)
    .where(commands.c.model_id.in_(_MODELS_OVER))
    .distinct()
)
_FORGET = (
    delete(commands).where(commands.c.id.in_(_OLD_COMMANDS)),
    delete(sampling_sessions).where(sampling_sessions.c.session_id.in_(_OVER)),
    delete(models).where(
        models.c.session_id.in_(_OVER),
        ~exists().where(checkpoints.c.model_id == models.c.model_id),
        ~exists().where(commands.c.model_id == models.c.model_id),
        ~exists().where(sampling_sessions.c.model_id == models.c.model_id),
    ),
    delete(sessions).where(
        sessions.c.finished_at < bindparam("before"), ~exists().where(models.c.session_id == sessions.c.session_id)
    ),
)


class SessionStore(Transactions):
    """Sessions, models and sampling sessions. Each method is one transaction."""

    def create_session(self, session_id: str, description: dict[str, Any], tenant: str = LOCAL) -> None:
        """Add a session, with tags, user_metadata, sdk_version, project_id and display_name."""
        now = time.time()
        with self.writing() as connection:
            connection.execute(
                sessions.insert(),
                {"session_id": session_id, "created_at": now, "last_seen_at": now, "tenant": tenant} | description,
            )

    def session(self, session_id: str) -> Session | None:
        row = self._first(_SESSION, key=session_id)
        return None if row is None else Session(*row)

    def tenant_of(self, session_id: str) -> str:
        """The owner of a session; that of all unknown ones is `local`."""
        row = self._first(_TENANT, key=session_id)
        return LOCAL if row is None else str(row.tenant)

    def owns(self, owned_id: str, tenant: str | None) -> bool:
        """Whether a session, a model, a sampling session or the checkpoints of a run are there and a tenant's.

        None stands for all tenants.
        """
        key = {"own": owned_id, "session": ids.session_of(owned_id) or owned_id, "tenant": tenant}
        return self._first(_OWNS, **key) is not None

    def finish_session(self, session_id: str, reason: str, detail: str | None) -> bool:
        """End a session with its sampling sessions, and its models if its client ends it.

        False if it was over or is unknown.

        If the server ends it, the engine saves and then unloads the models.
        """
        own = sessions.c.session_id == session_id
        end = update(sessions).where(own, sessions.c.finished_at.is_(None))
        with self.writing() as connection:
            ended = (
                connection.execute(
                    end.values(finished_at=time.time(), finish_reason=reason, finish_detail=detail)
                ).rowcount
                == 1
            )
            if ended:
                drawn = sampling_sessions.c.session_id == session_id, sampling_sessions.c.gone.is_(None)
                connection.execute(update(sampling_sessions).where(*drawn).values(gone="its session is finished"))
                if reason in CLIENT_REASONS:
                    connection.execute(
                        update(models).where(models.c.session_id == session_id, _LIVING).values(status="finished")
                    )
        return ended

    def open_sessions(self) -> list[str]:
        return self._column(select(sessions.c.session_id).where(sessions.c.finished_at.is_(None)))

    def model(self, model_id: str) -> Model | None:
        row = self._first(_MODEL, key=model_id)
        return None if row is None else Model(*row)

    def living_models(self, tenant: str) -> list[str]:
        """The models of a tenant that are in training, or being made."""
        return self._column(
            select(models.c.model_id).join_from(models, sessions).where(_LIVING, sessions.c.tenant == tenant)
        )

    def unload_model(self, model_id: str) -> None:
        """Note that a model was saved and removed from the engine."""
        with self.writing() as connection:
            connection.execute(update(models).where(models.c.model_id == model_id, _LIVING).values(status="unloaded"))

    def refusal(self, model_id: str) -> str | None:
        """The reason why a model takes no operations, with the remedy, if it takes none. Raises NotFoundError."""
        with self.reading() as connection:
            refused = refusal(connection, model_id, time.time())
        return None if refused is None else refused[0]

    def create_sampling_session(self, new: SamplingSession) -> bool:
        """Add a sampling session. False if its id exists."""
        with self.writing() as connection:
            return insert_sampling_session(connection, new, time.time())

    def join_sampling_session(self, sampling_session_id: str) -> int | None:
        """A number, from 1 on, for one more client of a sampling session, if there is such a session."""
        clones = sampling_sessions.c.clones
        joined = (
            update(sampling_sessions)
            .where(sampling_sessions.c.sampling_session_id == sampling_session_id)
            .values(clones=clones + 1)
        )
        with self.writing() as connection:
            return connection.execute(joined.returning(clones)).scalar()

    def sampling_session(self, sampling_session_id: str) -> SamplingSession | None:
        row = self._first(_SAMPLING, key=sampling_session_id)
        return None if row is None else SamplingSession(*row)


# ---- Parts of transactions


def insert_model(connection: Connection, new: Model, now: float) -> bool:
    """Add a model. False if its id exists."""
    return connection.execute(_INSERT_MODEL, vars(new) | {"created_at": now}).rowcount == 1


def insert_sampling_session(connection: Connection, new: SamplingSession, now: float) -> bool:
    """Add a sampling session. False if its id exists."""
    return connection.execute(_INSERT_SAMPLING, vars(new) | {"created_at": now}).rowcount == 1


def end_creation(connection: Connection, model_id: str, succeeded: bool) -> None:
    """Note how a model's creation ended, unless it is finished already."""
    created = update(models).where(models.c.model_id == model_id, models.c.status == "creating")
    connection.execute(created.values(status="ready" if succeeded else "failed"))


def living_models(connection: Connection) -> list[str]:
    """Ids of the models that an engine has, or had."""
    return list(connection.execute(select(models.c.model_id).where(_LIVING)).scalars())


def lose_model(connection: Connection, model_id: str) -> None:
    """Note that a living model ended with its worker."""
    connection.execute(_FINISH_WITH_CLIENT.where(models.c.model_id == model_id))
    connection.execute(update(models).where(models.c.model_id == model_id, _LIVING).values(status="lost"))


def refusal(connection: Connection, model_id: str, now: float) -> tuple[str, Category] | None:
    """Error and category for an operation on a model that has ended, if it has. Raises NotFoundError."""
    owner = connection.execute(_OWNER, {"key": model_id}).first()
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
        return (
            f"model {model_id} is unloaded: its session is finished, because it showed no sign of life; {hint}",
            "user",
        )
    if owner.status == "unloaded":
        return f"model {model_id} is unloaded: the server was stopped; {hint}", "user"
    return None


def how_to_go_on(connection: Connection, model_id: str, now: float) -> str:
    """The end of a message: the newest checkpoint, or how to have one next time."""
    path = connection.execute(_NEWEST, {"key": model_id, "now": now}).scalar()
    if path is None:
        return "it has no checkpoint to go on from: create a new model, and call save_state from time to time"
    return f"go on from its newest checkpoint, {path}, with create_training_client_from_state_with_optimizer"


def images_of_ended(connection: Connection, before: float) -> list[bytes]:
    """Images of sessions that were finished before then (Unix time)."""
    return list(connection.execute(_IMAGES_OVER, {"before": before}).scalars())


def forget_ended(connection: Connection, before: float, most: int = MOST_COMMANDS) -> int:
    """Delete rows of sessions finished before then (Unix time), of at most `most` operations; returns their number."""
    return sum(connection.execute(step, {"before": before, "most": most}).rowcount for step in _FORGET)
