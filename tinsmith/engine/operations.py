"""Operations other than forward work: create, step, save and load. Each is a generator of steps (`running.py`)."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from pydantic import BaseModel

from tinsmith.config import Config
from tinsmith.engine.checkpoints import CheckpointRows
from tinsmith.engine.model_state import Fresh, LoadedModel, Saved
from tinsmith.engine.running import Ended, Steps, until_stored
from tinsmith.errors import NotFoundError, TinsmithError, UserError
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import AdamSettings, LoraShape, rank_refusal
from tinsmith.protocol.work import (
    ClearGradients,
    CreateModel,
    DeleteModel,
    ExportModel,
    LoadModel,
    OptimStep,
    SaveModel,
    TakeSnapshot,
)
from tinsmith.store import ids
from tinsmith.store.files import kept_copies
from tinsmith.store.records import REJECTED, SESSION_END, Checkpoint, Command
from tinsmith.wire.json_body import parse_json
from tinsmith.wire.paths import CheckpointPath
from tinsmith.wire.training_requests import (
    OPERATIONS,
    AdamParams,
    CreateFromCheckpointRequest,
    CreateModelRequest,
    LoadWeightsRequest,
    OptimStepRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)

log = logging.getLogger(__name__)


class Operations:
    """Starts operations. `send` tells the workers; `facts` are those of the base models that they serve."""

    def __init__(
        self, config: Config, checkpoints: CheckpointRows, facts: Callable[[], Mapping[str, ModelFacts]], send: Callable[[Message], None]
    ) -> None:
        self.config = config
        self.checkpoints = checkpoints
        self.facts = facts
        self.send = send
        self.models: dict[str, LoadedModel] = {}
        self._numbers = iter(range(1, 2**63))

    def model(self, model_id: str) -> LoadedModel:
        if model_id not in self.models:
            raise NotFoundError(f"model {model_id} is not loaded: its create_model failed, or its session is over; create a model")
        return self.models[model_id]

    def next_number(self) -> int:
        return next(self._numbers)

    def read(self, command: Command) -> BaseModel:
        """Parse the request of a command. Raises TinsmithError."""
        payload = self.checkpoints.store.payload(command)
        if command.kind == REJECTED:
            raise UserError(payload.decode())
        return parse_json(OPERATIONS[command.kind], payload)

    def start(self, command: Command, request: BaseModel) -> Steps[Ended]:
        """Return the steps of a command. Raises TinsmithError: now, or from one of its steps."""
        match request:
            case CreateModelRequest():
                return self._create_model(command.model_id, request)
            case OptimStepRequest():
                return self._optim_step(command, request.adam_params)
            case SaveWeightsRequest():
                return self._save(request)
            case SaveWeightsForSamplerRequest(path=None):
                return self._snapshot(command, request)
            case SaveWeightsForSamplerRequest():
                return self._save_for_sampler(request)
            case SaveWeightsExternalRequest():
                return self._save_external(request)
            case CreateFromCheckpointRequest():
                return self._create_from_checkpoint(command.model_id, request)
            case LoadWeightsRequest():
                return self._load(request)
        raise UserError(f"operation {command.kind!r} is unknown")

    def after_failure(self, command: Command, reason: str) -> None:
        """Leave the model in a known state: a failed optim_step ends its step and drops the gradients, a failed contribution spoils it."""
        model = self.models.get(command.model_id)
        if model is None:
            return
        if command.kind == "optim_step":
            model.spoiled = None
            model.stepped_seq = command.seq_id
            self.send(ClearGradients(model.base_model, command.model_id))
        elif command.kind in ("forward_backward", REJECTED):
            self.spoil_step(command.model_id, f"seq_id {command.seq_id}: {reason}")

    def added(self, command: Command) -> None:
        if command.model_id in self.models:
            self.models[command.model_id].added_seq = command.seq_id

    def spoil_step(self, model_id: str, reason: str) -> None:
        """Let the next optim_step be refused: the gradients are not what the client asked for."""
        if model_id in self.models:
            self.models[model_id].spoiled = reason

    def keep(self, model_id: str) -> Steps[Ended]:
        """Save a model that the server is going to unload, if it was ever created."""
        if model_id not in self.models:
            return Ended({})
        ttl_s = self.config.training.ended_model_ttl_s
        saved = yield from self._written(self.models[model_id], CheckpointPath(model_id, "training", SESSION_END), ttl_s)
        yield from until_stored(lambda: self.checkpoints.store.unload_model(model_id))
        log.info(
            "model %s is kept as %s for %.3g days; go on with create_training_client_from_state_with_optimizer(%r)",
            model_id,
            saved.tinker_path,
            ttl_s / 86400,
            saved.tinker_path,
        )
        return Ended({})

    def unload(self, model_id: str) -> None:
        """Free a model, if it was ever created, and its snapshots."""
        model = self.models.pop(model_id, None)
        if model is not None:
            self.send(DeleteModel(model.base_model, model_id))

    def _create_model(self, model_id: str, request: CreateModelRequest) -> Steps[Ended]:
        base_model = find_base(request.base_model, self.facts())
        lora = request.lora_config
        self._check_rank(lora.rank)
        seed = _seed_of(model_id) if lora.seed is None else lora.seed
        shape = LoraShape(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        found = yield CreateModel(self.next_number(), base_model, model_id, asdict(shape))
        self.models[model_id] = LoadedModel(model_id, base_model, shape, origin=Fresh(shape))
        return Ended({"model_id": model_id, "type": "create_model"}, {"seed": seed} | found)

    def _check_rank(self, rank: int) -> None:
        largest = self.config.models.max_lora_rank
        if rank > largest:
            raise UserError(rank_refusal(rank, largest))

    def _optim_step(self, command: Command, adam: AdamParams) -> Steps[Ended]:
        model = self.model(command.model_id)
        if model.spoiled:
            reason, model.spoiled = model.spoiled, None
            raise UserError(f"the step was refused and the gradients are cleared, because an operation before it failed: {reason}")
        settings = AdamSettings(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm)
        copy, before = self._copy_after(model, command.seq_id)
        answer = yield OptimStep(self.next_number(), model.base_model, model.model_id, asdict(settings), copy, before)
        model.origin = Saved(f"the kept copy of model {model.model_id}", copy, optimizer=True, lasts=True) if answer["kept"] else None
        model.state += 1
        metrics = answer["metrics"] | ({} if model.has_gradients else self._without_gradients(model, command))
        model.stepped_seq = command.seq_id
        return Ended({"metrics": metrics})

    def _without_gradients(self, model: LoadedModel, command: Command) -> dict[str, float]:
        """Return the metrics of a step without gradients, which moved nothing: the client may have forgotten its forward_backward."""
        if not model.told_of_empty_step:
            model.told_of_empty_step = True
            log.warning(
                "%s is an optim_step without gradients, which changes nothing: no forward_backward has finished since the step before it, "
                "or since the model was made; it is obeyed, and no other one of this model is told here",
                command.request_id,
            )
        return {"without_gradients": 1.0}

    def _copy_after(self, model: LoadedModel, seq_id: int) -> tuple[str, str]:
        """Return where a step's copy goes, and where the one before is; none for full weights, which are too large."""
        if not self.config.training.kept_copies_gib or model.shape.rank == 0:
            return "", ""
        before = model.origin.directory if isinstance(model.origin, Saved) else ""
        return str(kept_copies(Path(self.config.data_dir), model.model_id) / str(seq_id)), before

    def _snapshot(self, command: Command, request: SaveWeightsForSamplerRequest) -> Steps[Ended]:
        model = self.model(command.model_id)
        inflight = request.kind == "inflight"
        yield TakeSnapshot(self.next_number(), model.base_model, model.model_id, command.request_id, inflight)
        session_id = ids.session_of(command.model_id)
        return Ended({"sampling_session_id": ids.sampling_session_id(session_id, request.sampling_session_seq_id or 0)})

    def _save(self, request: SaveWeightsRequest) -> Steps[Ended]:
        model = self.model(request.model_id)
        path = CheckpointPath(model.model_id, "training", request.path)
        if not request.overwrite:
            self.checkpoints.check_free(path)
        copied_state = model.state
        saved = yield from self._written(model, path, request.ttl_seconds, request.user_metadata)
        # A step may have been taken while the files were written: its state is not in them, and a model never goes further back.
        if model.state == copied_state and (model.origin is None or not model.origin.lasts):
            model.origin = Saved(saved.tinker_path, saved.directory, optimizer=True)
        return Ended({"path": saved.tinker_path, "type": "save_weights"}, {"directory": saved.directory})

    def _save_for_sampler(self, request: SaveWeightsForSamplerRequest) -> Steps[Ended]:
        model = self.model(request.model_id)
        path = CheckpointPath(model.model_id, "sampler", request.path or "")
        self.checkpoints.check_free(path)
        saved = yield from self._written(model, path, request.ttl_seconds, request.user_metadata)
        return Ended({"path": saved.tinker_path, "type": "save_weights_for_sampler"}, {"directory": saved.directory})

    def _save_external(self, request: SaveWeightsExternalRequest) -> Steps[Ended]:
        model = self.model(request.model_id)
        path = CheckpointPath(model.model_id, "external", request.path)
        self.checkpoints.check_free(path)
        recipients = list(request.age_encryption_recipients or [])
        saved = yield from self._written(model, path, request.ttl_seconds, recipients=recipients)
        result = {"path": saved.tinker_path, "size_bytes": saved.size_bytes, "type": "save_weights_external"}
        return Ended(result, {"directory": saved.directory})

    def _written(
        self,
        model: LoadedModel,
        path: CheckpointPath,
        ttl_seconds: float | None,
        user_metadata: dict[str, str] | None = None,
        recipients: Sequence[str] = (),
    ) -> Steps[Checkpoint]:
        architecture = self.facts()[model.base_model].architecture
        row = self.checkpoints.announce(path, model.base_model, architecture, asdict(model.shape), ttl_seconds, user_metadata)
        about = self.next_number(), model.base_model, model.model_id
        call = ExportModel(*about, list(recipients), row) if path.kind == "external" else SaveModel(*about, path.kind == "training", row)
        return (yield from self.checkpoints.written(call))

    def _create_from_checkpoint(self, model_id: str, request: CreateFromCheckpointRequest) -> Steps[Ended]:
        checkpoint = self.checkpoints.store.require_checkpoint(request.path, "training")
        base_model = find_base(request.base_model or checkpoint.base_model, self.facts())
        shape = LoraShape(**checkpoint.lora_config)
        self._check_rank(shape.rank)
        yield from self._restored(base_model, model_id, checkpoint, request.optimizer)
        origin = Saved(checkpoint.tinker_path, checkpoint.directory, request.optimizer)
        self.models[model_id] = LoadedModel(model_id, base_model, shape, origin=origin)
        result = {"path": request.path, "model_id": model_id, "type": "load_weights"}
        return Ended(result, {"directory": checkpoint.directory})

    def _load(self, request: LoadWeightsRequest) -> Steps[Ended]:
        """Replace the weights of a model that nothing has happened to yet."""
        model = self.model(request.model_id)
        if request.seq_id != 1:
            raise UserError(
                f"load_weights must be the first request of a model, this one is seq_id {request.seq_id}; "
                "use create_training_client_from_state, which makes a new model"
            )
        checkpoint = self.checkpoints.store.require_checkpoint(request.path, "training")
        saved = LoraShape(**checkpoint.lora_config)
        if replace(saved, seed=model.shape.seed) != model.shape:
            there, here = saved.differences(model.shape), model.shape.differences(saved)
            raise UserError(f"{request.path} was saved with {there}, the model was created with {here}; create one with {there}")
        yield from self._restored(model.base_model, model.model_id, checkpoint, request.optimizer)
        model.origin = Saved(checkpoint.tinker_path, checkpoint.directory, request.optimizer)
        model.state += 1
        result = {"path": request.path, "model_id": request.model_id, "type": "load_weights"}
        return Ended(result, {"directory": checkpoint.directory})

    def _restored(self, base_model: str, model_id: str, checkpoint: Checkpoint, optimizer: bool) -> Steps[None]:
        path = checkpoint.tinker_path
        try:
            yield LoadModel(self.next_number(), base_model, model_id, path, checkpoint.directory, optimizer)
        except TinsmithError:
            self.checkpoints.check_still_there(path)
            raise


def writes_files(request: BaseModel) -> bool:
    """Whether it is a save whose copy of the model is written to files."""
    match request:
        case SaveWeightsForSamplerRequest():
            return request.path is not None
    return isinstance(request, SaveWeightsRequest | SaveWeightsExternalRequest)


def _seed_of(model_id: str) -> int:
    """Seed a model whose client gave none: different for every model, the same if the command is run again."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")
