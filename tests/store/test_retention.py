"""What is left in the database of sessions that ended long ago.

Invariant: The rows of an ended session go after their time, its checkpoints and their run stay; the database's file
becomes shorter again.
"""

import time
from pathlib import Path

from sqlalchemy import func, select

from tests.store.test_commands import DESCRIPTION
from tests.store.test_store import checkpoint
from tinsmith.store import schema, sessions
from tinsmith.store.records import Model, NewCommand, Outcome, SamplingSession
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store

SOON = 3600.0


def rows(store: Store) -> dict[str, int]:
    """How many rows the tables have that grow with use."""
    tables = (schema.sessions, schema.models, schema.commands, schema.sampling_sessions)
    with store.reading() as connection:
        return {
            table.name: connection.execute(select(func.count()).select_from(table)).scalar_one() for table in tables
        }


def finished(model_id: str, seq_id: int, result: bytes = b"") -> Outcome:
    return Outcome(f"{model_id}/{seq_id}", result, "json", None, None)


def run(store: Store, session_id: str, steps: int = 3, ends: bool = True) -> str:
    """A session with a model, some steps and a sampling session; returns the model's id."""
    store.create_session(session_id, DESCRIPTION)
    model = Model(f"{session_id}:train:0", session_id, "tiny", {"rank": 4}, {"type": "adamw"}, None)
    store.append([NewCommand(model.model_id, 0, "create_model", b"", model=model)])
    store.append([NewCommand(model.model_id, seq_id, "optim_step", bytes(1000)) for seq_id in range(1, steps + 1)])
    store.record([finished(model.model_id, seq_id, bytes(1000)) for seq_id in range(steps + 1)])
    store.create_sampling_session(
        SamplingSession(f"{session_id}:sample:0", session_id, "tiny", f"{model.model_id}/1", model.model_id)
    )
    if ends:
        store.finish_session(session_id, "success", None)
    return model.model_id


def test_the_space_of_what_is_dropped_is_given_back_bit_by_bit(tmp_path: Path) -> None:
    store = Store.open(tmp_path)

    def size() -> int:
        with store.reading() as connection:
            connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
        return (tmp_path / FILE_NAME).stat().st_size

    before = size()
    model_id = run(store, "s", steps=1, ends=False)
    store.append([NewCommand(model_id, 2, "optim_step", bytes(2**22))])
    grown = size()
    store.record([finished(model_id, 2)])
    store.give_back_space()
    assert size() == grown > before + 2**22  # so little stays for what comes next
    store.give_back_space(spare_pages=16, most_pages=256)
    assert 0 <= grown - 256 * 4096 - size() < 4 * 4096
    store.give_back_space(spare_pages=16)
    assert size() < before + 20 * 4096


def test_an_ended_session_leaves_nothing_behind_but_a_run_with_checkpoints(store: Store) -> None:
    """That stays with its last operation."""
    for number in range(5):
        run(store, f"s{number}")
    assert rows(store) == {"sessions": 5, "models": 5, "commands": 20, "sampling_sessions": 5}
    path = "tinker://s0:train:0/weights/a"
    store.put_checkpoint(checkpoint(path))
    assert store.forget_ended(time.time() - SOON) == 0  # it ended just now
    assert [store.forget_ended(time.time() + SOON) for _ in range(2)] == [4 * 7 + 4, 0]
    assert rows(store) == {"sessions": 1, "models": 1, "commands": 1, "sampling_sessions": 0}
    assert store.status("s0:train:0/3") == "done"
    assert store.checkpoint(path) is not None


def test_what_is_open_or_queued_stays(store: Store) -> None:
    run(store, "open", ends=False)
    queued = run(store, "ending", ends=False)
    store.append([NewCommand(queued, 4, "optim_step", b"")])
    store.finish_session("ending", "success", None)
    store.forget_ended(time.time() + SOON)
    assert rows(store) == {"sessions": 2, "models": 2, "commands": 5, "sampling_sessions": 1}
    store.record([finished(queued, 4)])
    store.forget_ended(time.time() + SOON)
    assert rows(store) == {"sessions": 1, "models": 1, "commands": 4, "sampling_sessions": 1}


def test_many_operations_go_in_several_transactions(store: Store) -> None:
    run(store, "s", steps=9)
    counts = []
    for _ in range(3):
        with store.writing() as connection:
            counts.append(sessions.forget_ended(connection, time.time() + SOON, most=4))
    # The sampling session goes with the first, model and session with the last operations
    assert counts == [4 + 1, 4, 2 + 2]
    assert not any(rows(store).values())
