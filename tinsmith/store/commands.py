"""The command log: training operations, their results and their images.

Payload and images are dropped with the outcome, or kept up to a limit: `kept_bytes` is then their size.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import (
    JSON,
    Connection,
    Row,
    Select,
    Text,
    bindparam,
    cast,
    delete,
    exists,
    func,
    literal_column,
    select,
    tuple_,
    update,
)

from tinsmith.errors import NotFoundError, UserError
from tinsmith.store import histories, ids, usage
from tinsmith.store.database import Transactions
from tinsmith.store.dialects import Numbers, insert
from tinsmith.store.disk import oldest_beyond
from tinsmith.store.records import (
    REJECTED,
    Command,
    HistoryChange,
    NewCommand,
    OperationMetrics,
    Outcome,
    StoredHistory,
    Unfinished,
    Used,
)
from tinsmith.store.schema import (
    command_images,
    commands,
    first_requests,
    models,
    run_metrics,
    sampling_sessions,
    sessions,
)
from tinsmith.store.sessions import (
    end_creation,
    how_to_go_on,
    insert_model,
    insert_sampling_session,
    living_models,
    lose_model,
    refusal,
)
from tinsmith.wire.compression import HEADER_BYTES, unpacked_size

_INSERT = insert(commands).on_conflict_do_nothing().returning(commands.c.id)
_INSERT_REFERENCE = insert(command_images)
_REJECT = (
    update(commands).where(commands.c.id == bindparam("command_id")).values(kind=REJECTED, payload=bindparam("message"))
)
_COMMAND = (
    commands.c.id,
    commands.c.model_id,
    commands.c.seq_id,
    commands.c.kind,
    func.length(commands.c.payload),
    func.substr(commands.c.payload, 1, HEADER_BYTES),
    commands.c.created_at,
    commands.c.image_digests,
)
# As a literal, because SQLite takes a partial index only for what it can read
_IS_QUEUED = commands.c.status == literal_column("'queued'")
_IS_NEW = commands.c.seq_id.op("NOT IN")(Numbers(bindparam("known", type_=JSON)))
_QUEUED = (
    select(*_COMMAND)
    .where(_IS_QUEUED, commands.c.model_id == bindparam("model"), _IS_NEW)
    .order_by(commands.c.seq_id)
    .limit(bindparam("limit"))
)
_SINCE = (
    select(*_COMMAND, _IS_QUEUED)
    .where(commands.c.model_id == bindparam("model"), commands.c.seq_id > bindparam("after"))
    .order_by(commands.c.seq_id)
)
_NEVER_BEGUN = (
    select(models.c.model_id)
    .join_from(models, sessions)
    .where(models.c.status == "creating", sessions.c.finished_at.is_(None))
)
_UNFINISHED = (
    select(
        commands.c.model_id, commands.c.seq_id, func.length(commands.c.payload), sessions.c.tenant, models.c.base_model
    )
    .join_from(commands, models, commands.c.model_id == models.c.model_id)
    .join(sessions, models.c.session_id == sessions.c.session_id)
    .where(_IS_QUEUED)
    .order_by(commands.c.model_id, commands.c.seq_id)
)
_NOTE_SAVED = (
    update(commands).where(commands.c.id == bindparam("command_id"), _IS_QUEUED).values(resolved=bindparam("saved"))
)
_SAVED = select(commands.c.resolved).where(commands.c.id == bindparam("command_id"))
_PAYLOAD = select(commands.c.payload).where(commands.c.id == bindparam("command_id"))
_FINISH = update(commands).where(
    commands.c.model_id == bindparam("model"), commands.c.seq_id == bindparam("seq"), commands.c.status == "queued"
)
_DROPPED_INPUT = {"payload": None, "image_digests": None, "kept_bytes": None}
_IMAGE_BYTES = (
    select(func.sum(command_images.c.size)).where(command_images.c.command_id == commands.c.id).scalar_subquery()
)
_KEPT_INPUT = {"kept_bytes": func.length(commands.c.payload) + func.coalesce(_IMAGE_BYTES, 0)}
_FINISH_AND_DROP = _FINISH.values(_DROPPED_INPUT).returning(commands.c.id, commands.c.kept_bytes)
_FINISH_AND_KEEP = _FINISH.values(_KEPT_INPUT).returning(commands.c.id, commands.c.kept_bytes)
_FINISH_AND_LEAVE = _FINISH.returning(commands.c.id, commands.c.kept_bytes)
_LEFT = (
    select(commands.c.id)
    .where(
        commands.c.model_id == bindparam("model"),
        commands.c.seq_id > bindparam("after"),
        commands.c.seq_id <= bindparam("upto"),
        commands.c.status != "queued",
        commands.c.payload.is_not(None),
        commands.c.kept_bytes.is_(None),
    )
    .order_by(commands.c.seq_id)
)
_KEEP = (
    update(commands)
    .where(commands.c.id == bindparam("command_id"))
    .values(_KEPT_INPUT)
    .returning(commands.c.kept_bytes)
)
_DROP_REFERENCES = (
    delete(command_images)
    .where(command_images.c.command_id == bindparam("command_id"))
    .returning(command_images.c.sha256)
)
_IS_KEPT = commands.c.kept_bytes.is_not(None)
_ALL_KEPT = select(func.coalesce(func.sum(commands.c.kept_bytes), 0)).where(_IS_KEPT)
_OLDEST_KEPT = select(commands.c.id, commands.c.kept_bytes).where(_IS_KEPT).order_by(commands.c.id)
_DROP_INPUT = update(commands).where(commands.c.id == bindparam("command_id")).values(_DROPPED_INPUT)
_IS_USED = select(exists().where(command_images.c.sha256 == bindparam("digest")))
_USED = select(command_images.c.sha256).distinct()
_KEPT_WITH = (
    select(commands.c.id)
    .join_from(command_images, commands)
    .where(command_images.c.sha256 == bindparam("digest"), commands.c.status != "queued")
    .distinct()
)
_BY_KEY = (commands.c.model_id == bindparam("model_id")) & (commands.c.seq_id == bindparam("seq_id"))
_ENDED = commands.c.status.in_(("done", "failed"))
_OUTCOME_COLUMNS = (
    *(commands.c.result, commands.c.result_type, commands.c.error, commands.c.category),
    commands.c.resolved,
)
_OUTCOME = select(*_OUTCOME_COLUMNS).where(_BY_KEY, _ENDED)
_LOOKED_UP = select(commands.c.model_id, commands.c.seq_id, commands.c.status, *_OUTCOME_COLUMNS).where(
    tuple_(commands.c.model_id, commands.c.seq_id).in_(bindparam("keys", expanding=True))
)
_LOOKED_UP_AT_A_TIME = 256
_APPLY = (
    update(models)
    .where(models.c.model_id == bindparam("model"), func.coalesce(models.c.applied_seq, -1) < bindparam("seq"))
    .values(applied_seq=bindparam("seq"))
)
_LOSE_SNAPSHOTS = (
    update(sampling_sessions)
    .where(
        sampling_sessions.c.model_id == bindparam("model"),
        sampling_sessions.c.snapshot_id.is_not(None),
        sampling_sessions.c.gone.is_(None),
        sampling_sessions.c.snapshot_id.not_in(
            select(commands.c.model_id + "/" + cast(commands.c.seq_id, Text)).where(
                _IS_QUEUED, commands.c.model_id == bindparam("model")
            )
        ),
    )
    .values(gone=bindparam("reason"))
)
_WITH_SNAPSHOTS = (
    select(sampling_sessions.c.model_id)
    .where(
        sampling_sessions.c.snapshot_id.is_not(None),
        sampling_sessions.c.model_id.is_not(None),
        sampling_sessions.c.gone.is_(None),
    )
    .distinct()
)
_STATUS = select(commands.c.status).where(_BY_KEY)
_DIGEST_BYTES = 32

_ALL = 2**62

FIRST_REQUESTS = 2
"""Forward and backward passes of each run whose requests are kept as long as the run, unless a store is told others."""
_FIRST_SEQ_ID = 16
"""Highest seq_id of these."""
FIRST_REQUEST_BYTES = 2**20
"""Most bytes of a request that is kept so."""
_KEEP_FIRST = insert(first_requests).from_select(
    ["model_id", "seq_id", "payload"],
    select(commands.c.model_id, commands.c.seq_id, commands.c.payload).where(
        commands.c.model_id == bindparam("model"),
        commands.c.seq_id == bindparam("seq"),
        _IS_QUEUED,
        commands.c.kind == "forward_backward",
        func.length(commands.c.payload) <= FIRST_REQUEST_BYTES,
        select(func.count())
        .select_from(first_requests)
        .where(first_requests.c.model_id == bindparam("model"))
        .scalar_subquery()
        < bindparam("most"),
    ),
)
_INSERT_METRICS = insert(run_metrics)


class CommandStore(Transactions):
    """Reads the command log. Each method is one transaction."""

    def check_repeat(self, new: NewCommand) -> None:
        """Raise UserError if a command that was not queued has the key of another operation."""
        first = self._first(
            select(commands.c.kind, commands.c.digest).where(_BY_KEY), model_id=new.model_id, seq_id=new.seq_id
        )
        if first is None:
            return
        digest = _digest(new)
        # One that was refused when it came in has lost its kind.
        if first.digest != digest or (REJECTED not in (first.kind, new.kind) and first.kind != new.kind):
            raise UserError(
                f"{ids.request_id(new.model_id, new.seq_id)} is {first.kind} of digest {first.digest.hex()[:12]} "
                f"already, and now came as {new.kind} of digest {digest.hex()[:12]}: "
                "number every operation of a model anew (create_model: another model_seq_id), and repeat one unchanged"
            )

    def queued_models(self) -> list[str]:
        with self.reading() as connection:
            return _queued_models(connection)

    def queued(self, model_id: str, known: Collection[int] = (), limit: int = 1000) -> list[Command]:
        """Up to `limit` queued commands of a model by seq_id, but for `known` ones.

        Commands may become visible in another order than their ids: ask for all new ones, never for those after an id.
        """
        with self.reading() as connection:
            return _queued(connection, model_id, known, limit)

    def payload(self, command: Command) -> bytes:
        """The payload of a command, without images. Raises NotFoundError if it is dropped."""
        found = self._first(_PAYLOAD, command_id=command.id)
        if found is None or found.payload is None:
            raise NotFoundError(f"operation {command.request_id} has ended, and what it was sent with is dropped")
        return bytes(found.payload)

    def saved(self, command: Command) -> dict[str, Any] | None:
        """What `note_saved` has noted of a save that has not ended."""
        found = self._first(_SAVED, command_id=command.id)
        return None if found is None else found.resolved

    def histories(self) -> list[StoredHistory]:
        """All models that can be brought back."""
        with self.reading() as connection:
            return [
                StoredHistory(
                    model_id,
                    summary,
                    comebacks,
                    histories.events(connection, model_id),
                    _operations(connection, model_id, summary["needed_from"]),
                    is_over,
                )
                for model_id, summary, comebacks, is_over in histories.stored(connection)
            ]

    def unfinished(self) -> list[Unfinished]:
        """All queued operations."""
        with self.reading() as connection:
            return [
                Unfinished(ids.request_id(model_id, seq_id), size or 0, tenant, base_model)
                for model_id, seq_id, size, tenant, base_model in connection.execute(_UNFINISHED)
            ]

    def outcome(self, request_id: str) -> Outcome | None:
        row = self._find(_OUTCOME, request_id)
        return None if row is None else Outcome(request_id, *row)

    def status(self, request_id: str) -> str | None:
        """queued, done, failed or dropped (done, without its result); None if the operation is not in the log."""
        row = self._find(_STATUS, request_id)
        return None if row is None else row[0]

    def looked_up(self, request_ids: Sequence[str]) -> dict[str, tuple[str, Outcome | None]]:
        """Status of each of these operations that is in the log, and outcome if it has one, in few queries."""
        keys = sorted({key for each in request_ids if (key := ids.parse_request_id(each)) is not None})
        found: dict[str, tuple[str, Outcome | None]] = {}
        with self.reading() as connection:
            for start in range(0, len(keys), _LOOKED_UP_AT_A_TIME):
                some = {"keys": keys[start : start + _LOOKED_UP_AT_A_TIME]}
                for model_id, seq_id, status, *outcome in connection.execute(_LOOKED_UP, some):
                    request_id = ids.request_id(model_id, seq_id)
                    has_ended = status in ("done", "failed")
                    found[request_id] = status, Outcome(request_id, *outcome) if has_ended else None
        return found

    def _find(self, statement: Select[*tuple[Any, ...]], request_id: str) -> Row[*tuple[Any, ...]] | None:
        key = ids.parse_request_id(request_id)
        return None if key is None else self._first(statement, model_id=key[0], seq_id=key[1])

    def drop_results(self, before: float, ended_before: float) -> None:
        """Drop results from before `before` (Unix time), and of sessions that ended before `ended_before`.

        Errors stay.
        """
        drop = update(commands).where(commands.c.status == "done").values(status="dropped", result=None)
        ended = sessions.c.finished_at >= before, sessions.c.finished_at < ended_before
        of_ended = commands.c.model_id.in_(select(models.c.model_id).join_from(models, sessions).where(*ended))
        with self.writing() as connection:
            connection.execute(drop.where(commands.c.finished_at < before))
            connection.execute(drop.where(of_ended))


def _queued_models(connection: Connection) -> list[str]:
    return list(connection.execute(select(commands.c.model_id).where(_IS_QUEUED).distinct()).scalars())


def _queued(connection: Connection, model_id: str, known: Collection[int], limit: int) -> list[Command]:
    rows = connection.execute(_QUEUED, {"model": model_id, "known": [*known], "limit": limit})
    return [_command(row) for row in rows]


def _operations(connection: Connection, model_id: str, after: int) -> list[tuple[Command, bool]]:
    rows = connection.execute(_SINCE, {"model": model_id, "after": after})
    return [(_command(row[:-1]), bool(row[-1])) for row in rows]


# ---- Parts of transactions


def note_saved(connection: Connection, command: Command, saved: dict[str, Any]) -> None:
    """Note that the checkpoint of a save has a row, in the transaction of that."""
    connection.execute(_NOTE_SAVED, {"command_id": command.id, "saved": saved})


def append(connection: Connection, new: NewCommand, now: float) -> bool:
    """Append a command as `Store.append`, with its rows; returns whether it is queued."""
    if new.model is not None:
        insert_model(connection, new.model, now)
    refused = refusal(connection, new.model_id, now)
    row = {"model_id": new.model_id, "seq_id": new.seq_id, "kind": new.kind, "created_at": now, "digest": _digest(new)}
    if refused is not None:
        error, category = refused
        row |= {"status": "failed", "finished_at": now, "error": error, "category": category}
        connection.execute(_INSERT, row)
        return False
    digests = b"".join(new.image_digests) or None
    inserted = connection.execute(
        _INSERT, row | {"status": "queued", "payload": new.payload, "image_digests": digests}
    ).first()
    if inserted is None:
        return False
    if new.images:
        references = [
            {"command_id": inserted.id, "sha256": digest, "size": len(data)} for digest, data in new.images.items()
        ]
        connection.execute(_INSERT_REFERENCE, references)
    if new.sampling_session is not None and not insert_sampling_session(connection, new.sampling_session, now):
        message = (
            f"sampling session {new.sampling_session.sampling_session_id} exists already; "
            "use another sampling_session_seq_id"
        )
        connection.execute(_REJECT, {"command_id": inserted.id, "message": message.encode()})
    return True


def _digest(new: NewCommand) -> bytes:
    return new.digest or hashlib.sha256(new.payload).digest()


def _command(row: Sequence[Any]) -> Command:
    command_id, model_id, seq_id, kind, stored_bytes, beginning, created_at, digests = row
    # Of an empty payload SQLite gives null, and of one that is dropped every database
    payload_bytes = unpacked_size(beginning or b"", stored_bytes or 0)
    each = range(0, len(digests or b""), _DIGEST_BYTES)
    return Command(
        command_id,
        model_id,
        seq_id,
        kind,
        payload_bytes,
        created_at,
        tuple(digests[start : start + _DIGEST_BYTES] for start in each),
    )


@dataclass(frozen=True)
class Released:
    """What finishing commands releases."""

    kept_bytes: int = 0
    digests: Sequence[bytes] = ()
    """Images that these commands no longer need."""


@dataclass(eq=False)
class _Recording:
    """What is recorded in one transaction."""

    connection: Connection
    now: float
    keep: bool
    first_requests: int
    applied: dict[str, int] = field(default_factory=dict)
    used: defaultdict[str, Used] = field(default_factory=lambda: defaultdict(Used))
    released: list[Released] = field(default_factory=list)
    measured: list[dict[str, Any]] = field(default_factory=list)
    """Rows of `run_metrics`."""

    def finish(self, outcome: Outcome) -> bool:
        """Finish a queued command; False if it is not queued any more."""
        key = ids.parse_request_id(outcome.request_id)
        if key is None:
            raise NotFoundError(f"{outcome.request_id!r} is not a request id")
        model_id, seq_id = key
        if outcome.result_type == "protobuf" and seq_id <= _FIRST_SEQ_ID and self.first_requests:
            self.connection.execute(_KEEP_FIRST, {"model": model_id, "seq": seq_id, "most": self.first_requests})
        finish = _FINISH_AND_LEAVE if outcome.replays else _FINISH_AND_KEEP if self.keep else _FINISH_AND_DROP
        finished = self.connection.execute(finish, _finished(outcome, model_id, seq_id, self.now)).first()
        if finished is None:
            return False
        if outcome.tokens or outcome.gpu_seconds:
            more = Used(trained_tokens=outcome.tokens, gpu_seconds=outcome.gpu_seconds)
            self.used[model_id] = self.used[model_id].plus(more)
        if outcome.measured is not None and outcome.measured.metrics:
            self.measured.append(_metrics_row(model_id, seq_id, self.now, outcome.measured, outcome.tokens))
        if outcome.error is None:
            self.applied[model_id] = max(seq_id, self.applied.get(model_id, 0))
        if seq_id == 0:  # create_model, or load_weights into a new model
            end_creation(self.connection, model_id, outcome.error is None)
        if not outcome.replays and self.keep:
            self.released.append(Released(finished.kept_bytes))
        elif not outcome.replays:
            self.released.append(Released(0, _drop_references(self.connection, finished.id)))
        return True

    def change(self, history: HistoryChange) -> None:
        histories.write(self.connection, history)
        for after, upto in history.released:
            self.released.append(release(self.connection, history.model_id, after, upto, self.keep))

    def end(self) -> Released:
        for model_id, seq_id in self.applied.items():
            self.connection.execute(_APPLY, {"model": model_id, "seq": seq_id})
        usage.add_of_models(self.connection, self.now, self.used)
        if self.measured:
            self.connection.execute(_INSERT_METRICS, self.measured)
        return _together(self.released)


def record(
    connection: Connection,
    outcomes: Iterable[Outcome | HistoryChange],
    now: float,
    keep: bool,
    first_requests: int = FIRST_REQUESTS,
) -> Released:
    """Finish queued commands as `Store.record`; with `keep` payloads and images stay, and where an outcome says so."""
    recording = _Recording(connection, now, keep, first_requests)
    for outcome in outcomes:
        if isinstance(outcome, HistoryChange):
            recording.change(outcome)
        elif recording.finish(outcome) and outcome.history is not None:
            recording.change(outcome.history)
    return recording.end()


def _metrics_row(model_id: str, seq_id: int, now: float, measured: OperationMetrics, tokens: int) -> dict[str, Any]:
    """A row of `run_metrics`, in which numbers have seven digits, as float32 has them."""
    values = {
        name: float(f"{value:.7g}") if math.isfinite(value) else str(value) for name, value in measured.metrics.items()
    }
    row = {"model_id": model_id, "seq_id": seq_id, "at": now, "kind": measured.kind, "tokens": tokens}
    return row | {"metrics": json.dumps(values, separators=(",", ":"))}


def _together(released: Iterable[Released]) -> Released:
    kept, digests = 0, list[bytes]()
    for each in released:
        kept += each.kept_bytes
        digests += each.digests
    return Released(kept, digests)


def release(connection: Connection, model_id: str, after: int, upto: int, keep: bool) -> Released:
    """Release what `record` has left of a model's finished commands behind `after`, up to `upto`."""
    kept = 0
    digests: list[bytes] = []
    left = connection.execute(_LEFT, {"model": model_id, "after": after, "upto": upto}).scalars().all()
    for command_id in left:
        if keep:
            kept += connection.execute(_KEEP, {"command_id": command_id}).scalar_one()
        else:
            digests += _drop_input(connection, command_id)
    return Released(kept, digests)


