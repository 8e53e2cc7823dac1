"""Brings one model back on new workers: its newest state, then its history since, each pass with the datums it had.

    load state -> prepare, pass, pass, step, snapshot, save, pass ... -> prepare what is computed in part -> it goes on

A replay is a generator: each `yield` is a message to the workers under a number, and returns what they answer.
Outcomes were recorded the first time, and are not recorded again.
"""

import logging
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from math import isclose
from typing import Any

from tinsmith.engine.forward_work import ForwardWork
from tinsmith.engine.history import CopiedForSave, Kept, Passed, Published, Stepped
from tinsmith.engine.model_state import LoadedModel
from tinsmith.errors import StoreUnavailableError, TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.protocol.facts import ModelFacts
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Call, Drop, OptimStep, PassDone, Prepare, Prepared, RunPass, TakeSnapshot, error_of
from tinsmith.store.records import Command
from tinsmith.store.store import Store

log = logging.getLogger(__name__)

Asked = Call | Prepare | RunPass
Replaying = Generator[Asked, Any, None]

SAME_NORM = 0.1
"""Relative difference to which the gradient norms of a step and of its replay must agree; rounding makes far less."""
TINY_NORM = 1e-6
"""Gradient norms below this are rounding."""


@dataclass(eq=False)
class Replay:
    """What replays need; `save_again` does a save that was cut short, up to its copy."""

    forward: ForwardWork
    store: Store
    next_number: Callable[[], int]
    send: Callable[[Message], None]
    save_again: Callable[[CopiedForSave], Replaying]
    facts: Callable[[], Mapping[str, ModelFacts]]
    """Of the base models that the workers serve."""

    def bring_back(self, model: LoadedModel) -> Replaying:
        """Bring a model back.

        Raises TinsmithError if that cannot be; StoreUnavailableError if it cannot be now, and may begin anew.
        """
        kept = yield from self._restored(model)
        prepared: dict[str, Prepared] = {}
        try:
            yield from self._replayed(model, kept, prepared)
        finally:
            self._drop(prepared)
        yield from self._prepared_again(model)

    def _replayed(self, model: LoadedModel, kept: Kept, prepared: dict[str, Prepared]) -> Replaying:
        """Do again what has happened since a state was kept; `prepared` are the operations that the workers hold."""
        for event in model.history.since(kept):
            match event:
                case Passed():
                    yield from self._passed(model, event, prepared)
                case Stepped():
                    self._drop(prepared)
                    yield from self._stepped(model, event)
                case Published():
                    number = self.next_number()
                    yield TakeSnapshot(number, model.base_model, model.model_id, event.request_id, event.inflight)
                case CopiedForSave():
                    yield from self.save_again(event)

    def _restored(self, model: LoadedModel) -> Generator[Asked, Any, Kept]:
        """Load the newest state whose files are whole; raises what is wrong with the last that was tried."""
        history = model.history
        if model.base_model not in self.facts():
            raise TinsmithError(
                f"base model {model.base_model!r} is not served any more; start the server with it (--base-model)"
            )
        while True:
            kept, failures = history.kept[-1], list[TinsmithError]()
            with failing_into(failures.append, StoreUnavailableError):
                yield kept.source.call(self.next_number(), model.base_model, model.model_id)
            if not failures:
                return kept
            if len(history.kept) == 1:
                raise failures[0]
            log.error("%s cannot be used, the state before it is taken: %s", kept.source, failures[0])
            history.kept.remove(kept)

    def _passed(self, model: LoadedModel, event: Passed, prepared: dict[str, Prepared]) -> Replaying:
        for place, (command, index) in enumerate(event.pieces):
            if command.request_id not in prepared:
                prepared[command.request_id] = yield self._prepare(model, command)
            routed = prepared[command.request_id].routed
            if (routed[index] if routed else 0) != (event.routed[place] if event.routed else 0):
                raise TinsmithError(
                    f"datum {index} of {command.request_id} followed the experts that had sampled it, and these are "
                    "known no more (--recorded-routes-gib; they end with the engine)"
                )
        pieces = [(command.request_id, index) for command, index in event.pieces]
        number = self.next_number()
        done: PassDone = yield RunPass(
            number, model.base_model, True, pieces, event.lengths, event.together, event.pixels
        )
        for request_id, index, error_type, reason in done.failures:
            error = error_of(error_type, reason)
            raise type(error)(f"datum {index} of {request_id} was computed before, and now failed: {error}")
        self.forward.take_again(model.model_id, done)

    def _stepped(self, model: LoadedModel, event: Stepped) -> Replaying:
        answer = yield OptimStep(self.next_number(), model.base_model, model.model_id, event.settings)
        norm = answer["metrics"]["grad_norm"]
        if not isclose(norm, event.grad_norm, rel_tol=SAME_NORM, abs_tol=TINY_NORM):
            raise TinsmithError(
                f"the replay of a step has computed other gradients: their norm is {norm}, and was {event.grad_norm}"
            )

    def _prepared_again(self, model: LoadedModel) -> Replaying:
        """Let the workers prepare the operations again that are computed in part."""
        for operation in list(self.forward.operations.get(model.model_id, ())):
            prepared: Prepared = yield self._prepare(model, operation.command)
            operation.number, operation.prepared = prepared.number, prepared
        self.forward.complete_those_of(model.model_id)

    def _prepare(self, model: LoadedModel, command: Command) -> Prepare:
        digests = [digest.hex() for digest in command.image_digests]
        payload = self.store.payload(command)
        return Prepare(self.next_number(), command.request_id, model.model_id, model.base_model, digests, payload)

    def _drop(self, prepared: dict[str, Prepared]) -> None:
        """Let the workers forget operations that are replayed."""
        if prepared:
            self.send(Drop(list(prepared)))
            prepared.clear()
