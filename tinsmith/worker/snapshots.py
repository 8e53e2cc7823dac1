"""Frozen weights that sessions sample: ephemeral snapshots, and checkpoints, loaded when they are first sampled.

Over `memory_bytes` the least recently sampled leave the memory and come back on use. An ephemeral snapshot is written
to disk then, once; a checkpoint lies there already. Adapters are written when they are published, so that the next
worker has them if this one dies.

Clients do not say when they are done with a snapshot, and a training run makes one at every step. So it is dropped when
nobody has sampled it for `idle_s`, and over `disk_bytes` the least recently sampled are. The newest of each model and
what is being sampled are kept.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tinsmith.errors import NotFoundError, TinsmithError
from tinsmith.memory.budget import snapshot_bytes
from tinsmith.models.base import BaseModel
from tinsmith.models.full import Weights
from tinsmith.models.machine import require_memory
from tinsmith.observing.metrics import PUBLISHES
from tinsmith.protocol.shapes import WeightsRef
from tinsmith.sampling.sampler import ref_of
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.shared import SavedRows, SharedCheckpoints, require_sampled
from tinsmith.training.checkpoint import About, read_about, read_state, weights_from
from tinsmith.wire.paths import is_path
from tinsmith.worker.background import Background
from tinsmith.worker.checkpoint_files import opened_files
from tinsmith.worker.spill import Key, Spill, Written

log = logging.getLogger(__name__)

# Reads weights to sample from the files of checkpoints and of snapshots that have left the memory.


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
        """Read a checkpoint by its path.

        Raises NotFoundError if it is gone, UserError if it fits neither base nor memory.
        """
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
            # Clients are not told where it was
            log.warning("%s, files of snapshot %s, was deleted", written.directory, key[1])
            raise NotFoundError(f"the files of snapshot {key[1]} were deleted; save the weights again") from error

    def _read(self, key: Key, directory: Path, ref: WeightsRef) -> Weights:
        base_model, weights_id = key
        base = self.bases[base_model]
        shape = read_about(directory).shape
        if shape.rank == 0:
            size = snapshot_bytes(sum(parameter.numel() for parameter in base.full_targets(shape).values()), base.dtype)
            require_memory(f"sampling from {weights_id}", size, base.device)
        return weights_from(read_state(directory, base), base, ref)


# What stays in memory, what is written to the disk, and what is dropped.

_LOOK_S = 60.0
"""Seconds between two looks for idle snapshots."""


class Snapshots:
    """Frozen weights by base model and id."""

    def __init__(
        self,
        bases: Mapping[str, BaseModel],
        rows: SavedRows,
        files: CheckpointFiles,
        spill: Path,
        memory_bytes: float,
        disk_bytes: float = math.inf,
        idle_s: float = math.inf,
        shared: SharedCheckpoints | None = None,
    ) -> None:
        """Keep snapshots in directory `spill`, and take over what an earlier worker of the same engine left there.

        Checkpoints that are not among the `rows` of the database are looked for among the `shared` ones.
        """
        self.bases = bases
        self.read = WeightsReader(bases, rows, files, shared)
        self.spill = Spill(spill)
        self.memory_bytes = memory_bytes
        self.disk_bytes = disk_bytes
        self.idle_s = idle_s
        self.held: OrderedDict[Key, Snapshot] = OrderedDict()
        """Snapshots in memory, least recently sampled first."""
        self.sampled_at: dict[Key, float] = {}
        """Monotonic time at which each ephemeral snapshot was published or last sampled."""
        self.dropped: dict[Key, str] = {}
        """Why a snapshot of a model that still exists was dropped."""
        self.newest: dict[tuple[str, str], Key] = {}
        """The last snapshot of each model, by base model and model id."""
        self.watchers: list[Callable[[str, Weights], None]] = []
        """Called with base model and weights of each publication."""
        self.in_use: Callable[[], Iterable[Key]] = tuple
        """Keys of the weights that are sampled now."""
        self._reading: set[Key] = set()
        """Weights that are being read and have not changed since that began."""
        self._looked_at = time.monotonic()
        self._refs = self.spill.refs()
        """Identity of each ephemeral snapshot."""
        for base_model, snapshot_id in self._refs:
            self._note(base_model, snapshot_id)

    def publish(self, base_model: str, snapshot_id: str, weights: Weights) -> None:
        """Keep frozen weights for the sessions that are bound to this id, in the place of what they had before."""
        key = (base_model, snapshot_id)
        self.spill.drop(key)
        self._reading.discard(key)
        self._refs[key] = ref_of(weights, base_model)
        self._note(base_model, snapshot_id)
        self._keep(key, Snapshot(weights))
        PUBLISHES.labels(base_model).inc()
        self._drop_beyond_disk()
        for watch in self.watchers:
            watch(base_model, weights)

    def _note(self, base_model: str, snapshot_id: str) -> None:
        """Note that there is a snapshot, which is its model's newest."""
        key = (base_model, snapshot_id)
        self.sampled_at[key] = time.monotonic()
        if not ids.is_inflight(snapshot_id):
            self.newest[base_model, _model_of(snapshot_id)] = key

    def replicate(self, threads: Background, base_model: str, snapshot_id: str, weights: Weights) -> None:
        """Let a thread write a snapshot that was just published to the disk, for the worker after this one."""
        key, ref = (base_model, snapshot_id), ref_of(weights, base_model)
        about = About.of(self.bases[base_model], weights.shape)

        def then(ended: "Future[Written]") -> None:
            error = ended.exception()
            if error is None:
                self.spill.take(key, ended.result(), wanted=self._refs.get(key) == ref)
            else:
                log.warning("snapshot %s would be lost with this worker: %s", snapshot_id, error)

        threads.run(partial(self.spill.write, key, about, weights), then)

    def withdraw(self, model_id: str) -> None:
        """Forget the model's snapshots. What is being sampled from them goes on."""
        for key in [key for key in (*self.sampled_at, *self.dropped) if _model_of(key[1]) == model_id]:
            self._remove(key)
            self.dropped.pop(key, None)
            self.newest.pop((key[0], model_id), None)

    def find(self, base_model: str, weights_id: str) -> Weights | None:
        """Return weights by snapshot or path; None if they are to be read first (`reader`).

        Raises NotFoundError if they have expired.
        """
        key = (base_model, weights_id)
        held = self.held.get(key)
        if held is None:
            return None
        if held.expires_at is not None and held.expires_at <= time.time():
            del self.held[key]
            raise NotFoundError(f"{weights_id} has expired")
        self.held.move_to_end(key)
        if key in self.sampled_at:
            self.sampled_at[key] = time.monotonic()
        return held.weights

    def reader(self, base_model: str, weights_id: str) -> Callable[[], Snapshot]:
        """Return a function for any thread that reads weights which are not in memory, for `hold`.

        Both raise NotFoundError, with the reason, if they are gone; the function also UserError if they fit neither
        base nor memory.
        """
        key = (base_model, weights_id)
        if is_path(weights_id):
            self._reading.add(key)
            return partial(self.read.checkpoint, key)
        found = self.spill.find(key)
        if found is None:
            why = f": {self.dropped[key]}; weights that are saved under a name are kept" if key in self.dropped else ""
            raise NotFoundError(f"the weights of snapshot {weights_id} are gone{why}; save them again")
        self._reading.add(key)
        if isinstance(found, Written):
            return partial(self.read.spilled, key, found)
        return partial(Snapshot, found)

    def hold(self, key: Key, read: Callable[[], Snapshot]) -> None:
        """Keep what a `reader` has read; `read` returns it, or raises why it could not be read.

        Neither counts if the weights were published again, withdrawn or forgotten meanwhile: look for them again.
        """
        if key in self._reading:
            self._reading.remove(key)
            self._keep(key, read())

    def drop_idle(self) -> None:
        """Drop the snapshots that nobody has sampled for `idle_s`. Call it often: it looks once a minute."""
        now = time.monotonic()
        if now - self._looked_at < min(_LOOK_S, self.idle_s / 4):
            return
        self._looked_at = now
        self._note_use()
        kept = self._kept()
        for key in [key for key, at in self.sampled_at.items() if now - at > self.idle_s and key not in kept]:
            self._drop(key, f"nobody had sampled them for {self.idle_s / 3600:.4g} hours (--snapshot-idle-h)")

    def forget(self, path: str) -> None:
        """Look a checkpoint up again when it is next sampled: it was deleted, or expires at another time."""
        self._reading = {key for key in self._reading if key[1] != path}
        for key in [key for key in self.held if key[1] == path]:
            del self.held[key]

    def _keep(self, key: Key, held: Snapshot) -> None:
        """Keep weights in memory, which the least recently sampled leave if there is no room for all."""
        self.held[key] = held
        for oldest in list(self.held)[:-1]:
            if self._used() <= self.memory_bytes:
                return
            self._spill(oldest)
            del self.held[oldest]

    def _used(self) -> int:
        """Bytes of all weights in memory, of which some may share theirs."""
        held = [other.weights for other in self.held.values()]
        return sum({id(each.compared()[0]): each.nbytes for each in held}.values())

    def _spill(self, key: Key) -> None:
        """Put an ephemeral snapshot on the disk; a checkpoint lies there."""
        base_model, weights_id = key
        if is_path(weights_id):
            return
        weights = self.held[key].weights
        self.spill.put(key, About.of(self.bases[base_model], weights.shape), weights)
        log.info("snapshot %s goes to disk: snapshots take more than %.3g GiB", weights_id, self.memory_bytes / 2**30)

    def _drop_beyond_disk(self) -> None:
        """Drop the least recently sampled of those on the disk until the rest fits."""
        sizes = self.spill.sizes()
        used = sum(sizes.values())
        if used <= self.disk_bytes:
            return
        self._note_use()
        kept = self._kept()
        for key in sorted(sizes.keys() - kept, key=lambda key: self.sampled_at[key]):
            if used <= self.disk_bytes:
                return
            used -= sizes[key]
            if key in self.held:
                self.spill.drop(key)  # it is written again if it leaves the memory
            else:
                limit = f"{self.disk_bytes / 2**30:.4g} GiB (--snapshot-disk-gib)"
                self._drop(key, f"they were sampled least recently of snapshots that take more disk than {limit}")

    def _note_use(self) -> None:
        """Mark the weights in use as sampled now."""
        now = time.monotonic()
        for key in self.in_use():
            if key in self.sampled_at:
                self.sampled_at[key] = now

    def _kept(self) -> set[Key]:
        """Return the keys that are never dropped."""
        return {*self.newest.values(), *self.in_use(), *(key for key in self.sampled_at if ids.is_inflight(key[1]))}

    def _drop(self, key: Key, reason: str) -> None:
        self._remove(key)
        self.dropped[key] = reason
        log.info("snapshot %s is dropped: %s", key[1], reason)

    def _remove(self, key: Key) -> None:
        self.sampled_at.pop(key, None)
        self._refs.pop(key, None)
        self.held.pop(key, None)
        self._reading.discard(key)
        self.spill.drop(key)


def _model_of(snapshot_id: str) -> str:
    """The model that a snapshot was taken of."""
    return snapshot_id.rpartition("/")[0]
