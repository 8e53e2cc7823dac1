"""What may go wrong between a process and PostgreSQL: tried again, or said, and nothing is applied twice.

Invariant: A change of the store is applied once or not at all, and its caller is told which, when a connection breaks,
a commit is slow or PostgreSQL crashes.
"""

import selectors
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Literal

import pytest

from tests.databases import PostgreSQL, run_sql, running
from tests.store.power_cut import recorded
from tests.store.test_commands import DESCRIPTION, MODEL, SESSION, create_command, done, step
from tests.store.test_store import next_version
from tinsmith.errors import ConfigError, StoreUnavailableError
from tinsmith.store import schema
from tinsmith.store.catalog import SessionFilter, describe_session, search_sessions
from tinsmith.store.database import URL_FILE, database_url, look_into, open_database, use_database
from tinsmith.store.lease import take_lease
from tinsmith.store.postgresql import WRITERS
from tinsmith.store.records import Outcome, Used
from tinsmith.store.sqlite import FILE_NAME, open_sqlite
from tinsmith.store.store import Store
from tinsmith.store.usage import add_usage, total, used_between

SOCKET = ".s.PGSQL.5432"
AMOUNT = {("alice", "tiny", SESSION): Used(trained_tokens=7)}


class Wire:
    """A way to PostgreSQL that can be cut while a commit is on it."""

    def __init__(self, directory: Path, to: Path) -> None:
        self.cut: Literal["", "before", "after", "answered"] = ""
        """When the next commit's connection breaks: before it arrives, after, or once it is answered."""
        self._to = to
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / SOCKET))
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            threading.Thread(target=self._carry, args=[client], daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as server, selectors.DefaultSelector() as selector:
            server.connect(str(self._to / SOCKET))
            selector.register(client, selectors.EVENT_READ, server)
            selector.register(server, selectors.EVENT_READ, client)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    data = b""
                    with suppress(ConnectionResetError):
                        data = key.fileobj.recv(2**16)
                    is_commit = self.cut and key.fileobj is client and b"COMMIT\0" in data
                    if not data or (is_commit and self.cut == "before"):
                        self.cut = "" if data else self.cut
                        return
                    key.data.sendall(data)
                    if is_commit:
                        if self.cut == "answered":
                            server.recv(2**16)
                        self.cut = ""
                        return


@pytest.fixture
def wire(postgresql: PostgreSQL, tmp_path_factory: pytest.TempPathFactory) -> Wire:
    return Wire(tmp_path_factory.mktemp("w"), postgresql.directory)


@pytest.fixture
def store(postgresql: PostgreSQL, wire: Wire, tmp_path: Path) -> Iterator[Store]:
    """A store with a model, whose connections go over `wire`."""
    url = postgresql.url(postgresql.new_database())
    directory = wire._listener.getsockname().rpartition("/")[0]
    (tmp_path / URL_FILE).write_text(url.replace(str(postgresql.directory), directory))
    with closing(Store.open(tmp_path)) as opened:
        opened.create_session(SESSION, DESCRIPTION)
        opened.append([create_command()])
        yield opened


@pytest.mark.parametrize("cut", ["after", "answered"])
def test_a_commit_whose_answer_is_lost_is_applied_once(
    store: Store, wire: Wire, cut: Literal["after", "answered"], caplog: pytest.LogCaptureFixture
) -> None:
    wire.cut = cut
    add_usage(store, AMOUNT, "a", 1)
    assert "the database has committed, though it could not say so" in caplog.text
    assert total(used_between(store, 0, time.time() + 1)) == Used(trained_tokens=7)


def test_a_commit_that_never_arrives_is_not_applied(store: Store, wire: Wire) -> None:
    wire.cut = "before"
    with pytest.raises(StoreUnavailableError, match="look whether PostgreSQL runs and can be reached"):
        add_usage(store, AMOUNT, "a", 1)
    assert total(used_between(store, 0, time.time() + 1)) == Used()
    add_usage(store, AMOUNT, "a", 1)
    assert total(used_between(store, 0, time.time() + 1)) == Used(trained_tokens=7)


def test_what_a_crash_takes_along_is_not_taken_for_the_commit_of_another(tmp_path: Path) -> None:
    """PostgreSQL gives the number of a transaction that is lost to the next one."""
    numbers: list[object] = []
    with running() as cluster:
        cluster.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")  # nothing is on the disk but with a commit
        cluster.restart()
        cluster.serve(tmp_path)
        with closing(Store.open(tmp_path)) as store, closing(Store.open(tmp_path)) as other:
            store.create_session(SESSION, DESCRIPTION)
            store.append([create_command()])
            lost = pytest.raises(StoreUnavailableError, match="look whether PostgreSQL runs")
            with lost, store.writing() as writing:
                numbers.append(writing.exec_driver_sql("SELECT txid_current()").scalar())
                writing.exec_driver_sql("UPDATE commands SET status = 'done'")
                cluster.restart()
                with other.writing() as another:
                    numbers.append(another.exec_driver_sql("SELECT txid_current()").scalar())
            assert numbers[0] == numbers[1]
            assert store.status(f"{MODEL}/0") == "queued"


SLOW_COMMIT = """
CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(1.5); RETURN NULL; END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW EXECUTE FUNCTION wait()
"""


def test_what_a_slow_commit_comes_to_is_waited_for(store: Store, wire: Wire, tmp_path: Path) -> None:
    """Its connection breaks in the middle, and PostgreSQL goes on with it for a while."""
    run_sql(tmp_path, SLOW_COMMIT.format("usage"))
    wire.cut = "after"
    began = time.monotonic()
    add_usage(store, AMOUNT, "a", 1)
    assert time.monotonic() - began > 1.4
    assert total(used_between(store, 0, time.time() + 1)) == Used(trained_tokens=7)


def test_nobody_waits_for_a_slow_commit_longer_than_for_a_lock(store: Store, wire: Wire, tmp_path: Path) -> None:
    run_sql(tmp_path, SLOW_COMMIT.format("usage"))
    with closing(Store.open(tmp_path, busy_s=0.2)) as impatient:
        wire.cut = "after"
        with pytest.raises(StoreUnavailableError, match="another program has locked it"):
            add_usage(impatient, AMOUNT, "a", 1)
    assert store.append([step(1)]) == [True]  # behind the slow one, which is in
    add_usage(store, AMOUNT, "a", 1)  # as one does that does not know
    assert total(used_between(store, 0, time.time() + 1)) == Used(trained_tokens=7)


def test_a_server_that_does_not_know_whether_it_took_the_lease_takes_it_again(
    store: Store, wire: Wire, tmp_path: Path
) -> None:
    run_sql(tmp_path, SLOW_COMMIT.format("lease"))
    with closing(Store.open(tmp_path, busy_s=0.2)) as impatient:
        impatient.write_for(take_lease(store, str(tmp_path)))
        store.close()
        wire.cut = "after"
        with pytest.raises(StoreUnavailableError, match="another program has locked it"):
            take_lease(impatient, str(tmp_path))
        run_sql(tmp_path, f"SELECT pg_advisory_lock({WRITERS})", "DROP TRIGGER slow ON lease")
        assert take_lease(impatient, str(tmp_path)) == 3
        assert impatient.append([step(1)]) == [True]


def test_connections_that_broke_while_nobody_used_them_are_replaced(postgresql: PostgreSQL, tmp_path: Path) -> None:
    postgresql.serve(tmp_path)
    end = (
        "SELECT count(pg_terminate_backend(pid, 100000)) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    with closing(Store.open(tmp_path)) as store:
        for number in range(20):
            with store.reading() as one, store.reading() as another:
                assert {each.exec_driver_sql("SELECT 1").scalar() for each in (one, another)} == {1}
            assert run_sql(tmp_path, end)[0][0] >= 2
            if number % 2:
                store.create_session(f"s{number}", DESCRIPTION)
            else:
                assert store.session("s") is None


def test_a_process_that_hangs_in_a_transaction_holds_others_up_for_a_while_only(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.store.postgresql._STUCK_S", 1)
    postgresql.serve(tmp_path)
    with closing(Store.open(tmp_path)) as hung, closing(Store.open(tmp_path)) as other:
        ended = pytest.raises(StoreUnavailableError, match="idle-in-transaction timeout; PostgreSQL must take")
        with ended, hung.writing():
            other.create_session("s", DESCRIPTION)
        assert other.session("s") is not None


@contextmanager
def raising(data_dir: Path, code: str) -> Iterator[None]:
    """Outcomes meet this error of PostgreSQL."""
    run_sql(
        data_dir,
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE 'no' USING ERRCODE = '{code}'; END $$",
        "CREATE TRIGGER failing BEFORE UPDATE ON commands FOR EACH ROW EXECUTE FUNCTION fail()",
    )
    yield
    run_sql(data_dir, "DROP TRIGGER failing ON commands", "DROP FUNCTION fail")


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        ("40001", "try again"),  # serialization failure
        ("40P01", "try again"),  # deadlock
        ("53100", "free disk, memory or connections of PostgreSQL"),
        ("25006", "PostgreSQL must take what is written: name the primary"),  # read only: a standby
        ("58030", "look for a full or broken disk of PostgreSQL"),
        ("57P01", "look whether PostgreSQL runs"),
    ],
)
def test_an_error_that_is_no_fault_of_the_statement_changes_nothing_and_says_what_to_do(
    store: Store, tmp_path: Path, code: str, remedy: str
) -> None:
    with raising(tmp_path, code), pytest.raises(StoreUnavailableError, match=f"at the moment: no.*; {remedy}"):
        store.record([done(0)])
    assert store.status(f"{MODEL}/0") == "queued"
    store.record([done(0)])
    assert store.status(f"{MODEL}/0") == "done"


def test_damage_is_named_with_its_remedy(store: Store, tmp_path: Path) -> None:
    with (
        raising(tmp_path, "XX001"),
        pytest.raises(ConfigError, match=r"is damaged: no.*Put back a copy \(made by `pg_"),
    ):
        store.record([done(0)])


def test_what_is_acknowledged_survives_the_death_of_postgresql(tmp_path: Path) -> None:
    """Also where its configuration would let it lose the last commits."""
    with running() as cluster:
        cluster.execute("ALTER SYSTEM SET synchronous_commit = 'off'")
        cluster.execute("ALTER SYSTEM SET wal_writer_delay = '10s'")
        cluster.restart()
        cluster.serve(tmp_path)
        with closing(Store.open(tmp_path)) as store:
            store.create_session(SESSION, DESCRIPTION)
            store.append([create_command()])
            for seq_id in range(1, 20):
                store.append([step(seq_id)])
                cluster.restart()
                assert store.status(f"{MODEL}/{seq_id}") == "queued"
                store.record([done(seq_id - 1)])
            assert [command.seq_id for command in store.queued(MODEL)] == [19]


def test_texts_that_postgresql_cannot_hold_are_shown_instead(store: Store) -> None:
    """The character 0; PostgreSQL would refuse a whole row for it."""
    store.record([Outcome(f"{MODEL}/0", None, None, "a\0b", "user")])
    assert getattr(store.outcome(f"{MODEL}/0"), "error", None) == "a\N{SYMBOL FOR NULL}b"
    assert store.session("\0") is None
    store.create_session("t", DESCRIPTION | {"user_metadata": {"k": "\\\0", "l\0": "\\u0000"}})
    assert describe_session(store, "t").user_metadata == {
        "k": "\\\N{SYMBOL FOR NULL}",
        "l\N{SYMBOL FOR NULL}": "\\u0000",
    }
    found = search_sessions(store, SessionFilter(user_metadata={"k": "\\\0"}), 10, time.time())
    assert [each.session_id for each in found] == ["t"]


def test_a_data_directory_keeps_the_url_of_its_database(postgresql: PostgreSQL, tmp_path: Path) -> None:
    url = postgresql.url(postgresql.new_database())
    with recorded() as disk:
        use_database(tmp_path / "data", url)
    disk.cut(tmp_path / "data", tmp_path / "after a power cut")
    assert database_url(tmp_path / "after a power cut") == database_url(tmp_path / "data")
    with pytest.raises(ConfigError, match=r"tinsmith\.db is damaged: file is not a database"):
        open_sqlite(tmp_path / "data", 0.1)  # as a Tinsmith does that knows no other database
    assert stat.S_IMODE((tmp_path / "data" / URL_FILE).stat().st_mode) == 0o600
    for again in ("", url, url.replace("tinsmith@", "tinsmith:secret@")):
        use_database(tmp_path / "data", again)
    assert "tinsmith:secret@" in (tmp_path / "data" / URL_FILE).read_text()
    with pytest.raises(
        ConfigError, match=r"is not that of data_dir=.*: name that, or correct .*database\.url"
    ) as refused:
        use_database(tmp_path / "data", url.replace("?", "x?").replace("tinsmith@", "tinsmith:secret@"))
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("nothing", "database_url is no URL of a PostgreSQL database; give it as postgresql"),
        ("mysql://a/b", r"database_url begins with mysql://, and only postgresql\+psycopg is possible"),
        (
            "postgresql+psycopg://a/b?password=secret",
            r"database_url holds password behind the \?; give it before the @",
        ),
    ],
)
def test_another_url_is_refused(tmp_path: Path, url: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refused:
        use_database(tmp_path, url)
    assert list(tmp_path.iterdir()) == []
    assert "secret" not in str(refused.value)


def test_no_database_is_migrated_under_a_server(
    postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = postgresql.serve(tmp_path)
    with closing(Store.open(tmp_path)) as store:
        store.hold()
        next_version(tmp_path / "revisions", monkeypatch)
        with pytest.raises(ConfigError, match="is to be migrated for this version, and a server uses it: stop that"):
            Store.open(tmp_path)
    Store.open(tmp_path).close()
    assert postgresql.execute("SELECT version_num FROM alembic_version", name) == [(schema.REVISION,)]


def test_a_database_in_a_file_is_not_left_behind(tmp_path: Path) -> None:
    Store.open(tmp_path).close()
    with pytest.raises(ConfigError, match=rf"has a database already, {FILE_NAME}: .*`tinsmith recover` later"):
        use_database(tmp_path, "postgresql+psycopg://host/name")


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_hold_all_texts_is_refused(
    postgresql: PostgreSQL, tmp_path: Path, encoding: str
) -> None:
    """PostgreSQL chooses SQL_ASCII where no locale is set."""
    name = postgresql.new_database(f"ENCODING '{encoding}' TEMPLATE template0")
    (tmp_path / URL_FILE).write_text(postgresql.url(name))
    for attempt in (open_database, look_into):
        with pytest.raises(
            ConfigError, match=f"has the encoding {encoding}, .*: CREATE DATABASE {name} ENCODING 'UTF8'"
        ):
            attempt(tmp_path)


def test_a_database_that_is_not_there_is_said_with_its_name(tmp_path: Path) -> None:
    """Its URL is not kept: it may be mistyped."""
    url = f"postgresql+psycopg://tinsmith:secret@/missing?host={tmp_path}"
    message = r"the PostgreSQL database missing on .* cannot be opened: "
    with pytest.raises(ConfigError, match=message) as refused:
        use_database(tmp_path, url)
    assert list(tmp_path.iterdir()) == []
    assert "secret" not in str(refused.value)
    (tmp_path / URL_FILE).write_text(url)
    with pytest.raises(ConfigError, match=message) as refused:
        open_database(tmp_path, busy_s=0.1)
    assert "secret" not in str(refused.value)
