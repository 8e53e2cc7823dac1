"""Rows of checkpoints, and the operations that write and read them.

A worker writes the files of a checkpoint once, to a directory of their own, and the row points to them. So a checkpoint
is replaced by new files and a new row. A save is acknowledged when first the files and then the row are on the disk.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import BaseModel

from tinsmith.config import Config
from tinsmith.engine.history import History, Kept, Mark, Saved
from tinsmith.engine.model_state import Ended, LoadedModel, ModelStates, Steps, until_stored
from tinsmith.errors import StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.protocol.shapes import LoraShape, rank_refusal
from tinsmith.protocol.work import ExportModel, LoadModel, SaveModel
from tinsmith.store import ids
from tinsmith.store.files import CheckpointFiles
from tinsmith.store.keys import Retention, retention_of
from tinsmith.store.records import SESSION_END, Checkpoint, Command
from tinsmith.store.store import Store
from tinsmith.store.usage import living_bytes, make_room
from tinsmith.wire.paths import CheckpointPath
from tinsmith.wire.training_requests import (
    CreateFromCheckpointRequest,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

log = logging.getLogger(__name__)


class CheckpointRows:
    """All checkpoints of a data directory."""

    def __init__(self, store: Store, files: CheckpointFiles) -> None:
        self.store = store
        self.files = files

    def check_free(self, path: CheckpointPath) -> None:
        """Raise UserError if there is a checkpoint of this path."""
        if self.store.checkpoint(str(path)) is not None:
            raise UserError(
                f"{path} exists already; use another name" + (", or overwrite=True" if path.kind == "training" else "")
            )

    def check_storage(self, model_id: str) -> None:
        """Raise UserError if the keys of the model's tenant allow no more; deleted checkpoints make room.

        The server asks too, but of saves that wait behind each other it lets all in.
        """
        allowed = self.retention(model_id)
        tenant, limit = allowed.tenant, allowed.storage_bytes
        if limit is None:
            return
        if (stored := living_bytes(self.store, tenant)) >= limit:
            raise UserError(
                f"tenant {tenant!r} stores {stored:,} bytes of checkpoints, and its keys allow {limit:,}; "
                "delete some, or let them expire, and save again"
            )
        make_room(self.store, tenant, limit)

    def retention(self, model_id: str) -> Retention:
        """Return what the tenant of a model may store."""
        return retention_of(self.store, self.store.tenant_of(ids.session_of(model_id)))

    def announce(
        self,
        path: CheckpointPath,
        base_model: str,
        architecture: str,
        lora_config: dict[str, Any],
        ttl_seconds: float | None = None,
        user_metadata: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Return the row of a checkpoint that is going to be written, without what only its files tell.

        Its directory is new and known.
        """
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
            "tenant": self.store.tenant_of(ids.session_of(path.model_id)),
        }

    def written(
        self, call: SaveModel | ExportModel, command: Command | None, kept: int | None = None
    ) -> Steps[Checkpoint]:
        """Let a worker write an announced checkpoint's files, then store its row; one of the same path is replaced.

        Without a `command` the server saves the model for itself. Of its run and kind the newest `kept` stay.

        Raises TinsmithError if the disk or the object store does not take it; then there is none.
        """
        found = yield call
        checkpoint = Checkpoint(**call.checkpoint, **found)
        yield from until_stored(lambda: self.store.put_saved(checkpoint, command, kept))
        return checkpoint

    def check_still_there(self, tinker_path: str) -> None:
        """Raise NotFoundError if a checkpoint whose files could not be read has been deleted meanwhile."""
        with suppress(StoreUnavailableError):
            self.store.require_checkpoint(tinker_path)


# The operations: save, export and load. Each is a generator of steps (`model_state.py`).


