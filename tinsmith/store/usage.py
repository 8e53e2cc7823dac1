"""Metering: what tenants have used, by hour, base model and session.

An operation's part is added in the transaction that records its outcome, and stands in its row of the log too. So the
sums are those of the log, whichever process dies.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import Connection, Select, bindparam, select, update

from tinsmith.store.checkpoints import ALIVE, STORED
from tinsmith.store.database import Transactions
from tinsmith.store.dialects import insert
from tinsmith.store.records import Used, UsedBy
from tinsmith.store.schema import checkpoints, last_commits, models, sessions, usage

HOUR_S = 3600
DAY_S = 24 * HOUR_S

_KEY = (usage.c.hour, usage.c.tenant, usage.c.base_model, usage.c.session_id)
_SUMS = tuple(usage.c[name] for name in Used.__dataclass_fields__)
_INSERT = insert(usage)
_ADD = _INSERT.on_conflict_do_update(
    index_elements=_KEY, set_={column.name: column + _INSERT.excluded[column.name] for column in _SUMS}
)
_NEW_BYTES = _INSERT.excluded.stored_bytes
_STORE = _INSERT.on_conflict_do_update(
    index_elements=_KEY, set_={"stored_bytes": _NEW_BYTES}, where=usage.c.stored_bytes < _NEW_BYTES
)
_NOTE = insert(last_commits)
_IS_NEW = _NOTE.on_conflict_do_update(
    index_elements=[last_commits.c.writer],
    set_={"number": _NOTE.excluded.number, "noted_at": _NOTE.excluded.noted_at},
    where=last_commits.c.number < _NOTE.excluded.number,
).returning(last_commits.c.number)
_OWNERS = (
    select(models.c.model_id, sessions.c.tenant, models.c.base_model, models.c.session_id)
    .join_from(models, sessions)
    .where(models.c.model_id.in_(bindparam("ids", expanding=True)))
)
_SIZES = select(
    checkpoints.c.tenant, checkpoints.c.directory, checkpoints.c.base_model, checkpoints.c.size_bytes
).distinct()
_STORED, _LIVING = _SIZES.where(STORED), _SIZES.where(ALIVE)
Owned = tuple[str, str, str]
"""Tenant, base model and session."""


def hour_of(now: float) -> int:
    """The beginning of the hour of a Unix time."""
    return int(now) // HOUR_S * HOUR_S


def add(connection: Connection, now: float, amounts: Mapping[Owned, Used]) -> None:
    """Add to the sums of an hour, in a transaction."""
    for (tenant, base_model, session_id), used in amounts.items():
        key = {"hour": hour_of(now), "tenant": tenant, "base_model": base_model, "session_id": session_id}
        connection.execute(_ADD, key | asdict(used))


def add_of_models(connection: Connection, now: float, amounts: Mapping[str, Used]) -> None:
    """Add what models have used, by model id, in a transaction."""
    if amounts:
        owners = connection.execute(_OWNERS, {"ids": list(amounts)}).all()
        summed: defaultdict[Owned, Used] = defaultdict(Used)
        for model_id, *owner in owners:
            key = owner[0], owner[1], owner[2]
            summed[key] = summed[key].plus(amounts[model_id])
        add(connection, now, summed)


def add_usage(store: Transactions, amounts: Mapping[Owned, Used], writer: str, number: int) -> None:
    """Add to the sums of this hour, once: what a writer adds has a number, higher than that of what it added before.

    So it may be given again if nobody knows what a commit came to.
    """
    now = time.time()
    with store.writing() as connection:
        if connection.execute(_IS_NEW, {"writer": writer, "number": number, "noted_at": now}).first() is not None:
            add(connection, now, amounts)


def note_storage(store: Transactions) -> None:
    """Note the bytes that tenants store now, if they are the most of this hour.

    Copies share theirs, and deleted checkpoints count while they can be restored.
    """
    now = time.time()
    with store.writing() as connection:
        for (tenant, base_model), size in _stored(connection, now).items():
            key = {"hour": hour_of(now), "tenant": tenant, "base_model": base_model, "session_id": ""}
            connection.execute(_STORE, key | {"stored_bytes": size})


def stored_bytes(store: Transactions) -> Counter[str]:
    """The bytes that each tenant stores now."""
    with store.reading() as connection:
        return _by_tenant(connection, _STORED)


def living_bytes(store: Transactions, tenant: str) -> int:
    """The bytes that a tenant stores now, without deleted checkpoints."""
    with store.reading() as connection:
        return _by_tenant(connection, _LIVING)[tenant]


def make_room(store: Transactions, tenant: str, limit: int) -> None:
    """Let deleted checkpoints of a tenant go with the next sweep, oldest first, until it stores less than `limit`."""
    own = checkpoints.c.tenant == tenant, checkpoints.c.deleted_at.is_not(None), STORED
    deleted = select(checkpoints.c.tinker_path).where(*own).order_by(checkpoints.c.deleted_at)
    with store.writing() as connection:
        for path in connection.execute(deleted, {"now": time.time()}).scalars().all():
            if _by_tenant(connection, _STORED)[tenant] < limit:
                return
            connection.execute(update(checkpoints).where(checkpoints.c.tinker_path == path).values(deleted_at=0.0))


def _by_tenant(connection: Connection, sizes: Select[*tuple[Any, ...]]) -> Counter[str]:
    found: Counter[str] = Counter()
    for tenant, _, _, size in connection.execute(sizes, {"now": time.time()}):
        found[tenant] += size
    return found


def _stored(connection: Connection, now: float) -> Mapping[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for tenant, _, base_model, size in connection.execute(_STORED, {"now": now}):
        found[tenant, base_model] += size
    return found


def used_between(store: Transactions, start: float, end: float, tenant: str | None = None) -> list[UsedBy]:
    """All sums of hours that begin in [start, end), oldest first; of one tenant if given."""
    found = select(*_KEY, *_SUMS, usage.c.stored_bytes).where(usage.c.hour >= start, usage.c.hour < end).order_by(*_KEY)
    if tenant is not None:
        found = found.where(usage.c.tenant == tenant)
    with store.reading() as connection:
        return [UsedBy(*row[:4], Used(*row[4:-1]), row[-1]) for row in connection.execute(found)]


def total(found: Iterable[UsedBy]) -> Used:
    """The sum of what was used."""
    summed = Used()
    for each in found:
        summed = summed.plus(each.used)
    return summed
