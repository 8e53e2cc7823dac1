"""`tinsmith checkpoints`: lists checkpoints and brings deleted ones back, beside a server that runs too."""

import time
from pathlib import Path

from rich.table import Table

from tinsmith.commands.tables import table
from tinsmith.store.catalog import every_checkpoint, purge_checkpoint, restore_checkpoint
from tinsmith.store.checkpoints import recoverable_until
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import opened


def listed(data_dir: Path) -> Table | str:
    """A table of all checkpoints, oldest first."""
    with opened(data_dir) as store:
        found = every_checkpoint(store)
    rows = [(each.tinker_path, each.tenant, f"{each.size_bytes / 2**20:,.1f}", _state(each)) for each in found]
    return table(rows, ("path", "tenant", "MiB", "state")) if rows else "there are no checkpoints"


def _state(checkpoint: Checkpoint) -> str:
    if checkpoint.deleted_at is not None:
        return f"deleted, can be restored until {_minute(recoverable_until(checkpoint))}"
    ends = [] if checkpoint.expires_at is None else [f"until {_minute(checkpoint.expires_at)}"]
    return ", ".join([*(["public"] if checkpoint.public else []), *ends])


def _minute(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix))


def restore(data_dir: Path, path: str) -> None:
    """Bring a deleted checkpoint back. Raises NotFoundError."""
    with opened(data_dir) as store:
        restore_checkpoint(store, path)


def purge(data_dir: Path, path: str) -> None:
    """Let a deleted checkpoint go within a minute. Raises NotFoundError."""
    with opened(data_dir) as store:
        purge_checkpoint(store, path)
