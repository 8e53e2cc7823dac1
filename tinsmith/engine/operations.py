"""The commands that are not forward work: creating, stepping, saving and loading models. Each runs at once when its turn comes."""

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tinsmith.engine.checkpoints import Checkpoints
from tinsmith.engine.external import parse_recipients, write_external
from tinsmith.engine.snapshots import Snapshots
from tinsmith.errors import NotFoundError, UserError
from tinsmith.protocol.facts import find_base
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.rendering.renderer import Renderer
from tinsmith.store import ids
from tinsmith.store.records import REJECTED, SESSION_END, Command
from tinsmith.training.backend import Backend
from tinsmith.training.checkpoint import About, read_state
from tinsmith.wire.checkpoint_requests import (
    CreateFromCheckpointRequest,
    LoadWeightsRequest,
    SaveWeightsExternalRequest,
    SaveWeightsForSamplerRequest,
    SaveWeightsRequest,
)
from tinsmith.wire.json_body import parse_json
from tinsmith.wire.operations import OPERATIONS
from tinsmith.wire.paths import CheckpointPath
from tinsmith.wire.training_requests import AdamParams, CreateModelRequest, OptimStepRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Served:
    """A base model's name and what works on it."""

    name: str
    backend: Backend
    renderer: Renderer


@dataclass
class LoadedModel:
    """A model between create_model and the end of its session."""

    model_id: str
    served: Served
    shape: LoraShape
    spoiled: str | None = None
    """Why the gradients since the last optim_step are not what the client asked for."""


