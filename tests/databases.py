"""Both kinds of databases, as other programs use them, and a PostgreSQL of the tests' own.

It is started where it is installed; Debian's package brings it.
"""

import os
import pwd
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Connection, Engine, NullPool, create_engine

from tinsmith.store import postgresql
from tinsmith.store.database import URL_FILE, database_url
from tinsmith.store.sqlite import FILE_NAME

_NAMES = count()
_OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "max_connections": "300",
    "shared_buffers": "32MB",
    "client_connection_check_interval": "0",
}
_START_S = 120.0


def _program(name: str) -> str | None:
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return shutil.which(name) or (str(debian[-1]) if debian else None)


def plain_engine(data_dir: Path) -> Engine:
    """The database of a data directory, without anything that Tinsmith adds."""
    return create_engine(
        database_url(data_dir) or f"sqlite:///{data_dir / FILE_NAME}", poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )


def run_sql(data_dir: Path, *statements: str) -> list[tuple[Any, ...]]:
    """Run statements in the database of a data directory; returns the rows of the last one."""
    with plain_engine(data_dir).connect() as connection:
        results = [connection.exec_driver_sql(statement) for statement in statements]
        return [tuple(row) for row in results[-1]] if results[-1].returns_rows else []


@contextmanager
def locked(data_dir: Path) -> Iterator[Connection]:
    """Hold the lock of those who write, as another program may; until the connection is closed."""
    with plain_engine(data_dir).connect() as connection:
        is_sqlite = connection.dialect.name == "sqlite"
        lock = f"SELECT pg_advisory_xact_lock({postgresql.WRITERS})"
        for statement in ["BEGIN IMMEDIATE"] if is_sqlite else ["BEGIN", lock]:
            connection.exec_driver_sql(statement)
        yield connection
        if not connection.closed:
            connection.exec_driver_sql("ROLLBACK")


class PostgreSQL:
    """A cluster of databases in a directory, reached by a socket there. It refuses to run as root."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._user = (
            None if os.geteuid() else next(each for each in pwd.getpwall() if each.pw_name in ("postgres", "nobody"))
        )
        if self._user is not None:
            os.chown(directory, self._user.pw_uid, self._user.pw_gid)
        self._process: subprocess.Popen[bytes] | None = None
        self.run(
            "initdb",
            "--pgdata",
            str(directory / "data"),
            "--username",
            "tinsmith",
            "--no-sync",
            "--locale",
            "C",
            "--encoding",
            "UTF8",
            "--auth",
            "trust",
        )

    @property
    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": [], "cwd": self.directory}

    def run(self, name: str, *arguments: str) -> None:
        """Run one of PostgreSQL's programs."""
        program = _program(name)
        assert program is not None
        subprocess.run([program, *arguments], check=True, capture_output=True, **self._as_user)

    def start(self) -> None:
        """Start it, and wait until it answers."""
        program = _program("postgres")
        assert program is not None
        options = [f"-c{name}={value}" for name, value in _OPTIONS.items()]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [program, "-D", str(self.directory / "data"), "-k", str(self.directory), *options],
                stdout=log,
                stderr=log,
                **self._as_user,
            )
        deadline = time.monotonic() + _START_S
        while True:
            try:
                self.execute("SELECT 1")
            except psycopg.OperationalError:
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.02)
            else:
                return

    def stop(self, at_once: bool = True) -> None:
        """End it: at once, as after `pg_ctl stop -m immediate`, or in order."""
        assert self._process is not None
        (self._process.send_signal(3) if at_once else self._process.send_signal(2))
        self._process.wait()

    def restart(self, away_s: float = 0.0) -> None:
        """As a crash of all of it, from which it recovers: `pg_ctl restart -m immediate`."""
        self.stop()
        time.sleep(away_s)
        self.start()

    def execute(self, statement: str, database: str = "postgres") -> list[tuple[Any, ...]]:
        """Run a statement, and return its rows."""
        with psycopg.connect(host=str(self.directory), user="tinsmith", dbname=database, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    def new_database(self, options: str = "") -> str:
        """The name of a new, empty database."""
        name = f"d{os.getpid()}_{next(_NAMES)}"
        self.execute(f"CREATE DATABASE {name} {options}")
        return name

    def url(self, database: str) -> str:
        return f"postgresql+psycopg://tinsmith@/{database}?host={self.directory}"

    def serve(self, data_dir: Path) -> str:
        """Give a data directory a new database; returns its name."""
        name = self.new_database()
        data_dir.mkdir(parents=True, exist_ok=True)
        (data_dir / URL_FILE).write_text(self.url(name))
        return name


def require_postgresql() -> None:
    """Skip the test where PostgreSQL is not installed."""
    if _program("initdb") is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")


@contextmanager
def running() -> Iterator[PostgreSQL]:
    """A new PostgreSQL, which is deleted at the end."""
    require_postgresql()
    directory = Path(tempfile.mkdtemp(prefix="tinsmith-pg-", dir="/tmp"))
    try:
        cluster = PostgreSQL(directory)
        cluster.start()
        try:
            yield cluster
        finally:
            cluster.stop()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
