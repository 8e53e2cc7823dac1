"""The commands that are not forward work: create_model, optim_step and save_weights_for_sampler, each run at once when its turn comes."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tinsmith.engine.messages import find_base
from tinsmith.errors import NotFoundError, UserError
from tinsmith.models.lora import Adapter, LoraShape
from tinsmith.rendering.renderer import Renderer
from tinsmith.store.records import REJECTED, Command
from tinsmith.training.backend import Backend
from tinsmith.training.optimizer import AdamSettings
from tinsmith.wire.requests import OPERATIONS, AdamParams, CreateModelRequest, OptimStepRequest, SaveWeightsForSamplerRequest, parse_json


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
    spoiled: str | None = None
    """Why the gradients since the last optim_step are not what the client asked for."""


class Operations:
    """Executes commands. `publish(snapshot_id, adapter)` hands a snapshot to whoever samples; `withdraw(model_id)` takes a model's back."""

    def __init__(
        self,
        bases: Mapping[str, Served],
        max_lora_rank: int,
        publish: Callable[[str, Adapter], None],
        withdraw: Callable[[str], None],
    ) -> None:
        self.bases = bases
        self.max_lora_rank = max_lora_rank
        self.publish = publish
        self.withdraw = withdraw
        self.models: dict[str, LoadedModel] = {}

    def model(self, model_id: str) -> LoadedModel:
        """A loaded model. Raises NotFoundError."""
        if model_id not in self.models:
            raise NotFoundError(f"model {model_id} is not loaded: its create_model failed, or its session is over; create a model")
        return self.models[model_id]

    def execute(self, command: Command) -> dict[str, Any]:
        """Run a command and return its result as the client gets it. Raises TinsmithError."""
        if command.kind == REJECTED:
            raise UserError(command.payload.decode())
        match parse_json(OPERATIONS[command.kind], command.payload):
            case CreateModelRequest() as request:
                return self._create_model(command.model_id, request)
            case OptimStepRequest() as request:
                return {"metrics": self._optim_step(command.model_id, request.adam_params)}
            case SaveWeightsForSamplerRequest() as request:
                return self._snapshot(command, request)
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

    def unload(self, model_id: str) -> None:
        """Free a model, if it was ever created, and its snapshots."""
        model = self.models.pop(model_id, None)
        if model is not None:
            model.served.backend.delete_model(model_id)
        self.withdraw(model_id)

    def _create_model(self, model_id: str, request: CreateModelRequest) -> dict[str, Any]:
        served = self.bases[find_base(request.base_model, self.bases)]
        lora = request.lora_config
        if lora.rank > self.max_lora_rank:
            raise UserError(f"lora_config.rank is {lora.rank}; this server allows up to {self.max_lora_rank} (--max-lora-rank)")
        seed = _seed_of(model_id) if lora.seed is None else lora.seed
        served.backend.create_model(model_id, LoraShape(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed))
        self.models[model_id] = LoadedModel(model_id, served)
        return {"model_id": model_id, "type": "create_model"}

    def _optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        model = self.model(model_id)
        if model.spoiled:
            reason, model.spoiled = model.spoiled, None
            raise UserError(f"the step was refused and the gradients are cleared, because an operation before it failed: {reason}")
        settings = AdamSettings(adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm)
        return model.served.backend.optim_step(model_id, settings)

    def _snapshot(self, command: Command, request: SaveWeightsForSamplerRequest) -> dict[str, Any]:
        model = self.model(command.model_id)
        self.publish(command.request_id, model.served.backend.snapshot(command.model_id))
        session_id = command.model_id.partition(":train:")[0]
        return {"sampling_session_id": f"{session_id}:sample:{request.sampling_session_seq_id}"}


def _seed_of(model_id: str) -> int:
    """The seed of a client that gave none: different for every model, the same if the command is run again."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")
