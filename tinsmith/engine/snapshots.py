"""The frozen weights that sampling sessions are bound to: ephemeral snapshots, and checkpoints loaded when they are first sampled.

Over `limit_bytes` the least recently sampled leave the memory and come back on use. An ephemeral snapshot is written to disk then, once,
because nothing else holds it (`spill.py`); a checkpoint lies there already.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.spill import Key, Spill, Written
from tinsmith.errors import NotFoundError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights, snapshot_bytes
from tinsmith.models.machine import require_memory
from tinsmith.training.checkpoint import About, read_about, read_weights
from tinsmith.wire.paths import is_path

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """Weights in memory."""

    weights: Weights
    expires_at: float | None = None
    """Unix time from which a checkpoint may not be sampled any more."""


class Snapshots:
    """Frozen weights by base model and id."""

    def __init__(self, bases: Mapping[str, BaseModel], checkpoints: Checkpoints, spill: Path, limit_bytes: float) -> None:
        """Snapshots that memory has no room for go to the directory `spill`; what a former engine left there is deleted."""
        self.bases = bases
        self.checkpoints = checkpoints
        self.spill = Spill(spill)
        self.limit_bytes = limit_bytes
        self.held: OrderedDict[Key, Held] = OrderedDict()
        """In memory, least recently sampled first."""
        self.watchers: list[Callable[[str, str, Weights], None]] = []
        """Called with base model, id and weights of each publication."""

    def publish(self, base_model: str, snapshot_id: str, weights: Weights) -> None:
        """Keep frozen weights for the sampling sessions that are bound to this id, in the place of what they had before."""
        self.spill.drop((base_model, snapshot_id))
        self._hold((base_model, snapshot_id), Held(weights))
        for watch in self.watchers:
            watch(base_model, snapshot_id, weights)

    def withdraw(self, model_id: str) -> None:
        """Forget the model's snapshots. What is being sampled from them goes on."""
        for key in [key for key in (*self.held, *self.spill.keys()) if key[1].startswith(f"{model_id}/")]:
            self.held.pop(key, None)
            self.spill.drop(key)

    def find(self, base_model: str, weights_id: str) -> Weights:
        """The weights of that snapshot or path. Raises NotFoundError if they are gone, UserError if they fit neither base nor memory."""
        key = (base_model, weights_id)
        held = self.held.get(key) or self._load(key)
        if held.expires_at is not None and held.expires_at <= time.time():
            del self.held[key]
            raise NotFoundError(f"{weights_id} has expired")
        self.held.move_to_end(key)
        return held.weights

    def _load(self, key: Key) -> Held:
        weights_id = key[1]
        if is_path(weights_id):
            with self.checkpoints.opened(weights_id, "sampler") as (checkpoint, directory):
                held = Held(self._read(key, directory, weights_id), checkpoint.expires_at)
        else:
            match self.spill.find(key):
                case None:
                    raise NotFoundError(f"the weights of snapshot {weights_id} are gone; save them again")
                case Written(directory, version):
                    held = Held(self._read(key, directory, version))
                case weights:
                    held = Held(weights)
        self._hold(key, held)
        return held

    def _read(self, key: Key, directory: Path, version: str) -> Weights:
        base_model, weights_id = key
        base = self.bases[base_model]
        shape = read_about(directory).shape
        if shape.rank == 0:
            size = snapshot_bytes(sum(parameter.numel() for parameter in base.full_targets(shape).values()), base.dtype)
            require_memory(f"sampling from {weights_id}", size, base.device)
        weights = read_weights(directory, base, frozen=True)
        weights.version = version
        return weights

    def forget(self, path: str) -> None:
        """Look a checkpoint up again when it is next sampled: it was deleted, or expires at another time."""
        for key in [key for key in self.held if key[1] == path]:
            del self.held[key]

    def _hold(self, key: Key, held: Held) -> None:
        self.held[key] = held
        used = sum(other.weights.nbytes for other in self.held.values())
        for oldest in list(self.held)[:-1]:
            if used <= self.limit_bytes:
                return
            self._spill(oldest)
            used -= self.held.pop(oldest).weights.nbytes

    def _spill(self, key: Key) -> None:
        """Put an ephemeral snapshot on the disk. A checkpoint is on one."""
        base_model, weights_id = key
        if is_path(weights_id):
            return
        weights = self.held[key].weights
        self.spill.put(key, About.of(self.bases[base_model], weights.shape), weights)
        log.info("snapshot %s goes to disk: snapshots take more than %.3g GiB", weights_id, self.limit_bytes / 2**30)