def _finished(outcome: Outcome, model_id: str, seq_id: int, now: float) -> dict[str, Any]:
    return {
        "model": model_id,
        "seq": seq_id,
        "status": "done" if outcome.error is None else "failed",
        "finished_at": now,
        "result": outcome.result,
        "result_type": outcome.result_type,
        "error": outcome.error,
        "category": outcome.category,
        "resolved": outcome.resolved,
        "tokens": outcome.tokens,
        "gpu_seconds": outcome.gpu_seconds,
    }


def _drop_references(connection: Connection, command_id: int) -> Sequence[bytes]:
    return connection.execute(_DROP_REFERENCES, {"command_id": command_id}).scalars().all()


def kept_bytes(connection: Connection) -> int:
    """Bytes kept of finished commands; a shared image counts for each."""
    return int(connection.execute(_ALL_KEPT).scalar_one())


def drop_kept(connection: Connection, most_bytes: int) -> Released:
    """Drop payloads and images of the oldest finished commands until `most_bytes` are left."""
    digests: list[bytes] = []
    with connection.execute(_OLDEST_KEPT) as oldest_first:
        dropped = list(
            oldest_beyond(most_bytes, kept_bytes(connection), ((row.id, row.kept_bytes) for row in oldest_first))
        )
    for command_id in dropped:
        digests += _drop_input(connection, command_id)
    return Released(kept_bytes(connection), digests)


