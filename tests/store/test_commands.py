"""The command log: keys, order, outcomes, images.

Invariant: Queued operations take no memory; one that is refused with 429 is sent again, keeps its place and runs once.
Also: `tests/server/test_queued_operations.py`, `tests/acceptance/test_backpressure.py`.

Invariant: Outcome and applied operation are recorded together; commands are found whatever order they are committed in.
"""

import hashlib
import sqlite3
import time
import tracemalloc
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import NotFoundError
from tinsmith.store import commands
from tinsmith.store.database import FILE_NAME
from tinsmith.store.records import REJECTED, Model, NewCommand, Outcome, SamplingSession
from tinsmith.store.store import Store

SESSION = "s"
MODEL = "s:train:0"
DESCRIPTION: dict[str, Any] = {"tags": [], "user_metadata": None, "sdk_version": "0", "project_id": None, "display_name": None}


def new_model(model_id: str = MODEL) -> Model:
    return Model(model_id, SESSION, "tiny:long", {"rank": 8}, {"type": "adamw"}, {"renderer": "qwen3"})


def create_command(model_id: str = MODEL) -> NewCommand:
    return NewCommand(model_id, 0, "create_model", b"create", model=new_model(model_id))


def step(seq_id: int, payload: bytes = b"step", images: dict[bytes, bytes] | None = None) -> NewCommand:
    return NewCommand(MODEL, seq_id, "optim_step", payload, [*images] if images else [], images or {})


def done(seq_id: int, result: bytes = b"{}") -> Outcome:
    return Outcome(f"{MODEL}/{seq_id}", result, "json", None, None)


@pytest.fixture
def store(store: Store) -> Store:
    """A store with a model in it."""
    store.create_session(SESSION, DESCRIPTION)
    store.append([create_command()])
    return store


def the_model(store: Store, model_id: str = MODEL) -> Model:
    found = store.model(model_id)
    assert found is not None
    return found


def test_queued_commands_are_claimed_per_model_as_they_came_whatever_is_known_already(store: Store) -> None:
    before = time.time()
    assert store.append([create_command("s:train:1"), step(3, b"c"), step(1, b"a"), replace(step(1), model_id="s:train:1")]) == [True] * 4
    queued = store.queued(MODEL)
    assert [(command.seq_id, command.kind, store.payload(command)) for command in queued] == [
        (0, "create_model", b"create"),
        (1, "optim_step", b"a"),
        (3, "optim_step", b"c"),
    ]
    assert [command.seq_id for command in sorted(queued, key=lambda command: command.id)] == [0, 3, 1]
    assert before - 1 < queued[1].created_at < time.time() + 1
    assert [(command.model_id, command.seq_id) for command in store.queued("s:train:1")] == [("s:train:1", 0), ("s:train:1", 1)]
    store.record([done(0)])
    assert sorted(store.queued_models()) == [MODEL, "s:train:1"]
    store.append([step(2)])
    assert [command.seq_id for command in store.queued(MODEL, known=[3, 1])] == [2]
    assert [command.seq_id for command in store.queued(MODEL, known={2})] == [1, 3]
    assert [command.seq_id for command in store.queued(MODEL, limit=2)] == [1, 2]
    store.record([done(seq_id) for seq_id in (1, 2, 3)])
    assert (store.queued(MODEL), store.queued("unknown"), store.queued_models()) == ([], [], ["s:train:1"])


def test_a_command_with_a_lower_id_that_is_committed_later_is_found(store: Store, tmp_path: Path) -> None:
    """As a database may do that several writers share."""
    store.append([step(1), step(2)])
    assert [c.seq_id for c in store.queued(MODEL, known=[])] == [0, 1, 2]
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as other:
        other.execute(
            "INSERT INTO commands (id, model_id, seq_id, kind, payload, status, created_at) "
            "VALUES (-7, ?, 3, 'optim_step', x'7b', 'queued', 1)",
            [MODEL],
        )
        other.commit()
    assert [c.seq_id for c in store.queued(MODEL, known=[0, 1, 2])] == [3]


def test_claiming_reads_the_queued_commands_only(store: Store) -> None:
    """Not all that a model ever did: the queries use the index of what is queued."""
    with store.reading() as connection:
        for statement in (commands._QUEUED, commands._QUEUED_MODELS):
            text = str(statement.compile(connection))
            found = connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {text}", (None,) * text.count("?"))
            plan = [str(row.detail) for row in found if "commands" in row.detail]
            assert all("INDEX ix_commands_queued" in line for line in plan), plan
            assert len(plan) == 1


def test_a_repeat_changes_nothing(store: Store) -> None:
    assert store.append([step(1, b"first"), step(1, b"second")]) == [True, False]
    assert store.append([step(1, b"third")]) == [False]
    assert [store.payload(c) for c in store.queued(MODEL, known=[0])] == [b"first"]


def test_an_outcome_is_recorded_once_with_what_the_operation_took_from_outside(store: Store) -> None:
    store.append([step(1), step(2)])
    assert store.outcome(f"{MODEL}/1") is None
    assert store.status(f"{MODEL}/1") == "queued"
    failed = Outcome(f"{MODEL}/2", None, None, "datum 3: bad", "user")
    ended = replace(done(1, b'{"metrics":{}}'), resolved={"seed": 7, "base_fingerprint": "ab", "directory": "s3://bucket/x"})
    store.record([ended, failed])
    store.record([done(1), done(2)])
    assert store.outcome(f"{MODEL}/1") == ended
    assert store.outcome(f"{MODEL}/2") == failed
    assert [store.status(f"{MODEL}/{n}") for n in (1, 2, 3)] == ["done", "failed", None]
    assert [c.seq_id for c in store.queued(MODEL)] == [0]


