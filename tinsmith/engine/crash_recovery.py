"""Crash recovery: restores every model on new workers, exactly as its last finished step left it.

    workers end -> what holds its state?  nothing: the model is lost, and errors say so
                                          a checkpoint, a kept copy, its seed: it waits
    new workers -> one model after the other is made from that; then its operations go on

Gradients that finished operations had added are gone, so the next step of such a model is refused. A model whose recovery ends
the workers for a second time is lost: it may be what ends them. One after the other, so that it is known which.
"""

import logging
from collections.abc import Callable

from tinsmith.engine.operations import Operations
from tinsmith.errors import TinsmithError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import DeleteModel

log = logging.getLogger(__name__)

MOST_ENDS = 2
"""A model is lost when workers have ended so many times while they brought it back."""


class CrashRecovery:
    """The models that have no worker."""

    def __init__(self, operations: Operations, send: Callable[[Message], None]) -> None:
        self.operations = operations
        self.send = send
        self.waiting: dict[str, int] = {}
        """Models that are to come back, and how many times workers have ended while each did."""
        self.lost: dict[str, str] = {}
        """Models that do not come back, and why, until `take_lost`."""
        self.reason = ""
        self.under_way: tuple[str, int] | None = None
        """The model that is being brought back, and the number of the call."""
        self._to_delete: list[tuple[str, str]] = []
        """Base model and id of lost models, of which kept copies are to be deleted."""

    def workers_ended(self, reason: str) -> None:
        """Let all loaded models wait for new workers, or be lost."""
        self.reason = reason
        if self.under_way is not None:
            model_id, self.under_way = self.under_way[0], None
            self.waiting[model_id] += 1
            if self.waiting[model_id] == MOST_ENDS:
                self._lose(model_id, f"{reason} while the model was brought back, for the second time")
        for model_id, model in list(self.operations.models.items()):
            if model.origin is None:
                where = "--kept-copies-gib, --kept-copies-share" if model.shape.rank else "of all weights only save_state makes one"
                self._lose(model_id, f"{reason}, and there is no copy of what the last step left ({where})")
                continue
            self.waiting.setdefault(model_id, 0)
            if model.has_gradients and model.spoiled is None:
                model.spoiled = (
                    f"{reason}; the model came back as its last step had left it, without the gradients that finished "
                    "forward_backward operations had added since: send these again before the next optim_step"
                )

    def turn(self) -> None:
        """Let the workers, which are ready, bring the next model back. Those during whose recovery workers have ended come last."""
        for base_model, model_id in self._to_delete:
            self.send(DeleteModel(base_model, model_id))
        self._to_delete.clear()
        if self.under_way is not None or not self.waiting:
            return
        model_id = min(self.waiting, key=lambda each: self.waiting[each])
        model = self.operations.models[model_id]
        assert model.origin is not None
        number = self.operations.next_number()
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
        log.info("model %s is back, as its last step left it", model_id)
        return True

    def take_lost(self) -> dict[str, str]:
        lost, self.lost = self.lost, {}
        return lost

    def _lose(self, model_id: str, reason: str) -> None:
        log.error("model %s is lost: %s", model_id, reason)
        self.waiting.pop(model_id, None)
        self.lost[model_id] = reason
        model = self.operations.models.pop(model_id)
        self._to_delete.append((model.base_model, model_id))
