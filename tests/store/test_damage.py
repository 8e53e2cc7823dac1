"""A database whose content makes no sense: said with file and remedy, whatever was hit.

Invariant: A damaged database or journal is named with its remedy; no save is acknowledged whose row goes into a file which a restart
would not find.
Also: `tests/server/test_database_trouble.py`.
"""

import os
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from tests.store.test_commands import DESCRIPTION
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.store.catalog import Page
from tinsmith.store.database import look_into, open_database
from tinsmith.store.session_catalog import describe_session, list_sessions
from tinsmith.store.store import Store


def filled(data_dir: Path) -> Path:
    """A closed database with content; its file."""
    store = Store.open(data_dir)
    for number in range(200):
        store.create_session(f"s{number}", DESCRIPTION | {"display_name": "x" * 500})
    store.close()
    return data_dir / "tinsmith.db"


def header(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(100) + path.read_bytes()[100:])


def middle(path: Path) -> None:
    content = path.read_bytes()
    third = len(content) // 3
    path.write_bytes(content[:third] + random.Random(0).randbytes(third) + content[2 * third :])


def zeros(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:8192] + bytes(20000) + content[28192:])


def end(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE checkpoints")
        connection.commit()


@pytest.mark.parametrize("damage", [header, middle, zeros, end, table])
def test_a_damaged_file_is_refused_with_file_and_remedy(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    path = filled(tmp_path)
    damage(path)
    with pytest.raises(ConfigError) as refused:
        Store.open(tmp_path).check()
    assert str(refused.value).startswith(f"{path} is damaged: ")
    assert "Put back a copy of the data directory (made by `tinsmith backup`); or move tinsmith.db* away and run `tinsmith recover" in str(
        refused.value
    )
    assert len(str(refused.value).splitlines()) == 1


def test_damage_that_is_met_later_is_named_too(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    middle(path)
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: "):
        list_sessions(store, Page(1000, 0))


def move_away(path: Path) -> None:
    path.rename(path.with_name("moved"))


def replace_by_another(path: Path) -> None:
    path.rename(path.with_name("moved"))
    shutil.copyfile(path.with_name("moved"), path)


def empty(path: Path) -> None:
    shutil.copyfile(path, path.with_name("moved"))
    os.truncate(path, 0)


def remove_wal(path: Path) -> None:
    path.with_name("tinsmith.db-wal").unlink()


def replace_shm(path: Path) -> None:
    replace_by_another(path.with_name("tinsmith.db-shm"))


@pytest.mark.parametrize(
    ("trouble", "named"),
    [
        (move_away, "tinsmith.db is gone (No such file"),
        (replace_by_another, "tinsmith.db was replaced"),
        (empty, "tinsmith.db was emptied"),
        (remove_wal, "tinsmith.db-wal is gone (No such file"),
        (replace_shm, "tinsmith.db-shm was replaced"),
    ],
)
def test_no_checkpoint_goes_into_a_file_that_a_restart_would_not_find(tmp_path: Path, trouble: Callable[[Path], None], named: str) -> None:
    store = Store.open(tmp_path)
    store.create_session("s", DESCRIPTION)
    trouble(tmp_path / "tinsmith.db")
    before = (tmp_path / "tinsmith.db").exists()

    def change() -> None:
        with store.writing_durably():
            pass

    def read() -> None:
        with store.reading(), store.reading():  # the second needs a connection of its own, which must make no new file
            pass

    for attempt in (change, read, store.check, store.require_there, partial(store.fail_unfinished, "before another engine starts")):
        with pytest.raises(StoreUnavailableError) as refused:
            attempt()
        assert named in str(refused.value)
        assert "`tinsmith recover --data-dir" in str(refused.value)
    if trouble is not empty:
        store.announce_checkpoint("d")  # its files are written, for `recover`
    assert (tmp_path / "tinsmith.db").exists() == before


def test_a_check_reads_what_is_on_the_disk_and_not_what_is_in_memory(tmp_path: Path) -> None:
    path = filled(tmp_path)
    store = Store.open(tmp_path)
    list_sessions(store, Page(1000, 0))
    middle(path)
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: "):
        store.check()


def test_a_look_into_a_database_changes_nothing(tmp_path: Path) -> None:
    assert not look_into(tmp_path)
    assert list(tmp_path.iterdir()) == []
    open_database(tmp_path).dispose()
    before = (tmp_path / "tinsmith.db").read_bytes()
    assert look_into(tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"tinsmith.db": before}
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "tinsmith.db").touch()
    with pytest.raises(ConfigError, match="is damaged: it is empty"):
        look_into(tmp_path / "empty")
    with closing(Store.open(tmp_path)), closing(sqlite3.connect(tmp_path / "tinsmith.db")) as connection:
        assert look_into(tmp_path)
        connection.execute("UPDATE alembic_version SET version_num = '999'")
        connection.commit()
        with pytest.raises(ConfigError, match="has schema version 999, made by a newer Tinsmith"):
            look_into(tmp_path)


def test_garbage_in_a_column_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE sessions SET tags = 'garbage', user_metadata = '{'")
        connection.commit()
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: a column of JSON holds '"):
        describe_session(Store.open(tmp_path), "s1")
