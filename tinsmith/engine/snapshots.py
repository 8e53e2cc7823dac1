"""The frozen weights that sampling sessions are bound to: ephemeral snapshots, and checkpoints loaded when they are first sampled.

Over `limit_bytes` the least recently sampled leave the memory and come back on use. An ephemeral snapshot is written to disk then, once,
because nothing else holds it; a checkpoint lies there already.
"""

import logging
import shutil
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.errors import NotFoundError
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.training.checkpoint import About, read_adapter, write_checkpoint
from tinsmith.wire.paths import is_path

log = logging.getLogger(__name__)

Key = tuple[str, str]
"""Name of the base model, and the id of a snapshot or the path of a checkpoint."""


@dataclass(frozen=True)
class Held:
    """Weights in memory."""

    adapter: Adapter
    expires_at: float | None = None
    """Unix time from which a checkpoint may not be sampled any more."""


class Snapshots:
    """Frozen adapters by base model and id."""

    def __init__(self, bases: Mapping[str, BaseModel], checkpoints: Checkpoints, spill: Path, limit_bytes: float) -> None:
        """What a former engine left in the directory `spill` is deleted: its snapshots ended with it."""
        self.bases = bases
        self.checkpoints = checkpoints
        self.spill = spill
        self.limit_bytes = limit_bytes
        self.held: OrderedDict[Key, Held] = OrderedDict()
        """In memory, least recently sampled first."""
        self.written: dict[Key, Path] = {}
        """Ephemeral snapshots that are on disk."""
        shutil.rmtree(spill, ignore_errors=True)
        spill.mkdir(parents=True)

    def publish(self, base_model: str, snapshot_id: str, adapter: Adapter) -> None:
        """Keep a frozen adapter for the sampling session that is bound to it."""
        self._hold((base_model, snapshot_id), Held(adapter))

    def withdraw(self, model_id: str) -> None:
        """Forget the model's snapshots. What is being sampled from them goes on."""
        for key in [key for key in (*self.held, *self.written) if key[1].startswith(f"{model_id}/")]:
            self.held.pop(key, None)
            if key in self.written:
                shutil.rmtree(self.written.pop(key))

    def find(self, base_model: str, weights_id: str) -> Adapter:
        """The adapter of that snapshot or path. Raises NotFoundError if it is gone, UserError if it does not fit the base model."""
        key = (base_model, weights_id)
        held = self.held.get(key) or self._load(key)
        if held.expires_at is not None and held.expires_at <= time.time():
            del self.held[key]
            raise NotFoundError(f"{weights_id} has expired")
        self.held.move_to_end(key)
        return held.adapter

    def _load(self, key: Key) -> Held:
        base_model, weights_id = key
        expires_at = None
        if is_path(weights_id):
            checkpoint, directory = self.checkpoints.find(weights_id, "sampler")
            expires_at = checkpoint.expires_at
        elif key in self.written:
            directory = self.written[key]
        else:
            raise NotFoundError(f"the weights of snapshot {weights_id} are gone; save them again")
        held = Held(read_adapter(directory, self.bases[base_model]), expires_at)
        self._hold(key, held)
        return held

    def _hold(self, key: Key, held: Held) -> None:
        self.held[key] = held
        used = sum(other.adapter.nbytes for other in self.held.values())
        for oldest in list(self.held)[:-1]:
            if used <= self.limit_bytes:
                return
            self._write(oldest)
            used -= self.held.pop(oldest).adapter.nbytes

    def _write(self, key: Key) -> None:
        """Put an ephemeral snapshot on the disk, unless it is there or can be had again."""
        base_model, weights_id = key
        if is_path(weights_id) or key in self.written:
            return
        adapter, directory = self.held[key].adapter, self.spill / uuid.uuid4().hex
        write_checkpoint(directory, About.of(self.bases[base_model], adapter.shape), adapter)
        self.written[key] = directory
        log.info("snapshot %s goes to disk: snapshots take more than %.3g GiB", weights_id, self.limit_bytes / 2**30)
