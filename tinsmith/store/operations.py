"""Operations of the command log as people look at them: what is queued, what has failed, and the log itself.

Each function is one transaction. No column behind the payload is read of queued operations: the database would go
through all of the payload for it.
"""

from dataclasses import dataclass

from sqlalchemy import ColumnElement, func, literal_column, select, true

from tinsmith.errors import NotFoundError
from tinsmith.store import ids
from tinsmith.store.schema import commands, models, sessions
from tinsmith.store.store import Store

_IS_QUEUED = commands.c.status == literal_column("'queued'")
_IS_FAILED = commands.c.status == literal_column("'failed'")
_JOINED = commands.join(models, commands.c.model_id == models.c.model_id).join(sessions)
_SHOWN = (
    commands.c.id,
    commands.c.model_id,
    commands.c.seq_id,
    commands.c.kind,
    commands.c.status,
    commands.c.created_at,
    commands.c.finished_at,
    commands.c.error,
    commands.c.category,
    commands.c.tokens,
    commands.c.gpu_seconds,
    sessions.c.tenant,
)


@dataclass(frozen=True)
class QueuedOperation:
    """An operation that has not ended."""

    position: int
    """1 is the oldest of all tenants' operations."""
    model_id: str
    seq_id: int
    kind: str
    tenant: str


@dataclass(frozen=True)
class ShownOperation:
    """An operation of the log."""

    number: int
    model_id: str
    seq_id: int
    kind: str
    status: str
    """queued, done, failed, or dropped: done, and its result is not kept any more."""
    created_at: float
    finished_at: float | None
    error: str | None
    category: str | None
    tokens: int | None
    gpu_seconds: float | None
    tenant: str

    @property
    def request_id(self) -> str:
        return ids.request_id(self.model_id, self.seq_id)


def _of(tenant: str | None) -> ColumnElement[bool]:
    return true() if tenant is None else sessions.c.tenant == tenant


def queued_operations(store: Store, tenant: str | None, limit: int) -> tuple[list[QueuedOperation], int]:
    """The oldest operations of a tenant, or of all, that have not ended, and the number of all of them."""
    position = func.row_number().over(order_by=commands.c.id).label("position")
    queued = (
        select(
            position,
            commands.c.id,
            commands.c.model_id,
            commands.c.seq_id,
            commands.c.kind,
            sessions.c.tenant,
        )
        .select_from(_JOINED)
        .where(_IS_QUEUED)
        .subquery()
    )
    own = true() if tenant is None else queued.c.tenant == tenant
    columns = [queued.c[name] for name in QueuedOperation.__dataclass_fields__]
    with store.reading() as connection:
        found = connection.execute(select(*columns).where(own).order_by(queued.c.id).limit(limit))
        shown = [QueuedOperation(*row) for row in found]
        return shown, connection.execute(select(func.count()).select_from(queued).where(own)).scalar_one()


def failed_operations(store: Store, tenant: str | None, limit: int) -> list[ShownOperation]:
    """The operations of a tenant, or of all, that failed last."""
    failed = select(*_SHOWN).select_from(_JOINED).where(_IS_FAILED, _of(tenant))
    with store.reading() as connection:
        found = connection.execute(failed.order_by(commands.c.finished_at.desc()).limit(limit))
        return [ShownOperation(*row) for row in found]


def list_operations(
    store: Store,
    tenant: str | None,
    limit: int,
    before: int | None = None,
    model_id: str | None = None,
    kind: str | None = None,
    status: str | None = None,
) -> list[ShownOperation]:
    """Operations that match, newest first; those from before the operation of number `before`."""
    listed = select(*_SHOWN).select_from(_JOINED).where(_of(tenant)).order_by(commands.c.id.desc()).limit(limit)
    if before is not None:
        listed = listed.where(commands.c.id < before)
    if model_id is not None:
        listed = listed.where(commands.c.model_id == model_id)
    if kind is not None:
        listed = listed.where(commands.c.kind == kind)
    if status == "done":
        listed = listed.where(commands.c.status.in_(("done", "dropped")))
    elif status is not None:
        listed = listed.where(commands.c.status == status)
    with store.reading() as connection:
        return [ShownOperation(*row) for row in connection.execute(listed)]


def find_operation(store: Store, model_id: str, seq_id: int) -> ShownOperation:
    """One operation. Raises NotFoundError."""
    found = select(*_SHOWN).select_from(_JOINED).where(commands.c.model_id == model_id, commands.c.seq_id == seq_id)
    with store.reading() as connection:
        row = connection.execute(found).first()
    if row is None:
        raise NotFoundError(f"operation {ids.request_id(model_id, seq_id)!r} does not exist")
    return ShownOperation(*row)
