"""Crash recovery: restores every model on new workers, exactly as its last finished step left it.

    workers end -> what holds its state?  nothing: the model is lost, and errors say so
                                          a checkpoint, a kept copy, its seed: it waits
    new workers -> one model after the other is made from that; then its operations go on

Gradients that finished operations had added are gone, so the next step of such a model is refused. A model whose
recovery ends the workers for a second time is lost: it may be what ends them. One after the other, so that it is known
which.
"""

import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.model_state import ModelState, ModelStates
from tinsmith.engine.outcomes import Outcomes
from tinsmith.errors import TinsmithError
from tinsmith.observing.metrics import MODELS_LOST, MODELS_RECOVERED
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import DeleteModel
from tinsmith.store.records import Command

log = logging.getLogger(__name__)

MOST_ENDS = 2
"""A model is lost when workers have ended so many times while they brought it back."""


@dataclass(eq=False)
class CrashRecovery:
    """The models that have no worker.

    `forget` lets nothing be left of a lost model; `send` tells the workers.
    """

    models: ModelStates
    forward: ForwardWork
    outcomes: Outcomes
    next_number: Callable[[], int]
    forget: Callable[[str], None]
    send: Callable[[Message], None]
    waiting: dict[str, int] = field(default_factory=dict)
    """Models that are to come back, and how many times workers have ended while each did."""
    lost: dict[str, str] = field(default_factory=dict)
    """Models that do not come back, and why, until `take_lost`."""
    reason: str = ""
    under_way: tuple[str, int] | None = None
    """The model that is being brought back, and the number of the call."""
    _to_delete: list[tuple[str, str]] = field(default_factory=list)
    """Base model and id of lost models, of which kept copies are to be deleted."""

    def workers_ended(self, reason: str) -> None:
        """Take in that the workers have ended: each model waits to come back, or `take_lost` says that it does not.

        What had begun and was not recorded is run again. What was under way for the second time fails with `reason`: it
        may be what ends workers, and would do so again and again.
        """
        self._take_back_complete()
        self.outcomes.computed(self.forward.take_complete())
        self._wait_or_lose(reason)
        begun = [(each.command, each.is_at_worker) for queue in self.forward.operations.values() for each in queue]
        for state in self.models.values():
            begun += self._cut_short(state, reason)
        self.forward.forget_all()
        again: defaultdict[str, list[Command]] = defaultdict(list)
        for command, is_under_way in begun:
            if is_under_way and command.request_id in self.outcomes.suspects:
                self.outcomes.fail(command, TinsmithError(f"{reason} while the operation was run, for the second time"))
            elif command.model_id not in self.lost:
                again[command.model_id].append(command)
                self.outcomes.suspects |= {command.request_id} if is_under_way else set()
        for model_id, commands in again.items():
            self.models[model_id].queue.rewind(sorted(commands, key=lambda command: command.seq_id))

    def _cut_short(self, state: ModelState, reason: str) -> list[tuple[Command, bool]]:
        """The workers have ended: returns operations of a model that can begin anew, and whether each was under way.

        A model comes back as its last step has left it. If that is the state that a save has copied, the same is saved
        again; if not, nothing is left of what was to be saved. A save that only waits for its row goes on.
        """
        running, state.running, state.save_again_at, state.is_put_off, state.next_is_save = (
            state.running,
            None,
            None,
            False,
            False,
        )
        begun = [] if running is None or running.command is None else [(running.command, running.in_call is not None)]
        saving, model = state.saving, state.loaded
        if saving is None or saving.in_call is None:
            return begun
        state.saving = None
        assert saving.command is not None
        if model is not None and model.state == saving.copied_state:
            begun.append((saving.command, True))
        elif model is not None:
            what = (
                "while the save was written; its model has gone on since, and what was to be saved is gone: save again"
            )
            self.outcomes.fail(saving.command, TinsmithError(f"{reason} {what}"))
        return begun

    def _take_back_complete(self) -> None:
        """Run again what is computed and not recorded, where that keeps the model's open step whole.

        Recorded, it would lose gradients.
        """
        for operation in reversed(self.forward.take_complete()):
            model = self.models.find(operation.command.model_id)
            if model is None or model.origin is None or model.has_gradients or model.spoiled:
                self.forward.complete.insert(0, operation)
            else:
                self.forward.operations.add_first(operation)

    def _wait_or_lose(self, reason: str) -> None:
        """Let all loaded models wait for new workers, or be lost."""
        self.reason = reason
        if self.under_way is not None:
            model_id, self.under_way = self.under_way[0], None
            self.waiting[model_id] += 1
            if self.waiting[model_id] == MOST_ENDS:
                self._lose(model_id, f"{reason} while the model was brought back, for the second time")
        for model_id, model in self.models.loaded.items():
            if model.origin is None:
                where = (
                    "--kept-copies-gib, --kept-copies-share"
                    if model.shape.rank
                    else "of all weights only save_state makes one"
                )
                self._lose(model_id, f"{reason}, and there is no copy of what the last step left ({where})")
                continue
            self.waiting.setdefault(model_id, 0)
            if model.has_gradients and model.spoiled is None:
                model.spoiled = (
                    f"{reason}; the model came back as its last step had left it, without the gradients that finished "
                    "forward_backward operations had added since: send these again before the next optim_step"
                )

    def turn(self) -> None:
        """Let the workers, which are ready, bring the next model back.

        Those during whose recovery workers have ended come last.
        """
        for base_model, model_id in self._to_delete:
            self.send(DeleteModel(base_model, model_id))
        self._to_delete.clear()
        if self.under_way is not None or not self.waiting:
            return
        model_id = min(self.waiting, key=lambda each: self.waiting[each])
        model = self.models.require(model_id)
        assert model.origin is not None
        number = self.next_number()
        self.under_way = model_id, number
        self.send(model.origin.call(number, model.base_model, model_id))

    def answered(self, number: int, answer: "dict[str, object] | TinsmithError") -> bool:
        """Take in the answer of a call; False if it is not one of ours."""
        if self.under_way is None or self.under_way[1] != number:
            return False
        model_id, self.under_way = self.under_way[0], None
        if isinstance(answer, TinsmithError):
            self._lose(model_id, f"{self.reason}, and the model could not be brought back: {answer}")
            return True
        del self.waiting[model_id]
        MODELS_RECOVERED.inc()
        log.info("model %s is back, as its last step left it", model_id, extra={"model": model_id})
        return True

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
        self._to_delete.append((model.base_model, model_id))
