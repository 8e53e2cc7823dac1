"""Opens a PostgreSQL database, and says what its errors mean.

A transaction that writes takes one lock of the database first, as SQLite's do. So each sees all before it, rows of a
lower number never become visible after those of a higher one, and no two transactions wait for each other.

Every commit is on the disk when it returns. With synchronous_commit=off, PostgreSQL would lose the last ones when it is
killed, and clients have the ids of their operations by then.

A connection may break while a commit is on its way. So each transaction notes itself in the table last_commits, and is
looked for there over another connection. PostgreSQL's own number would not do: after a crash it gives the number of a
lost transaction to another one. Only if PostgreSQL stays away for longer is the caller told to try again, perhaps in
vain: operations, outcomes and checkpoints have keys, and a repeat changes nothing.
"""

import json
import logging
import math
import re
import select
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from threading import Lock, get_ident
from typing import Any, TypeVar
from uuid import uuid4

from sqlalchemy import URL, Connection, create_engine, event, inspect
from sqlalchemy.engine import ExceptionContext
from sqlalchemy.exc import DatabaseError, DisconnectionError

from tinsmith.config_values import installer
from tinsmith.errors import ConfigError, StoreUnavailableError, translated
from tinsmith.store.fence import BUSY_S, NEWEST, require_own
from tinsmith.store.versions import bring_to_our_version, is_older

try:
    import psycopg
    from psycopg.types.string import StrDumper
except ImportError as error:
    raise ConfigError(f"database_url needs the package psycopg; install it with: {installer('postgres')}") from error

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITERS, SERVERS = 7464_736_1, 7464_736_2
"""Advisory locks: of the transaction that writes, and of the server whose engine works on the database."""
_BEGIN = f"SELECT pg_advisory_xact_lock({WRITERS})"
_NOTE = f"""
WITH noted AS (
    INSERT INTO last_commits (writer, number, noted_at) VALUES (%s, %s, extract(epoch FROM now()))
    ON CONFLICT (writer) DO UPDATE SET number = excluded.number, noted_at = excluded.noted_at
) {NEWEST}
"""
"""Notes the transaction, for `_IS_COMMITTED`, and finds the newest engine."""
_IS_COMMITTED = "SELECT count(*) FROM last_commits WHERE writer = %s AND number = %s"
_FORGET = "DELETE FROM last_commits WHERE noted_at < extract(epoch FROM now()) - 86400"
_SET = """
SELECT set_config(name, value, false) FROM json_each_text(%s::json) AS wanted (name, value)
UNION ALL SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'
"""
_RETRY_S = 0.1
_HOLD_S = 5.0
"""Seconds that a server waits for another to leave: one that was killed may just be about to."""
_SILENT_S = 30
"""Seconds without an answer after which a connection is taken for broken, on both sides."""
_STUCK_S = 60
"""Longest pause of a client within a transaction, while others wait for the lock."""
_DAMAGED = ("XX001", "XX002")
_REMEDY = {
    "": "look whether PostgreSQL runs and can be reached",
    "08": "look whether PostgreSQL runs and can be reached",
    "25": "PostgreSQL must take what is written: name the primary server, and look whether the machine is overloaded",
    "40": "try again",
    "53": "free disk, memory or connections of PostgreSQL",
    "55": "another program has locked it: let that end",
    "57": "look whether PostgreSQL runs and has been started completely",
    "58": "look for a full or broken disk of PostgreSQL",
}
"""By the first two characters of SQLSTATE, for errors that are no fault of the statement."""


class _Text(StrDumper):
    """Texts as PostgreSQL takes them, which cannot hold the character 0."""

    def dump(self, obj: str) -> Any:
        return super().dump(obj.replace("\0", "\N{SYMBOL FOR NULL}"))


def _json(value: Any) -> str:
    return re.sub(r"(?<!\\)((?:\\\\)*)\\u0000", r"\1\\u2400", json.dumps(value))


