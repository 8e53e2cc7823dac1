"""A database whose content makes no sense: said with file and remedy, whatever was hit.

Invariant: A damaged database or journal is named with its remedy; no save is acknowledged whose row goes into a file
which a restart would not find. Also: `tests/server/test_database_trouble.py`.
"""

import os
import random
import re
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.store.test_commands import DESCRIPTION
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.store.catalog import Page, describe_session, list_sessions
from tinsmith.store.database import look_into
from tinsmith.store.store import Store


def filled(data_dir: Path) -> Path:
    """A closed database with content; its file."""
    store = Store.open(data_dir)
    for number in range(200):
        store.create_session(f"s{number}", DESCRIPTION | {"display_name": "x" * 500})
    store.close()
    return data_dir / "tinsmith.db"


def noise(path: Path, start: int, count: int) -> None:
    """Write noise over a part of the file."""
    content = path.read_bytes()
    path.write_bytes(content[:start] + random.Random(0).randbytes(count) + content[start + count :])


def middle(path: Path) -> None:
    third = path.stat().st_size // 3
    noise(path, third, third)


def zeros(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8192] + bytes(20000) + content[28192:])


def execute(path: Path, statement: str) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


DAMAGES: dict[str, Callable[[Path], None]] = {
    "header": lambda path: noise(path, 0, 100),
    "middle": middle,
    "zeros": zeros,
    "end": lambda path: os.truncate(path, path.stat().st_size // 2),
    "table": lambda path: execute(path, "DROP TABLE checkpoints"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_refused_with_file_and_remedy(tmp_path: Path, damage: str) -> None:
    path = filled(tmp_path)
    DAMAGES[damage](path)
    remedy = (
        "Put back a copy of the data directory (made by `tinsmith backup`); "
        "or move tinsmith.db* away and run `tinsmith recover"
    )
    with pytest.raises(ConfigError, match=rf"\A{re.escape(str(path))} is damaged: .*{re.escape(remedy)}.*\Z"):
        Store.open(tmp_path).check()


@pytest.mark.parametrize("was_read", [False, True])
def test_damage_that_is_met_later_is_named_too(tmp_path: Path, was_read: bool) -> None:
    """A check reads what is on the disk and not what is in memory."""
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    if was_read:
        list_sessions(store, Page(1000, 0))
    middle(path)
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: "):
        store.check() if was_read else list_sessions(store, Page(1000, 0))


def replace_by_another(path: Path) -> None:
    path.rename(path.with_name("moved"))
    shutil.copyfile(path.with_name("moved"), path)


TROUBLES: dict[str, Callable[[Path], object]] = {
    "tinsmith.db is gone (No such file": lambda path: path.rename(path.with_name("moved")),
    "tinsmith.db was replaced": replace_by_another,
    "tinsmith.db was emptied": lambda path: os.truncate(path, 0),
    "tinsmith.db-wal is gone (No such file": lambda path: path.with_name("tinsmith.db-wal").unlink(),
    "tinsmith.db-shm was replaced": lambda path: replace_by_another(path.with_name("tinsmith.db-shm")),
}
"""What may happen to files, by what is said of it."""


@pytest.mark.parametrize("named", TROUBLES)
def test_no_checkpoint_goes_into_a_file_that_a_restart_would_not_find(tmp_path: Path, named: str) -> None:
    store = Store.open(tmp_path)
    store.create_session("s", DESCRIPTION)
    TROUBLES[named](tmp_path / "tinsmith.db")
    before = (tmp_path / "tinsmith.db").exists()

    def change() -> None:
        with store.writing_if_there():
            pass

    def read() -> None:
        with store.reading(), store.reading():  # the second needs a connection of its own, which must make no new file
            pass

    for attempt in (
        change,
        read,
        store.check,
        store.require_there,
        partial(store.fail_unfinished, "before another engine starts"),
    ):
        with pytest.raises(StoreUnavailableError) as refused:
            attempt()
        assert named in str(refused.value)
        assert "`tinsmith recover --data-dir" in str(refused.value)
    if "emptied" not in named:
        store.announce_checkpoint("d")  # its files are written, for `recover`
    assert (tmp_path / "tinsmith.db").exists() == before


def test_a_look_into_a_database_changes_nothing(tmp_path: Path) -> None:
    assert not look_into(tmp_path)
    assert list(tmp_path.iterdir()) == []
    Store.open(tmp_path).close()
    before = (tmp_path / "tinsmith.db").read_bytes()
    assert look_into(tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"tinsmith.db": before}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tinsmith.db").touch()
    with pytest.raises(ConfigError, match="is damaged: it is empty"):
        look_into(tmp_path / "empty")
    with closing(Store.open(tmp_path)):
        assert look_into(tmp_path)
        execute(tmp_path / "tinsmith.db", "UPDATE alembic_version SET version_num = '999'")
        with pytest.raises(ConfigError, match="has schema version 999, made by a newer Tinsmith"):
            look_into(tmp_path)


def test_garbage_in_a_column_is_named(tmp_path: Path) -> None:
    execute(filled(tmp_path), "UPDATE sessions SET tags = 'garbage', user_metadata = '{'")
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: a column of JSON holds '"):
        describe_session(Store.open(tmp_path), "s1")
