"""The training half of the engine: commands in order, forward work merged into passes, results into the log.

What one command needs of the database may be out of reach for a while: its picture, the checkpoint that it reads or writes. Then nothing of
it has happened yet; its model waits and is tried again, and all others go on.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

import orjson

from tinsmith.engine.backoff import Backoff
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.datums import prepare
from tinsmith.engine.operations import Operations
from tinsmith.engine.passes import ForwardOperation, next_pass, render, run_pass
from tinsmith.errors import StoreUnavailableError, TinsmithError, UserError
from tinsmith.protocol.boundary import failing_into
from tinsmith.store.records import Command, Outcome
from tinsmith.wire.forward_backward import decode_stored, encode_output

log = logging.getLogger(__name__)

SAVE_AGAIN_S = 60.0
"""Time between two attempts to save a model whose session has ended: each writes until the disk is full, while all others wait."""


class Trainer:
    """Runs the commands of all models. `finish` takes their outcomes; it does not fail (`Recorder.record`)."""

    def __init__(self, operations: Operations, queue: CommandQueue, tokens_per_pass: int, finish: Callable[[list[Outcome]], None]) -> None:
        self.operations = operations
        self.queue = queue
        self.tokens_per_pass = tokens_per_pass
        self.finish = finish
        self.trained_tokens: Counter[str] = Counter()
        """Tokens of the forward_backward operations of each loaded model so far."""
        self.trained_before = 0
        """The same of models that are unloaded, together."""
        self.forward: dict[str, deque[ForwardOperation]] = {}
        """Forward work of each model that was taken from the queue and prepared; a model without any is not in it."""
        self.ending: dict[str, bool] = {}
        """Models to unload as soon as what they have begun has ended, and whether to save them first."""
        self.unsaved: dict[str, float] = {}
        """Models to unload that could not be saved, and when that is tried again (monotonic time). Until then they stay loaded."""
        self.put_off: set[str] = set()
        """Models whose next command, or whose saving, waits for the database."""
        self.backoff = Backoff()
        """When the models that are put off are tried again."""

    def queued(self, model_id: str) -> int:
        """How many operations of a model have come and are not finished."""
        queue = self.queue.models.get(model_id)
        return len(self.forward.get(model_id, ())) + (len(queue.held) if queue else 0)

    @property
    def has_work(self) -> bool:
        """Whether a `turn` would do something."""
        if self.put_off and self.backoff.wait_s == 0:
            return True
        return bool(self._to_unload()) or any(model_id not in self.put_off for model_id in (*self.forward, *self.queue.ready()))

    def _to_unload(self) -> list[str]:
        """The models that can be unloaded now."""
        now = time.monotonic()
        busy = self.put_off.union(self.forward, (model_id for model_id, due_at in self.unsaved.items() if due_at > now))
        return [model_id for model_id in self.ending if model_id not in busy]

    def add(self, command: Command) -> None:
        """File a new command."""
        if not self.queue.add(command):
            late = UserError(f"seq_id {command.seq_id} came after the operations behind it had been given up")
            self._fail(command, late, touches_step=False)

    def end_session(self, session_id: str, save: bool) -> None:
        """Cancel what the session's models have queued and unload them; with `save` keep them as checkpoints.

        An operation of which a part is computed is computed to its end.
        """
        for model_id in [model_id for model_id in self.queue.models if model_id.startswith(f"{session_id}:train:")]:
            operations = self.forward.pop(model_id, ())
            begun = deque(operation for operation in operations if operation.results)
            if begun:
                self.forward[model_id] = begun
            for command in (*(operation.command for operation in operations if not operation.results), *self.queue.cancel(model_id)):
                self._cancel(command)
            self.ending[model_id] = save

    def _cancel(self, command: Command) -> None:
        self._fail(command, UserError("it was cancelled: its session ended before the operation was run"))

    def turn(self) -> None:
        """Run what is due: all commands but forward work, then at most one pass."""
        tried_again = self.put_off if self.backoff.wait_s == 0 else set()
        self.put_off = self.put_off - tried_again
        for model_id in self.queue.ready():
            if model_id not in self.put_off:
                self._advance(model_id)
        if any(model_id not in self.put_off for model_id in self.forward):
            self._pass()
        for model_id in self._to_unload():
            self._unload(model_id)
        if tried_again and not tried_again & self.put_off:
            self.backoff.succeeded()

    def _advance(self, model_id: str) -> None:
        """Take this model's commands in order: forward work until a pass is full, others only when no forward work is before them."""
        queue = self.queue.models[model_id]
        while (command := queue.head()) is not None:
            waiting = self.forward.get(model_id, ())
            is_forward = command.kind == "forward_backward"
            if sum(operation.tokens for operation in waiting) >= self.tokens_per_pass if is_forward else waiting:
                return
            queue.take()
            try:
                (self._prepare if is_forward else self._execute)(command)
            except StoreUnavailableError as error:  # nothing of the command has happened
                queue.put_back(command)
                self._put_off(model_id, error)
                return

    def _put_off(self, model_id: str, error: StoreUnavailableError) -> None:
        log.warning("model %s waits for the database: %s", model_id, error)
        self.put_off.add(model_id)
        if self.backoff.wait_s == 0:  # several models that are tried together are one attempt
            self.backoff.failed()

    def _execute(self, command: Command) -> None:
        """Run a command. Raises StoreUnavailableError if it could not begin."""
        started = time.monotonic()
        result = None
        with failing_into(lambda error: self._fail(command, error), StoreUnavailableError):
            result = self.operations.execute(command)
        if result is not None:  # it has had its effect, and nothing makes a failure of it any more
            self.finish([Outcome(command.request_id, orjson.dumps(result), "json", None, None)])
            metrics = " ".join(f"{name}={value:.6g}" for name, value in result.get("metrics", {}).items())
            log_finished(command, started, tokens=0, detail=metrics)

    def _prepare(self, command: Command) -> None:
        """Make a forward command ready for passes. Raises StoreUnavailableError if its pictures cannot be read now."""
        with failing_into(lambda error: self._fail(command, error), StoreUnavailableError):
            request = decode_stored(self.operations.read_payload(command), command.image_digests)
            with failing_into(lambda error: self._fail(command, error, touches_step=not request.forward_only), StoreUnavailableError):
                model = self.operations.model(command.model_id)
                work = prepare(command.model_id, request, model.served.renderer)
                self.forward.setdefault(command.model_id, deque()).append(ForwardOperation(command, work, not request.forward_only))

    def _pass(self) -> None:
        """One pass on the base model whose work has waited longest."""
        queues = {model_id: queue for model_id, queue in self.forward.items() if model_id not in self.put_off}
        oldest = min(queues, key=lambda model_id: queues[model_id][0].command.id)
        served = self.operations.model(oldest).served
        mine = {model_id: queue for model_id, queue in queues.items() if self.operations.model(model_id).served is served}
        work, broken = render(next_pass(list(mine.values()), served.backend.tokens_per_pass))
        for operation, error in broken.items():
            if isinstance(error, StoreUnavailableError):
                self._put_off(operation.command.model_id, error)
            else:
                self._fail_operation(operation, error)
        failures: dict[ForwardOperation, str] = {}
        if work:
            with failing_into(lambda error: failures.update({piece.operation: str(error) for piece, _ in work})):
                failures.update(run_pass(served.backend, work))
        for operation, reason in failures.items():
            self._fail_operation(operation, TinsmithError(reason))
        self._finish_complete(list(mine))

    def _fail_operation(self, operation: ForwardOperation, error: TinsmithError) -> None:
        """What it has contributed to the gradients is only a part of what the client asked for: the step that it belongs to fails too."""
        self.forward[operation.command.model_id].remove(operation)
        self._fail(operation.command, error, touches_step=operation.backward)

    def _finish_complete(self, model_ids: list[str]) -> None:
        complete = []
        for model_id in model_ids:
            queue = self.forward[model_id]
            while queue and queue[0].is_complete:
                complete.append(queue.popleft())
            if not queue:
                del self.forward[model_id]
        encoded: dict[ForwardOperation, Outcome] = {}
        for operation in complete:
            with failing_into(partial(self._fail, operation.command, touches_step=operation.backward)):
                encoded[operation] = _outcome(operation)
        self.finish(list(encoded.values()))
        for operation in encoded:
            if operation.backward:
                self.trained_tokens[operation.command.model_id] += operation.tokens
            log_finished(operation.command, operation.started_at, operation.tokens, f"loss={operation.loss:.6g}")

    def fail_overdue(self) -> None:
        """Give up on commands that waited too long for their predecessor."""
        for overdue in self.queue.overdue(time.monotonic()):
            command = overdue.command
            waited = f"seq_id {overdue.missing} never came; this operation, seq_id {command.seq_id}, waited {self.queue.held_s:g} s for it"
            self._fail(command, UserError(waited))
            if command.kind != "optim_step":  # what is missing may belong to the step that is open now; an optim_step has ended it
                self.operations.spoil_step(command.model_id, waited)

    def _fail(self, command: Command, error: TinsmithError, touches_step: bool = True) -> None:
        """Record a failure. `touches_step` is False for what leaves the open step as it is: a forward, or part of an earlier step."""
        if touches_step:
            self.operations.after_failure(command, str(error))
        self.finish([Outcome(command.request_id, None, None, str(error), error.category)])
        log.warning("failed model=%s seq_id=%d kind=%s: %s", command.model_id, command.seq_id, command.kind, error)

    def _unload(self, model_id: str) -> None:
        if self.ending[model_id] and not self._saved(model_id):
            return
        self.unsaved.pop(model_id, None)
        del self.ending[model_id]
        for command in self.queue.cancel(model_id):
            self._cancel(command)
        self.queue.drop(model_id)
        self.trained_before += self.trained_tokens.pop(model_id, 0)
        with failing_into(lambda error: log.error("something of model %s could not be freed: %s", model_id, error)):
            self.operations.unload(model_id)

    def _saved(self, model_id: str) -> bool:
        """Save a model whose session has ended by itself. False if that must be tried again."""
        failures: list[TinsmithError] = []
        try:
            with failing_into(failures.append, StoreUnavailableError):
                self.operations.keep(model_id)
        except StoreUnavailableError as unavailable:
            self._put_off(model_id, unavailable)
            return False
        for error in failures:
            self.unsaved[model_id] = time.monotonic() + SAVE_AGAIN_S
            log.error("model %s stays loaded until it can be saved, tried again in %.0f s: %s", model_id, SAVE_AGAIN_S, error)
        return not failures


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.in_order]
    result = encode_output(outputs, {"loss:sum": operation.loss})
    return Outcome(operation.command.request_id, result, "protobuf", None, None)


def log_finished(command: Command, started_at: float, tokens: int, detail: str) -> None:
    """One line for each finished operation: how much it was, what came out, how long it took, how long it had waited.

    `started_at` is monotonic time. How long it waited is counted by the clock, which two processes share and somebody may have set.
    """
    seconds = time.monotonic() - started_at
    log.info(
        "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
        command.model_id,
        command.seq_id,
        command.kind,
        tokens,
        detail,
        seconds,
        max(0.0, time.time() - seconds - command.created_at),
    )
