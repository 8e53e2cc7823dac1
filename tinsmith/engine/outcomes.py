"""What operations came to: recorded, logged, and noted in their models."""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import orjson

from tinsmith.engine.journal import change_of
from tinsmith.engine.model_state import Ended, ModelStates, Running
from tinsmith.engine.passes import ForwardOperation
from tinsmith.errors import EngineUnavailableError, GivenUpError, StoreUnavailableError, TinsmithError
from tinsmith.observing.metrics import OPERATION_SECONDS, OPERATIONS, TRAINED_TOKENS
from tinsmith.observing.spans import OPERATIONS as OF_OPERATIONS
from tinsmith.observing.spans import SPANS
from tinsmith.protocol.boundary import failing_into
from tinsmith.store.records import LOCAL, Command, HistoryChange, OperationMetrics, Outcome
from tinsmith.store.store import Store
from tinsmith.wire.forward_backward import encode_output

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Outcomes:
    """Tells how operations have ended. `record` takes it and does not fail (`Recorder.record`)."""

    models: ModelStates
    record: Callable[[Sequence[Outcome | HistoryChange]], None]
    tenant_of: Callable[[str], str] = lambda _: LOCAL
    """Tells the tenant of a model."""
    gpu_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of devices by model, until the next outcome of the model takes them along."""
    take_complete: Callable[[], Sequence[ForwardOperation]] = tuple
    """Gives forward work that is computed and not recorded."""
    suspects: Counter[str] = field(default_factory=Counter)
    """How often workers have ended while each operation was under way that is computed again."""

    def computed(self, operations: Sequence[ForwardOperation]) -> None:
        """Record forward work; what cannot be written fails."""
        encoded: dict[ForwardOperation, Outcome] = {}
        for operation in operations:
            with failing_into(partial(self.fail, operation.command, touches_step=operation.backward)):
                encoded[operation] = replace(
                    _outcome(operation),
                    gpu_seconds=self._unpaid(operation.command.model_id),
                    replays=self._is_replayed(operation),
                )
        for operation, outcome in encoded.items():
            model = self.models.find(operation.command.model_id)
            if model is not None and operation.backward:
                model.added_seq = operation.command.seq_id
            encoded[operation] = replace(outcome, history=self._change(operation.command.model_id))
        self.record(list(encoded.values()))
        for operation in encoded:
            self.suspects.pop(operation.command.request_id, None)
            if operation.backward:
                TRAINED_TOKENS.labels(operation.base_model).inc(operation.tokens)
                if (state := self.models.get(operation.command.model_id)) is not None:
                    state.trained_tokens += operation.tokens
            detail = f"loss={operation.loss:.6g}"
            self._tell_finished(operation.command, operation.started_at, operation.tokens, detail)

    def catch_up(self) -> None:
        """Record forward work that is computed, before anything changes its model behind it."""
        self.computed(self.take_complete())

    def _is_replayed(self, operation: ForwardOperation) -> bool:
        """Whether a replay may need the request."""
        model = self.models.find(operation.command.model_id)
        is_taken = model is not None and model.history.keeps_open_step and not model.spoiled
        return operation.backward and is_taken

    def ended(self, command: Command, running: Running, ended: Ended) -> None:
        """Record the result of an operation that is no forward work."""
        self.suspects.pop(command.request_id, None)
        result, seconds = orjson.dumps(ended.result), self._unpaid(command.model_id)
        history = self._change(command.model_id)
        measured = OperationMetrics(command.kind, ended.result.get("metrics", {}))
        outcome = Outcome(command.request_id, result, "json", None, None, ended.resolved, gpu_seconds=seconds)
        self.record([replace(outcome, history=history, measured=measured)])
        metrics = " ".join(f"{name}={value:.6g}" for name, value in measured.metrics.items())
        self._tell_finished(command, running.started_at, tokens=0, detail=metrics)

    def fail(self, command: Command, error: TinsmithError, touches_step: bool = True) -> None:
        """Record a failure.

        `touches_step` is False for what leaves the open step as it is: a forward, or part of an earlier step.
        """
        state = self.models.get(command.model_id)
        if isinstance(error, GivenUpError) and state is not None and state.ending:
            state.cancelled.append(command)
            return
        self.catch_up()
        self.suspects.pop(command.request_id, None)
        if touches_step:
            self.models.after_failure(command, str(error))
        seconds, history = self._unpaid(command.model_id), self._change(command.model_id)
        reason = str(error)
        self.record(
            [Outcome(command.request_id, None, None, reason, error.category, gpu_seconds=seconds, history=history)]
        )
        OPERATIONS.labels(command.kind, error.category).inc()
        self._note(command, 0.0, max(0.0, time.time() - command.created_at), outcome=error.category, error=reason)
        log.warning(
            "failed model=%s seq_id=%d kind=%s: %s",
            command.model_id,
            command.seq_id,
            command.kind,
            error,
            extra=self._ids(command),
        )

    def _change(self, model_id: str) -> HistoryChange | None:
        model = self.models.find(model_id)
        return None if model is None else change_of(model)

    def _unpaid(self, model_id: str) -> float:
        """Seconds of devices for passes of a model that no outcome has yet."""
        return self.gpu_seconds.pop(model_id, 0.0)

    def forget(self, model_id: str) -> None:
        for request_id in [each for each in self.suspects if each.startswith(f"{model_id}/")]:
            del self.suspects[request_id]
        self.gpu_seconds.pop(model_id, None)

    def _tell_finished(self, command: Command, started_at: float, tokens: int, detail: str) -> None:
        """Log and count what an operation came to: it began at monotonic `started_at`, after it had waited.

        The wait is counted by the clock, which two processes share and somebody may have set.
        """
        seconds = time.monotonic() - started_at
        queued_s = max(0.0, time.time() - seconds - command.created_at)
        OPERATIONS.labels(command.kind, "ok").inc()
        self._note(command, queued_s, seconds, outcome="ok", tokens=tokens)
        OPERATION_SECONDS.labels(command.kind, "queued").observe(queued_s)
        OPERATION_SECONDS.labels(command.kind, "run").observe(seconds)
        log.info(
            "model=%s seq_id=%d kind=%s tokens=%d %s seconds=%.3f queued=%.3f",
            *(
                command.model_id,
                command.seq_id,
                command.kind,
                tokens,
                detail,
                seconds,
                queued_s,
            ),
            extra=self._ids(command),
        )

    def _note(self, command: Command, queued_s: float, seconds: float, **facts: object) -> None:
        """Note the span of an operation from its arrival on: it was queued, then it ran."""
        facts |= self._ids(command) | {"model": command.model_id, "seq_id": command.seq_id, "queued_s": queued_s}
        SPANS.note(command.kind, OF_OPERATIONS, time.time() - queued_s - seconds, queued_s + seconds, **facts)

    def _ids(self, command: Command) -> dict[str, str]:
        """Ids for log lines about an operation."""
        return {"request": command.request_id, "tenant": self.tenant_of(command.model_id)}


def _outcome(operation: ForwardOperation) -> Outcome:
    outputs = [{"logprobs": result.logprobs} for result in operation.in_order]
    result = encode_output(outputs, operation.metrics)
    command, tokens = operation.command, operation.tokens
    measured = OperationMetrics("forward_backward" if operation.backward else "forward", operation.measured)
    return Outcome(command.request_id, result, "protobuf", None, None, tokens=tokens, measured=measured)


# Records the outcomes of operations in the log, then tells the server.
#
# An outcome that the database does not take is kept in memory and tried again until it does. It is never replaced by a
# failure: the operation has had its effect, and a client that repeats a step applies it twice.

FIRST_S = 0.1
LONGEST_S = 5.0
"""Intervals double between these two, in seconds."""


class Backoff:
    """The next attempt at one thing that goes well again by itself: soon at first, then at growing intervals."""

    def __init__(self) -> None:
        self._interval_s = 0.0
        self._due_at = 0.0

    @property
    def is_failing(self) -> bool:
        return self._interval_s > 0

    @property
    def wait_s(self) -> float:
        return max(0.0, self._due_at - time.monotonic())

    def failed(self) -> None:
        self._interval_s = min(LONGEST_S, 2 * self._interval_s or FIRST_S)
        self._due_at = time.monotonic() + self._interval_s

    def succeeded(self) -> None:
        self._interval_s = self._due_at = 0.0


@dataclass(eq=False)
class Recorder:
    """Outcomes on their way to the log. `tell` gets each one that is there, for the server.

    Over `limit_bytes` of results that the database has not taken, `is_full` asks for no more.
    """

    store: Store
    tell: Callable[[Outcome], None]
    limit_bytes: float
    waiting: list[Outcome | HistoryChange] = field(default_factory=list)
    """What is not in the log, oldest first."""
    backoff: Backoff = field(default_factory=Backoff)

    @property
    def is_full(self) -> bool:
        """Whether so much waits that no more work should be started."""
        outcomes = [each for each in self.waiting if isinstance(each, Outcome)]
        held = sum(len(outcome.result or b"") + len(outcome.error or "") for outcome in outcomes)
        return bool(self.waiting) and held >= self.limit_bytes

    def record(self, outcomes: Sequence[Outcome | HistoryChange]) -> None:
        """Record outcomes behind those that wait, now or later. Raises nothing that the database raises.

        Raises EngineUnavailableError if another engine has taken over.
        """
        was_full = self.is_full
        self.waiting += outcomes
        self.flush()
        if self.is_full and not was_full:
            log.error(
                "training waits until the database takes results: it is to take %d (--max-unrecorded-mib)",
                len(self.waiting),
            )

    def flush(self) -> None:
        """Record what waits, if the next attempt is due."""
        if not self.waiting or self.backoff.wait_s > 0:
            return
        left = self._left_over(self.waiting)
        waiting = set(map(id, left))
        recorded = [outcome for outcome in self.waiting if id(outcome) not in waiting]
        self.waiting = left
        if left:
            self.backoff.failed()
        elif self.backoff.is_failing:
            self.backoff.succeeded()
            log.info("the database has taken %d outcomes that waited for it", len(recorded))
        for outcome in recorded:
            if isinstance(outcome, Outcome):
                self.tell(outcome)

    def _left_over(self, outcomes: list[Outcome | HistoryChange]) -> list[Outcome | HistoryChange]:
        """Record outcomes in one transaction, or each alone if one cannot be; returns those that are not in the log.

        Those of one model stay in their order: each changes the history that the ones before have left.
        """
        try:
            self.store.record(outcomes)
        except StoreUnavailableError as error:
            log.warning("%d outcomes wait for the database: %s", len(outcomes), error)
            return outcomes
        except EngineUnavailableError:  # another engine has the database: this one ends
            raise
        except Exception:
            if len(outcomes) == 1:
                log.exception("the outcome of %s cannot be recorded; it is tried again", _name_of(outcomes[0]))
                return outcomes
            left: list[Outcome | HistoryChange] = []
            for single in outcomes:
                if _model_of(single) in map(_model_of, left):
                    left.append(single)
                else:
                    left += self._left_over([single])
            return left
        return []


def _name_of(recorded: Outcome | HistoryChange) -> str:
    return recorded.request_id if isinstance(recorded, Outcome) else f"the history of {recorded.model_id}"


def _model_of(recorded: Outcome | HistoryChange) -> str:
    return recorded.request_id.rpartition("/")[0] if isinstance(recorded, Outcome) else recorded.model_id
