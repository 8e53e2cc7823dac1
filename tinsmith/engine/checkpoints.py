"""Saved checkpoints: their rows in the store, their files, and what a client may ask of them.

The files of a checkpoint lie at a place of their own that no client chose, are written once and never changed. The row points to them, so
a checkpoint is replaced by new files and a new row.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from tinsmith.errors import TinsmithError, UserError
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.training.backend import Backend
from tinsmith.training.checkpoint import About, has_moments, read_about
from tinsmith.wire.paths import CheckpointKind, CheckpointPath


class Checkpoints:
    """All checkpoints of a data directory."""

    def __init__(self, store: Store, files: CheckpointFiles) -> None:
        self.store = store
        self.files = files

    def save(
        self,
        path: CheckpointPath,
        backend: Backend,
        ttl_seconds: float | None = None,
        overwrite: bool = False,
        user_metadata: dict[str, str] | None = None,
    ) -> str:
        """Save the model of `path` as it is now; returns the path. Raises UserError if the path is taken and `overwrite` is not set."""
        if not overwrite:
            self.check_free(path)

        def write(directory: Path) -> About:
            backend.save(path.model_id, directory, optimizer=path.kind == "training")
            return read_about(directory)

        return self.add(path, write, ttl_seconds, user_metadata).tinker_path

    def check_free(self, path: CheckpointPath) -> None:
        """Raise UserError if there is a checkpoint of this path."""
        if self.store.checkpoint(str(path)) is not None:
            raise UserError(f"{path} exists already; use another name" + (", or overwrite=True" if path.kind == "training" else ""))

    def add(
        self,
        path: CheckpointPath,
        write: Callable[[Path], About],
        ttl_seconds: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> Checkpoint:
        """A new checkpoint; one of the same path is replaced. `write` makes a directory of its files, complete, and says what they are."""
        place = self.files.new_place()
        self.store.announce_checkpoint(place)
        try:
            with self.files.written(place) as directory:
                about = write(directory)
                size_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
                has_optimizer = has_moments(directory)
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
            raise TinsmithError(f"{path} could not be written: {error}; see to that and save again") from error
        now = time.time()
        checkpoint = Checkpoint(
            tinker_path=str(path),
            model_id=path.model_id,
            kind=path.kind,
            name=path.name,
            directory=place,
            base_model=about.base_model,
            architecture=about.architecture,
            lora_config=asdict(about.shape),
            has_optimizer=has_optimizer,
            size_bytes=size_bytes,
            user_metadata=user_metadata,
            created_at=now,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
        )
        self.store.put_checkpoint(checkpoint)
        return checkpoint

    @contextmanager
    def opened(self, text: str, kind: CheckpointKind) -> Iterator[tuple[Checkpoint, Path]]:
        """A checkpoint and a directory of its files, to read while the body runs.

        Raises UserError for a path of another kind, NotFoundError if there is no such checkpoint, or it is deleted meanwhile.
        """
        checkpoint = self.store.require_checkpoint(text, kind)
        with self.files.fetched(checkpoint.directory) as directory:
            yield checkpoint, directory
