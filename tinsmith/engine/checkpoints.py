"""Saved checkpoints: their rows in the store, their files below the data directory, and what a client may ask of them.

The directory of a checkpoint has a name of its own that no client chose, is written once and never changed. The row points to it, so a
checkpoint is replaced by a new directory and a new row.
"""

import logging
import shutil
import time
import uuid
from dataclasses import asdict
from pathlib import Path

from tinsmith.errors import UserError
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.training.backend import Backend
from tinsmith.training.checkpoint import has_moments, read_about
from tinsmith.wire.paths import CheckpointKind, CheckpointPath

CHECKPOINTS_DIR = "checkpoints"
"""Where the files lie below a data directory."""
_ORPHAN_S = 3600.0

log = logging.getLogger(__name__)


class Checkpoints:
    """All checkpoints of a data directory."""

    def __init__(self, store: Store, root: Path) -> None:
        """Their files lie in `root`, which is made if it is not there."""
        self.store = store
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def save(
        self,
        path: CheckpointPath,
        backend: Backend,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> str:
        """Save the model of `path` as it is now; returns the path. Raises UserError if the path is taken and `overwrite` is not set."""
        key = str(path)
        former = self.store.checkpoint(key)
        if not overwrite and former is not None:
            raise UserError(f"{key} exists already; use another name" + (", or overwrite=True" if path.kind == "training" else ""))
        directory = self.root / uuid.uuid4().hex
        backend.save(path.model_id, directory, optimizer=path.kind == "training")
        self.store.put_checkpoint(describe(path, directory, ttl_seconds, user_metadata))
        if former is not None:
            shutil.rmtree(self.root / former.directory)
        return key

    def find(self, text: str, kind: CheckpointKind) -> tuple[Checkpoint, Path]:
        """A checkpoint and the directory of its files. Raises UserError for a path of the other kind, NotFoundError if there is none."""
        checkpoint = self.store.require_checkpoint(text, kind)
        return checkpoint, self.root / checkpoint.directory

    def drop_expired(self) -> None:
        """Delete the checkpoints whose time is over."""
        for checkpoint in self.store.drop_expired_checkpoints():
            shutil.rmtree(self.root / checkpoint.directory)
            log.info("%s has expired and is deleted", checkpoint.tinker_path)

    def drop_orphans(self) -> None:
        """Delete what a process that died left behind: directories that belong to no checkpoint and that nobody can be writing now."""
        directories = list(self.root.iterdir())
        kept = self.store.checkpoint_directories()
        for directory in directories:
            if directory.name not in kept and directory.stat().st_mtime < time.time() - _ORPHAN_S:
                shutil.rmtree(directory)


def describe(path: CheckpointPath, directory: Path, ttl_seconds: float | None, user_metadata: dict[str, str] | None) -> Checkpoint:
    """The row of a checkpoint whose files are in `directory`."""
    about = read_about(directory)
    now = time.time()
    return Checkpoint(
        tinker_path=str(path),
        model_id=path.model_id,
        kind=path.kind,
        name=path.name,
        directory=directory.name,
        base_model=about.base_model,
        architecture=about.architecture,
        lora_config=asdict(about.shape),
        has_optimizer=has_moments(directory),
        size_bytes=sum(file.stat().st_size for file in directory.iterdir()),
        user_metadata=user_metadata,
        created_at=now,
        expires_at=None if ttl_seconds is None else now + ttl_seconds,
    )