class PostgreSQLDatabase:
    """A PostgreSQL database and its connections."""

    def __init__(self, url: URL, busy_s: float) -> None:
        """Nothing is connected yet."""
        self.fence: int | None = None
        self.name = f"the PostgreSQL database {url.database} on {url.host or url.query.get('host') or 'this machine'}"
        self._busy_s = busy_s
        self._id = uuid4().hex
        self._numbers = count()
        self._engine = create_engine(
            url,
            json_serializer=_json,
            connect_args={
                "connect_timeout": max(2, math.ceil(busy_s)),
                "application_name": "tinsmith",
                "client_encoding": "utf8",
                "keepalives_idle": _SILENT_S // 3,
                "keepalives_interval": _SILENT_S // 6,
                "keepalives_count": 4,
                "tcp_user_timeout": 1000 * _SILENT_S,
            },
        )
        self._reads = self._engine.execution_options(isolation_level="REPEATABLE READ", postgresql_readonly=True)
        self._reads_once = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._is_servers = False
        """Whether other servers are to be kept away."""
        self._held: Connection | None = None
        self._holding = Lock()
        event.listen(self._engine, "connect", self._prepare)
        event.listen(self._engine, "checkout", _require_connected)
        event.listen(self._engine, "handle_error", self._name_trouble)

    def _prepare(self, connection: "psycopg.Connection[Any]", _record: object) -> None:
        wanted = {
            "lock_timeout": f"{max(1, round(1000 * self._busy_s))}ms",
            "idle_in_transaction_session_timeout": f"{_STUCK_S}s",
            "tcp_keepalives_idle": str(_SILENT_S // 3),
            "tcp_keepalives_interval": str(_SILENT_S // 6),
            "tcp_keepalives_count": "4",
        }
        connection.adapters.register_dumper(str, _Text)
        connection.autocommit = True
        connection.execute(_SET, [json.dumps(wanted)])
        connection.autocommit = False

    def _name_trouble(self, context: ExceptionContext) -> None:
        found = context.original_exception
        if not isinstance(found, psycopg.Error):
            return
        line = " ".join(str(found).split())
        if found.sqlstate in _DAMAGED:
            raise damaged(self.name, line) from found
        remedy = _REMEDY.get((found.sqlstate or "")[:2])
        if remedy is not None and (found.sqlstate or isinstance(found, psycopg.OperationalError)):
            raise StoreUnavailableError(f"the database takes nothing at the moment: {line}; {remedy}") from found

    # ---- Transactions

    @contextmanager
    def reading(self) -> Iterator[Connection]:
        with self._until_there(self._reads.connect) as connection:
            yield connection

    @contextmanager
    def reading_once(self) -> Iterator[Connection]:
        with self._until_there(self._reads_once.connect) as connection:
            yield connection

    @contextmanager
    def writing(self) -> Iterator[Connection]:
        note = f"{self._id} {get_ident()}", next(self._numbers)
        with self._until_there(lambda: self._begun(note)) as connection:  # which rolls back what is not committed
            yield connection
            self._commit(connection, note)

    @contextmanager
    def opening(self) -> Iterator[Connection]:
        """As `writing`, of a database that may lack tables."""
        with self._until_there(self._locked) as connection:
            yield connection
            connection.commit()

    def _until_there(self, attempt: Callable[[], T]) -> T:
        """Try again what has changed nothing, for `busy_s` seconds."""
        deadline = time.monotonic() + self._busy_s
        while True:
            try:
                return attempt()
            except StoreUnavailableError:
                if time.monotonic() + _RETRY_S >= deadline:
                    raise
            time.sleep(_RETRY_S)

    def _locked(self) -> Connection:
        """A connection that has the lock of those who write."""
        with ExitStack() as failed:
            connection = failed.enter_context(self._engine.connect())
            connection.exec_driver_sql(_BEGIN)
            failed.pop_all()
        return connection

    def _begun(self, note: tuple[str, int]) -> Connection:
        """A connection that may write, whose transaction has this note: its writer, and its number among theirs."""
        with ExitStack() as failed:
            connection = failed.enter_context(self._locked())
            newest = connection.exec_driver_sql(_NOTE, note).first()
            if self.fence is not None:
                require_own(self.fence, newest, self.name)
            failed.pop_all()
        return connection

    def _commit(self, connection: Connection, note: tuple[str, int]) -> None:
        """Commit. Raises StoreUnavailableError if that was not done, or if nobody can be asked whether it was."""
        try:
            connection.commit()
        except StoreUnavailableError as error:
            if not self._until_there(lambda: self._is_committed(note)):
                raise
            log.warning("the database has committed, though it could not say so: %s", error)

    def _is_committed(self, note: tuple[str, int]) -> bool:
        with self._locked() as connection:  # which its transaction has, while PostgreSQL is still about to commit it
            return bool(connection.exec_driver_sql(_IS_COMMITTED, note).scalar())

    # ---- The database as a whole

    def hold(self) -> None:
        with self._holding:
            self._is_servers = True
            self._hold()

    def _hold(self) -> None:
        if self._held is not None:
            try:
                self._held.exec_driver_sql("SELECT 1")
            except StoreUnavailableError:
                self._let_go()
            else:
                return
        connection = self._reads_once.connect()
        deadline = time.monotonic() + _HOLD_S
        while not connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({SERVERS})").scalar():
            if time.monotonic() >= deadline:
                newest = connection.exec_driver_sql(NEWEST).first()
                connection.close()
                holder = "another server" if newest is None else newest[1]
                raise ConfigError(f"{self.name} is used by {holder}; stop it, or name another database_url")
            time.sleep(_RETRY_S)
        self._held = connection

    def _let_go(self) -> None:
        if self._held is not None:
            self._held.invalidate()
            self._held.close()
            self._held = None

    def close(self) -> None:
        self._let_go()
        self._engine.dispose()

    def require_there(self) -> None:
        """Do nothing: whether it is there is seen by its answers."""

    def check(self) -> None:
        """Look whether it has all tables, and is still this server's."""
        if self._is_servers:
            self.hold()
        with self.reading() as connection:
            is_older(connection, self.name, self.damaged)

    def give_back_space(self, spare_pages: int, most_pages: int) -> None:
        """Do nothing: PostgreSQL does it itself."""

    def require_unicode(self, connection: Connection) -> None:
        """Raise ConfigError if it cannot hold all texts."""
        encoding = connection.exec_driver_sql("SHOW server_encoding").scalar()
        if encoding != "UTF8":
            raise ConfigError(
                f"{self.name} has the encoding {encoding}, which cannot hold all texts; make another one: "
                f"CREATE DATABASE {self._engine.url.database} ENCODING 'UTF8' TEMPLATE template0"
            )

    def damaged(self, found: str) -> ConfigError:
        return damaged(self.name, found)


def damaged(name: str, found: str) -> ConfigError:
    """The error for a damaged database."""
    return ConfigError(
        f"{name} is damaged: {found}. Put back a copy (made by `pg_dump`); or name an empty database and run "
        "`tinsmith recover`, which registers the checkpoints again"
    )


def _require_connected(connection: "psycopg.Connection[Any]", _record: object, _proxy: object) -> None:
    """Raise DisconnectionError if PostgreSQL has closed a connection while nobody used it."""
    ready = select.poll()
    ready.register(connection.fileno(), select.POLLIN)
    if ready.poll(0):
        raise DisconnectionError("PostgreSQL has closed the connection")


def open_postgresql(url: URL, busy_s: float = BUSY_S) -> PostgreSQLDatabase:
    """Open a database and make or migrate its tables. Raises ConfigError: unusable, damaged, of an unknown version."""
    database = PostgreSQLDatabase(url, busy_s)
    with ExitStack() as failed:
        failed.callback(database.close)

        def require_unused() -> None:
            if not connection.exec_driver_sql(f"SELECT pg_try_advisory_xact_lock({SERVERS})").scalar():
                raise ConfigError(
                    f"{database.name} is to be migrated for this version, and a server uses it: stop that server first"
                )

        with _usable(database), database.opening() as connection:
            database.require_unicode(connection)
            bring_to_our_version(connection, database.name, database.damaged, require_unused)
            connection.exec_driver_sql(_FORGET)
        failed.pop_all()
    return database


def look_into_postgresql(url: URL) -> str:
    """Look whether a database has all tables, or none; returns its name. Raises as `open_postgresql`."""
    database = PostgreSQLDatabase(url, busy_s=0.0)
    try:
        with _usable(database), database.reading() as connection:
            database.require_unicode(connection)
            if inspect(connection).get_table_names():
                is_older(connection, database.name, database.damaged)
    finally:
        database.close()
    return database.name


def _usable(database: PostgreSQLDatabase) -> AbstractContextManager[None]:
    def why_not(error: DatabaseError | StoreUnavailableError) -> str:
        reason = error.orig if isinstance(error, DatabaseError) else error
        return f"{database.name} cannot be opened: {reason}; see to that and start again"

    return translated((DatabaseError, StoreUnavailableError), ConfigError, why_not)
