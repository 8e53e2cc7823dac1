"""Rows of checkpoints for the operations that write and read them.

A worker writes the files of a checkpoint once, to a directory of their own, and the row points to them. So a checkpoint is replaced by
new files and a new row. A save is acknowledged when first the files and then the row are on the disk.
"""

import time
from contextlib import suppress
from typing import Any

from tinsmith.engine.running import Steps, until_stored
from tinsmith.errors import StoreUnavailableError, UserError
from tinsmith.protocol.work import ExportModel, SaveModel
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.wire.paths import CheckpointPath


class CheckpointRows:
    """All checkpoints of a data directory."""

    def __init__(self, store: Store, files: CheckpointFiles) -> None:
        self.store = store
        self.files = files

    def check_free(self, path: CheckpointPath) -> None:
        """Raise UserError if there is a checkpoint of this path."""
        if self.store.checkpoint(str(path)) is not None:
            raise UserError(f"{path} exists already; use another name" + (", or overwrite=True" if path.kind == "training" else ""))

    def announce(
        self,
        path: CheckpointPath,
        base_model: str,
        architecture: str,
        lora_config: dict[str, Any],
        ttl_seconds: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the row of a checkpoint that is going to be written, without what only its files tell. Its directory is new and known."""
        directory = self.files.new_place()
        self.store.announce_checkpoint(directory)
        now = time.time()
        return {
            "tinker_path": str(path),
            "model_id": path.model_id,
            "kind": path.kind,
            "name": path.name,
            "directory": directory,
            "base_model": base_model,
            "architecture": architecture,
            "lora_config": lora_config,
            "user_metadata": user_metadata,
            "created_at": now,
            "expires_at": None if ttl_seconds is None else now + ttl_seconds,
        }

    def written(self, call: SaveModel | ExportModel) -> Steps[Checkpoint]:
        """Let a worker write the files of an announced checkpoint, then put its row on the disk; one of the same path is replaced.

        Raises TinsmithError if the disk or the object store does not take it; then there is none.
        """
        found = yield call
        checkpoint = Checkpoint(**call.checkpoint, **found)
        yield from until_stored(lambda: self.store.put_checkpoint(checkpoint))
        return checkpoint

    def check_still_there(self, tinker_path: str) -> None:
        """Raise NotFoundError if a checkpoint whose files could not be read has been deleted meanwhile."""
        with suppress(StoreUnavailableError):
            self.store.require_checkpoint(tinker_path)
