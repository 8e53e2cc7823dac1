"""The training half of the engine: operations in order, forward work merged into passes, results into the log.

Nothing here computes or waits. What is due is sent to the workers, whose answers come back with `take`, and meanwhile other models go
on. Where an operation needs what the database cannot give now, its model waits and is tried again.
"""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import orjson

from tinsmith.config import Config
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.crash_recovery import CrashRecovery
from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.operations import Operations, writes_files
from tinsmith.engine.passes import ForwardOperation
from tinsmith.engine.recorder import Backoff
from tinsmith.engine.running import Ended, Running, log_finished
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Answer, CallFailed, Copied, PassDone, Prepared, PrepareFailed, error_of
from tinsmith.store import ids
from tinsmith.store.records import Command, Outcome
from tinsmith.wire.forward_backward import encode_output

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 60.0
"""Seconds between two attempts to save a model whose session has ended: each writes until the disk is full."""

SAMPLING_S = 600.0
"""Seconds after a session's sample in which another is expected, so that passes are kept short."""

CANCELLED = GivenUpError("it was cancelled: its session ended before the operation was run")
"""Error of a cancelled operation. Its client is told more when the model has been unloaded."""


class Trainer:
    """Runs the commands of all models. `record` takes their outcomes and does not fail (`Recorder.record`). `send` tells the workers."""

    def __init__(
        self,
        config: Config,
        workers: int,
        operations: Operations,
        record: Callable[[list[Outcome]], None],
        send: Callable[[Message], None],
    ) -> None:
        """A pass is divided among `workers`."""
        self.cuts_passes = not config.shards_weights  # every pass gathers the layers: in small ones that would take most of the time
        self.operations = operations
        self.queue = CommandQueue(config.training.held_operation_s)
        self.record = record
        self.send = send
        self.models = ModelStates()
        self.trained_tokens = 0
        self.sampling: dict[str, float] = {}
        """Sessions that sample, and when they last did (monotonic time), longest ago first."""
        tokens, pixels = config.training.tokens_per_pass * workers, config.images.max_image_pixels
        self.forward = ForwardWork(
            *(tokens, pixels, operations.next_number, send, self._fail, self._put_back, self._put_off, self._is_shared, workers)
        )
        self.stops = False
        """Whether the server stops, so that nothing is tried again."""
        self.backoff = Backoff()
        """The time at which what waits for the database is tried again."""
        self.crash_recovery = CrashRecovery(operations, send)
        self.suspects: set[str] = set()
        """Operations that were under way when workers ended, and are computed again."""

    def _is_shared(self) -> bool:
        """Whether there are several sessions, which may wait for each other, so that passes are cut."""
        while self.sampling and next(iter(self.sampling.values())) < time.monotonic() - SAMPLING_S:
            del self.sampling[next(iter(self.sampling))]
        return self.cuts_passes and len({*self.sampling, *map(ids.session_of, self.operations.models)}) > 1

    def sampled(self, session_id: str) -> None:
        self.sampling.pop(session_id, None)
        self.sampling[session_id] = time.monotonic()

    def queued(self, model_id: str) -> int:
        """Return the number of a model's unfinished operations."""
        begun = [each for each in self.models[model_id].begun if each.command is not None]
        return len(self.forward.operations.get(model_id, ())) + len(begun) + len(self.queue.models[model_id].held)

    @property
    def wait_s(self) -> float:
        """Seconds until a `turn` has something to do that no message announces."""
        waits = [self.backoff.wait_s] if self.models.wait_for_database else []
        later = [state for state in self.models.values() if state.save_again_at is not None]
        busy = self._busy if later else set()
        waits += [max(0.0, state.save_again_at - time.monotonic()) for state in later if state.save_again_at and state.model_id not in busy]
        return min(waits, default=float("inf"))

    @property
    def overdue_at(self) -> float | None:
        """Monotonic time at which `fail_overdue` is due; None if nothing waits for its predecessor alone."""
        return self.queue.next_deadline(self._begun)

    @property
    def _begun(self) -> set[str]:
        """Models with operations that have begun and not ended, and those that are to come back."""
        return {*self.forward.operations, *self.crash_recovery.waiting, *self.models.running}

    @property
    def _busy(self) -> set[str]:
        """Models that cannot be unloaded, because something has begun or waits for the database."""
        return self._begun.union(model_id for model_id, state in self.models.items() if state.is_put_off or state.saving is not None)

    def to_unload(self) -> list[ModelState]:
        ending = [state for state in self.models.values() if state.ending is not None]
        now, busy = time.monotonic(), self._busy if ending else set()
        return [state for state in ending if state.model_id not in busy and (state.save_again_at is None or state.save_again_at <= now)]

    def add(self, command: Command) -> None:
        self.models.setdefault(command.model_id, ModelState(command.model_id))
        if not self.queue.add(command):
            late = UserError(f"seq_id {command.seq_id} came after the operations behind it had been given up")
            self._fail(command, late, touches_step=False)

    def end_session(self, session_id: str, save: bool) -> None:
        """Cancel what the session's models have not finished and unload them; with `save` keep them as checkpoints."""
        self.sampling.pop(session_id, None)
        for model_id, state in self.models.items():
            if model_id.startswith(f"{session_id}:train:"):
                state.cancelled += (*self.forward.cancel(model_id, CANCELLED), *self.queue.cancel(model_id))
                state.ending = "save" if save else "drop"

    def turn(self) -> None:
        """Send the worker what is due, then record what it has computed."""
        self.crash_recovery.turn()
        tries_again = self.models.wait_for_database and self.backoff.wait_s == 0
        if tries_again:
            self.try_again()
        for model_id in self.queue.ready():
            if not self.models[model_id].is_put_off and model_id not in self.crash_recovery.waiting:
                self._advance(model_id)
        self.forward.send_passes(self.models.put_off)
        self.record_complete()
        for state in self.to_unload():
            if state.ending == "save" and state.model_id in self.operations.models:
                self.begin_saving(state)
            else:
                self.unload(state)
        if tries_again and not self.models.wait_for_database:
            self.backoff.succeeded()

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

    def begin_saving(self, state: ModelState) -> None:
        """Begin to save a model that is unloaded when it is saved."""
        state.running = Running(state.model_id, self.operations.keep(state.model_id), None)
        self._go_on(state.running, None)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is being computed or saved, and no model is left to be saved."""
        begun = any(state.begun for state in self.models.values())
        return not (begun or self.forward.passes or self.forward.complete or self.operations.models)

    def _advance(self, model_id: str) -> None:
        """Take this model's commands in order: forward work until a pass is full, others only when nothing is before them."""
        queue, state = self.queue.models[model_id], self.models[model_id]
        while (command := queue.head()) is not None and state.running is None and not state.next_is_save:
            is_forward = command.kind == "forward_backward"
            if self.forward.has_enough(model_id) if is_forward else model_id in self.forward.operations:
                return
            queue.take()
            try:
                (self._prepare if is_forward else self._begin)(command)
            except StoreUnavailableError as error:  # nothing of the command has happened
                queue.put_back(command)
                self._put_off(model_id, error)
                return

    def _put_off(self, model_id: str, error: StoreUnavailableError) -> None:
        log.warning("model %s waits for the database: %s", model_id, error)
        self.models[model_id].is_put_off = True
        self._try_later()

    def _try_later(self) -> None:
        if self.backoff.wait_s == 0:  # several models that are tried together are one attempt
            self.backoff.failed()

    def _put_back(self, commands: list[Command], error: StoreUnavailableError) -> None:
        """Put commands of one model, which follow each other, back into the queue until the database can be read."""
        for command in reversed(commands):
            self.queue.models[command.model_id].put_back(command)
        self._put_off(commands[0].model_id, error)

    # ---- Operations that are steps

    def _begin(self, command: Command) -> None:
        """Begin a command. Raises StoreUnavailableError if it could not."""
        state = self.models[command.model_id]
        with failing_into(partial(self._fail, command), StoreUnavailableError):
            request = self.operations.read(command)
            if writes_files(request) and state.saving is not None:
                self.queue.models[command.model_id].put_back(command)
                state.next_is_save = True
                return
            state.running = Running(command.model_id, self.operations.start(command, request), command)
        if state.running is not None:
            self._go_on(state.running, None)

    def _go_on(self, running: Running, answer: "dict[str, object] | TinsmithError | None") -> None:
        """Take an operation to its next call, or to its end. Raises StoreUnavailableError if it could not begin."""
        running.in_call = None
        try:
            with failing_into(partial(self._failed_running, running), StoreUnavailableError):
                step = running.step(answer)
                if isinstance(step, Ended):
                    self._end_running(running, step)
                    return
                running.has_begun = True
                if not isinstance(step, StoreUnavailableError):
                    running.in_call = step.number
                    self.send(step)
                elif running.copied_state is None:
                    self._put_off(running.model_id, step)
                else:
                    log.warning("a checkpoint of model %s waits for the database: %s", running.model_id, step)
                    self._try_later()
        except StoreUnavailableError as error:
            if running.has_begun:
                self._failed_running(running, error)
                return
            self.models[running.model_id].running = None
            if running.command is not None:
                raise
            self._put_off(running.model_id, error)

    def _copied(self, number: int) -> None:
        """Let a model go on whose save has its copy. One that the server is going to unload has nothing to go on with."""
        running = self.models.in_call(number)
        if running is not None and running.command is not None:
            running.copied_state = self.operations.models[running.model_id].state
            state = self.models[running.model_id]
            state.running, state.saving = None, running

    def _remove(self, running: Running) -> ModelState:
        """Take an operation that has ended out of the state of its model, which is returned."""
        state = self.models[running.model_id]
        if running.copied_state is None:
            state.running = None
        else:
            state.forget_save()
        return state

    def _end_running(self, running: Running, ended: Ended) -> None:
        state = self._remove(running)
        if running.command is None:
            self.unload(state)
            return
        command = running.command
        self.suspects.discard(command.request_id)
        self.record([Outcome(command.request_id, orjson.dumps(ended.result), "json", None, None, ended.resolved)])
        metrics = " ".join(f"{name}={value:.6g}" for name, value in ended.result.get("metrics", {}).items())
        log_finished(command, running.started_at, tokens=0, detail=metrics)

    def _failed_running(self, running: Running, error: TinsmithError) -> None:
        state = self._remove(running)
        if running.command is not None:
            self._fail(running.command, error)
            return
        self._fail_cancelled(state, TinsmithError(f"it was cancelled, and its model could not be saved: {error}"))
        state.save_again_at = time.monotonic() + SAVE_AGAIN_S
        then = "and the server stops" if self.stops else f"stays loaded, and is tried again in {SAVE_AGAIN_S:.0f} s"
        log.error("model %s cannot be saved, %s: %s", running.model_id, then, error)

    # ---- Forward work

    def _prepare(self, command: Command) -> None:
        """Let the workers check and measure a forward command. Raises StoreUnavailableError if it cannot be read now."""
        with failing_into(lambda error: self._fail(command, error), StoreUnavailableError):
            payload = self.operations.checkpoints.store.payload(command)
            model = self.operations.model(command.model_id)
            self.forward.add(command, model.base_model, payload)

    def take(self, message: Message) -> None:
        """Take in what the workers say of their work."""
        match message:
            case Prepared() | PrepareFailed() | PassDone():
                self.forward.take(message)
            case Copied():
                self._copied(message.number)
            case Answer():
                self._answered(message.number, message.result)
            case CallFailed():
                self._answered(message.number, error_of(message.error_type, message.error))

    def _answered(self, number: int, answer: "dict[str, object] | TinsmithError") -> None:
        if self.crash_recovery.answered(number, answer):
            return
        if (running := self.models.in_call(number)) is not None:
            self._go_on(running, answer)

    def record_complete(self) -> None:
        """Record the forward work that is computed."""
        operations = self.forward.take_complete()
        encoded: dict[ForwardOperation, Outcome] = {}
        for operation in operations:
            with failing_into(partial(self._fail, operation.command, touches_step=operation.backward)):
                encoded[operation] = _outcome(operation)
        self.record(list(encoded.values()))
        self.suspects -= {operation.command.request_id for operation in encoded}
        for operation in encoded:
            if operation.backward:
                self.operations.added(operation.command)
                self.trained_tokens += operation.tokens
                if (state := self.models.get(operation.command.model_id)) is not None:
                    state.trained_tokens += operation.tokens
            log_finished(operation.command, operation.started_at, operation.tokens, f"loss={operation.loss:.6g}")

    # ---- Ends

    def fail_overdue(self) -> None:
        """Fail commands that waited too long for their predecessor.

        An optim_step among them clears the gradients, so passes of its model that are under way must have ended.
        """
        for command, missing in self.queue.overdue(time.monotonic(), self._begun):
            waited = f"seq_id {missing} never came; this operation, seq_id {command.seq_id}, waited {self.queue.held_s:g} s for it"
            self._fail(command, UserError(waited))
            if command.kind != "optim_step":  # what is missing may belong to the step that is open now; an optim_step has ended it
                self.operations.spoil_step(command.model_id, waited)

    def _fail(self, command: Command, error: TinsmithError, touches_step: bool = True) -> None:
        """Record a failure. `touches_step` is False for what leaves the open step as it is: a forward, or part of an earlier step."""
        state = self.models.get(command.model_id)
        if isinstance(error, GivenUpError) and state is not None and state.ending:
            state.cancelled.append(command)
            return
        self.suspects.discard(command.request_id)
        if touches_step:
            self.operations.after_failure(command, str(error))
        self.record([Outcome(command.request_id, None, None, str(error), error.category)])
        log.warning("failed model=%s seq_id=%d kind=%s: %s", command.model_id, command.seq_id, command.kind, error)

    def unload(self, state: ModelState) -> None:
        """Unload a model as it is, and fail its operations that are not run any more."""
        state.ending = None
        self._fail_cancelled(state)
        self.operations.unload(state.model_id)
        self._forget(state.model_id)

    def _fail_cancelled(self, state: ModelState, error: TinsmithError | None = None) -> None:
        """Fail what is not run any more of a model; by default with what became of the model."""
        cancelled, state.cancelled = state.cancelled + self.queue.cancel(state.model_id), []
        if cancelled:
            error = error or self._why_cancelled(state.model_id)
            for command in cancelled:
                self._fail(command, error, touches_step=False)

    def _why_cancelled(self, model_id: str) -> UserError:
        """Describe the end of an unloaded model, and name the checkpoint to go on from."""
        refusal = None
        with suppress(TinsmithError):  # the database cannot be read, or does not know the session any more
            refusal = self.operations.checkpoints.store.refusal(model_id)
        return UserError(str(CANCELLED) if refusal is None else f"it was cancelled, because {refusal}")

    def _forget(self, model_id: str) -> None:
        self.models.pop(model_id, None)
        self.queue.drop(model_id)
        self.forward.forget(model_id)
        self.suspects = {each for each in self.suspects if not each.startswith(f"{model_id}/")}

    def workers_ended(self, reason: str) -> None:
        """Take in that the workers are gone, and all models with them: these come back, or `take_lost` says that they do not.

        What had begun and was not recorded is run again. What was under way for the second time fails with `reason`: it may be what ends
        workers, and would do so again and again.
        """
        self._take_back_complete()
        self.record_complete()
        self.crash_recovery.workers_ended(reason)
        begun = [(each.command, each.is_at_worker) for queue in self.forward.operations.values() for each in queue]
        for state in self.models.values():
            begun += self._cut_short(state, reason)
        self.forward.forget_all()
        again: defaultdict[str, list[Command]] = defaultdict(list)
        for command, is_under_way in begun:
            if is_under_way and command.request_id in self.suspects:
                self._fail(command, TinsmithError(f"{reason} while the operation was run, for the second time"))
            elif command.model_id not in self.crash_recovery.lost:
                again[command.model_id].append(command)
                self.suspects |= {command.request_id} if is_under_way else set()
        for model_id, commands in again.items():
            self.queue.models[model_id].rewind(sorted(commands, key=lambda command: command.seq_id))

    def _cut_short(self, state: ModelState, reason: str) -> list[tuple[Command, bool]]:
        """The workers have ended: returns operations of a model that can begin anew, and whether each was under way.

        A model comes back as its last step has left it. If that is the state that a save has copied, the same is saved again; if not,
        nothing is left of what was to be saved. A save that only waits for its row goes on.
        """
        running, state.running, state.save_again_at, state.is_put_off, state.next_is_save = state.running, None, None, False, False
        begun = [] if running is None or running.command is None else [(running.command, running.in_call is not None)]
        saving, model = state.saving, self.operations.models.get(state.model_id)
        if saving is None or saving.in_call is None:
            return begun
        state.saving = None
        assert saving.command is not None
        if model is not None and model.state == saving.copied_state:
            begun.append((saving.command, True))
        elif model is not None:
            what = "while the save was written; its model has gone on since, and what was to be saved is gone: save again"
            self._fail(saving.command, TinsmithError(f"{reason} {what}"))
        return begun

    def _take_back_complete(self) -> None:
        """Run again what is computed and not recorded, where that keeps the model's open step whole. Recorded, it would lose gradients."""
        for operation in reversed(self.forward.take_complete()):
            model = self.operations.models.get(operation.command.model_id)
            if model is None or model.origin is None or model.has_gradients or model.spoiled:
                self.forward.complete.insert(0, operation)
            else:
                self.forward.operations.setdefault(model.model_id, deque()).appendleft(operation)

    def take_lost(self) -> dict[str, str]:
        """Forget the models that ended with their workers; returns why each did. They are still queued in the log."""
        lost = self.crash_recovery.take_lost()
        for model_id in lost:
            self._forget(model_id)
        return lost


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.in_order]
    result = encode_output(outputs, operation.metrics)
    return Outcome(operation.command.request_id, result, "protobuf", None, None)
