"""The database: a SQLite file in the data directory, or PostgreSQL, and its kinds of transactions.

The URL of a PostgreSQL database is kept in the data directory, whose checkpoint files belong to its rows: all commands
find it there.

Transactions that write follow one another on both, and each sees all that those before it have done.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from sqlalchemy import URL, CompoundSelect, Connection, Row, Select, make_url
from sqlalchemy.exc import ArgumentError

from tinsmith.errors import ConfigError, StoreUnavailableError, translated
from tinsmith.store.disk import make_directory, renamed
from tinsmith.store.fence import BUSY_S
from tinsmith.store.sqlite import FILE_NAME, look_into_sqlite, open_sqlite

log = logging.getLogger(__name__)

URL_FILE = "database.url"
"""File in a data directory with the URL of its PostgreSQL database, password included."""
_DRIVER = "postgresql+psycopg"
_EXAMPLE = f"{_DRIVER}://USER:PASSWORD@HOST/DATABASE"


class Database(Protocol):
    """A database that a process has opened, for any of its threads."""

    fence: int | None
    """The number of the engine for which this process writes; None if it is no engine and no engine's server."""

    def reading(self) -> AbstractContextManager[Connection]:
        """A transaction that sees one state of the database."""
        ...

    def reading_once(self) -> AbstractContextManager[Connection]:
        """As `reading`, for one statement, for which PostgreSQL needs no transaction."""
        ...

    def writing(self) -> AbstractContextManager[Connection]:
        """A transaction that sees all before it, and survives a power cut before anybody sees it.

        Raises EngineUnavailableError if `fence` is not the newest number.
        """
        ...

    def hold(self) -> None:
        """Keep other servers from it, until `close`. Raises ConfigError if one has it."""
        ...

    def require_there(self) -> None:
        """Raise StoreUnavailableError if its file has left its directory."""
        ...

    def check(self) -> None:
        """Look whether all of it can be used. Raises ConfigError if not, StoreUnavailableError if it is gone."""
        ...

    def give_back_space(self, spare_pages: int, most_pages: int) -> None:
        """Shorten its file by up to `most_pages` of 4 KiB, if over `spare_pages` are free."""
        ...

    def close(self) -> None:
        """End all connections."""
        ...


class Transactions:
    """A database's kinds of transactions, and the care for it. For any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def reading(self) -> AbstractContextManager[Connection]:
        return self._database.reading()

    def writing(self) -> AbstractContextManager[Connection]:
        return self._database.writing()

    def _first(
        self, statement: Select[*tuple[Any, ...]] | CompoundSelect[*tuple[Any, ...]], **values: Any
    ) -> Row[*tuple[Any, ...]] | None:
        with self._database.reading_once() as connection:
            return connection.execute(statement, values).first()

    def _column(self, statement: Select[Any] | CompoundSelect[Any], **values: Any) -> list[Any]:
        with self._database.reading_once() as connection:
            return list(connection.execute(statement, values).scalars())

    @contextmanager
    def writing_if_there(self) -> Iterator[Connection]:
        """As `writing`. Raises StoreUnavailableError if the database's file has left its directory."""
        self.require_there()
        with self.writing() as connection:
            yield connection

    def write_for(self, number: int) -> None:
        """Let transactions raise EngineUnavailableError once there is an engine of a higher number."""
        self._database.fence = number

    def hold(self) -> None:
        """Keep other servers from the database, until `close`. Raises ConfigError if one has it."""
        self._database.hold()

    def close(self) -> None:
        self._database.close()

    def require_there(self) -> None:
        """Raise StoreUnavailableError if the file has left its directory."""
        self._database.require_there()

    def check(self) -> None:
        """Read the whole file. Raises ConfigError if it is damaged, StoreUnavailableError if it is gone."""
        self._database.check()

    def give_back_space(self, spare_pages: int = 2**14, most_pages: int = 2**12) -> None:
        """Shorten the file by up to `most_pages` of 4 KiB, if over `spare_pages` are free."""
        self._database.give_back_space(spare_pages, most_pages)