def _drop_input(connection: Connection, command_id: int) -> Sequence[bytes]:
    connection.execute(_DROP_INPUT, {"command_id": command_id})
    return _drop_references(connection, command_id)


def drop_kept_with(connection: Connection, digest: bytes) -> None:
    """Drop what is kept of finished commands with an image that is gone."""
    for command_id in connection.execute(_KEPT_WITH, {"digest": digest}).scalars().all():
        _drop_input(connection, command_id)


def unused(connection: Connection, digests: Iterable[bytes]) -> list[bytes]:
    """Digests that no command refers to."""
    return [digest for digest in digests if not connection.execute(_IS_USED, {"digest": digest}).scalar()]


def used(connection: Connection) -> set[bytes]:
    """All digests that commands refer to."""
    return set(connection.execute(_USED).scalars())


def fail_unfinished(connection: Connection, reason: str, place: str, former: str, now: float, keep: bool) -> set[str]:
    """Lose what cannot come back, as `Store.fail_unfinished`; returns the models that can."""
    comebacks = histories.keep_only(connection, (place, former))
    if comebacks is None:
        comebacks, reason = {}, f"{reason}, and the data directory was moved or copied"
    never_begun = set(connection.execute(_NEVER_BEGUN).scalars())
    with_snapshots = connection.execute(_WITH_SNAPSHOTS).scalars()
    found = {*living_models(connection), *_queued_models(connection), *with_snapshots}
    lost = dict.fromkeys(sorted(found - never_begun - comebacks.keys()), reason)
    for model_id, times in comebacks.items():
        if times >= histories.MOST_ENDS:
            lost[model_id] = f"{reason} while the model was brought back, {times} times now"
    histories.forget(connection, lost)
    lose_models(connection, lost, now, keep)
    if histories.note_start(connection, place):
        left = set(_queued_models(connection))
        again = f"{reason}, {histories.MOST_IDLE_STARTS} times now before an operation was done"
        for model_id in left & comebacks.keys():
            queued = _queued(connection, model_id, (), _ALL)
            histories.spoil(connection, model_id, [(each.seq_id, each.kind) for each in queued], again)
        _fail_queued(connection, dict.fromkeys(left, again), now, keep)
    return comebacks.keys() - lost.keys()


def lose_models(
    connection: Connection, reasons: Mapping[str, str], now: float, keep: bool
) -> tuple[list[Outcome], Released]:
    """Fail what is queued for these models, each for its reason, and lose the models and their snapshots.

    Returns the outcomes and what they release. Each error names the model's newest checkpoint.
    """
    failed, failing = _fail_queued(connection, reasons, now, keep)
    all_released = [failing]
    for model_id in reasons:
        all_released.append(release(connection, model_id, -1, _ALL, keep))
        lose_model(connection, model_id)
        connection.execute(_LOSE_SNAPSHOTS, {"model": model_id, "reason": reasons[model_id]})
    histories.forget(connection, reasons)
    return failed, _together(all_released)


def _fail_queued(
    connection: Connection, reasons: Mapping[str, str], now: float, keep: bool
) -> tuple[list[Outcome], Released]:
    failed: list[Outcome] = []
    for model_id, reason in reasons.items():
        error = f"{reason}; {how_to_go_on(connection, model_id, now)}"
        failed += [
            Outcome(command.request_id, None, None, error, "server")
            for command in _queued(connection, model_id, (), _ALL)
        ]
    return failed, record(connection, failed, now, keep)
