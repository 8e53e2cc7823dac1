"""Opening the SQLite file: its modes, its transactions, and its version: an older one is migrated.

WAL lets server and engine read while the other writes; synchronous=NORMAL is safe against the death of any process. A transaction
that will write says so when it begins (BEGIN IMMEDIATE): it then waits for its turn instead of failing halfway.
"""

import sqlite3
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, select
from sqlalchemy.exc import DatabaseError

from tinsmith.errors import ConfigError
from tinsmith.store import schema

FILE_NAME = "tinsmith.db"

_PRAGMAS = ("journal_mode=WAL", "synchronous=NORMAL", "busy_timeout=30000", "foreign_keys=ON")


def open_database(data_dir: Path) -> Engine:
    """The database in `data_dir`, both made if they do not exist. Give `write=True` as execution option to transactions that write.

    A database of an older version is migrated. Raises ConfigError: the directory or file cannot be used, or is of a newer version.
    """
    path = data_dir / FILE_NAME
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data_dir={data_dir} cannot be made: {error}") from error
    engine = create_engine(f"sqlite:///{path}", connect_args={"timeout": 30.0})
    event.listen(engine, "connect", _prepare)
    event.listen(engine, "begin", _begin)
    try:
        with engine.execution_options(write=True).begin() as connection:
            _bring_to_our_version(connection, path)
    except DatabaseError as error:
        raise ConfigError(f"{path} cannot be opened as a database: {error.orig}") from error
    return engine


def _prepare(connection: sqlite3.Connection, _record: Any) -> None:
    connection.isolation_level = None  # transactions begin in `_begin`, not when the driver thinks so
    for pragma in _PRAGMAS:
        connection.execute(f"PRAGMA {pragma}")


def _begin(connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    driver.execute("BEGIN IMMEDIATE" if connection.get_execution_options().get("write") else "BEGIN")


def _bring_to_our_version(connection: Connection, path: Path) -> None:
    schema.schema_version.create(connection, checkfirst=True)
    version = connection.execute(select(schema.schema_version.c.version)).scalar()
    if version is None:
        schema.metadata.create_all(connection)
        connection.execute(schema.schema_version.insert().values(version=schema.SCHEMA_VERSION))
    elif version > schema.SCHEMA_VERSION:
        raise ConfigError(
            f"{path} has schema version {version}, made by a newer Tinsmith; this one knows up to {schema.SCHEMA_VERSION}: "
            "use the newer one, or another data_dir"
        )
    elif version < schema.SCHEMA_VERSION:
        from tinsmith.store.migrations import migrate  # Alembic is only loaded when it is needed

        migrate(connection, version)
        connection.execute(schema.schema_version.update().values(version=schema.SCHEMA_VERSION))
