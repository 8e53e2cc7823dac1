"""Engines whose successor has been started: nothing that they write is taken.

Invariant: Two engines never work on one data directory or one database; what a stopped one writes later is refused.
"""

import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.databases import PostgreSQL, run_sql
from tests.store.test_commands import DESCRIPTION, MODEL, SESSION, create_command, done, step
from tinsmith.errors import ConfigError, EngineUnavailableError
from tinsmith.store.lease import take_lease
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store

SAVED = Checkpoint(
    f"tinker://{MODEL}/weights/a", MODEL, "training", "a", "d", "tiny", "qwen3", {}, True, 10, None, 1.0, None
)
WRITES: dict[str, Callable[[Store], object]] = {
    "outcome": lambda store: store.record([done(0)]),
    "checkpoint": lambda store: store.put_checkpoint(SAVED),
    "begun": lambda store: store.announce_checkpoint("d"),
    "unloaded": lambda store: store.unload_model(MODEL),
    "lost": lambda store: store.lose_models({MODEL: "its worker ended"}),
    "submit": lambda store: store.append([step(1)]),
}


@pytest.mark.parametrize("what", WRITES)
def test_nothing_of_an_earlier_engine_is_taken(store: Store, tmp_path: Path, what: str) -> None:
    store.create_session(SESSION, DESCRIPTION)
    store.append([create_command()])
    with closing(Store.open(tmp_path)) as engine, closing(Store.open(tmp_path)) as newer:
        engine.write_for(take_lease(store, str(tmp_path)))
        newer.write_for(take_lease(store, str(tmp_path)))
        with pytest.raises(EngineUnavailableError, match="which has started engine 2, and this is engine 1: one of"):
            WRITES[what](engine)
        assert (store.status(f"{MODEL}/0"), store.known_directories()) == ("queued", set())
        WRITES[what](newer)
        assert engine.status(f"{MODEL}/0") is not None  # it may still read


def test_no_transaction_of_an_earlier_engine_ends_after_its_successor_has_begun(store: Store, tmp_path: Path) -> None:
    store.create_session(SESSION, DESCRIPTION)
    store.append([create_command()])
    taken: list[int] = []
    with closing(Store.open(tmp_path)) as engine:
        engine.write_for(take_lease(store, str(tmp_path)))
        taking = threading.Thread(target=lambda: taken.append(take_lease(store, str(tmp_path))))
        with engine.writing() as connection:
            taking.start()
            taking.join(0.3)
            assert taken == []
            connection.exec_driver_sql("UPDATE commands SET kind = 'noticed'")
        taking.join()
    assert (taken, run_sql(tmp_path, "SELECT kind FROM commands")) == ([2], [("noticed",)])


def test_one_server_has_a_database(postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection may break: it has the database again, unless another came first."""
    monkeypatch.setattr("tinsmith.store.postgresql._HOLD_S", 0.1)
    postgresql.serve(tmp_path)
    end = (
        "SELECT pg_terminate_backend(pid) FROM pg_locks JOIN pg_database ON pg_database.oid = database "
        "WHERE locktype = 'advisory' AND datname = current_database()"
    )
    with closing(Store.open(tmp_path)) as first, closing(Store.open(tmp_path)) as second:
        assert take_lease(first, "one") == 1
        with pytest.raises(
            ConfigError,
            match=r"is used by the server on .* \(process \d+, started [-0-9 :.+]+, data directory .*one\); stop",
        ):
            take_lease(second, "two")
        run_sql(tmp_path, end)
        first.check()
        with pytest.raises(ConfigError, match="is used by the server on "):
            second.hold()
        run_sql(tmp_path, end)
        assert take_lease(second, "two") == 2
        for attempt in (first.check, first.check, lambda: take_lease(first, "one")):
            with pytest.raises(ConfigError, match=r"is used by the server on .*two\); stop"):
                attempt()
    with closing(Store.open(tmp_path)) as third:
        assert take_lease(third, "three") == 3