def test_a_model_knows_the_last_operation_that_had_its_effect(store: Store) -> None:
    store.append([step(1), step(2), step(3), step(4)])
    assert the_model(store).applied_seq is None
    store.record([done(0)])
    assert the_model(store).applied_seq == 0
    store.record([done(1), done(2), Outcome(f"{MODEL}/3", None, None, "datum 0: bad", "user")])
    assert the_model(store).applied_seq == 2
    store.record([done(4)])
    assert the_model(store).applied_seq == 4
    store.record([done(4), done(2), done(7)])  # a second outcome, an older one, and one of an operation that is not in the log
    assert the_model(store).applied_seq == 4
    store.append([step(5)])
    store.fail_unfinished("the engine died")
    assert the_model(store).applied_seq == 4


def test_effect_and_outcome_are_recorded_together_or_not_at_all(store: Store) -> None:
    store.append([step(1)])
    with pytest.raises(NotFoundError, match="'nonsense' is not a request id"):
        store.record([done(0), done(1), Outcome("nonsense", None, None, None, None)])
    assert (the_model(store).applied_seq, store.status(f"{MODEL}/1")) == (None, "queued")


@pytest.mark.parametrize(
    "text", ["", "x", "x/", f"{MODEL}/-1", f"{MODEL}/01", f"{MODEL}/{2**70}", f"{MODEL}/{2**63 - 1}", f"{MODEL}/1 ", f"{MODEL}/²"]
)
def test_absurd_request_ids_have_no_outcome(store: Store, text: str) -> None:
    assert store.outcome(text) is None
    assert store.status(text) is None


def test_the_outcome_of_create_model_decides_its_status(store: Store) -> None:
    store.append([create_command("s:train:1")])
    store.record([done(0), Outcome("s:train:1/0", None, None, "rank too large", "user")])
    assert the_model(store) == replace(new_model(), status="ready", applied_seq=0)
    assert the_model(store, "s:train:1").status == "failed"


def test_operations_of_a_finished_session_fail_at_once(store: Store) -> None:
    assert store.finish_session(SESSION, "success", None)
    assert store.append([step(1)]) == [False]
    assert store.status(f"{MODEL}/1") == "failed"
    assert [command.seq_id for command in store.queued(MODEL)] == [0]


def test_an_unknown_model_is_refused_and_nothing_is_appended(store: Store) -> None:
    with pytest.raises(NotFoundError, match="s:train:9"):
        store.append([step(1), NewCommand("s:train:9", 1, "optim_step", b"")])
    assert store.status(f"{MODEL}/1") is None


def test_what_an_engine_left_is_given_up(store: Store) -> None:
    """What clients are told is in `test_endings.py`."""
    digest = hashlib.sha256(b"i").digest()
    store.append([step(1), step(2, images={digest: b"i"})])
    store.record([done(0), done(1)])
    store.create_sampling_session(SamplingSession("s:sample:0", SESSION, "tiny", f"{MODEL}/2", MODEL))
    store.create_sampling_session(SamplingSession("s:sample:1", SESSION, "tiny"))
    assert store.fail_unfinished("the engine died") == [f"{MODEL}/2"]
    assert store.outcome(f"{MODEL}/1") == done(1)
    assert store.read_blob(digest) is None
    gone, kept = store.sampling_session("s:sample:0"), store.sampling_session("s:sample:1")
    assert gone is not None
    assert kept is not None
    assert (gone.gone, kept.gone) == ("the engine died", None)


def test_a_snapshot_comes_into_being_with_its_command(store: Store) -> None:
    first = SamplingSession("s:sample:4", SESSION, "tiny", f"{MODEL}/1", MODEL)
    retried = SamplingSession("s:sample:5", SESSION, "tiny", f"{MODEL}/1", MODEL)
    save = NewCommand(MODEL, 1, "save_weights_for_sampler", b"4", sampling_session=first)
    again = NewCommand(MODEL, 1, "save_weights_for_sampler", b"5", sampling_session=retried)
    assert store.append([save, again]) == [True, False]
    assert store.sampling_session("s:sample:4") == first
    assert store.sampling_session("s:sample:5") is None


def test_a_sampling_session_id_that_is_taken_rejects_the_command_but_keeps_its_place(store: Store) -> None:
    store.create_sampling_session(SamplingSession("s:sample:4", SESSION, "tiny"))
    taken = SamplingSession("s:sample:4", SESSION, "tiny", f"{MODEL}/1", MODEL)
    store.append([NewCommand(MODEL, 1, "save_weights_for_sampler", b"4", sampling_session=taken)])
    command = store.queued(MODEL)[-1]
    assert (command.seq_id, command.kind) == (1, REJECTED)
    assert "s:sample:4 exists already" in store.payload(command).decode()
    kept = store.sampling_session("s:sample:4")
    assert kept is not None
    assert kept.snapshot_id is None


def test_a_queue_of_large_payloads_is_read_without_them(store: Store) -> None:
    store.append([step(number, bytes(2**20)) for number in range(1, 65)])
    tracemalloc.start()
    queued = store.queued(MODEL, known=[0])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20  # less than a single payload
    assert [command.payload_bytes for command in queued] == [2**20] * 64
    assert store.payload(queued[5]) == bytes(2**20)
    store.record([done(6)])
    with pytest.raises(NotFoundError, match="operation s:train:0/6 has ended"):
        store.payload(queued[5])
