"""Opens the SQLite file, sets its modes, and migrates an older schema.

In WAL mode several processes read while one writes. Transactions that write begin with BEGIN IMMEDIATE: they wait for
their turn instead of failing halfway.

A commit with synchronous=NORMAL survives the death of any process but perhaps no power cut: enough for commands, whose
models do not either. One with synchronous=FULL is on the disk when it returns, with all before it; for rows which say
that a checkpoint exists or that its files may be deleted.

An open file that is deleted or replaced goes on taking commits that nobody finds after a restart, and so does its log,
tinsmith.db-wal. So transactions with synchronous=FULL first compare the open files with those in the directory. Others
go on: they let checkpoints be written, which `tinsmith recover` finds.
"""

import json
import shlex
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import URL, CompoundSelect, Connection, Engine, Row, Select, create_engine, event, inspect, select
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DatabaseError

from tinsmith.errors import ConfigError, StoreUnavailableError, translated
from tinsmith.store import schema
from tinsmith.store.disk import make_directory, sync

FILE_NAME = "tinsmith.db"
REVISIONS = "tinsmith.store:revisions"

_PRAGMAS = ("journal_mode=WAL", f"journal_size_limit={64 * 2**20}", "foreign_keys=ON")
_NEW_PRAGMAS = ("auto_vacuum=INCREMENTAL", *_PRAGMAS)
"""Only an empty file can be told to give back deleted space (`give_back_space`)."""
_BESIDE = ("-wal", "-shm")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
"""Primary error codes of SQLite for a damaged file."""

BUSY_S = 30.0
"""Longest wait for the lock."""

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


@dataclass(frozen=True)
class Database:
    """One SQLite file, with two kinds of commits. Writing needs the execution option `write=True`."""

    file: _OpenFile
    normal: Engine
    """synchronous=NORMAL."""
    durable: Engine
    """synchronous=FULL."""
    held: Engine
    """Stays open: with the last connection SQLite deletes the files beside the database."""


