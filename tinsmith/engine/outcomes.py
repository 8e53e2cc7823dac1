"""What operations came to: recorded, logged, and noted in their models."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import orjson

from tinsmith.engine.model_state import ModelStates
from tinsmith.engine.passes import ForwardOperation
from tinsmith.engine.running import Ended, Running
from tinsmith.errors import GivenUpError, TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.store.records import Command, Outcome
from tinsmith.wire.forward_backward import encode_output

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Outcomes:
    """Tells how operations have ended. `record` takes it and does not fail (`Recorder.record`)."""

    models: ModelStates
    record: Callable[[list[Outcome]], None]
    trained_tokens: int = 0
    suspects: set[str] = field(default_factory=set)
    """Operations that were under way when workers ended, and are computed again."""

    def computed(self, operations: Sequence[ForwardOperation]) -> None:
        """Record forward work; what cannot be written fails."""
        encoded: dict[ForwardOperation, Outcome] = {}
        for operation in operations:
            with failing_into(partial(self.fail, operation.command, touches_step=operation.backward)):
                encoded[operation] = _outcome(operation)
        self.record(list(encoded.values()))
        self.suspects -= {operation.command.request_id for operation in encoded}
        for operation in encoded:
            if operation.backward:
                self.trained_tokens += operation.tokens
                if (state := self.models.get(operation.command.model_id)) is not None:
                    state.trained_tokens += operation.tokens
                    if state.loaded is not None:
                        state.loaded.added_seq = operation.command.seq_id
            _log_finished(operation.command, operation.started_at, operation.tokens, f"loss={operation.loss:.6g}")

    def ended(self, command: Command, running: Running, ended: Ended) -> None:
        """Record the result of an operation that is no forward work."""
        self.suspects.discard(command.request_id)
        self.record([Outcome(command.request_id, orjson.dumps(ended.result), "json", None, None, ended.resolved)])
        metrics = " ".join(f"{name}={value:.6g}" for name, value in ended.result.get("metrics", {}).items())
        _log_finished(command, running.started_at, tokens=0, detail=metrics)

    def fail(self, command: Command, error: TinsmithError, touches_step: bool = True) -> None:
        """Record a failure. `touches_step` is False for what leaves the open step as it is: a forward, or part of an earlier step."""
        state = self.models.get(command.model_id)
        if isinstance(error, GivenUpError) and state is not None and state.ending:
            state.cancelled.append(command)
            return
        self.suspects.discard(command.request_id)
        if touches_step:
            self.models.after_failure(command, str(error))
        self.record([Outcome(command.request_id, None, None, str(error), error.category)])
        log.warning("failed model=%s seq_id=%d kind=%s: %s", command.model_id, command.seq_id, command.kind, error)

    def forget(self, model_id: str) -> None:
        self.suspects = {each for each in self.suspects if not each.startswith(f"{model_id}/")}


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.in_order]
    result = encode_output(outputs, operation.metrics)
    return Outcome(operation.command.request_id, result, "protobuf", None, None)


def _log_finished(command: Command, started_at: float, tokens: int, detail: str) -> None:
    """Log how much an operation was, what came out, how long it took (since monotonic `started_at`), and how long it had waited.

    The wait is counted by the clock, which two processes share and somebody may have set.
    """
    seconds = time.monotonic() - started_at
    log.info(
        "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
        *(command.model_id, command.seq_id, command.kind, tokens, detail, seconds, max(0.0, time.time() - seconds - command.created_at)),
    )
