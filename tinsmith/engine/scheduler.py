"""The training half of the engine: operations in order, forward work merged into passes, results into the log.

Nothing here computes or waits. What is due is sent to the workers, whose answers come back with `take`, and meanwhile
other models go on.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from cachetools import LRUCache

from tinsmith.config import Config
from tinsmith.engine.crash_recovery import CrashRecovery, Reply
from tinsmith.engine.forward_work import ForwardWork, PassOrder
from tinsmith.engine.model_state import ModelState
from tinsmith.engine.operations import DatabaseWaits, Operations, StepwiseOperations
from tinsmith.engine.outcomes import Outcomes
from tinsmith.engine.passes import ActiveSessions, Paces
from tinsmith.engine.replay import Replay
from tinsmith.engine.unloading import Unloading
from tinsmith.errors import StoreUnavailableError, UserError, reported
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Answer, CallFailed, Copied, CopyEnded, PassDone, Prepared, PrepareFailed, error_of
from tinsmith.store import ids
from tinsmith.store.records import LOCAL, Command, HistoryChange, Outcome

log = logging.getLogger(__name__)

_KNOWN_SESSIONS = 4096


class OperationScheduler:
    """Runs the commands of all models.

    `record` takes their outcomes and does not fail (`Recorder.record`). `send` tells the workers.
    """

    def __init__(
        self,
        config: Config,
        workers: int,
        operations: Operations,
        record: Callable[[Sequence[Outcome | HistoryChange]], None],
        send: Callable[[Message], None],
    ) -> None:
        """A pass is divided among `workers`."""
        self.operations = operations
        self.held_s = config.training.held_operation_s
        self.models = operations.models
        self.sessions = ActiveSessions(lambda: self.models.loaded)
        self.outcomes = Outcomes(self.models, record, self.tenant_of)
        self.waits = DatabaseWaits(self.models)
        # Every pass gathers the layers: in small ones that would take most of the time
        cuts_passes = not config.shards_weights
        paces = Paces(
            config.training.tokens_per_pass * workers, workers, lambda: self.sessions.are_several() and cuts_passes
        )
        self._tenants: LRUCache[str, str] = LRUCache(_KNOWN_SESSIONS)
        order = PassOrder(paces, config.images.max_image_pixels, tenant_of=self.tenant_of)
        waits = self.waits
        self.forward = ForwardWork(
            *(order, operations.next_number, send, self.outcomes.fail, waits.put_back, waits.put_off),
            operations.copies.passed,
            paid=self.outcomes.gpu_seconds,
        )
        self.outcomes.take_complete = self.forward.take_complete
        self.unloading = Unloading(self.models, self.sessions, operations.store, self.forward, self.outcomes)
        self.stepwise = StepwiseOperations(self.models, operations, self.outcomes, self.unloading, self.waits, send)
        replay = Replay(
            *(self.forward, operations.store, operations.next_number, send, self.stepwise.save_again, operations.facts)
        )
        self.crash_recovery = CrashRecovery(
            self.models, self.forward, self.outcomes, replay, self.unloading.forget, send
        )

    def tenant_of(self, model_id: str) -> str:
        """Return the tenant of a model; looked up once for its session, and `local` while the database is locked."""
        session_id = ids.session_of(model_id)
        if session_id not in self._tenants:
            with reported(StoreUnavailableError, partial(log.warning, "the tenant of %s is not known: %s", model_id)):
                self._tenants[session_id] = self.operations.store.tenant_of(session_id)
        return self._tenants.get(session_id, LOCAL)

    def unfinished(self, model_id: str) -> list[Command]:
        """Return a model's operations that have not ended."""
        state = self.models[model_id]
        begun = [each.command for each in state.begun if each.command is not None]
        forward = [each.command for each in self.forward.operations.get(model_id, ())]
        return [*forward, *begun, *state.queue.held.values()]

    @property
    def has_due(self) -> bool:
        """Whether a `turn` would begin an operation, or go on with one."""
        due = {model_id for model_id, state in self.models.items() if state.queue.head() is not None}
        return any(not self.crash_recovery.holds(model_id) for model_id in {*due, *self.forward.operations})

    @property
    def wait_s(self) -> float:
        """Seconds until a `turn` has something to do that no message announces."""
        waits = [self.waits.backoff.wait_s] if self.models.wait_for_database else []
        waits += [self.crash_recovery.backoff.wait_s] if self.crash_recovery.backoff.is_failing else []
        later = [state for state in self.models.values() if state.save_again_at is not None]
        busy = self._busy if later else set()
        waits += [
            max(0.0, state.save_again_at - time.monotonic())
            for state in later
            if state.save_again_at and state.model_id not in busy
        ]
        return min(waits, default=float("inf"))

    @property
    def overdue_at(self) -> float | None:
        """Monotonic time at which `fail_overdue` is due; None if nothing waits for its predecessor alone."""
        times = [since for state in self._not_begun if (since := state.queue.waiting_since()) is not None]
        return min(times) + self.held_s if times else None

    @property
    def _begun(self) -> set[str]:
        """Models with operations that have begun and not ended, and those that are to come back."""
        return {*self.forward.operations, *self.crash_recovery.waiting, *self.models.running}

    @property
    def _not_begun(self) -> list[ModelState]:
        """Models that have begun nothing: what comes before a gap in their queues has ended."""
        begun = self._begun
        return [state for model_id, state in self.models.items() if model_id not in begun]

    @property
    def _busy(self) -> set[str]:
        """Models that cannot be unloaded, because something has begun or waits for the database."""
        return self._begun.union(
            model_id for model_id, state in self.models.items() if state.is_put_off or state.saving is not None
        )

    def to_unload(self) -> list[ModelState]:
        """List the ended models that are idle, and whose last save need not wait."""
        ending = [state for state in self.models.values() if state.ending is not None]
        now, busy = time.monotonic(), self._busy if ending else set()
        return [
            state
            for state in ending
            if state.model_id not in busy and (state.save_again_at is None or state.save_again_at <= now)
        ]

    def add(self, command: Command) -> None:
        if not self.models.setdefault(command.model_id, ModelState(command.model_id)).queue.add(command):
            late = UserError(f"seq_id {command.seq_id} came after the operations behind it had been given up")
            self.outcomes.fail(command, late, touches_step=False)

    def turn(self) -> None:
        """Send the worker what is due, then record what it has computed."""
        self.crash_recovery.turn()
        tries_again = self.models.wait_for_database and self.waits.backoff.wait_s == 0
        if tries_again:
            self.stepwise.try_again()
        for state in [state for state in self.models.values() if state.queue.head() is not None]:
            if not state.is_put_off and not self.crash_recovery.holds(state.model_id):
                self._advance(state)
        if not self.crash_recovery.has_suspects:
            self.forward.send_passes({*self.models.put_off, *self.crash_recovery.waiting})
        self.outcomes.computed(self.forward.take_complete())
        for state in self.to_unload():
            if state.ending == "save" and state.loaded is not None:
                self.stepwise.begin_saving(state)
            else:
                self.unloading.unload(state)
        if tries_again and not self.models.wait_for_database:
            self.waits.backoff.succeeded()

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is being computed or saved, and no model is left to be saved."""
        begun = any(state.begun for state in self.models.values())
        return not (begun or self.forward.passes or self.forward.complete or self.models.loaded)

    def _advance(self, state: ModelState) -> None:
        """Take a model's commands in order: forward work until a pass is full, others only with nothing before them."""
        queue, model_id = state.queue, state.model_id
        while (command := queue.head()) is not None and state.running is None and not state.next_is_save:
            is_forward = command.kind == "forward_backward"
            if self.forward.has_enough(model_id) if is_forward else model_id in self.forward.operations:
                return
            queue.take()
            try:
                (self._prepare if is_forward else self.stepwise.begin)(command)
            except StoreUnavailableError as error:  # nothing of the command has happened
                queue.put_back(command)
                self.waits.put_off(model_id, error)
                return

    def _prepare(self, command: Command) -> None:
        """Let the workers check and measure a forward command.

        Raises StoreUnavailableError if it cannot be read now.
        """
        with failing_into(partial(self.outcomes.fail, command), StoreUnavailableError):
            payload = self.operations.store.payload(command)
            model = self.models.require(command.model_id)
            self.forward.add(command, model.base_model, payload)

    def take(self, message: Message) -> None:
        """Take in what the workers say of their work."""
        match message:
            case CopyEnded():
                self.operations.copies.ended(message)
            case Prepared() | PrepareFailed() | PassDone() | Copied() | Answer() | CallFailed():
                if not self.crash_recovery.take(message):
                    self._take_reply(message)

    def _take_reply(self, message: Reply) -> None:
        match message:
            case Prepared() | PrepareFailed() | PassDone():
                self.forward.take(message)
            case Copied():
                self.stepwise.copied(message.number)
            case Answer():
                self.stepwise.answered(message.number, message.result)
            case CallFailed():
                self.stepwise.answered(message.number, error_of(message.error_type, message.error))

    def fail_overdue(self) -> None:
        """Fail commands that waited too long for their predecessor.

        An optim_step among them clears the gradients, so passes of its model that are under way must have ended.
        """
        before = time.monotonic() - self.held_s
        self.outcomes.catch_up()
        for command, missing in [overdue for state in self._not_begun for overdue in state.queue.overdue(before)]:
            waited = (
                f"seq_id {missing} never came; this operation, seq_id {command.seq_id}, waited {self.held_s:g} s for it"
            )
            # What is missing may belong to the step that is open now; an optim_step has ended it
            if command.kind != "optim_step":
                self.models.spoil_step(command.model_id, waited)
            self.outcomes.fail(command, UserError(waited), touches_step=command.kind == "optim_step")
