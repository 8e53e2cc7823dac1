"""Opening a store, and what two processes see of each other.

Invariant: A database of an older schema is migrated or left as it was; one of a newer or unreleased schema is refused.
"""

import random
import shutil
import sqlite3
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import MetaData, select, text
from sqlalchemy.schema import CreateIndex, CreateTable

from tests.databases import locked, plain_engine, run_sql
from tests.preloaded import REAL_PYTHON
from tests.store.test_commands import MODEL, SESSION, create_command, done
from tinsmith.errors import ConfigError, NotFoundError, StoreUnavailableError, UserError
from tinsmith.store import ids, schema, versions
from tinsmith.store.catalog import publish_checkpoint
from tinsmith.store.records import Checkpoint, NewCommand, SamplingSession
from tinsmith.store.sqlite import FILE_NAME
from tinsmith.store.store import Store
from tinsmith.wire.paths import parse_path

DESCRIPTION = {"tags": ["a"], "user_metadata": {"k": 1}, "sdk_version": "0", "project_id": None, "display_name": "run"}


@pytest.mark.parametrize("name", ["a::b", "a?b", "a#b", "a%20b", "a=b c", "ü&~"])
def test_a_directory_of_any_name_has_its_database(name: str, tmp_path: Path) -> None:
    """To SQLAlchemy `a?b` as text of a URL was the file `a`, in the directory above."""
    with_name = tmp_path / name
    with_name.mkdir()
    Store.open(with_name).create_session("s", DESCRIPTION)
    assert (with_name / FILE_NAME).exists()
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert Store.open(with_name).session("s") is not None


MADE_UP = """
from alembic import op
from sqlalchemy import Column, Text

revision, down_revision = "13", "12"

def upgrade():
    op.add_column("sessions", Column("mood", Text, server_default="calm"))
    op.create_index("ix_sessions_mood", "sessions", ["mood"])
"""


def next_version(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this Tinsmith one whose schema has a made-up revision more."""
    with as_file(files("tinsmith.store") / "revisions") as revisions:
        shutil.copytree(revisions, directory)
    (directory / "versions" / "v13_made_up.py").write_text(MADE_UP)
    monkeypatch.setattr(schema, "REVISION", "13")
    monkeypatch.setattr(versions, "REVISIONS", str(directory))


@pytest.mark.usefixtures("database")
def test_a_database_of_the_version_before_is_migrated_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Store.open(tmp_path)) as store:
        store.create_session("s", DESCRIPTION)
    next_version(tmp_path / "revisions", monkeypatch)
    for _ in range(2):
        with closing(Store.open(tmp_path)) as store:
            assert store.session("s") is not None
        assert run_sql(tmp_path, "SELECT session_id, mood FROM sessions") == [("s", "calm")]
        assert run_sql(tmp_path, "SELECT version_num FROM alembic_version") == [("13",)]


@pytest.mark.usefixtures("database")
def test_a_migration_that_fails_leaves_the_database_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store.open(tmp_path).close()
    next_version(tmp_path / "revisions", monkeypatch)
    # The last thing that the revision wants to make
    run_sql(tmp_path, "CREATE INDEX ix_sessions_mood ON sessions (session_id)")
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match=r'ix_sessions_mood"? already exists'):
        Store.open(tmp_path)
    assert contents(tmp_path) == before


def contents(data_dir: Path) -> list[str]:
    """All tables with their columns and indexes, and the version of the schema."""
    with plain_engine(data_dir).connect() as connection:
        tables = MetaData()
        tables.reflect(connection)
        made = [CreateTable(table) for table in tables.sorted_tables]
        made_later = [CreateIndex(index) for table in tables.sorted_tables for index in table.indexes]
        return sorted([str(each) for each in [*made, *made_later]]) + [
            str(row) for row in connection.execute(select(schema.alembic_version))
        ]


def test_every_revision_leads_to_the_next_and_is_installed(store: Store, tmp_path: Path) -> None:
    """A new database has today's schema, and is opened without alembic: importing it would make every start slower."""
    with plain_engine(tmp_path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.REVISION
    directory = files("tinsmith.store") / "revisions"
    revisions = [revision.revision for revision in ScriptDirectory(str(directory)).walk_revisions()]
    assert revisions == [str(n) for n in range(int(schema.REVISION), int(schema.BASELINE) - 1, -1)]
    # What is no package is not in the wheel.
    assert all((place / "__init__.py").is_file() for place in (directory, directory / "versions"))
    code = (
        "import sys; from pathlib import Path; from tinsmith.store.store import Store; Store.open(Path(sys.argv[1])); "
    )
    command = [REAL_PYTHON, "-c", code + "sys.exit('alembic' in sys.modules)", str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 0


UNKNOWN = r" is damaged: it has tables, and its schema version is (None|'x')\. Put back a copy"
NEWER = "schema version 99, made by a newer Tinsmith; this one knows up to 12: use the newer one, or another data_dir"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("UPDATE alembic_version SET version_num = '99'", NEWER),
        (
            "UPDATE alembic_version SET version_num = '4'",
            "version 4, made before the first release; this Tinsmith migrates from 5 on",
        ),
        ("UPDATE alembic_version SET version_num = 'x'", UNKNOWN),
        ("DELETE FROM alembic_version", UNKNOWN),
        ("DROP TABLE alembic_version", UNKNOWN),
    ],
)
@pytest.mark.usefixtures("database")
def test_a_database_of_another_version_or_of_none_is_refused(tmp_path: Path, change: str, why: str) -> None:
    Store.open(tmp_path).close()
    run_sql(tmp_path, change)
    with pytest.raises(ConfigError, match=why):
        Store.open(tmp_path)


def test_a_data_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="data_dir"):
        Store.open(tmp_path / "file")


