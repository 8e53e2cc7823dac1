"""What finished operations were sent with stays, up to a limit, if it is asked for.

Invariant: Payloads and images of finished operations go by default, or stay up to their limit, the oldest going first.

Invariant: What a replay may need stays until it is released, whatever the limit.
"""

import hashlib
import logging
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.databases import locked, run_sql
from tests.store.test_blobs import DATA, DIGEST, IMAGE, blobs_in, with_model
from tests.store.test_commands import MODEL, SESSION, done, step
from tinsmith.errors import NotFoundError
from tinsmith.store.records import Command, HistoryChange, Outcome
from tinsmith.store.store import Store

pytestmark = pytest.mark.usefixtures("database")

KIB = 2**10


def kept(store: Store, claimed: list[Command]) -> list[int]:
    """The seq_ids of commands whose payload can still be read."""
    found = []
    for command in claimed:
        with suppress(NotFoundError):
            store.payload(command)
            found.append(command.seq_id)
    return found


def test_what_is_kept_can_be_read_until_its_session_is_forgotten(tmp_path: Path) -> None:
    """Also what an engine left, and by another process."""
    store = with_model(tmp_path, keep_bytes=KIB)
    store.append([step(1, b"one", IMAGE), step(2, b"two"), step(3, b"left")])
    commands = store.queued(MODEL)
    store.record([done(0), done(1), Outcome(f"{MODEL}/2", None, None, "bad", "user")])
    assert [store.blobs.read(digest) for digest in commands[1].image_digests] == [DATA]
    store.close()
    store = Store.open(tmp_path, keep_bytes=KIB)
    assert store.fail_unfinished("the server stopped") == set()
    assert store.status(f"{MODEL}/3") == "failed"
    assert [store.payload(command) for command in commands] == [b"create", b"one", b"two", b"left"]
    assert store.blobs.read(DIGEST) == DATA
    store.finish_session(SESSION, "success", None)
    store.forget_ended(time.time() + 3600)
    assert store.status(f"{MODEL}/1") is None
    assert blobs_in(tmp_path) == []


def replayed(seq_id: int) -> Outcome:
    return replace(done(seq_id), replays=True)


@pytest.mark.parametrize("how", ["release", "lose", "fail"])
def test_what_a_replay_needs_stays_until_it_is_released_or_its_model_is_lost(tmp_path: Path, how: str) -> None:
    store = with_model(tmp_path)
    store.append([step(1, b"one", IMAGE), step(2, b"two"), step(3, b"three", IMAGE)])
    commands = store.queued(MODEL)
    store.record([done(0), *map(replayed, (1, 2, 3))])
    assert (kept(store, commands), blobs_in(tmp_path) != []) == ([1, 2, 3], True)
    store.record([HistoryChange(MODEL, begins=True, summary={}, released=[(0, 1)])])
    assert (kept(store, commands), store.blobs.read(DIGEST)) == ([2, 3], DATA)
    if how == "release":
        store.end_history(MODEL)
    elif how == "lose":
        assert store.lose_models({MODEL: "its worker ended"}) == []
    else:
        assert store.fail_unfinished("the engine ended") == set()
    assert (kept(store, commands), blobs_in(tmp_path)) == ([], [])


def test_what_is_released_counts_to_what_is_kept_and_not_before(tmp_path: Path) -> None:
    """The limit would take it from a replay."""
    store = with_model(tmp_path, keep_bytes=2 * KIB)
    store.append([step(seq_id, bytes(KIB)) for seq_id in range(1, 5)])
    commands = store.queued(MODEL)
    store.record([done(0), *map(replayed, range(1, 5))])
    assert kept(store, commands) == [0, 1, 2, 3, 4]
    store.end_history(MODEL)
    assert kept(store, commands) == [4]


@pytest.mark.parametrize("before", [0, KIB], ids=["never", "before"])
def test_nothing_stays_unless_it_is_asked_for(tmp_path: Path, before: int) -> None:
    """What was kept goes at the next start."""
    store = with_model(tmp_path, keep_bytes=before)
    store.append([step(1, b"p", IMAGE)])
    commands = store.queued(MODEL)
    store.record([done(0), done(1)])
    store.close()
    store = Store.open(tmp_path)
    store.fail_unfinished("the server stopped")
    assert (kept(store, commands), blobs_in(tmp_path)) == ([], [])
    assert run_sql(tmp_path, "SELECT payload, image_digests, kept_bytes FROM commands") == [(None, None, None)] * 2
    assert run_sql(tmp_path, "SELECT * FROM command_images") == []


def test_the_oldest_goes_when_there_is_too_much(tmp_path: Path) -> None:
    store = with_model(tmp_path, keep_bytes=9 * KIB)
    images = [bytes([number]) * KIB for number in range(1, 9)]
    digests = [hashlib.sha256(image).digest() for image in images]
    store.append(
        [
            step(number, bytes(KIB), {digest: image})
            for number, digest, image in zip(range(1, 9), digests, images, strict=True)
        ]
    )
    commands = store.queued(MODEL)
    store.record([done(seq_id) for seq_id in range(4)])
    assert kept(store, commands)[:4] == [0, 1, 2, 3]
    for seq_id in range(4, 9):
        store.record([done(seq_id)])
        # Four of 2 KiB have room, and the first one, which is small, with them.
        assert kept(store, commands[: seq_id + 1]) == ([0] if seq_id == 4 else []) + list(range(seq_id - 3, seq_id + 1))
        assert [store.blobs.read(digest) is not None for digest in digests] == [False] * (seq_id - 4) + [True] * (
            12 - seq_id
        )


def test_queued_operations_do_not_count_and_never_go(tmp_path: Path) -> None:
    store = with_model(tmp_path, keep_bytes=2 * KIB)
    store.append([step(1, bytes(KIB)), step(2, bytes(50 * KIB), IMAGE)])
    commands = store.queued(MODEL)
    store.record([done(0), done(1)])
    assert kept(store, commands) == [0, 1, 2]
    Store.open(tmp_path, keep_bytes=2 * KIB).record([done(2)])  # by another process
    assert kept(store, commands) == []  # the last one alone is too large, and everything before it is older


def test_an_image_stays_as_long_as_one_operation_has_it(tmp_path: Path) -> None:
    store = with_model(tmp_path, keep_bytes=3 * KIB)
    store.append([step(1, bytes(2 * KIB), IMAGE), step(2, b"", IMAGE), step(3, bytes(2 * KIB))])
    commands = store.queued(MODEL)
    store.record([done(seq_id) for seq_id in range(4)])
    assert kept(store, commands) == [2, 3]
    assert store.blobs.read(DIGEST) == DATA


def test_a_database_that_is_locked_after_the_outcome_costs_no_outcome(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = with_model(tmp_path, keep_bytes=1)
    store.append([step(1, b"one", IMAGE)])
    store.close()
    store = Store.open(tmp_path, busy_s=0.05, keep_bytes=1)
    count = store._count_kept

    def count_beside_another(more: int) -> None:
        with locked(tmp_path):
            count(more)

    store._count_kept = count_beside_another  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        store.record([done(0), done(1)])
    assert "finished operations are kept beyond their limit for now" in caplog.text
    assert store.status(f"{MODEL}/1") == "done"