@dataclass(eq=False)
class CheckpointOperations:
    """Saves models as checkpoints, and loads checkpoints as models."""

    config: Config
    rows: CheckpointRows
    models: ModelStates
    facts: Callable[[], Mapping[str, ModelFacts]]
    next_number: Callable[[], int]

    def save(self, command: Command, request: SaveWeightsRequest) -> Steps[Ended]:
        """Save weights and optimizer, to train on."""
        path = CheckpointPath(request.model_id, "training", request.path)
        saved = yield from self._saved(
            command, path, request.overwrite, request.ttl_seconds, user_metadata=request.user_metadata
        )
        files = Saved(str(path), saved["directory"], optimizer=True)
        return Ended({"path": str(path), "type": "save_weights"}, {"directory": saved["directory"]}, files)

    def save_for_sampler(self, command: Command, request: SaveWeightsForSamplerRequest) -> Steps[Ended]:
        """Save weights to sample from."""
        path = CheckpointPath(request.model_id, "sampler", request.path or "")
        saved = yield from self._saved(command, path, False, request.ttl_seconds, user_metadata=request.user_metadata)
        return Ended({"path": str(path), "type": "save_weights_for_sampler"}, {"directory": saved["directory"]})

    def save_external(self, command: Command, request: SaveWeightsExternalRequest) -> Steps[Ended]:
        """Export weights to download, encrypted for their recipients if there are any."""
        path = CheckpointPath(request.model_id, "external", request.path)
        recipients = list(request.age_encryption_recipients or [])
        saved = yield from self._saved(command, path, False, request.ttl_seconds, recipients=recipients)
        result = {"path": str(path), "size_bytes": saved["size_bytes"], "type": "save_weights_external"}
        return Ended(result, {"directory": saved["directory"]})

    def _saved(
        self,
        command: Command,
        path: CheckpointPath,
        overwrite: bool,
        ttl_seconds: float | None,
        user_metadata: dict[str, str] | None = None,
        recipients: Sequence[str] = (),
    ) -> Steps[dict[str, Any]]:
        """Save a model for its client; returns `directory` and `size_bytes`.

        An engine that has died may have done so, and not recorded it.
        """
        model = self.models.require(path.model_id)
        saved = self.rows.store.saved(command)
        if saved is not None:
            return saved
        self.rows.check_storage(path.model_id)
        if not overwrite:
            self.rows.check_free(path)
        checkpoint = yield from self._written(model, path, ttl_seconds, user_metadata, recipients, command)
        return {"directory": checkpoint.directory, "size_bytes": checkpoint.size_bytes}

    def _written(
        self,
        model: LoadedModel,
        path: CheckpointPath,
        ttl_seconds: float | None,
        user_metadata: dict[str, str] | None = None,
        recipients: Sequence[str] = (),
        command: Command | None = None,
    ) -> Steps[Checkpoint]:
        allowed = self.rows.retention(model.model_id)
        ttl_s = allowed.ttl_s(ttl_seconds)
        architecture = self.facts()[model.base_model].architecture
        row = self.rows.announce(path, model.base_model, architecture, asdict(model.shape), ttl_s, user_metadata)
        about = self.next_number(), model.base_model, model.model_id
        call = (
            ExportModel(*about, list(recipients), row)
            if path.kind == "external"
            else SaveModel(*about, path.kind == "training", row)
        )
        # What the server saves at a session's end expires, and is no reason to delete a save of the client
        kept = None if path.name == SESSION_END else allowed.kept_checkpoints
        return (yield from self.rows.written(call, command, kept))

    def keep(self, model_id: str) -> Steps[Ended]:
        """Save a model that the server is going to unload, if it was ever created."""
        model = self.models.find(model_id)
        if model is None:
            return Ended({})
        longest_s = self.rows.retention(model_id).checkpoint_ttl_s
        ttl_s = min(self.config.training.ended_model_ttl_s, math.inf if longest_s is None else longest_s)
        saved = yield from self._written(model, CheckpointPath(model_id, "training", SESSION_END), ttl_s)
        yield from until_stored(lambda: self.rows.store.unload_model(model_id))
        log.info(
            "model %s is kept as %s for %.3g days; go on with create_training_client_from_state_with_optimizer(%r)",
            model_id,
            saved.tinker_path,
            ttl_s / 86400,
            saved.tinker_path,
        )
        return Ended({})

    def create(self, model_id: str, request: CreateFromCheckpointRequest) -> Steps[Ended]:
        """Make a new model of a checkpoint."""
        checkpoint = self.rows.store.require_checkpoint(request.path, "training")
        base_model = find_base(request.base_model or checkpoint.base_model, self.facts())
        shape = LoraShape(**checkpoint.lora_config)
        require_rank(shape.rank, self.config.models.max_lora_rank)
        yield from self._restored(base_model, model_id, checkpoint, request.optimizer)
        files = Saved(checkpoint.tinker_path, checkpoint.directory, request.optimizer)
        self.models[model_id].loaded = LoadedModel(model_id, base_model, shape, History([Kept(files, Mark())]))
        result = {"path": request.path, "model_id": model_id, "type": "load_weights"}
        return Ended(result, {"directory": checkpoint.directory})

    def load(self, request: LoadWeightsRequest) -> Steps[Ended]:
        """Replace the weights of a model that nothing has happened to yet."""
        model = self.models.require(request.model_id)
        if request.seq_id != 1:
            raise UserError(
                f"load_weights must be the first request of a model, this one is seq_id {request.seq_id}; "
                "use create_training_client_from_state, which makes a new model"
            )
        checkpoint = self.rows.store.require_checkpoint(request.path, "training")
        saved = LoraShape(**checkpoint.lora_config)
        if replace(saved, seed=model.shape.seed) != model.shape:
            there, here = saved.differences(model.shape), model.shape.differences(saved)
            raise UserError(
                f"{request.path} was saved with {there}, the model was created with {here}; create one with {there}"
            )
        yield from self._restored(model.base_model, model.model_id, checkpoint, request.optimizer)
        files = Saved(checkpoint.tinker_path, checkpoint.directory, request.optimizer)
        model.history.loaded(files, request.seq_id)
        result = {"path": request.path, "model_id": request.model_id, "type": "load_weights"}
        return Ended(result, {"directory": checkpoint.directory})

    def _restored(self, base_model: str, model_id: str, checkpoint: Checkpoint, optimizer: bool) -> Steps[None]:
        path = checkpoint.tinker_path
        try:
            yield LoadModel(self.next_number(), base_model, model_id, path, checkpoint.directory, optimizer)
        except TinsmithError:
            self.rows.check_still_there(path)
            raise


def require_rank(rank: int, largest: int) -> None:
    """Raise UserError for adapters of a larger rank than this server trains."""
    if rank > largest:
        raise UserError(rank_refusal(rank, largest))


def writes_files(request: BaseModel) -> bool:
    """Whether it is a save whose copy of the model is written to files."""
    match request:
        case SaveWeightsForSamplerRequest():
            return request.path is not None
    return isinstance(request, SaveWeightsRequest | SaveWeightsExternalRequest)
