"""Opens the SQLite file and sets its modes.

In WAL mode several processes read while one writes. Transactions that write begin with BEGIN IMMEDIATE: they wait for
their turn instead of failing halfway.

A commit is synced before it returns, and before another connection sees it (synchronous=FULL). So whatever anybody was
told survives a power cut, with all that was committed before.

An open file that is deleted or replaced goes on taking commits that nobody finds after a restart, and so does its log,
tinsmith.db-wal. So transactions of checkpoints first compare the open files with those in the directory. Others go on:
they let checkpoints be written, which `tinsmith recover` finds.
"""

import json
import shlex
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DatabaseError

from tinsmith.errors import ConfigError, StoreUnavailableError, translated
from tinsmith.store.disk import make_directory, sync
from tinsmith.store.fence import BUSY_S, NEWEST, require_own
from tinsmith.store.versions import bring_to_our_version, is_older

FILE_NAME = "tinsmith.db"
_PRAGMAS = ("journal_mode=WAL", "synchronous=FULL", f"journal_size_limit={64 * 2**20}", "foreign_keys=ON")
_NEW_PRAGMAS = ("auto_vacuum=INCREMENTAL", *_PRAGMAS)
"""Only an empty file can be told to give back deleted space (`give_back_space`)."""
_BESIDE = ("-wal", "-shm")
_LOOKS_S = 0.0005
"""Seconds until a transaction looks again for the lock that another one has."""
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Primary error codes of SQLite for a damaged file."""

_LOCKED = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL)
_REMEDY = {
    **dict.fromkeys(_LOCKED, "another program has locked it: let that end (a backup?)"),
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_IOERR: "look for a full or broken disk",
    sqlite3.SQLITE_READONLY: "make file, directory and disk writable",
    sqlite3.SQLITE_CANTOPEN: "look for missing files, permissions, or too many open files",
    sqlite3.SQLITE_NOMEM: "free memory",
}
"""By SQLite's primary error code, for errors that are no fault of the statement."""


@dataclass(frozen=True)
class _OpenFile:
    path: Path
    identities: Mapping[Path, tuple[int, int]]
    """Device and inode of each."""

    @classmethod
    def find(cls, path: Path) -> "_OpenFile":
        beside = (path.with_name(path.name + suffix) for suffix in _BESIDE)
        found = {each: each.stat() for each in (path, *(each for each in beside if each.exists()))}
        return cls(path, {each: (there.st_dev, there.st_ino) for each, there in found.items()})

    def require_there(self) -> None:
        """Raise StoreUnavailableError if one is gone or was replaced or emptied."""
        for path, identity in self.identities.items():
            what = _changed(path, identity, may_be_empty=path != self.path)
            if what:
                raise StoreUnavailableError(
                    f"the database {path} {what} while the server runs: put this very file back; "
                    "or save what is loaded, stop the server, and run `tinsmith recover --data-dir "
                    f"{shlex.quote(str(self.path.parent))}`, which registers the checkpoints again"
                )


def _changed(path: Path, identity: tuple[int, int], may_be_empty: bool) -> str:
    """Return what happened to the file of this device and inode, if anything."""
    try:
        found = path.stat()
    except OSError as error:
        return f"is gone ({error.strerror})"
    if (found.st_dev, found.st_ino) != identity:
        return "was replaced"
    return "" if found.st_size or may_be_empty else "was emptied"


class SQLiteDatabase:
    """One SQLite file. Writing needs the execution option `write=True`."""

    def __init__(self, file: _OpenFile, busy_s: float, held: Engine) -> None:
        """`held` stays open: with the last connection SQLite deletes the files beside the database."""
        self.fence: int | None = None
        self._file = file
        self._engine = _engine(file.path, busy_s, file)
        self._held = held
        event.listen(self._engine, "begin", self._require_own)
        self._write = self._engine.execution_options(write=True)

    def reading(self) -> AbstractContextManager[Connection]:
        return self._engine.begin()

    def reading_once(self) -> AbstractContextManager[Connection]:
        return self.reading()

    def writing(self) -> AbstractContextManager[Connection]:
        return self._write.begin()

    def _require_own(self, connection: Connection) -> None:
        if self.fence is not None and connection.get_execution_options().get("write"):
            driver = connection.connection.driver_connection
            assert driver is not None
            with available():
                newest = driver.execute(NEWEST).fetchone()
            require_own(self.fence, newest, str(self._file.path))

    def hold(self) -> None:
        """Do nothing: the lock of the data directory keeps other servers from the file."""

    def close(self) -> None:
        for engine in (self._engine, self._held):
            engine.dispose()

    def require_there(self) -> None:
        self._file.require_there()

    def check(self) -> None:
        # One that is open has pages in memory
        with _connected(_engine(self._file.path, BUSY_S, self._file)) as connection:
            _require_sound(connection, self._file.path)

    def give_back_space(self, spare_pages: int, most_pages: int) -> None:
        with self._engine.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            with available():
                ((free,),) = driver.execute("PRAGMA freelist_count")
                if free > spare_pages:  # as a script, because the driver's `execute` would free one page alone
                    driver.executescript(f"PRAGMA incremental_vacuum({min(free - spare_pages, most_pages)})")


def open_sqlite(data_dir: Path, busy_s: float) -> SQLiteDatabase:
    """Open the database in `data_dir`; create both if needed. Raises as `open_database`."""
    path = data_dir / FILE_NAME
    remedy = "choose another with --data-dir, or let this user write there"
    with translated(OSError, ConfigError, lambda error: f"data_dir={data_dir} cannot be made: {error}; {remedy}"):
        make_directory(data_dir)
    opening = _engine(path, BUSY_S, is_new=not path.exists())
    with ExitStack() as failed:
        failed.callback(opening.dispose)
        with _usable(path), opening.execution_options(write=True).begin() as connection:
            bring_to_our_version(connection, str(path), partial(damaged, path))
        failed.pop_all()
    sync(data_dir)
    return SQLiteDatabase(_OpenFile.find(path), busy_s, opening)


