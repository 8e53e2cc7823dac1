"""Makes the tables of a new database, and migrates one of an older schema. SQLite and PostgreSQL alike."""

from collections.abc import Callable

from sqlalchemy import Connection, inspect, select

from tinsmith.errors import ConfigError
from tinsmith.store import schema

REVISIONS = "tinsmith.store:revisions"

Damaged = Callable[[str], ConfigError]
"""The error for a database of which this was found."""


def bring_to_our_version(
    connection: Connection, name: str, damaged: Damaged, require_unused: Callable[[], None] = lambda: None
) -> None:
    """Make or migrate the tables of the database that errors call `name`. Raises as `is_older`.

    `require_unused` raises ConfigError if a server uses it, before it is migrated.
    """
    if not inspect(connection).get_table_names():
        schema.metadata.create_all(connection)
        schema.alembic_version.create(connection)
        connection.execute(schema.alembic_version.insert().values(version_num=schema.REVISION))
    elif is_older(connection, name, damaged):
        require_unused()
        _upgrade(connection)


def is_older(connection: Connection, name: str, damaged: Damaged) -> bool:
    """Whether to migrate a database. Raises ConfigError: damaged, or of an unknown version."""
    tables = set(inspect(connection).get_table_names())
    if not tables:
        raise damaged("it is empty")
    stamped = schema.alembic_version.name in tables
    revision = connection.execute(select(schema.alembic_version.c.version_num)).scalar() if stamped else None
    if revision == schema.REVISION:
        missing = schema.metadata.tables.keys() - tables
        if missing:
            raise damaged(f"there is no table {', '.join(sorted(missing))}")
        return False
    if revision is None or not revision.isdecimal():
        raise damaged(f"it has tables, and its schema version is {revision!r}")
    if int(revision) > int(schema.REVISION):
        raise ConfigError(
            f"{name} has schema version {revision}, made by a newer Tinsmith; this one knows up to {schema.REVISION}: "
            "use the newer one, or another data_dir"
        )
    if int(revision) < int(schema.BASELINE):
        raise ConfigError(
            f"{name} has schema version {revision}, made before the first release; "
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
