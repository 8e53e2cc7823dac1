"""The training half of the engine: commands in order, forward work merged into passes, results into the log."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable

import orjson

from tinsmith.engine.boundary import failing_into
from tinsmith.engine.command_queue import CommandQueue
from tinsmith.engine.datums import prepare
from tinsmith.engine.operations import LoadedModel, Operations
from tinsmith.engine.passes import ForwardOperation, run_pass
from tinsmith.errors import TinsmithError, UserError
from tinsmith.store.records import Command, Outcome
from tinsmith.wire.forward_backward import decode_stored, encode_output

log = logging.getLogger(__name__)


class Trainer:
    """Runs the commands of all models. `finish` records outcomes and tells the server."""

    def __init__(self, operations: Operations, queue: CommandQueue, tokens_per_pass: int, finish: Callable[[list[Outcome]], None]) -> None:
        self.operations = operations
        self.queue = queue
        self.tokens_per_pass = tokens_per_pass
        self.finish = finish
        self.trained_tokens: Counter[str] = Counter()
        """Tokens of the forward_backward operations of each model so far."""
        self.forward: dict[str, deque[ForwardOperation]] = {}
        """Forward work of each model that was taken from the queue and prepared; a model without any is not in it."""
        self.ending: dict[str, bool] = {}
        """Models to unload as soon as they have nothing to run, and whether to save them first."""

    def queued(self, model_id: str) -> int:
        """How many operations of a model have come and are not finished."""
        queue = self.queue.models.get(model_id)
        return len(self.forward.get(model_id, ())) + (len(queue.held) if queue else 0)

    @property
    def has_work(self) -> bool:
        """Whether a `turn` would do something."""
        return bool(self.forward or self.ending or self.queue.ready())

    def add(self, command: Command) -> None:
        """File a new command."""
        if not self.queue.add(command):
            late = UserError(f"seq_id {command.seq_id} came after the operations behind it had been given up")
            self._fail(command, late, touches_step=False)

    def end_session(self, session_id: str, save: bool) -> None:
        """Unload the session's models once the work that can run has run; with `save` keep them as checkpoints."""
        self.ending |= {model_id: save for model_id in self.queue.models if model_id.startswith(f"{session_id}:train:")}

    def turn(self) -> None:
        """Run what is due: all commands but forward work, then at most one pass."""
        for model_id in self.queue.ready():
            self._advance(model_id)
        if self.forward:
            self._pass()
        for model_id in [m for m in self.ending if m not in self.forward and self.queue.models[m].head() is None]:
            self._unload(model_id)

    def _advance(self, model_id: str) -> None:
        """Take this model's commands in order: forward work until a pass is full, others only when no forward work is before them."""
        queue = self.queue.models[model_id]
        while (command := queue.head()) is not None:
            waiting = self.forward.get(model_id, ())
            if command.kind != "forward_backward":
                if waiting:
                    return
                queue.take()
                self._execute(command)
            elif sum(operation.tokens for operation in waiting) < self.tokens_per_pass:
                queue.take()
                self._prepare(command)
            else:
                return

    def _execute(self, command: Command) -> None:
        started = time.time()
        with failing_into(lambda error: self._fail(command, error)):
            result = self.operations.execute(command)
            self.finish([Outcome(command.request_id, orjson.dumps(result), "json", None, None)])
            metrics = " ".join(f"{name}={value:.6g}" for name, value in result.get("metrics", {}).items())
            log_finished(command, started, tokens=0, detail=metrics)

    def _prepare(self, command: Command) -> None:
        with failing_into(lambda error: self._fail(command, error)):
            request = decode_stored(command.payload)
            with failing_into(lambda error: self._fail(command, error, touches_step=not request.forward_only)):
                model = self.operations.model(command.model_id)
                work = prepare(command.model_id, request, model.served.renderer)
                self.forward.setdefault(command.model_id, deque()).append(ForwardOperation(command, work, not request.forward_only))

    def _pass(self) -> None:
        """One pass on the base model whose work has waited longest."""
        served = self._oldest().served
        mine = {m: queue for m, queue in self.forward.items() if self.operations.model(m).served is served}
        failures = run_pass(served.backend, list(mine.values()), served.backend.tokens_per_pass)
        for model_id, reason in failures.items():
            self._fail_head(model_id, reason)
        self._finish_complete(list(mine))

    def _oldest(self) -> LoadedModel:
        model_id = min(self.forward, key=lambda m: self.forward[m][0].command.id)
        return self.operations.model(model_id)

    def _fail_head(self, model_id: str, reason: str) -> None:
        """The pass of this model failed: so does the operation at its head, and the step that it belongs to."""
        operation = self.forward[model_id].popleft()
        self._fail(operation.command, TinsmithError(reason), touches_step=operation.backward)

    def _finish_complete(self, model_ids: list[str]) -> None:
        complete = []
        for model_id in model_ids:
            queue = self.forward[model_id]
            while queue and queue[0].is_complete:
                complete.append(queue.popleft())
            if not queue:
                del self.forward[model_id]
        self.finish([_outcome(operation) for operation in complete])
        for operation in complete:
            if operation.backward:
                self.trained_tokens[operation.command.model_id] += operation.tokens
            log_finished(operation.command, operation.started_at, operation.tokens, f"loss={operation.loss:.6g}")

    def fail_overdue(self) -> None:
        """Give up on commands that waited too long for their predecessor."""
        for overdue in self.queue.overdue(time.time()):
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
        if self.ending.pop(model_id):
            with failing_into(lambda error: log.error("model %s could not be kept: %s", model_id, error)):
                self.operations.keep(model_id)
        for command in self.queue.drop(model_id):
            self._fail(command, UserError("the session was finished before this operation could run"))
        self.operations.unload(model_id)


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.results]
    result = encode_output(outputs, {"loss:sum": operation.loss})
    return Outcome(operation.command.request_id, result, "protobuf", None, None)


def log_finished(command: Command, started_at: float, tokens: int, detail: str) -> None:
    """One line for each finished operation: how much it was, what came out, how long it took, how long it had waited."""
    log.info(
        "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
        command.model_id,
        command.seq_id,
        command.kind,
        tokens,
        detail,
        time.time() - started_at,
        started_at - command.created_at,
    )
