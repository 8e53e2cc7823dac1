"""Operations except forward work, as generators of steps (`model_state.py`): create, step, snapshot, checkpoints."""

import hashlib
import itertools
import logging
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

from pydantic import BaseModel

from tinsmith.config import Config
from tinsmith.engine.checkpoints import CheckpointOperations, CheckpointRows, require_rank, writes_files
from tinsmith.engine.copies import Copies
from tinsmith.engine.history import CopiedForSave, Fresh, History, Kept, Mark, Published
from tinsmith.engine.model_state import Ended, LoadedModel, ModelState, ModelStates, Running, Steps
from tinsmith.engine.outcomes import Backoff, Outcomes, Recorder
from tinsmith.engine.unloading import Unloading
from tinsmith.errors import StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.facts import ModelFacts, find_base
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.protocol.work import CreateModel, ExportModel, OptimStep, SaveModel, TakeSnapshot
from tinsmith.store import ids
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

    def __init__(
        self,
        config: Config,
        rows: CheckpointRows,
        facts: Callable[[], Mapping[str, ModelFacts]],
        models: ModelStates,
        recorder: Recorder,
    ) -> None:
        self.config = config
        self.store = rows.store
        self.facts = facts
        self.models = models
        self.copies = Copies(config, models, recorder)
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
                return self.checkpoints.save(command, request)
            case SaveWeightsForSamplerRequest(path=None):
                return self._snapshot(command, request)
            case SaveWeightsForSamplerRequest():
                return self.checkpoints.save_for_sampler(command, request)
            case SaveWeightsExternalRequest():
                return self.checkpoints.save_external(command, request)
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
        seeded = Fresh(shape, found["base_fingerprint"] or "")
        model = LoadedModel(model_id, base_model, shape, History([Kept(seeded, Mark())]))
        self.models[model_id].loaded = model
        self.copies.announce(model)
        return Ended({"model_id": model_id, "type": "create_model"}, {"seed": seed} | found)

    def _optim_step(self, command: Command, adam: AdamParams) -> Steps[Ended]:
        model = self.models.require(command.model_id)
        if model.spoiled:
            raise UserError(
                "the step was refused and the gradients are cleared, because an operation before it failed: "
                f"{model.spoiled}"
            )
        settings = AdamSettings(
            adam.learning_rate, (adam.beta1, adam.beta2), adam.eps, adam.weight_decay, adam.grad_clip_norm
        )
        copy, before = self.copies.after_step(self.models[command.model_id], model, command.seq_id)
        call = OptimStep(self.next_number(), model.base_model, model.model_id, asdict(settings), copy, before)
        sent_at = time.monotonic()
        metrics = (yield call)["metrics"]
        self.copies.stepped(model, call, command.seq_id, metrics["grad_norm"], sent_at)
        metrics |= {} if model.has_gradients else self._without_gradients(model, command)
        model.stepped_seq = command.seq_id
        return Ended({"metrics": metrics})

    def _without_gradients(self, model: LoadedModel, command: Command) -> dict[str, float]:
        """Return the metrics of a step without gradients: the client may have forgotten its forward_backward."""
        if not model.told_of_empty_step:
            model.told_of_empty_step = True
            log.warning(
                "%s is an optim_step without gradients, which changes nothing: "
                "no forward_backward has finished since the step before it, "
                "or since the model was made; it is obeyed, and no other one of this model is told here",
                command.request_id,
            )
        return {"without_gradients": 1.0}

    def _snapshot(self, command: Command, request: SaveWeightsForSamplerRequest) -> Steps[Ended]:
        model = self.models.require(command.model_id)
        inflight = request.kind == "inflight"
        yield TakeSnapshot(self.next_number(), model.base_model, model.model_id, command.request_id, inflight)
        model.history.add(Published(model.history.state, command.request_id, inflight))
        session_id = ids.session_of(command.model_id)
        return Ended({"sampling_session_id": ids.sampling_session_id(session_id, request.sampling_session_seq_id or 0)})


def _seed_of(model_id: str) -> int:
    """Seed a model whose client gave none: different for every model, the same if the command is run again."""
    return int.from_bytes(hashlib.sha256(model_id.encode()).digest()[:7], "big")


# Runs the operations that are generators of steps (`model_state.py`): sends their calls, and goes on with the answers.
#
# Where an operation needs what the database cannot give now, its model waits and is tried again.

SAVE_AGAIN_S = 60.0
"""Seconds between two attempts to save a model whose session has ended: each writes until the disk is full."""


@dataclass(eq=False)
class DatabaseWaits:
    """Puts models off until the database is tried again, for all of them together and at growing intervals."""

    models: ModelStates
    backoff: Backoff = field(default_factory=Backoff)

    def put_off(self, model_id: str, error: StoreUnavailableError) -> None:
        log.warning("model %s waits for the database: %s", model_id, error, extra={"model": model_id})
        self.models[model_id].is_put_off = True
        self.try_later()

    def put_back(self, commands: list[Command], error: StoreUnavailableError) -> None:
        """Put commands of one model, which follow each other, back into the queue."""
        for command in reversed(commands):
            self.models[command.model_id].queue.put_back(command)
        self.put_off(commands[0].model_id, error)

    def try_later(self) -> None:
        if self.backoff.wait_s == 0:  # several models that are tried together are one attempt
            self.backoff.failed()