def test_every_client_of_a_sampling_session_gets_a_number_of_its_own(store: Store, tmp_path: Path) -> None:
    store.create_session("s", DESCRIPTION)
    store.create_sampling_session(SamplingSession("s:sample:0", "s", "tiny"))
    assert [store.join_sampling_session("s:sample:0") for _ in range(2)] == [1, 2]
    store.close()
    assert Store.open(tmp_path).join_sampling_session("s:sample:0") == 3
    assert Store.open(tmp_path).join_sampling_session("s:sample:1") is None


def test_ids_have_the_form_that_the_sdk_builds() -> None:
    assert (ids.model_id("abc", 2), ids.sampling_session_id("abc", 0)) == ("abc:train:2", "abc:sample:0")
    assert ids.session_of("abc:train:2") == ids.session_of("abc:sample:0") == "abc"
    assert ids.parse_request_id(ids.request_id("abc:train:2", 7)) == ("abc:train:2", 7)
    assert [ids.is_sample(text) for text in ("abc:sample:0/3", "abc:train:0/3")] == [True, False]
    assert [ids.clone_of(seq_id) for seq_id in (0, 10**9 - 1, 10**9, 5 * 10**9 + 2)] == [0, 0, 1, 5]


def checkpoint(path: str, expires_at: float | None = None, directory: str = "d") -> Checkpoint:
    parts = parse_path(path)
    shape = {"rank": 8, "seed": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    return Checkpoint(
        path, *parts, directory, "tiny", "qwen3", shape, parts.kind == "training", 10, {"a": "b"}, 1.0, expires_at
    )


def test_checkpoints_are_found_by_path_and_kind_until_they_expire_or_are_replaced(store: Store) -> None:
    kept, expired = checkpoint("tinker://m/weights/a"), checkpoint("tinker://m/sampler_weights/b", time.time() - 1, "e")
    for each in (kept, expired):
        store.announce_checkpoint(each.directory)
        store.put_checkpoint(each)
    assert store.require_checkpoint(kept.tinker_path, "training") == kept
    with pytest.raises(UserError, match="were saved for training; sample from"):
        store.require_checkpoint(kept.tinker_path, "sampler")
    gone = r"^tinker://m/sampler_weights/b does not exist any more: it expired at \d{4}-.* UTC; save with a longer"
    with pytest.raises(NotFoundError, match=gone):
        store.require_checkpoint(expired.tinker_path, "sampler")
    assert (store.gone_checkpoints(), store.discarded_directories()) == ([expired], [])
    assert store.drop_gone_checkpoints() == [expired]
    assert store.discarded_directories() == ["e"]
    store.announce_checkpoint("f")
    store.put_checkpoint(replace(kept, directory="f"))
    assert sorted(store.discarded_directories()) == ["d", "e"]
    for directory in ("d", "e"):
        store.forget_directory(directory)
    assert (store.known_directories(), store.discarded_directories()) == ({"f"}, [])


def test_why_there_is_no_checkpoint_of_a_path_is_said(store: Store) -> None:
    store.create_session(SESSION, DESCRIPTION)
    store.append([create_command()])
    path, other = f"tinker://{MODEL}/weights/a", f"tinker://{MODEL}/weights/b"

    def reason(of: str = path) -> str:
        with pytest.raises(NotFoundError) as raised:
            store.require_checkpoint(of)
        return str(raised.value)

    assert reason("tinker://nobody/weights/a").endswith(
        "there is no model 'nobody' here; correct the path, or ask its server"
    )
    assert reason().endswith("it was never saved, was deleted, or expired long ago; its model has no checkpoint")
    store.append([NewCommand(MODEL, 1, "save_weights", b"")])
    assert reason() == f"{path} does not exist yet: 1 save of its model is queued; wait for the result of its save"
    store.record([done(1)])
    store.put_checkpoint(checkpoint(other))
    assert reason().endswith(f"it was never saved, was deleted, or expired long ago; there are {other}")


@pytest.mark.usefixtures("database")
def test_a_checkpoint_whose_row_was_not_taken_is_added_again_with_the_same_files(tmp_path: Path) -> None:
    store = Store.open(tmp_path, busy_s=0.05)
    row = checkpoint("tinker://m/weights/a", directory="d")
    store.announce_checkpoint("d")
    with locked(tmp_path), pytest.raises(StoreUnavailableError, match="another program has locked it: let that end"):
        store.put_checkpoint(row)
    assert store.known_directories() == {"d"}
    store.put_checkpoint(row)
    assert store.require_checkpoint("tinker://m/weights/a") == row
    publish_checkpoint(store, "tinker://m/weights/a", public=True)
    store.put_checkpoint(row)  # the answer to the former was lost
    assert store.require_checkpoint("tinker://m/weights/a") == replace(row, public=True)
    assert (store.known_directories(), store.discarded_directories()) == ({"d"}, [])


@pytest.mark.usefixtures("database")
def test_a_process_that_hardly_pauses_between_writes_keeps_no_other_from_writing(tmp_path: Path) -> None:
    """As a server to which many clients submit does, on a slow disk; an engine has outcomes to record meanwhile."""
    store, busy = Store.open(tmp_path, busy_s=1.0), Store.open(tmp_path)
    over, chance = threading.Event(), random.Random(0)

    def write() -> None:
        while not over.is_set():
            with busy.writing():
                time.sleep(chance.uniform(0.05, 0.1))
            time.sleep(0.002)

    with ThreadPoolExecutor(1) as thread:
        writing = thread.submit(write)
        try:
            for number in range(12):
                store.create_session(f"s{number}", DESCRIPTION)
                time.sleep(0.01)  # so that the next one has to wait too
        finally:
            over.set()
        writing.result()


def test_a_database_of_the_first_release_becomes_one_of_today(tmp_path: Path) -> None:
    """All that it holds belongs to the tenant `local`, and only imported checkpoints can be read by others."""
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript((Path(__file__).parent / "schema_5.sql").read_text())
        connection.execute(
            "INSERT INTO sessions (session_id, tags, sdk_version, created_at, last_seen_at) "
            "VALUES ('s', '[]', '', 1, 1)"
        )
        for run, public in ((MODEL, 1), ("imported", 0)):
            connection.execute(
                "INSERT INTO checkpoints (tinker_path, model_id, kind, name, directory, base_model, architecture, "
                "lora_config, has_optimizer, size_bytes, created_at, public) "
                "VALUES (?, ?, 'training', 'a', ?, 'tiny', 'qwen3', '{}', 1, 10, 1.0, ?)",
                (f"tinker://{run}/weights/a", run, run, public),
            )
        connection.commit()
    with closing(Store.open(tmp_path)) as store:
        assert store.tenant_of("s") == "local"
        assert [store.owns(run, "local") for run in ("s", MODEL, "imported", "x")] == [True, True, True, False]
        assert [store.is_public(f"tinker://{run}/weights/a") for run in (MODEL, "imported")] == [False, True]
    with plain_engine(tmp_path).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, schema.metadata) == []
        assert context.get_current_revision() == schema.REVISION


def test_engines_of_the_version_before_do_not_count_as_ones_that_have_begun_operations(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / FILE_NAME)) as connection:
        connection.executescript((Path(__file__).parent / "schema_5.sql").read_text())
    with plain_engine(tmp_path).begin() as migrating:
        config = Config(attributes={"connection": migrating})
        config.set_main_option("script_location", versions.REVISIONS)
        command.upgrade(config, "9")
        migrating.execute(text("INSERT INTO engine_starts (started_at, place, left_work) VALUES (1, 'here', true)"))
    Store.open(tmp_path).close()
    assert run_sql(tmp_path, "SELECT number, started_at, place, has_begun FROM engine_starts") == [(1, 1, "here", 0)]
