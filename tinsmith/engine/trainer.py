"""The training half of the engine: operations in order, forward work merged into passes, results into the log.

Nothing here computes or waits. What is due is sent to the worker, whose answers come back with `take`, and meanwhile other models go on.

What an operation needs of the database may be out of reach for a while: its payload, its images, the row of a checkpoint. Its model then
waits and is tried again, and all others go on.
"""

import itertools
import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial

import orjson

from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.crash_recovery import CrashRecovery
from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.operations import Operations, writes_files
from tinsmith.engine.passes import ForwardOperation
from tinsmith.engine.recorder import Backoff
from tinsmith.engine.running import Ended, Running, Saves, Wait, log_finished
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Answer, CallFailed, Copied, PassDone, Prepared, PrepareFailed, error_of
from tinsmith.store import ids
from tinsmith.store.records import Command, Outcome
from tinsmith.wire.forward_backward import encode_output

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 60.0
"""Time between two attempts to save a model whose session has ended: each writes until the disk is full."""

SAMPLING_S = 600.0
"""Seconds after a session's sample in which another is expected, so that passes are kept short."""

CANCELLED = GivenUpError("it was cancelled: its session ended before the operation was run")
"""Error of a cancelled operation. Its client is told more when the model has been unloaded."""


class Trainer:
    """Runs the commands of all models. `record` takes their outcomes and does not fail (`Recorder.record`). `send` tells the worker."""

    def __init__(
        self,
        operations: Operations,
        queue: CommandQueue,
        tokens_per_pass: int,
        max_pixels: int,
        record: Callable[[list[Outcome]], None],
        send: Callable[[Message], None],
        workers: int,
        cuts_passes: bool,
    ) -> None:
        """A pass is divided among `workers`. With `cuts_passes` none is to keep other sessions waiting for long (`ForwardWork`)."""
        self.cuts_passes = cuts_passes
        self.operations = operations
        self.queue = queue
        self.record = record
        self.send = send
        self.trained_tokens: Counter[str] = Counter()
        """Tokens of the forward_backward operations of each loaded model so far."""
        self.trained_before = 0
        """The same of models that are unloaded, together."""
        self.sampling: dict[str, float] = {}
        """Sessions that sample, and when they last did (monotonic time), longest ago first. One that has ended may go on sampling."""
        self.forward = ForwardWork(
            *(tokens_per_pass, max_pixels, operations.next_number, send, self._fail, self._put_back, self._put_off, self._is_shared),
            workers=workers,
        )
        self.running: dict[str, Running] = {}
        """The operation of each model that runs and is no forward work."""
        self.saves = Saves()
        """Saves that are written while their models go on."""
        self.ending: dict[str, bool] = {}
        """Models to unload as soon as what they have begun has ended, and whether to save them first."""
        self.cancelled: defaultdict[str, list[Command]] = defaultdict(list)
        """Operations of these models that are not run any more, and fail when the model has been unloaded or cannot be saved."""
        self.unsaved: dict[str, float] = {}
        """Models to unload that could not be saved, and when that is tried again (monotonic time). Until then they stay loaded."""
        self.stops = False
        """Whether the server stops, so that nothing is tried again."""
        self.put_off: set[str] = set()
        """Models whose next command, or whose saving, waits for the database."""
        self.backoff = Backoff()
        """The time at which the models that are put off are tried again."""
        self.crash_recovery = CrashRecovery(operations, send)
        self.suspects: set[str] = set()
        """Operations that were under way when workers ended, and are computed again."""

    def _is_shared(self) -> bool:
        """Whether there are several sessions, of which one may wait for another, and passes are cut for their sake."""
        while self.sampling and next(iter(self.sampling.values())) < time.monotonic() - SAMPLING_S:
            del self.sampling[next(iter(self.sampling))]
        return self.cuts_passes and len({*self.sampling, *map(ids.session_of, self.operations.models)}) > 1

    def sampled(self, session_id: str) -> None:
        """Note that a session samples."""
        self.sampling.pop(session_id, None)
        self.sampling[session_id] = time.monotonic()

    def queued(self, model_id: str) -> int:
        """Return the number of a model's operations that are not finished."""
        queue = self.queue.models.get(model_id)
        running = self.running.get(model_id)
        here = len(self.forward.operations.get(model_id, ())) + (running is not None and running.command is not None)
        return here + (model_id in self.saves.writing) + (len(queue.held) if queue else 0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being computed, and nothing will be before a new command comes."""
        begun = self.forward.operations or self.forward.complete or self.running or self.saves.writing
        return not (begun or self.put_off or self.crash_recovery.waiting or self.queue.ready() or self._to_unload())

    @property
    def wait_s(self) -> float:
        """Seconds until a `turn` has something to do that no message announces."""
        waits = [self.backoff.wait_s] if self.waits_for_database else []
        busy = self.put_off.union(self._begun, self.saves.writing)
        waits += [max(0.0, due_at - time.monotonic()) for model_id, due_at in self.unsaved.items() if model_id not in busy]
        return min(waits, default=float("inf"))

    @property
    def waits_for_database(self) -> bool:
        """Whether a model, or a checkpoint whose files are written, waits for the database."""
        return bool(self.put_off or self.saves.unrecorded)

    @property
    def overdue_at(self) -> float | None:
        """The monotonic time at which `fail_overdue` has something to do next; None if nothing waits for its predecessor alone."""
        return self.queue.next_deadline(self._begun)

    @property
    def _begun(self) -> set[str]:
        """Models with operations that have begun and not ended, and those that are still to come back."""
        return {*self.forward.operations, *self.running, *self.crash_recovery.waiting}

    def _to_unload(self) -> list[str]:
        """The models that can be unloaded now."""
        now = time.monotonic()
        unsaved = (model_id for model_id, due_at in self.unsaved.items() if due_at > now)
        busy = self.put_off.union(self._begun, self.saves.writing, unsaved)
        return [model_id for model_id in self.ending if model_id not in busy]

    def add(self, command: Command) -> None:
        """File a new command."""
        if not self.queue.add(command):
            late = UserError(f"seq_id {command.seq_id} came after the operations behind it had been given up")
            self._fail(command, late, touches_step=False)

    def end_session(self, session_id: str, save: bool) -> None:
        """Cancel what the session's models have not finished and unload them; with `save` keep them as checkpoints."""
        self.sampling.pop(session_id, None)
        models = [model_id for model_id in self.queue.models if model_id.startswith(f"{session_id}:train:")]
        for model_id in models:
            self.cancelled[model_id] += (*self.forward.cancel(model_id, CANCELLED), *self.queue.cancel(model_id))
            self.ending[model_id] = save

    def turn(self) -> None:
        """Send the worker what is due, then record what it has computed."""
        self.crash_recovery.turn()
        is_due = self.backoff.wait_s == 0
        unrecorded = self.saves.unrecorded if is_due else []
        tried_again = self.put_off if is_due else set()
        self.put_off = self.put_off - tried_again
        for running in [*unrecorded, *(self.running[model_id] for model_id in tried_again & self.running.keys())]:
            self._go_on(running, None)
        for model_id in self.queue.ready():
            if model_id not in self.put_off and model_id not in self.crash_recovery.waiting:
                self._advance(model_id)
        self.forward.send_passes(self.put_off)
        self._record_complete()
        self._unload_due()
        if (tried_again or unrecorded) and not tried_again & self.put_off and not self.saves.unrecorded:
            self.backoff.succeeded()

    def _unload_due(self) -> None:
        """Begin to save, or unload, the models whose sessions have ended."""
        for model_id in self._to_unload():
            if self.ending[model_id] and model_id in self.operations.models:
                self._begin_saving(model_id)
            else:
                self._unload(model_id)

    def _begin_saving(self, model_id: str) -> None:
        self.running[model_id] = Running(model_id, self.operations.keep(model_id), None)
        self._go_on(self.running[model_id], None)

    # ---- When the server stops

    def begin_to_stop(self) -> None:
        """Begin to end: `finish` takes the place of `turn`, and saves all models but those whose clients ended their sessions."""
        self.stops = True
        self._end_all()
        self.unsaved.clear()

    def _end_all(self) -> None:
        for model_id in self.operations.models:
            self.ending.setdefault(model_id, True)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is being computed or saved, and no model is left to be saved."""
        return not (self.forward.passes or self.running or self.saves.writing or self.forward.complete or self.operations.models)

    @property
    def saving(self) -> str | None:
        """A model that is being saved by itself, or else one whose save is being written for its client."""
        own = (model_id for model_id, running in self.running.items() if running.command is None)
        asked = (model_id for model_id, saving in self.saves.writing.items() if saving.in_call is not None)
        return next(itertools.chain(own, asked), None)

    def finish(self, give_up: bool) -> None:
        """Record what the worker has computed, then save the models, one after the other. Nothing else is begun.

        With `give_up` what waits for the database is lost.
        """
        self._record_complete()
        self.crash_recovery.turn()
        self._end_all()  # one that was being made when the stop began may be there now
        waiting = set[str]()
        if self.backoff.wait_s == 0 or give_up:
            waiting, self.put_off = self.put_off, waiting
            for running in [*self.saves.unrecorded, *(self.running[model_id] for model_id in waiting & self.running.keys())]:
                self._go_on(running, None)
        if self.forward.passes:
            return
        for model_id in list(self.forward.operations):
            self.cancelled[model_id] += self.forward.cancel(model_id, CANCELLED)
        self._lose_unsaved(self._forget_unrecorded(waiting) if give_up else set())
        for model_id in self._to_unload():
            if not self.ending[model_id]:
                self._unload(model_id)
            elif not self.running:
                self._begin_saving(model_id)

    def _forget_unrecorded(self, waiting: set[str]) -> set[str]:
        """Give up the saves that wait for the database. Returns the models that are lost with them, and those of `waiting`."""
        unrecorded = [saving.model_id for saving in self.saves.unrecorded]
        for model_id in unrecorded:  # its model may be lost already
            self.saves.forget(model_id)
        return waiting.union(self.put_off, unrecorded) & self.operations.models.keys()

    def _lose_unsaved(self, without_database: set[str]) -> None:
        """Let go of models that could not be saved: they are unloaded as they are."""
        for model_id in {*self.unsaved, *without_database}:
            log.error("model %s could not be saved and is lost", model_id)
            self.running.pop(model_id, None)
            self.saves.forget(model_id)
            self.ending[model_id] = False
        self.unsaved.clear()
        self.put_off -= {model_id for model_id in self.put_off if not self.ending.get(model_id, True)}

    def _advance(self, model_id: str) -> None:
        """Take this model's commands in order: forward work until a pass is full, others only when nothing is before them."""
        queue = self.queue.models[model_id]
        while (command := queue.head()) is not None and model_id not in self.running and model_id not in self.saves.next:
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
        self.put_off.add(model_id)
        self._try_later()

    def _try_later(self) -> None:
        if self.backoff.wait_s == 0:  # several models that are tried together are one attempt
            self.backoff.failed()

    def _put_back(self, commands: list[Command], error: StoreUnavailableError) -> None:
        """Let commands of one model, which follow each other, wait in the queue until the database can be read."""
        for command in reversed(commands):
            self.queue.models[command.model_id].put_back(command)
        self._put_off(commands[0].model_id, error)

    # ---- Operations that are steps

    def _begin(self, command: Command) -> None:
        """Begin a command. Raises StoreUnavailableError if it could not."""
        with failing_into(partial(self._fail, command), StoreUnavailableError):
            request = self.operations.read(command)
            if writes_files(request) and command.model_id in self.saves.writing:
                self.queue.models[command.model_id].put_back(command)
                self.saves.next.add(command.model_id)
                return
            steps = self.operations.start(command, request)
            self.running[command.model_id] = Running(command.model_id, steps, command)
        if command.model_id in self.running:
            self._go_on(self.running[command.model_id], None)

    def _go_on(self, running: Running, answer: "dict[str, object] | TinsmithError | None") -> None:
        """Take an operation to its next call, or to its end. Raises StoreUnavailableError if it could not begin."""
        running.in_call = None
        try:
            with failing_into(partial(self._failed_running, running), StoreUnavailableError):
                try:
                    step = running.steps.throw(answer) if isinstance(answer, TinsmithError) else running.steps.send(answer)
                except StopIteration as end:
                    self._end_running(running, end.value)
                    return
                running.has_begun = True
                if isinstance(step, Wait) and running.copied_state is not None:
                    log.warning("a checkpoint of model %s waits for the database: %s", running.model_id, step.reason)
                    self._try_later()
                elif isinstance(step, Wait):
                    self._put_off(running.model_id, step.reason)
                else:
                    running.in_call = step.number
                    self.send(step)
        except StoreUnavailableError as error:
            if running.has_begun:
                self._failed_running(running, error)
                return
            del self.running[running.model_id]
            if running.command is not None:
                raise
            self._put_off(running.model_id, error)

    def _copied(self, number: int) -> None:
        """The copy that a save writes is there, and its model goes on. One that the server is going to unload has nothing to go on with."""
        running = next((running for running in self.running.values() if running.in_call == number), None)
        if running is not None and running.command is not None:
            del self.running[running.model_id]
            self.saves.begin(running, self.operations.models[running.model_id].state)

    def _remove(self, running: Running) -> None:
        """An operation has ended."""
        if running.copied_state is None:
            del self.running[running.model_id]
        else:
            self.saves.forget(running.model_id)

    def _end_running(self, running: Running, ended: Ended) -> None:
        self._remove(running)
        if running.command is None:
            self.unsaved.pop(running.model_id, None)
            self._unload(running.model_id)
            return
        command = running.command
        self.suspects.discard(command.request_id)
        self.record([Outcome(command.request_id, orjson.dumps(ended.result), "json", None, None, ended.resolved)])
        metrics = " ".join(f"{name}={value:.6g}" for name, value in ended.result.get("metrics", {}).items())
        log_finished(command, running.started_at, tokens=0, detail=metrics)

    def _failed_running(self, running: Running, error: TinsmithError) -> None:
        self._remove(running)
        if running.command is not None:
            self._fail(running.command, error)
            return
        self._fail_cancelled(running.model_id, TinsmithError(f"it was cancelled, and its model could not be saved: {error}"))
        self.unsaved[running.model_id] = time.monotonic() + SAVE_AGAIN_S
        then = "and the server stops" if self.stops else f"stays loaded, and is tried again in {SAVE_AGAIN_S:.0f} s"
        log.error("model %s cannot be saved, %s: %s", running.model_id, then, error)

    # ---- Forward work

    def _prepare(self, command: Command) -> None:
        """Let the worker check and measure a forward command. Raises StoreUnavailableError if it cannot be read now."""
        with failing_into(lambda error: self._fail(command, error), StoreUnavailableError):
            payload = self.operations.read_payload(command)
            model = self.operations.model(command.model_id)
            self.forward.add(command, model.base_model, payload)

    def take(self, message: Message) -> None:
        """Take in what the worker says of its work."""
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
        begun = *self.running.values(), *self.saves.writing.values()
        running = next((running for running in begun if running.in_call == number), None)
        if running is not None:
            self._go_on(running, answer)

    def _record_complete(self) -> None:
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
                self.trained_tokens[operation.command.model_id] += operation.tokens
            log_finished(operation.command, operation.started_at, operation.tokens, f"loss={operation.loss:.6g}")

    # ---- Ends

    def fail_overdue(self) -> None:
        """Give up on commands that waited too long for their predecessor.

        An optim_step among them clears the gradients, so passes of its model that are under way must have ended.
        """
        for overdue in self.queue.overdue(time.monotonic(), self._begun):
            command = overdue.command
            waited = f"seq_id {overdue.missing} never came; this operation, seq_id {command.seq_id}, waited {self.queue.held_s:g} s for it"
            self._fail(command, UserError(waited))
            if command.kind != "optim_step":  # what is missing may belong to the step that is open now; an optim_step has ended it
                self.operations.spoil_step(command.model_id, waited)

    def _fail(self, command: Command, error: TinsmithError, touches_step: bool = True) -> None:
        """Record a failure. `touches_step` is False for what leaves the open step as it is: a forward, or part of an earlier step."""
        if isinstance(error, GivenUpError) and command.model_id in self.ending:
            self.cancelled[command.model_id].append(command)
            return
        self.suspects.discard(command.request_id)
        if touches_step:
            self.operations.after_failure(command, str(error))
        self.record([Outcome(command.request_id, None, None, str(error), error.category)])
        log.warning("failed model=%s seq_id=%d kind=%s: %s", command.model_id, command.seq_id, command.kind, error)

    def _unload(self, model_id: str) -> None:
        del self.ending[model_id]
        self.unsaved.pop(model_id, None)
        self._fail_cancelled(model_id)
        self.operations.unload(model_id)
        self._forget(model_id)

    def _fail_cancelled(self, model_id: str, error: TinsmithError | None = None) -> None:
        """Fail all that is not run any more of a model; by default with what became of the model."""
        cancelled = self.cancelled.pop(model_id, []) + self.queue.cancel(model_id)
        if cancelled:
            error = error or self._why_cancelled(model_id)
            for command in cancelled:
                self._fail(command, error, touches_step=False)

    def _why_cancelled(self, model_id: str) -> UserError:
        """Describe the end of an unloaded model, and name the checkpoint to go on from."""
        try:
            refusal = self.operations.checkpoints.store.refusal(model_id)
        except TinsmithError:  # the database cannot be read, or does not know the session any more
            refusal = None
        return UserError(str(CANCELLED) if refusal is None else f"it was cancelled, because {refusal}")

    def _forget(self, model_id: str) -> None:
        self.cancelled.pop(model_id, None)
        self.queue.drop(model_id)
        self.forward.forget(model_id)
        self.saves.forget(model_id)  # of a model that is lost, with which it has failed
        self.suspects = {each for each in self.suspects if not each.startswith(f"{model_id}/")}
        self.trained_before += self.trained_tokens.pop(model_id, 0)

    def workers_ended(self, reason: str) -> None:
        """The workers are gone, and with them all models: these come back, or `take_lost` says that they do not.

        What had begun and was not recorded is run again by the next workers. What was under way for the second time fails with `reason`:
        it may be what ends them, and would do so again and again.
        """
        self._take_back_complete()
        self._record_complete()
        self.crash_recovery.workers_ended(reason)
        begun = [(each.command, each.is_at_worker) for queue in self.forward.operations.values() for each in queue]
        anew, gone = self.saves.cut_short(self.operations.models)
        begun += [(each.command, each.in_call is not None) for each in (*anew, *self.running.values()) if each.command is not None]
        for saving in gone:
            assert saving.command is not None
            what = "while the save was written; its model has gone on since, and what was to be saved is gone: save again"
            self._fail(saving.command, TinsmithError(f"{reason} {what}"))
        self.running.clear()
        self.unsaved.clear()
        self.put_off.clear()
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

    def _take_back_complete(self) -> None:
        """Run again what is computed and not recorded, where that keeps the model's open step whole. Recorded, it would lose gradients."""
        for operation in reversed(self.forward.take_complete()):
            model = self.operations.models.get(operation.command.model_id)
            if model is None or model.origin is None or model.has_gradients or model.spoiled:
                self.forward.complete.insert(0, operation)
            else:
                self.forward.operations.setdefault(model.model_id, deque()).appendleft(operation)

    def take_lost(self) -> dict[str, str]:
        """Models that ended with their workers since this was last asked, and why. They are forgotten here, and still queued in the log."""
        lost = self.crash_recovery.take_lost()
        for model_id in lost:
            self.ending.pop(model_id, None)
            self.put_off.discard(model_id)
            self._forget(model_id)
        return lost


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.in_order]
    result = encode_output(outputs, operation.metrics)
    return Outcome(operation.command.request_id, result, "protobuf", None, None)
