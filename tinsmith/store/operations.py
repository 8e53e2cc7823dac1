"""Operations of the command log as people look at them: what is queued, what has failed, and the log itself.

Each function is one transaction. No column behind the payload is read of queued operations: the database would go
through all of the payload for it.
"""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Select, func, literal, literal_column, select, true

from tinsmith.errors import NotFoundError
from tinsmith.store import ids
from tinsmith.store.schema import checkpoints, commands, first_requests, models, run_metrics, sessions
from tinsmith.store.store import Store

_IS_QUEUED = commands.c.status == literal_column("'queued'")
_IS_FAILED = commands.c.status == literal_column("'failed'")
_STATUSES = {"queued": _IS_QUEUED, "failed": _IS_FAILED, "done": commands.c.status.in_(("done", "dropped"))}
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


MOST_SEARCHED = 10_000
"""Operations that one search looks at; the next search goes on from there."""


@dataclass(frozen=True)
class FoundOperations:
    """A part of the log."""

    operations: list[ShownOperation]
    """Those that match, newest first."""
    older: int | None
    """Number of the operation before which to search on; None if there are no older ones."""


def list_operations(
    store: Store,
    tenant: str | None,
    limit: int,
    before: int | None = None,
    model_id: str | None = None,
    kind: str | None = None,
    status: str | None = None,
) -> FoundOperations:
    """Operations that match, of a tenant or of all; those from before the operation of number `before`.

    The search begins at the newest operation of the tenant, or of the run, and looks at `MOST_SEARCHED`.
    """
    number = _number(status)
    listed = select(*_SHOWN).select_from(_JOINED).order_by(number.desc()).limit(limit)
    if tenant is not None:
        # Not through the index of sessions, from which all operations of the tenant would be read
        listed = listed.where(func.coalesce(sessions.c.tenant, "") == tenant)
    if model_id is not None:
        listed = listed.where(commands.c.model_id == model_id)
    if kind is not None:
        listed = listed.where(commands.c.kind == kind)
    if status is not None:
        listed = listed.where(_STATUSES[status])
    with store.reading() as connection:
        newest = connection.execute(_newest(tenant, model_id, before)).scalar()
        if newest is None:
            return FoundOperations([], None)
        oldest = connection.execute(_oldest(newest, model_id, status)).scalar() or 0
        rows = connection.execute(listed.where(number.between(oldest, newest)))
        found = [ShownOperation(*row) for row in rows]
        end = found[-1].number if len(found) == limit else oldest
        is_more = connection.execute(_newest(tenant, model_id, end)).scalar() is not None
    return FoundOperations(found, end if is_more else None)


def _number(status: str | None) -> ColumnElement[int]:
    """The number of an operation; of queued ones, which are few, in a form that no index has but theirs."""
    return commands.c.id + literal_column("0") if status == "queued" else commands.c.id


def _newest(tenant: str | None, model_id: str | None, before: int | None) -> Select[int | None]:
    """The number of the newest operation of a tenant, or of all, and of a run, or of all."""
    numbers = select(func.max(commands.c.id).label("number"))
    if before is not None:
        numbers = numbers.where(commands.c.id < before)
    if model_id is None and tenant is None:
        return numbers
    # One look into the index for each run: a log is longer
    of_runs = numbers.where(commands.c.model_id == models.c.model_id).correlate(models).scalar_subquery()
    runs = select(of_runs.label("number")).select_from(models.join(sessions)).where(_of(tenant))
    if model_id is not None:
        runs = runs.where(models.c.model_id == model_id)
    return select(func.max(runs.subquery().c.number))


def _oldest(newest: int, model_id: str | None, status: str | None) -> Select[int]:
    """The number of the last operation that a search looks at; none if it looks at all."""
    number = _number(status)
    looked_at = select(commands.c.id).where(number <= newest)
    if status in ("failed", "queued"):  # which have an index of their own
        looked_at = looked_at.where(_STATUSES[status])
    elif model_id is not None:
        looked_at = looked_at.where(commands.c.model_id == model_id)
    else:
        return select(literal(newest - MOST_SEARCHED + 1))  # numbers have hardly any gaps
    return looked_at.order_by(number.desc()).limit(1).offset(MOST_SEARCHED - 1)


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
