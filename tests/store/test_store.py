"""Opening a store, and what two processes see of each other."""

import sqlite3
from pathlib import Path

import pytest

from tinsmith.errors import ConfigError
from tinsmith.store import ids
from tinsmith.store.store import Store

DESCRIPTION = {"tags": ["a"], "user_metadata": {"k": 1}, "sdk_version": "0", "project_id": None, "display_name": "run"}


def test_a_second_connection_sees_what_the_first_wrote(tmp_path: Path) -> None:
    server, engine = Store.open(tmp_path / "deep" / "data"), Store.open(tmp_path / "deep" / "data")
    server.create_session("s", DESCRIPTION)
    session = engine.session("s")
    assert session is not None
    assert session.finished_at is None
    server.close()
    engine.close()


def test_a_session_is_touched_until_it_is_finished(tmp_path: Path) -> None:
    store = Store.open(tmp_path)
    store.create_session("s", DESCRIPTION)
    assert store.touch_session("s")
    assert not store.touch_session("unknown")
    assert store.finish_session("s", "errored", "detail")
    assert not store.finish_session("s", "success", None)
    assert not store.touch_session("s")
    session = store.session("s")
    assert session is not None
    assert session.finished_at is not None


def test_the_file_is_in_wal_mode(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "tinsmith.db") as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_another_schema_version_is_refused(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with sqlite3.connect(tmp_path / "tinsmith.db") as connection:
        connection.execute("UPDATE schema_version SET version = 99")
    with pytest.raises(ConfigError, match="schema version 99"):
        Store.open(tmp_path)


def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tinsmith.db").write_bytes(b"not a database" * 100)
    with pytest.raises(ConfigError, match="cannot be opened as a database"):
        Store.open(tmp_path)


def test_a_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="data_dir"):
        Store.open(tmp_path / "file")


def test_ids_have_the_form_that_the_sdk_builds() -> None:
    assert ids.model_id("abc", 2) == "abc:train:2"
    assert ids.sampling_session_id("abc", 0) == "abc:sample:0"
    assert ids.session_of("abc:train:2") == "abc"
    assert ids.session_of("abc:sample:0") == "abc"
    assert ids.parse_request_id(ids.request_id("abc:train:2", 7)) == ("abc:train:2", 7)
    assert ids.is_sample("abc:sample:0/3")
    assert not ids.is_sample("abc:train:0/3")
