"""Runs the operations that are generators of steps (`running.py`): sends their calls, and goes on with the answers.

Where an operation needs what the database cannot give now, its model waits and is tried again.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from tinsmith.engine.checkpoint_operations import writes_files
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.operations import Operations
from tinsmith.engine.outcomes import Outcomes
from tinsmith.engine.recorder import Backoff
from tinsmith.engine.running import Ended, Running
from tinsmith.engine.unloading import Unloading
from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.store.records import Command

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 60.0
"""Seconds between two attempts to save a model whose session has ended: each writes until the disk is full."""


@dataclass(eq=False)
class DatabaseWaits:
    """Puts models off until the database is tried again, for all of them together and at growing intervals."""

    models: ModelStates
    backoff: Backoff = field(default_factory=Backoff)

    def put_off(self, model_id: str, error: StoreUnavailableError) -> None:
        log.warning("model %s waits for the database: %s", model_id, error)
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
            self._go_on(running, answer)

    def copied(self, number: int) -> None:
        """Let a model go on whose save has its copy. One that the server is going to unload has nothing to go on with."""
        running = self.models.in_call(number)
        if running is not None and running.command is not None:
            running.copied_state = self.models.require(running.model_id).state
            state = self.models[running.model_id]
            state.running, state.saving = None, running

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
                elif running.copied_state is None:
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
        if running.copied_state is None:
            state.running = None
        else:
            state.forget_save()
        return state

    def _ended(self, running: Running, ended: Ended) -> None:
        state = self._remove(running)
        if running.command is None:
            self.unloading.unload(state)
        else:
            self.outcomes.ended(running.command, running, ended)

    def _failed(self, running: Running, error: TinsmithError) -> None:
        state = self._remove(running)
        if running.command is not None:
            self.outcomes.fail(running.command, error)
            return
        self.unloading.fail_cancelled(state, TinsmithError(f"it was cancelled, and its model could not be saved: {error}"))
        state.save_again_at = time.monotonic() + SAVE_AGAIN_S
        then = "and the server stops" if self.stops else f"stays loaded, and is tried again in {SAVE_AGAIN_S:.0f} s"
        log.error("model %s cannot be saved, %s: %s", running.model_id, then, error)

    def try_again(self) -> list[ModelState]:
        """Go on with what waits for the database; returns the models that were put off."""
        unrecorded = [state for state in self.models.values() if state.waits_for_row]
        put_off = [state for state in self.models.values() if state.is_put_off]
        for state in put_off:
            state.is_put_off = False
        for running in [*(state.saving for state in unrecorded), *(state.running for state in put_off)]:
            if running is not None:
                self._go_on(running, None)
        return put_off