def open_database(data_dir: Path, busy_s: float = BUSY_S) -> Database:
    """Open the database of `data_dir`; create both if needed.

    Raises ConfigError: unusable, damaged, or of an unknown version. Transactions raise StoreUnavailableError after
    `busy_s` seconds without the lock or a connection, or if the disk is full or fails.
    """
    url = database_url(data_dir)
    if url is None:
        return open_sqlite(data_dir, busy_s)
    from tinsmith.store.postgresql import open_postgresql  # which needs a package that is not there without it

    return open_postgresql(url, busy_s)


def use_database(data_dir: Path, text: str) -> None:
    """Let a data directory have its rows in the database of this URL; in a file of its own if it is empty.

    Raises ConfigError: no URL of PostgreSQL, or the directory has another database, or a new URL cannot be used. Its
    password may change.
    """
    before = database_url(data_dir)
    url = _parsed(text, "database_url") if text else before
    if url is None:
        return
    log.info("the data directory %s has its database at %s", data_dir, url.render_as_string())
    if before is not None and without_password(before) != without_password(url):
        raise ConfigError(
            f"database_url={url.render_as_string()} is not that of data_dir={data_dir}, which has its database at "
            f"{before.render_as_string()}: name that, or correct {data_dir / URL_FILE} if the database has moved"
        )
    if before is None and (data_dir / FILE_NAME).exists():
        raise ConfigError(
            f"data_dir={data_dir} has a database already, {FILE_NAME}: name a new directory with database_url; or move "
            f"{FILE_NAME}* away, and run `tinsmith recover` later, which registers the checkpoints in the new database"
        )
    if before != url:
        look_into(data_dir, text)  # a mistyped one is not kept
        with translated(OSError, ConfigError, lambda error: f"data_dir={data_dir} cannot be written: {error}"):
            make_directory(data_dir)
            _write(data_dir / URL_FILE, url.render_as_string(hide_password=False))
            if before is None:  # a Tinsmith that does not know PostgreSQL would make an empty database
                _write(data_dir / FILE_NAME, f"No database: it is where {URL_FILE} says.")


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    with suppress(FileNotFoundError):
        new.unlink()
    with renamed(new, path), os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(f"{text}\n")


def database_url(data_dir: Path) -> URL | None:
    """The URL of a data directory's PostgreSQL database; None if it has none. Raises ConfigError."""
    path = data_dir / URL_FILE

    def why_not(error: Exception) -> str:
        return f"{path} cannot be read: {error}; correct that"

    with translated((OSError, ValueError), ConfigError, why_not), suppress(FileNotFoundError, NotADirectoryError):
        return _parsed(path.read_text().strip(), str(path))
    return None


def without_password(url: URL) -> URL:
    """The URL, but for its password."""
    return URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)


def _parsed(text: str, name: str) -> URL:
    def why_not(_: object) -> str:
        return f"{name} is no URL of a PostgreSQL database; give it as {_EXAMPLE}"

    with translated((ArgumentError, ValueError), ConfigError, why_not):
        url = make_url(text)
    if url.drivername != _DRIVER:
        raise ConfigError(f"{name} begins with {url.drivername}://, and only {_DRIVER} is possible: {_EXAMPLE}")
    for key in url.query:
        if key.endswith("password"):  # which would be shown wherever the URL is
            raise ConfigError(f"{name} holds {key} behind the ?; give it before the @, as {_EXAMPLE}, or in ~/.pgpass")
    return url


def require_data(data_dir: Path) -> None:
    """Raise ConfigError if a directory has no database."""
    if not (data_dir / FILE_NAME).is_file() and database_url(data_dir) is None:
        raise ConfigError(
            f"data_dir={data_dir} holds no data of a server (there is no {FILE_NAME} in it); name its --data-dir"
        )


def look_into(data_dir: Path, text: str = "") -> str:
    """Look into the database of a directory, beside a server too; returns its name, empty if there is none.

    That of the URL `text`, if one is given. Raises ConfigError: unusable, damaged, or of an unknown version.
    """
    url = _parsed(text, "database_url") if text else database_url(data_dir)
    if url is None:
        return str(data_dir / FILE_NAME) if look_into_sqlite(data_dir) else ""
    from tinsmith.store.postgresql import look_into_postgresql

    with translated(StoreUnavailableError, ConfigError, str):
        return look_into_postgresql(url)
