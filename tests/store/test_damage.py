"""A database whose content makes no sense: said with file and remedy, whatever was hit."""

import os
import random
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from tests.store.test_commands import DESCRIPTION
from tinsmith.errors import ConfigError
from tinsmith.store.catalog import Page
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


def end(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def table(path: Path) -> None:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TABLE checkpoints")
        connection.commit()


@pytest.mark.parametrize("damage", [header, middle, end, table])
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


def test_garbage_in_a_column_is_named(tmp_path: Path) -> None:
    path = filled(tmp_path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("UPDATE sessions SET tags = 'garbage', user_metadata = '{'")
        connection.commit()
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: a column of JSON holds '"):
        describe_session(Store.open(tmp_path), "s1")