class Operations:
    """Executes commands. What they save goes to `checkpoints`, what they hand to sampling to `snapshots`.

    A model that the server unloads is kept as a checkpoint for `ended_ttl_s` seconds.
    """

    def __init__(
        self,
        bases: Mapping[str, Served],
        max_lora_rank: int,
        checkpoints: Checkpoints,
        snapshots: Snapshots,
        ended_ttl_s: float,
        read_payload: Callable[[Command], bytes],
    ) -> None:
        """`read_payload` fetches what a command was sent with, when its turn comes."""
        self.bases = bases
        self.max_lora_rank = max_lora_rank
        self.checkpoints = checkpoints
        self.snapshots = snapshots
        self.ended_ttl_s = ended_ttl_s
        self.read_payload = read_payload
        self.models: dict[str, LoadedModel] = {}

    def model(self, model_id: str) -> LoadedModel:
        """A loaded model. Raises NotFoundError."""
        if model_id not in self.models:
            raise NotFoundError(f"model {model_id} is not loaded: its create_model failed, or its session is over; create a model")
        return self.models[model_id]

    def execute(self, command: Command) -> dict[str, Any]:
        """Run a command and return its result as the client gets it. Raises TinsmithError."""
        if command.kind == REJECTED:
            raise UserError(self.read_payload(command).decode())
        match parse_json(OPERATIONS[command.kind], self.read_payload(command)):
            case CreateModelRequest() as request:
                return self._create_model(command.model_id, request)
            case OptimStepRequest() as request:
                return {"metrics": self._optim_step(command.model_id, request.adam_params)}
            case SaveWeightsRequest() as request:
                return self._save(request)
            case SaveWeightsForSamplerRequest(path=None) as request:
                return self._snapshot(command, request)
            case SaveWeightsForSamplerRequest() as request:
                return self._save_for_sampler(request)
            case SaveWeightsExternalRequest() as request:
                return self._save_external(request)
            case CreateFromCheckpointRequest() as request:
                return self._create_from_checkpoint(command.model_id, request)
            case LoadWeightsRequest() as request:
                return self._load(request)
        raise UserError(f"operation {command.kind!r} is unknown")

    def after_failure(self, command: Command, reason: str) -> None:
        """Leave the model in a known state: a failed optim_step ends its step and drops the gradients, a failed contribution spoils it."""
        model = self.models.get(command.model_id)
        if model is None:
            return
        if command.kind == "optim_step":
            model.spoiled = None
            model.served.backend.clear_gradients(command.model_id)
        elif command.kind in ("forward_backward", REJECTED):
            self.spoil_step(command.model_id, f"seq_id {command.seq_id}: {reason}")

    def spoil_step(self, model_id: str, reason: str) -> None:
        """The gradients since the last optim_step are not what the client asked for: the next one is refused and clears them."""
        if model_id in self.models:
            self.models[model_id].spoiled = reason

    def keep(self, model_id: str) -> None:
        """Save a model that the server is going to unload, if it was ever created. Raises TinsmithError."""
        if model_id in self.models:
            path = CheckpointPath(model_id, "training", SESSION_END)
            saved = self.checkpoints.save(path, self.models[model_id].served.backend, self.ended_ttl_s, overwrite=True)
            self.checkpoints.store.unload_model(model_id)
            log.info(
                "model %s is kept as %s for %.3g days; go on with create_training_client_from_state_with_optimizer(%r)",
                model_id,
                saved,
                self.ended_ttl_s / 86400,
                saved,
            )

    def unload(self, model_id: str) -> None:
        """Free a model, if it was ever created, and its snapshots."""
        model = self.models.pop(model_id, None)
        if model is not None:
            model.served.backend.delete_model(model_id)
        self.snapshots.withdraw(model_id)

    def _create_model(self, model_id: str, request: CreateModelRequest) -> dict[str, Any]:
        served = self.bases[find_base(request.base_model, self.bases)]
        lora = request.lora_config
        self._check_rank(lora.rank)
        seed = _seed_of(model_id) if lora.seed is None else lora.seed
        shape = LoraShape(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        served.backend.create_model(model_id, shape)
        self.models[model_id] = LoadedModel(model_id, served, shape)
        return {"model_id": model_id, "type": "create_model"}

    def _check_rank(self, rank: int) -> None:
        if rank > self.max_lora_rank:
            raise UserError(f"lora_config.rank is {rank}; this server allows up to {self.max_lora_rank} (--max-lora-rank)")

    def _optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self.model(model_id)
        if model.spoiled:
            reason, model.spoiled = model.spoiled, None
            raise UserError(f"the step was refused and the gradients are cleared, because an operation before it failed: {reason}")
        settings = AdamSettings(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm)
        return model.served.backend.optim_step(model_id, settings)

    def _snapshot(self, command: Command, request: SaveWeightsForSamplerRequest) -> dict[str, Any]:
        model = self.model(command.model_id)
        inflight = request.kind == "inflight"
        snapshot_id = ids.inflight_id(command.model_id) if inflight else command.request_id
        ref = WeightsRef(model.served.name, command.request_id, command.request_id, command.model_id if inflight else None)
        weights = model.served.backend.snapshot(command.model_id, ref)
        self.snapshots.publish(model.served.name, snapshot_id, weights)
        session_id = command.model_id.partition(":train:")[0]
        return {"sampling_session_id": f"{session_id}:sample:{request.sampling_session_seq_id}"}

    def _save(self, request: SaveWeightsRequest) -> dict[str, Any]:
        backend = self.model(request.model_id).served.backend
        path = CheckpointPath(request.model_id, "training", request.path)
        saved = self.checkpoints.save(path, backend, request.ttl_seconds, request.overwrite, request.user_metadata)
        return {"path": saved, "type": "save_weights"}

    def _save_for_sampler(self, request: SaveWeightsForSamplerRequest) -> dict[str, Any]:
        backend = self.model(request.model_id).served.backend
        path = CheckpointPath(request.model_id, "sampler", request.path or "")
        saved = self.checkpoints.save(path, backend, request.ttl_seconds, user_metadata=request.user_metadata)
        self.snapshots.forget(saved)
        return {"path": saved, "type": "save_weights_for_sampler"}

    def _save_external(self, request: SaveWeightsExternalRequest) -> dict[str, Any]:
        backend = self.model(request.model_id).served.backend
        path = CheckpointPath(request.model_id, "external", request.path)
        self.checkpoints.check_free(path)
        recipients = parse_recipients(request.age_encryption_recipients or [])
        state = backend.copy_state(request.model_id, optimizer=False)

        def write(directory: Path) -> About:
            write_external(state, directory, recipients)
            return state.about

        saved = self.checkpoints.add(path, write, request.ttl_seconds)
        return {"path": saved.tinker_path, "size_bytes": saved.size_bytes, "type": "save_weights_external"}

    def _create_from_checkpoint(self, model_id: str, request: CreateFromCheckpointRequest) -> dict[str, Any]:
        with self.checkpoints.opened(request.path, "training", request.optimizer) as (checkpoint, directory):
            served = self.bases[find_base(request.base_model or checkpoint.base_model, self.bases)]
            shape = LoraShape(**checkpoint.lora_config)
            self._check_rank(shape.rank)
            served.backend.restore(model_id, read_state(directory, served.renderer.base, request.optimizer))
        self.models[model_id] = LoadedModel(model_id, served, shape)
        return {"path": request.path, "model_id": model_id, "type": "load_weights"}

    def _load(self, request: LoadWeightsRequest) -> dict[str, Any]:
        """Into a model that nothing has happened to yet: its own weights are replaced."""
        model = self.model(request.model_id)
        if request.seq_id != 1:
            raise UserError(
                f"load_weights must be the first request of a model, this one is seq_id {request.seq_id}; "
                "use create_training_client_from_state, which makes a new model"
            )
        with self.checkpoints.opened(request.path, "training", request.optimizer) as (checkpoint, directory):
            saved = LoraShape(**checkpoint.lora_config)
            if replace(saved, seed=model.shape.seed) != model.shape:
                raise UserError(f"{request.path} was saved with {saved}, the model was created with {model.shape}; their sizes must agree")
            state = read_state(directory, model.served.renderer.base, request.optimizer)
            model.served.backend.restore(request.model_id, state)
        return {"path": request.path, "model_id": request.model_id, "type": "load_weights"}


def _seed_of(model_id: str) -> int:
    """The seed of a client that gave none: different for every model, the same if the command is run again."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")
