"""Operations of the command log as people look at them: what is queued, what has failed, and the log itself.

Each function is one transaction. No column behind the payload is read of queued operations: the database would go
through all of the payload for it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, literal_column, select, true

from tinsmith.errors import NotFoundError
from tinsmith.store import ids
from tinsmith.store.schema import checkpoints, commands, first_requests, models, run_metrics, sessions
from tinsmith.store.store import Store

_IS_QUEUED = commands.c.status == literal_column("'queued'")
_IS_FAILED = commands.c.status == literal_column("'failed'")
_JOINED = commands.join(models, commands.c.model_id == models.c.model_id).join(sessions)


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


_SHOWN = [
    commands.c.id,
    *(commands.c[name] for name in list(ShownOperation.__dataclass_fields__)[1:-1]),
    sessions.c.tenant,
]


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


# ---- Runs


@dataclass(frozen=True)
class MetricsRow:
    """Metrics of one operation."""

    number: int
    """Later operations of a run have a higher one."""
    at: float
    kind: str
    tokens: int
    metrics: str
    """A JSON object; numbers that are not finite are texts."""


@dataclass(frozen=True)
class RunOrigin:
    """A run whose weights, or some of them, come from a checkpoint."""

    model_id: str
    at: float
    tinker_path: str | None
    """None if the checkpoint is not there any more."""


_METRICS = [run_metrics.c.id, *(run_metrics.c[name] for name in ("at", "kind", "tokens", "metrics"))]
_LOADS = commands.c.kind.in_([literal_column("'create_from_checkpoint'"), literal_column("'load_weights'")])
_LOADED_FROM = commands.c.resolved["directory"].as_string()


def read_metrics(store: Store, model_id: str, after: int = 0) -> list[MetricsRow]:
    """Metrics of a run's operations behind that of number `after`, in order."""
    found = select(*_METRICS).where(run_metrics.c.model_id == model_id, run_metrics.c.id > after)
    with store.reading() as connection:
        return [MetricsRow(*row) for row in connection.execute(found.order_by(run_metrics.c.id))]


def last_metrics(store: Store, model_ids: Collection[str], kind: str) -> dict[str, MetricsRow]:
    """The last metrics of this kind of operation, by run."""
    found: dict[str, MetricsRow] = {}
    newest = select(*_METRICS).where(run_metrics.c.kind == kind).order_by(run_metrics.c.id.desc()).limit(1)
    with store.reading() as connection:
        for model_id in model_ids:
            row = connection.execute(newest.where(run_metrics.c.model_id == model_id)).first()
            if row is not None:
                found[model_id] = MetricsRow(*row)
    return found


def read_first_requests(store: Store, model_id: str) -> list[tuple[int, bytes]]:
    """The seq_ids and payloads of a run's first passes, as far as they are kept."""
    found = select(first_requests.c.seq_id, first_requests.c.payload).where(first_requests.c.model_id == model_id)
    with store.reading() as connection:
        return [(seq_id, bytes(payload)) for seq_id, payload in connection.execute(found.order_by("seq_id"))]


def origins_of(store: Store, model_id: str) -> list[RunOrigin]:
    """The checkpoints that a run has loaded, in order."""
    with store.reading() as connection:
        found = connection.execute(_loads().where(commands.c.model_id == model_id).order_by(commands.c.id))
        return [RunOrigin(*row) for row in found]


def offspring_of(store: Store, model_id: str, tenant: str | None) -> list[RunOrigin]:
    """The runs of a tenant, or of all, that have loaded checkpoints of a run."""
    directories = select(checkpoints.c.directory).where(checkpoints.c.model_id == model_id)
    with store.reading() as connection:
        found = connection.execute(
            _loads().where(_LOADED_FROM.in_(directories), commands.c.model_id != model_id, _of(tenant))
        )
        return [RunOrigin(*row) for row in found]


def _loads() -> Select[*tuple[Any, ...]]:
    path = (
        select(checkpoints.c.tinker_path)
        .where(checkpoints.c.directory == _LOADED_FROM)
        .order_by(checkpoints.c.created_at)
        .limit(1)
        .scalar_subquery()
    )
    return select(commands.c.model_id, commands.c.created_at, path).select_from(_JOINED).where(_LOADS)