class Transactions:
    """A database's kinds of transactions, and the care for its file. For any thread."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._write = database.normal.execution_options(write=True)
        self._durable = database.durable.execution_options(write=True)

    def reading(self) -> AbstractContextManager[Connection]:
        return self._database.normal.begin()

    def writing(self) -> AbstractContextManager[Connection]:
        return self._write.begin()

    def _first(
        self, statement: Select[*tuple[Any, ...]] | CompoundSelect[*tuple[Any, ...]], **values: Any
    ) -> Row[*tuple[Any, ...]] | None:
        with self.reading() as connection:
            return connection.execute(statement, values).first()

    def _column(self, statement: Select[Any] | CompoundSelect[Any], **values: Any) -> list[Any]:
        with self.reading() as connection:
            return list(connection.execute(statement, values).scalars())

    def writing_durably(self) -> AbstractContextManager[Connection]:
        """A transaction that survives a power cut once it has ended."""
        return self._durable.begin()

    def close(self) -> None:
        for engine in (self._database.normal, self._database.durable, self._database.held):
            engine.dispose()

    def require_there(self) -> None:
        """Raise StoreUnavailableError if the file has left its directory."""
        self._database.file.require_there()

    def check(self) -> None:
        """Read the whole file. Raises ConfigError if it is damaged, StoreUnavailableError if it is gone."""
        file = self._database.file
        # One that is open has pages in memory
        with _connected(_engine(file.path, "NORMAL", BUSY_S, file)) as connection:
            _require_sound(connection, file.path)

    def give_back_space(self, spare_pages: int = 2**14, most_pages: int = 2**12) -> None:
        """Shorten the file by up to `most_pages` of 4 KiB, if over `spare_pages` are free."""
        with self._database.normal.connect() as connection:
            driver = connection.connection.driver_connection
            assert driver is not None
            with available():
                ((free,),) = driver.execute("PRAGMA freelist_count")
                if free > spare_pages:  # as a script, because the driver's `execute` would free one page alone
                    driver.executescript(f"PRAGMA incremental_vacuum({min(free - spare_pages, most_pages)})")


def open_database(data_dir: Path, busy_s: float = BUSY_S) -> Database:
    """Open the database in `data_dir`; create both if needed.

    Raises ConfigError: unusable, damaged, or of an unknown version. Transactions raise StoreUnavailableError after
    `busy_s` seconds without the lock, or if the disk is full or fails.
    """
    path = data_dir / FILE_NAME
    with translated(OSError, ConfigError, lambda error: f"data_dir={data_dir} cannot be made: {error}"):
        make_directory(data_dir)
    opening = _engine(path, "FULL", BUSY_S, is_new=not path.exists())
    with ExitStack() as failed:
        failed.callback(opening.dispose)
        with _usable(path), opening.execution_options(write=True).begin() as connection:
            _bring_to_our_version(connection, path)
        failed.pop_all()
    sync(data_dir)
    file = _OpenFile.find(path)
    return Database(file, _engine(path, "NORMAL", busy_s, file), _engine(path, "FULL", busy_s, file), opening)


def require_data(data_dir: Path) -> None:
    """Raise ConfigError if a directory holds no database."""
    if not (data_dir / FILE_NAME).is_file():
        raise ConfigError(
            f"data_dir={data_dir} holds no data of a server (there is no {FILE_NAME} in it); name its --data-dir"
        )


def look_into(data_dir: Path) -> bool:
    """Read the whole database of a directory, beside a server too; False if there is none.

    Raises ConfigError: unusable, damaged, or of an unknown version.
    """
    path = (data_dir / FILE_NAME).absolute()
    if not path.exists():
        return False
    with _usable(path), _connected(_engine(path, "NORMAL", BUSY_S, only_read=True)) as connection:
        _require_sound(connection, path)
        _is_older(connection, path)
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
    path: Path,
    synchronous: Literal["NORMAL", "FULL"],
    busy_s: float,
    file: _OpenFile | None = None,
    only_read: bool = False,
    is_new: bool = False,
) -> Engine:
    """Connections to a database.

    With `file`, new ones and FULL transactions are refused once it has left its directory.
    """

    def require_there(*_: Any) -> None:
        if file is not None:
            file.require_there()

    def prepare(connection: sqlite3.Connection, _record: Any) -> None:
        connection.isolation_level = None  # transactions begin in `_begin`, not implicitly in the driver
        for pragma in () if only_read else (*(_NEW_PRAGMAS if is_new else _PRAGMAS), f"synchronous={synchronous}"):
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
    if synchronous == "FULL":
        event.listen(engine, "begin", require_there)
    event.listen(engine, "begin", _begin)
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


def _begin(connection: Connection) -> None:
    driver = connection.connection.driver_connection
    assert driver is not None
    try:  # not `available`: a transaction begins here thousands of times a second
        driver.execute("BEGIN IMMEDIATE" if connection.get_execution_options().get("write") else "BEGIN")
    except sqlite3.Error as error:
        check_available(error)
        raise


def _bring_to_our_version(connection: Connection, path: Path) -> None:
    if not inspect(connection).get_table_names():
        schema.metadata.create_all(connection)
        schema.alembic_version.create(connection)
        connection.execute(schema.alembic_version.insert().values(version_num=schema.REVISION))
    elif _is_older(connection, path):
        _upgrade(connection)


def _is_older(connection: Connection, path: Path) -> bool:
    """Whether to migrate a database. Raises ConfigError: damaged, or of an unknown version."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        raise damaged(path, "it is empty")
    stamped = schema.alembic_version.name in tables
    revision = connection.execute(select(schema.alembic_version.c.version_num)).scalar() if stamped else None
    if revision == schema.REVISION:
        missing = schema.metadata.tables.keys() - tables
        if missing:
            raise damaged(path, f"there is no table {', '.join(sorted(missing))}")
        return False
    if revision is None or not revision.isdecimal():
        raise damaged(path, f"it has tables, and its schema version is {revision!r}")
    if int(revision) > int(schema.REVISION):
        raise ConfigError(
            f"{path} has schema version {revision}, made by a newer Tinsmith; this one knows up to {schema.REVISION}: "
            "use the newer one, or another data_dir"
        )
    if int(revision) < int(schema.BASELINE):
        raise ConfigError(
            f"{path} has schema version {revision}, made before the first release; "
            f"this Tinsmith migrates from {schema.BASELINE} on: "
            "use another data_dir"
        )
    return True


def _upgrade(connection: Connection) -> None:
    """Migrate within the transaction: whole, or not at all."""
    from alembic import command  # only here: it takes a tenth of a second, and most databases need no migration
    from alembic.config import Config

    config = Config(attributes={"connection": connection})
    config.set_main_option("script_location", REVISIONS)
    config.set_main_option("path_separator", "os")
    command.upgrade(config, "head")