def look_into_sqlite(data_dir: Path) -> bool:
    """Read the whole database of a directory, beside a server too; False if there is none.

    Raises ConfigError: unusable, damaged, or of an unknown version.
    """
    path = (data_dir / FILE_NAME).absolute()
    if not path.exists():
        return False
    with _usable(path), _connected(_engine(path, BUSY_S, only_read=True)) as connection:
        _require_sound(connection, path)
        is_older(connection, str(path), partial(damaged, path))
    return True


@contextmanager
def _connected(engine: Engine) -> Iterator[Connection]:
    """A transaction on a connection of its own."""
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def _require_sound(connection: Connection, path: Path) -> None:
    found = str(connection.exec_driver_sql("PRAGMA quick_check(1)").scalar())
    if found != "ok":
        raise damaged(path, found)


def _usable(path: Path) -> AbstractContextManager[None]:
    def why_not(error: DatabaseError | StoreUnavailableError) -> str:
        reason = error.orig if isinstance(error, DatabaseError) else error
        return f"{path} cannot be opened as a database: {reason}; see to that and start again"

    return translated((DatabaseError, StoreUnavailableError), ConfigError, why_not)


@contextmanager
def available() -> Iterator[None]:
    """Turn errors of SQLite that are no fault of the statement into StoreUnavailableError."""
    try:
        yield
    except sqlite3.Error as error:
        check_available(error)
        raise


def _engine(
    path: Path, busy_s: float, file: _OpenFile | None = None, only_read: bool = False, is_new: bool = False
) -> Engine:
    """Connections to a database. With `file`, new ones are refused once it has left its directory."""

    def require_there(*_: Any) -> None:
        if file is not None:
            file.require_there()

    def prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin in `_begin`, not implicitly in the driver
        for pragma in () if only_read else (_NEW_PRAGMAS if is_new else _PRAGMAS):
            connection.execute(f"PRAGMA {pragma}")

    def name_trouble(context: ExceptionContext) -> None:
        check_available(context.original_exception)
        code = getattr(context.original_exception, "sqlite_errorcode", None)
        if code is not None and code & 0xFF in DAMAGED:
            raise damaged(path, str(context.original_exception)) from context.original_exception

    def parse_json(text: str) -> Any:
        try:
            return json.loads(text)
        except ValueError as error:
            raise damaged(path, f"a column of JSON holds {text[:40]!r}") from error

    place = _only_read(path) if only_read else URL.create("sqlite", database=str(path))  # its name may hold ? or #
    engine = create_engine(place, connect_args={"timeout": busy_s}, json_deserializer=parse_json)
    # A connection would make a new file in the place of one that is gone
    event.listen(engine, "do_connect", require_there)
    event.listen(engine, "connect", prepare)
    event.listen(engine, "begin", partial(_begin, busy_s=busy_s))
    event.listen(engine, "handle_error", name_trouble)
    return engine


def _only_read(path: Path) -> URL:
    query = {"mode": "ro", "uri": "true"}
    if not path.with_name(path.name + "-wal").exists():  # nobody uses it: SQLite would leave files beside it
        query["immutable"] = "1"
    return URL.create("sqlite", database=path.as_uri(), query=query)


def damaged(path: Path, found: str) -> ConfigError:
    """The error for a damaged database file."""
    line = " ".join(found.removeprefix("*** in database main ***").split())
    return ConfigError(
        f"{path} is damaged: {line}. Put back a copy of the data directory (made by `tinsmith backup`); "
        f"or move {path.name}* away and run `tinsmith recover --data-dir {shlex.quote(str(path.parent))}`, "
        "which registers the checkpoints again in a new database"
    )


def check_available(error: BaseException) -> None:
    """Raise StoreUnavailableError for errors of `_REMEDY`."""
    code = getattr(error, "sqlite_errorcode", None)  # missing if the module itself was misused
    if isinstance(error, sqlite3.Error) and code is not None and code & 0xFF in _REMEDY:
        raise StoreUnavailableError(
            f"the database takes nothing at the moment: {error} ({error.sqlite_errorname}); {_REMEDY[code & 0xFF]}"
        ) from error


def _begin(connection: Connection, busy_s: float) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    try:  # not `available`: a transaction begins here thousands of times a second
        if connection.get_execution_options().get("write"):
            _lock(driver, busy_s)
        else:
            driver.execute("BEGIN")
    except sqlite3.Error as error:
        check_available(error)
        raise


def _lock(driver: sqlite3.Connection, busy_s: float) -> None:
    """Begin to write, and wait for our turn.

    SQLite alone would look every 100 ms. A process that writes one transaction behind the other, each of which waits
    for the disk, would keep the others out.
    """
    deadline = time.monotonic() + busy_s
    driver.execute("PRAGMA busy_timeout = 0")
    try:
        while not _has_begun(driver, is_last=time.monotonic() >= deadline):
            time.sleep(_LOOKS_S)
    finally:
        driver.execute(f"PRAGMA busy_timeout = {int(1000 * busy_s)}")


def _has_begun(driver: sqlite3.Connection, is_last: bool) -> bool:
    """Try to begin to write. Raises sqlite3.Error, but while another writes only for the last attempt."""
    try:
        driver.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        if is_last or error.sqlite_errorcode & 0xFF not in _LOCKED:
            raise
    return driver.in_transaction
