"""Reads weights to sample from the files of checkpoints and of snapshots that have left the memory."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.memory.budget import snapshot_bytes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.machine import require_memory
from tinsmith.protocol.weights import WeightsRef
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.shared import SavedRows, SharedCheckpoints, require_sampled
from tinsmith.training.checkpoint import read_about, read_state, weights_from
from tinsmith.worker.checkpoint_files import opened_files
from tinsmith.worker.spill import Key, Written

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Snapshot:
    """Weights in memory that can be sampled."""

    weights: Weights
    expires_at: float | None = None
    """Unix time from which a checkpoint may not be sampled any more."""


@dataclass(frozen=True)
class WeightsReader:
    """Reads weights of these base models. Any thread may do so."""

    bases: Mapping[str, BaseModel]
    rows: SavedRows
    files: CheckpointFiles
    shared: SharedCheckpoints | None
    """Where checkpoints are looked for that are not among the `rows` of the database."""

    def checkpoint(self, key: Key) -> Snapshot:
        """Read a checkpoint by its path. Raises NotFoundError if it is gone, UserError if it fits neither base nor memory."""
        path = key[1]
        checkpoint = require_sampled(self.rows, self.shared, path)
        ref = WeightsRef(key[0], checkpoint.directory, path)
        try:
            with opened_files(self.files, checkpoint.directory, optimizer=False) as directory:
                return Snapshot(self._read(key, directory, ref), checkpoint.expires_at)
        except TinsmithError:
            require_sampled(self.rows, self.shared, path)  # it may have been deleted while its files were read
            raise

    def spilled(self, key: Key, written: Written) -> Snapshot:
        """Read a snapshot that was written to disk. Raises as `checkpoint`."""
        try:
            return Snapshot(self._read(key, written.directory, written.ref))
        except FileNotFoundError as error:
            log.warning("%s, files of snapshot %s, was deleted", written.directory, key[1])  # clients are not told where it was
            raise NotFoundError(f"the files of snapshot {key[1]} were deleted; save the weights again") from error

    def _read(self, key: Key, directory: Path, ref: WeightsRef) -> Weights:
        base_model, weights_id = key
        base = self.bases[base_model]
        shape = read_about(directory).shape
        if shape.rank == 0:
            size = snapshot_bytes(sum(parameter.numel() for parameter in base.full_targets(shape).values()), base.dtype)
            require_memory(f"sampling from {weights_id}", size, base.device)
        return weights_from(read_state(directory, base), base, ref)
