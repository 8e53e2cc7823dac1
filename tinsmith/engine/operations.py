"""Operations other than forward work: create, step and snapshot, and those on checkpoints. Each is a generator of steps (`running.py`)."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from pydantic import BaseModel

from tinsmith.config import Config
from tinsmith.engine.checkpoint_operations import CheckpointOperations, require_rank
from tinsmith.engine.checkpoints import CheckpointRows
from tinsmith.engine.loaded_model import Fresh, LoadedModel, Saved
from tinsmith.engine.model_state import ModelStates
from tinsmith.engine.running import Ended, Steps
from tinsmith.errors import UserError
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.work import CreateModel, OptimStep, TakeSnapshot
from tinsmith.store import ids
from tinsmith.store.files import kept_copies
from tinsmith.store.records import REJECTED, Command
from tinsmith.wire.json_body import parse_json
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
    """Starts operations. `facts` are those of the base models that the workers serve."""

    def __init__(self, config: Config, rows: CheckpointRows, facts: Callable[[], Mapping[str, ModelFacts]], models: ModelStates) -> None:
        self.config = config
        self.store = rows.store
        self.facts = facts
        self.models = models
        self.next_number = itertools.count(1).__next__
        self.checkpoints = CheckpointOperations(config, rows, models, facts, self.next_number)

    def read(self, command: Command) -> BaseModel:
        """Parse the request of a command. Raises TinsmithError."""
        payload = self.store.payload(command)
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
                return self.checkpoints.save(request)
            case SaveWeightsForSamplerRequest(path=None):
                return self._snapshot(command, request)
            case SaveWeightsForSamplerRequest():
                return self.checkpoints.save_for_sampler(request)
            case SaveWeightsExternalRequest():
                return self.checkpoints.save_external(request)
            case CreateFromCheckpointRequest():
                return self.checkpoints.create(command.model_id, request)
            case LoadWeightsRequest():
                return self.checkpoints.load(request)
        raise UserError(f"operation {command.kind!r} is unknown")

    def _create_model(self, model_id: str, request: CreateModelRequest) -> Steps[Ended]:
        base_model = find_base(request.base_model, self.facts())
        lora = request.lora_config
        require_rank(lora.rank, self.config.models.max_lora_rank)
        seed = _seed_of(model_id) if lora.seed is None else lora.seed
        shape = LoraShape(lora.rank, seed, lora.train_attn, lora.train_mlp, lora.train_unembed)
        found = yield CreateModel(self.next_number(), base_model, model_id, asdict(shape))
        self.models[model_id].loaded = LoadedModel(model_id, base_model, shape, origin=Fresh(shape))
        return Ended({"model_id": model_id, "type": "create_model"}, {"seed": seed} | found)

    def _optim_step(self, command: Command, adam: AdamParams) -> Steps[Ended]:
        model = self.models.require(command.model_id)
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
        model = self.models.require(command.model_id)
        inflight = request.kind == "inflight"
        yield TakeSnapshot(self.next_number(), model.base_model, model.model_id, command.request_id, inflight)
        session_id = ids.session_of(command.model_id)
        return Ended({"sampling_session_id": ids.sampling_session_id(session_id, request.sampling_session_seq_id or 0)})


def _seed_of(model_id: str) -> int:
    """Seed a model whose client gave none: different for every model, the same if the command is run again."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")