@dataclass(eq=False)
class StepwiseOperations:
    """The operations that are under way and are no forward work. `send` tells the workers."""

    models: ModelStates
    operations: Operations
    outcomes: Outcomes
    unloading: Unloading
    waits: DatabaseWaits
    send: Callable[[Message], None]
    stops: bool = False
    """Whether the server stops, so that nothing is tried again."""

    def begin(self, command: Command) -> None:
        """Begin a command. Raises StoreUnavailableError if it could not."""
        state = self.models[command.model_id]
        with failing_into(partial(self.outcomes.fail, command), StoreUnavailableError):
            request = self.operations.read(command)
            if writes_files(request) and state.saving is not None:
                state.queue.put_back(command)
                state.next_is_save = True
                return
            state.running = Running(command.model_id, self.operations.start(command, request), command)
        if state.running is not None:
            self._go_on(state.running, None)

    def begin_saving(self, state: ModelState) -> None:
        """Begin to save a model that is unloaded when it is saved."""
        state.running = Running(state.model_id, self.operations.checkpoints.keep(state.model_id), None)
        self._go_on(state.running, None)

    def answered(self, number: int, answer: "dict[str, object] | TinsmithError") -> None:
        """Go on with the operation that waits for this call, if it has not ended."""
        if (running := self.models.in_call(number)) is not None:
            self.outcomes.catch_up()
            self._go_on(running, answer)

    def copied(self, number: int) -> None:
        """Let a model go on whose save has its copy.

        One that the server is going to unload has nothing to go on with.
        """
        running = self.models.in_call(number)
        if running is not None and running.command is not None:
            history = self.models.require(running.model_id).history
            running.copied = history.mark()
            history.add(CopiedForSave(running.copied, running.command))
            state = self.models[running.model_id]
            state.running, state.saving = None, running

    def save_again(self, event: CopiedForSave) -> Generator[SaveModel | ExportModel, Any, None]:
        """Do a save again that ended with its worker, up to the copy, while its model is brought back.

        Raises StoreUnavailableError.
        """
        command, state = event.command, self.models[event.command.model_id]
        if state.saving is not None:  # its files are written, and it only waits for its row
            return
        with failing_into(partial(self._not_saved_again, command), StoreUnavailableError):
            running = Running(command.model_id, self.operations.start(command, self.operations.read(command)), command)
            call = running.step(None)
            if isinstance(call, Ended):  # it has its row, and only its outcome was not recorded
                self.models.require(command.model_id).history.forget_save(command)
                self.outcomes.ended(command, running, call)
                return
            assert isinstance(call, SaveModel | ExportModel)
            running.has_begun, running.in_call, running.copied = True, call.number, event.mark
            yield call
            state.saving = running

    def _not_saved_again(self, command: Command, error: TinsmithError) -> None:
        self.models.require(command.model_id).history.forget_save(command)
        self.outcomes.fail(command, error)

    def _go_on(self, running: Running, answer: "dict[str, object] | TinsmithError | None") -> None:
        """Take an operation to its next call, or to its end. Raises StoreUnavailableError if it could not begin."""
        running.in_call = None
        try:
            with failing_into(partial(self._failed, running), StoreUnavailableError):
                step = running.step(answer)
                if isinstance(step, Ended):
                    self._ended(running, step)
                    return
                running.has_begun = True
                if not isinstance(step, StoreUnavailableError):
                    running.in_call = step.number
                    self.send(step)
                elif running.copied is None:
                    self.waits.put_off(running.model_id, step)
                else:
                    log.warning("a checkpoint of model %s waits for the database: %s", running.model_id, step)
                    self.waits.try_later()
        except StoreUnavailableError as error:
            if running.has_begun:
                self._failed(running, error)
                return
            self.models[running.model_id].running = None
            if running.command is not None:
                raise
            self.waits.put_off(running.model_id, error)

    def _remove(self, running: Running) -> ModelState:
        """Take an operation that has ended out of the state of its model, which is returned."""
        state = self.models[running.model_id]
        if running.copied is None:
            state.running = None
        else:
            state.forget_save()
            if state.loaded is not None and running.command is not None:
                state.loaded.history.forget_save(running.command)
        return state

    def _ended(self, running: Running, ended: Ended) -> None:
        state = self._remove(running)
        if running.command is None:
            self.unloading.unload(state)
            return
        self.outcomes.ended(running.command, running, ended)
        if state.loaded is not None and running.copied is not None and ended.saved is not None:
            self.operations.copies.saved(state.loaded, ended.saved, running.copied)

    def _failed(self, running: Running, error: TinsmithError) -> None:
        state = self._remove(running)
        if running.command is not None:
            self.outcomes.fail(running.command, error)
            return
        self.unloading.fail_cancelled(
            state, TinsmithError(f"it was cancelled, and its model could not be saved: {error}")
        )
        state.save_again_at = time.monotonic() + SAVE_AGAIN_S
        then = "and the server stops" if self.stops else f"stays loaded, and is tried again in {SAVE_AGAIN_S:.0f} s"
        log.error("model %s cannot be saved, %s: %s", running.model_id, then, error, extra={"model": running.model_id})

    def try_again(self) -> list[ModelState]:
        """Go on with what waits for the database; returns the models that were put off."""
        self.outcomes.catch_up()
        unrecorded = [state for state in self.models.values() if state.waits_for_row]
        put_off = [state for state in self.models.values() if state.is_put_off]
        for state in put_off:
            state.is_put_off = False
        for running in [*(state.saving for state in unrecorded), *(state.running for state in put_off)]:
            if running is not None:
                self._go_on(running, None)
        return put_off
