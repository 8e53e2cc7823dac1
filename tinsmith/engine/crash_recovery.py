"""Crash recovery: brings every model back on new workers, exactly as it was.

    engine ends -> the next one reads its journal: the models in it wait
    workers end -> has it a state?  no: the model is lost, and errors say so
                                    a checkpoint, a kept copy, its seed: it waits
    new workers -> one model after the other is replayed from that (`replay.py`); then its operations go on

A model whose recovery ends the workers for the third time is lost: it may be what ends them. One after the other, so
that it is known which.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.outcomes import Backoff, Outcomes
from tinsmith.engine.replay import Replay, Replaying
from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.observing.metrics import MODELS_LOST, MODELS_RECOVERED
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import (
    Answer,
    CallFailed,
    Copied,
    DeleteModel,
    PassDone,
    Prepared,
    PrepareFailed,
    RunPass,
    error_of,
)
from tinsmith.store.histories import MOST_ENDS
from tinsmith.store.records import Command, HistoryChange

log = logging.getLogger(__name__)

Reply = Prepared | PrepareFailed | PassDone | Copied | Answer | CallFailed


@dataclass(eq=False)
class Comeback:
    """A model that is being brought back."""

    model_id: str
    steps: Replaying
    number: int = 0
    """The number under which the workers were asked last."""
    began: float = field(default_factory=time.monotonic)
    passes: int = 0
    """Passes that were computed again."""


@dataclass(eq=False)
class CrashRecovery:
    """The models that have no worker.

    `forget` lets nothing be left of a lost model; `send` tells the workers.
    """

    models: ModelStates
    forward: ForwardWork
    outcomes: Outcomes
    replay: Replay
    forget: Callable[[str], None]
    send: Callable[[Message], None]
    waiting: dict[str, int] = field(default_factory=dict)
    """Models that are to come back, and how many times workers have ended while each did."""
    lost: dict[str, str] = field(default_factory=dict)
    """Models that do not come back, and why, until `take_lost`."""
    reason: str = "the engine ended"
    under_way: Comeback | None = None
    is_stopping: bool = False
    """Whether the engine was told to stop: then its end says nothing about what it is at."""
    backoff: Backoff = field(default_factory=Backoff)
    """The delay of replays that wait for the database."""
    _to_delete: list[tuple[str, str]] = field(default_factory=list)
    """Base model and id of lost models, of which kept copies are to be deleted."""

    def workers_ended(self, reason: str) -> None:
        """Take in that the workers have ended: each model waits to come back, or `take_lost` says that it does not.

        What had begun and was not recorded goes on, or is run again. What was under way for the third time fails with
        `reason`: it may be what ends workers, and would do so again and again.
        """
        self.reason = reason
        self.outcomes.computed(self.forward.take_complete())
        self._wait_or_lose()
        for command in self.forward.workers_ended(self._runs_again):
            self.models[command.model_id].put_aside.append(command)
        for state in self.models.values():
            self._cut_short(state)
            again, state.put_aside = sorted(state.put_aside, key=lambda command: command.seq_id), []
            if again:
                state.queue.rewind(again)

    def _runs_again(self, command: Command, is_under_way: bool) -> bool:
        """Whether an operation is run again, of which nothing is recorded; one that is not fails here."""
        if command.model_id in self.lost:
            return False
        if is_under_way:
            self.outcomes.suspects[command.request_id] += 1
        if self.outcomes.suspects[command.request_id] < MOST_ENDS:
            return True
        times = f"{MOST_ENDS} times now"
        self.outcomes.fail(command, TinsmithError(f"{self.reason} while the operation was run, {times}"))
        return False

    def _cut_short(self, state: ModelState) -> None:
        """Take back the operation that ran. A save that was written is done again when the replay comes to its place.

        A save that only waits for its row goes on.
        """
        running, state.running = state.running, None
        state.save_again_at, state.is_put_off, state.next_is_save = None, False, False
        command = None if running is None else running.command
        if running is not None and command is not None and self._runs_again(command, running.in_call is not None):
            state.put_aside.append(command)
        saving = state.saving
        if saving is not None and saving.in_call is not None:
            state.saving = None
            assert saving.command is not None
            if not self._runs_again(saving.command, is_under_way=True) and state.loaded is not None:
                state.loaded.history.forget_save(saving.command)

    def _wait_or_lose(self) -> None:
        """Let all loaded models wait for new workers, or be lost."""
        if self.under_way is not None:
            model_id, self.under_way = self.under_way.model_id, None
            self.waiting[model_id] += 1
            if self.waiting[model_id] == MOST_ENDS:
                self._lose(model_id, f"{self.reason} while the model was brought back, {MOST_ENDS} times now")
        for model_id, model in self.models.loaded.items():
            model.history.copying = None
            if model.history.open_is_given_up:
                model.spoil(f"{self.reason}, and its gradients are of too many datums to compute them again")
            if model.history.kept:
                self.waiting.setdefault(model_id, 0)
            else:
                self._lose(model_id, f"{self.reason}, and there is no copy of the model (--kept-copies-gib)")

    def turn(self) -> None:
        """Let the workers, which are ready, bring the next model back.

        Those during whose recovery workers have ended come last.
        """
        for base_model, model_id in self._to_delete:
            self.send(DeleteModel(base_model, model_id))
        self._to_delete.clear()
        if self.under_way is not None or not self.waiting or self.backoff.wait_s > 0:
            return
        model_id = min(self.waiting, key=lambda each: self.waiting[each])
        # Noted first: it may end this engine, and the next one has to know
        self._note(model_id)
        self.under_way = Comeback(model_id, self.replay.bring_back(self.models.require(model_id)))
        self._go_on(self.under_way, None)

    def stop(self) -> None:
        """Count no end against the models that are brought back from now on, or just now."""
        self.is_stopping = True
        if self.under_way is not None:
            self._note(self.under_way.model_id)

    def _note(self, model_id: str) -> None:
        ends = self.waiting[model_id] + (0 if self.is_stopping else 1)
        self.outcomes.record([HistoryChange(model_id, comebacks=ends)])

    @property
    def has_suspects(self) -> bool:
        """Whether a model waits during whose recovery processes have ended.

        Until it is back nothing else is begun: an operation of another model may have ended them, and would again.
        """
        return any(self.waiting.values())

    def holds(self, model_id: str) -> bool:
        """Whether the operations of a model wait: for it, or for suspects, or for it to be recorded as lost."""
        return model_id in self.waiting or model_id in self.lost or self.has_suspects

    def take(self, message: Reply) -> bool:
        """Take in what the workers say; False if it does not answer a replay."""
        comeback = self.under_way
        if comeback is None or comeback.number != message.number:
            return False
        match message:
            case Answer():
                self._go_on(comeback, message.result)
            case CallFailed() | PrepareFailed():
                self._go_on(comeback, error_of(message.error_type, message.error))
            case _:
                self._go_on(comeback, message)
        return True

    def _go_on(self, comeback: Comeback, answer: "dict[str, object] | Message | TinsmithError | None") -> None:
        """Take a replay to its next message, or to its end."""
        model_id, steps = comeback.model_id, comeback.steps
        try:
            message = steps.throw(answer) if isinstance(answer, TinsmithError) else steps.send(answer)
        except StopIteration:
            self.under_way = None
            self.backoff.succeeded()
            del self.waiting[model_id]
            self.outcomes.record([HistoryChange(model_id, comebacks=0)])
            MODELS_RECOVERED.inc()
            taken_s = self.models.require(model_id).history.replayed_s = time.monotonic() - comeback.began
            log.info(
                "model %s is back, as it was, after %.1f s: passes computed again: %d",
                *(model_id, taken_s, comeback.passes),
                extra={"model": model_id},
            )
        except StoreUnavailableError as error:
            self.under_way = None
            self.backoff.failed()
            log.warning("model %s waits for the database to come back: %s", model_id, error)
        except TinsmithError as error:
            self.under_way = None
            self.forward.cancel(model_id, error)  # operations computed in part, which are still queued in the log
            self._lose(model_id, f"{self.reason}, and the model could not be brought back: {error}")
        else:
            comeback.number = message.number
            comeback.passes += isinstance(message, RunPass)
            self.send(message)

    def take_lost(self) -> dict[str, str]:
        """Forget the models that ended with their workers; returns why each did. They are still queued in the log."""
        lost, self.lost = self.lost, {}
        for model_id in lost:
            self.forget(model_id)
        return lost

    def _lose(self, model_id: str, reason: str) -> None:
        log.error("model %s is lost: %s", model_id, reason, extra={"model": model_id})
        MODELS_LOST.inc()
        self.waiting.pop(model_id, None)
        self.lost[model_id] = reason
        model, self.models[model_id].loaded = self.models.require(model_id), None
        if model.base_model in self.replay.facts():
            self._to_delete.append((model.base_model, model_id))
