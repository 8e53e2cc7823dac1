"""The command log: keys, order, outcomes, images.

Invariant: Queued operations take no memory; one that is refused with 429 is sent again, keeps its place and runs once.
Also: `tests/server/test_queued_operations.py`, `tests/acceptance/test_backpressure.py`.

Invariant: Outcome and applied operation are recorded together; commands are found whatever order they are committed in.
"""

import hashlib
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.databases import run_sql
from tinsmith.errors import NotFoundError
from tinsmith.store.records import REJECTED, Model, NewCommand, Outcome, SamplingSession
from tinsmith.store.store import Store

SESSION = "s"
MODEL = "s:train:0"
DESCRIPTION: dict[str, Any] = {
    "tags": [],
    "user_metadata": None,
    "sdk_version": "0",
    "project_id": None,
    "display_name": None,
}


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
    assert (
        store.append(
            [create_command("s:train:1"), step(3, b"c"), step(1, b"a"), replace(step(1), model_id="s:train:1")]
        )
        == [True] * 4
    )
    queued = store.queued(MODEL)
    assert [(command.seq_id, command.kind) for command in queued] == [
        (0, "create_model"),
        (1, "optim_step"),
        (3, "optim_step"),
    ]
    assert [store.payload(command) for command in queued] == [b"create", b"a", b"c"]
    assert [command.seq_id for command in sorted(queued, key=lambda command: command.id)] == [0, 3, 1]
    assert before - 1 < queued[1].created_at < time.time() + 1
    assert [(command.model_id, command.seq_id) for command in store.queued("s:train:1")] == [
        ("s:train:1", 0),
        ("s:train:1", 1),
    ]
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
    run_sql(
        tmp_path,
        "INSERT INTO commands (id, model_id, seq_id, kind, payload, status, created_at) "
        f"SELECT -7, '{MODEL}', 3, 'optim_step', payload, 'queued', 1 FROM commands WHERE seq_id = 1",
    )
    assert [c.seq_id for c in store.queued(MODEL, known=[0, 1, 2])] == [3]


def test_a_repeat_changes_nothing(store: Store) -> None:
    assert store.append([step(1, b"first"), step(1, b"second")]) == [True, False]
    assert store.append([step(1, b"third")]) == [False]
    assert [store.payload(c) for c in store.queued(MODEL, known=[0])] == [b"first"]


def test_an_outcome_is_recorded_once_with_what_the_operation_took_from_outside(store: Store) -> None:
    store.append([step(1), step(2)])
    assert (store.outcome(f"{MODEL}/1"), store.status(f"{MODEL}/1")) == (None, "queued")
    failed = Outcome(f"{MODEL}/2", None, None, "datum 3: bad", "user")
    ended = replace(
        done(1, b'{"metrics":{}}'), resolved={"seed": 7, "base_fingerprint": "ab", "directory": "s3://bucket/x"}
    )
    store.record([ended, failed])
    store.record([done(1), done(2)])
    assert [store.outcome(f"{MODEL}/{n}") for n in (1, 2)] == [ended, failed]
    assert [store.status(f"{MODEL}/{n}") for n in (1, 2, 3)] == ["done", "failed", None]
    assert [c.seq_id for c in store.queued(MODEL)] == [0]


def test_a_model_knows_the_last_operation_that_had_its_effect(store: Store) -> None:
    store.append([step(1), step(2), step(3), step(4)])
    assert the_model(store).applied_seq is None
    failed = Outcome(f"{MODEL}/3", None, None, "datum 0: bad", "user")
    # At last a second outcome, an older one, and one of an operation that is not in the log.
    for outcomes, applied in (
        ([done(0)], 0),
        ([done(1), done(2), failed], 2),
        ([done(4)], 4),
        ([done(4), done(2), done(7)], 4),
    ):
        store.record(outcomes)
        assert the_model(store).applied_seq == applied
    store.append([step(5)])
    store.fail_unfinished("the engine died")
    assert the_model(store).applied_seq == 4


def test_effect_and_outcome_are_recorded_together_or_not_at_all(store: Store) -> None:
    store.append([step(1)])
    with pytest.raises(NotFoundError, match="'nonsense' is not a request id"):
        store.record([done(0), done(1), Outcome("nonsense", None, None, None, None)])
    assert (the_model(store).applied_seq, store.status(f"{MODEL}/1")) == (None, "queued")


def test_absurd_request_ids_have_no_outcome(store: Store) -> None:
    ends = ("/-1", "/01", f"/{2**70}", f"/{2**63 - 1}", "/1 ", "/²")
    for text in ("", "x", "x/", *(MODEL + end for end in ends)):
        assert (store.outcome(text), store.status(text)) == (None, None), text


def test_the_outcome_of_create_model_decides_its_status(store: Store) -> None:
    store.append([create_command("s:train:1")])
    store.record([done(0), Outcome("s:train:1/0", None, None, "rank too large", "user")])
    assert the_model(store) == replace(new_model(), status="ready", applied_seq=0)
    assert the_model(store, "s:train:1").status == "failed"


def test_operations_of_a_finished_session_fail_at_once(store: Store) -> None:
    assert store.finish_session(SESSION, "success", None)
    assert not store.finish_session(SESSION, "errored", "detail")
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
    assert store.fail_unfinished("the engine died") == set()
    assert store.status(f"{MODEL}/2") == "failed"
    assert store.outcome(f"{MODEL}/1") == done(1)
    assert store.blobs.read(digest) is None
    sessions = [store.sampling_session(f"s:sample:{number}") for number in range(2)]
    assert [session and session.gone for session in sessions] == ["the engine died", None]


def test_a_snapshot_comes_into_being_with_its_command(store: Store) -> None:
    """One whose id is taken rejects the command, which keeps its place."""
    first, retried = (SamplingSession(f"s:sample:{number}", SESSION, "tiny", f"{MODEL}/1", MODEL) for number in (4, 5))
    taken = replace(first, snapshot_id=f"{MODEL}/2")

    def save(seq_id: int, payload: bytes, session: SamplingSession) -> NewCommand:
        return NewCommand(MODEL, seq_id, "save_weights_for_sampler", payload, sampling_session=session)

    assert store.append([save(1, b"4", first), save(1, b"5", retried), save(2, b"4", taken)]) == [True, False, True]
    assert store.sampling_session("s:sample:4") == first
    assert store.sampling_session("s:sample:5") is None
    rejected = store.queued(MODEL)[-1]
    assert (rejected.seq_id, rejected.kind) == (2, REJECTED)
    assert "s:sample:4 exists already" in store.payload(rejected).decode()


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
