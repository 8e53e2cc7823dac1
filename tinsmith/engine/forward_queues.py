"""Forward operations of each model, in order, and whose turn it is to have a pass."""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field

from tinsmith.engine.paces import PASS_S, Paces
from tinsmith.engine.passes import ForwardOperation, Piece, next_pass
from tinsmith.protocol.work import Prepared, PrepareFailed


class ForwardQueues(dict[str, deque[ForwardOperation]]):
    """Operations of each model, in order; a model without any is absent."""

    def add(self, operation: ForwardOperation) -> None:
        self.setdefault(operation.command.model_id, deque()).append(operation)

    def add_first(self, operation: ForwardOperation) -> None:
        self.setdefault(operation.command.model_id, deque()).appendleft(operation)

    def asked(self, message: Prepared | PrepareFailed) -> ForwardOperation | None:
        """Find the operation that this answers, unless it has ended, or was dropped and asked for again."""
        queue = self.get(message.operation.rpartition("/")[0], ())
        return next((operation for operation in queue if operation.number == message.number), None)

    def remove(self, operation: ForwardOperation) -> None:
        queue = self[operation.command.model_id]
        queue.remove(operation)
        if not queue:
            del self[operation.command.model_id]

    def take_from(self, operation: ForwardOperation) -> list[ForwardOperation]:
        """Remove and return an operation, and those of its model behind it."""
        queue = list(self.pop(operation.command.model_id))
        place = queue.index(operation)
        if place:
            self[operation.command.model_id] = deque(queue[:place])
        return queue[place:]

    def take_complete(self) -> list[ForwardOperation]:
        """Remove and return the operations at the head of each queue that are computed."""
        complete = []
        for model_id in list(self):
            queue = self[model_id]
            while queue and queue[0].is_complete:
                complete.append(queue.popleft())
            if not queue:
                del self[model_id]
        return complete


@dataclass(eq=False)
class PassOrder:
    """Chooses the next pass: models, and base models, take turns."""

    paces: Paces
    max_pixels: int
    """Most pixels of images that a pass decodes."""
    served: dict[str, int] = field(default_factory=dict)
    """Number of the last pass of each model."""
    served_bases: dict[str, int] = field(default_factory=dict)
    """Number of the last pass on a base model."""

    def given(self, number: int, pieces: list[Piece]) -> None:
        """Note that the worker has been given a pass."""
        self.served |= dict.fromkeys((piece.operation.command.model_id for piece in pieces), number)
        self.served_bases[pieces[0].operation.base_model] = number

    def next(self, queues: ForwardQueues, put_off: Collection[str], of_images: bool, decoding: Collection[str]) -> list[Piece]:
        """Compose a pass on the base model that was served longest ago; among those that never were, on that of the oldest operation.

        Models in `put_off` have none. With `of_images` it is one of models with images to decode, or that are `decoding` some: a model
        stays with the passes of images until these are computed, so that its own passes keep their order.
        """
        able = {
            model_id: queue
            for model_id, queue in queues.items()
            if model_id not in put_off and (model_id in decoding or any(map(_has_images, queue))) is of_images
        }
        bases: dict[str, list[deque[ForwardOperation]]] = {}
        for queue in sorted(able.values(), key=lambda queue: queue[0].command.id):
            bases.setdefault(queue[0].base_model, []).append(queue)
        in_turn = sorted(bases, key=lambda name: self.served_bases.get(name, 0))
        workers = self.paces.workers
        passes = (next_pass(bases[name], self.paces.most_tokens(name), self.max_pixels, self.served, workers) for name in in_turn)
        return next((pieces for pieces in passes if pieces and not self._is_others_turn(pieces, queues, put_off)), [])

    def is_worth_waiting(self, pieces: list[Piece], ahead: Collection[list[Piece]]) -> bool:
        """Whether a pass is to wait at the worker for those `ahead`: half full it gains little from what may still come."""
        full = self.paces.full[pieces[0].operation.base_model]
        is_quick = all(self._is_quick(pass_) for pass_ in (*ahead, pieces))
        return (is_quick and 2 * sum(piece.tokens for piece in pieces) > full) or any(piece.pixels for piece in pieces)

    def _is_others_turn(self, pieces: list[Piece], queues: ForwardQueues, put_off: Collection[str]) -> bool:
        """Whether work that may take long has to let another model go first, whose operation has just begun to be prepared."""
        turn, since = self.served.get(pieces[0].operation.command.model_id, 0), time.monotonic() - PASS_S
        others = (queue[0] for model_id, queue in queues.items() if self.served.get(model_id, 0) < turn and model_id not in put_off)
        return not self._is_quick(pieces) and any(other.prepared is None and other.started_at > since for other in others)

    def _is_quick(self, pieces: list[Piece]) -> bool:
        first = pieces[0].operation
        return self.paces.is_quick(first.base_model, first.backward, max(piece.tokens for piece in pieces))


def _has_images(operation: ForwardOperation) -> bool:
    """Whether images are to be decoded of what is still to be given to the worker."""
    pixels = operation.prepared.pixels if operation.prepared else []
    return any(pixels) and any(pixels[index] for index in operation.open)
