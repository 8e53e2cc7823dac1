"""Saved checkpoints: their rows in the store, their files, and what a client may ask of them.

The files of a checkpoint lie at a place of their own that no client chose, are written once and never changed. The row points to them, so
a checkpoint is replaced by new files and a new row. First the files are on the disk, then the row is; only then is a save acknowledged.
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from safetensors import SafetensorError

from tinsmith.errors import TinsmithError, UserError
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.manifest import NAME as MANIFEST
from tinsmith.store.manifest import REMEDY, read_manifest, verify_files, write_manifest
from tinsmith.store.records import Checkpoint
from tinsmith.store.store import Store
from tinsmith.training.backend import Backend
from tinsmith.training.checkpoint import OPTIMIZER_FILE, About, has_moments, read_about, write_state
from tinsmith.wire.paths import CheckpointKind, CheckpointPath

log = logging.getLogger(__name__)


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
            state = backend.copy_state(path.model_id, optimizer=path.kind == "training")
            write_state(state, directory)
            return state.about

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
        """A new checkpoint; one of the same path is replaced. `write` fills a directory with its files and says what they are.

        It is on the disk when this returns. Raises TinsmithError if the disk or the object store does not take it; then there is none.
        """
        place = self.files.new_place()
        self.store.announce_checkpoint(place)
        try:
            with self.files.written(place) as directory:
                about = write(directory)
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
                    has_optimizer=has_moments(directory),
                    size_bytes=sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()),
                    user_metadata=user_metadata,
                    created_at=now,
                    expires_at=None if ttl_seconds is None else now + ttl_seconds,
                )
                write_manifest(directory, checkpoint)
        except (OSError, SafetensorError) as error:  # safetensors has an error of its own for a disk that is full
            raise TinsmithError(f"{path} could not be written: {error}; see to that and save again") from error
        self.store.put_checkpoint(checkpoint)
        return checkpoint

    @contextmanager
    def opened(self, text: str, kind: CheckpointKind, optimizer: bool = False) -> Iterator[tuple[Checkpoint, Path]]:
        """A checkpoint and a directory of its files, to read while the body runs; they are what was written.

        Without `optimizer` the optimizer's file is not checked and must not be read. Raises UserError for a path of another kind,
        NotFoundError if there is no such checkpoint, or it is deleted meanwhile, TinsmithError naming a file that is damaged.
        """
        checkpoint = self.store.require_checkpoint(text, kind)
        with self.files.fetched(checkpoint.directory) as directory:
            self._verify(checkpoint, directory, optimizer)
            yield checkpoint, directory

    def _verify(self, checkpoint: Checkpoint, directory: Path, optimizer: bool) -> None:
        shown = self.files.shown(checkpoint.directory)
        try:
            written = read_manifest(directory, shown)
            if written is not None:
                verify_files(written, directory, shown, [name for name in written.files if optimizer or name != OPTIMIZER_FILE])
            else:
                self._pass_unverified(checkpoint, directory, shown)
        except TinsmithError:
            self.store.require_checkpoint(checkpoint.tinker_path)  # it may have been deleted while its files were read
            raise

    def _pass_unverified(self, checkpoint: Checkpoint, directory: Path, shown: str) -> None:
        """Warn of a checkpoint that has no manifest, because it is an old one. Raises TinsmithError if it is not."""
        if read_about(directory).format_version > 1:
            raise TinsmithError(f"{shown}/{MANIFEST} is missing; {REMEDY}")
        log.warning(
            "%s was saved by a Tinsmith that kept no checksums and no fingerprint of the base model: neither can be checked; "
            "save it again to have that",
            checkpoint.tinker_path,
        )
