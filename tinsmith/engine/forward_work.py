"""Forward and forward_backward operations under way: prepared, composed into passes, and completed from the results of passes."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable
from itertools import islice

import numpy as np

from tinsmith.engine.passes import PASS_S, DatumOutput, ForwardOperation, Pace, Piece, next_pass
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Drop, PassDone, Prepare, Prepared, PrepareFailed, RunPass, error_of
from tinsmith.store.records import Command

log = logging.getLogger(__name__)

PREPARED_BYTES = 2**20
"""Bytes of a model's operations that are prepared at a time; the last one may go beyond."""

PASSES_AHEAD = 2
"""Most passes that a worker has: the one that it computes, and the next. As many besides of models with images to decode."""


class ForwardWork:
    """The forward work of all models that was taken from their queues.

    `send` tells the worker. `fail` is told of an operation that has failed, and whether that touches the open step; `put_back` of
    operations that cannot be prepared before the database can be read; `put_off` of a model whose images cannot be read now.
    """

    def __init__(
        self,
        tokens_per_pass: int,
        max_pixels: int,
        next_number: Callable[[], int],
        send: Callable[[Message], None],
        fail: Callable[[Command, TinsmithError, bool], None],
        put_back: Callable[[list[Command], StoreUnavailableError], None],
        put_off: Callable[[str, StoreUnavailableError], None],
        is_shared: Callable[[], bool],
        workers: int = 1,
    ) -> None:
        """A pass has at most `tokens_per_pass` tokens, of all `workers`, and decodes at most `max_pixels` pixels of images.

        `is_shared` says whether sessions may wait for each other. One that is alone is divided into passes in the same way each time.
        """
        self.tokens_per_pass: defaultdict[str, int] = defaultdict(lambda: tokens_per_pass)
        """Most tokens of a pass on each base model: fewer than configured after its worker ran out of memory."""
        self.paces: defaultdict[tuple[str, bool], Pace] = defaultdict(Pace)
        """Pace of each base model, forward and (True) with backward."""
        self.max_pixels = max_pixels
        self.next_number = next_number
        self.send = send
        self.fail = fail
        self.put_back = put_back
        self.put_off = put_off
        self.is_shared = is_shared
        self.workers = workers
        self.operations: dict[str, deque[ForwardOperation]] = {}
        """Operations of each model, in order; a model without any is absent."""
        self.passes: dict[int, list[Piece]] = {}
        """Datums of each pass that the worker has, by the number of the pass."""
        self.of_images: set[int] = set()
        """Numbers of the passes of models that have images to decode."""
        self.served: dict[str, int] = {}
        self.served_bases: dict[str, int] = {}
        """Number of the last pass on a base model."""
        self.complete: list[ForwardOperation] = []

    def add(self, command: Command, base_model: str, payload: bytes) -> None:
        """Let the worker check and measure an operation."""
        number = self.next_number()
        self.operations.setdefault(command.model_id, deque()).append(ForwardOperation(command, base_model, number))
        digests = [digest.hex() for digest in command.image_digests]
        self.send(Prepare(number, command.request_id, command.model_id, base_model, digests, payload))

    def has_enough(self, model_id: str) -> bool:
        """Whether a model has work for a whole pass, or as much as may be prepared at a time."""
        waiting = self.operations.get(model_id, ())
        preparing = sum(operation.command.payload_bytes for operation in waiting if operation.prepared is None)
        tokens = sum(operation.tokens for operation in waiting)
        return preparing >= PREPARED_BYTES or any(tokens >= self.tokens_per_pass[operation.base_model] for operation in waiting)

    def cancel(self, model_id: str, error: TinsmithError) -> list[Command]:
        """Give up the operations of a model; returns those of which nothing is in a pass, in order.

        The others fail with `error` when their passes have ended, which the worker is told to give up.
        """
        operations = list(self.operations.pop(model_id, ()))
        in_pass = [operation for operation in operations if operation.in_pass]
        for operation in in_pass:
            operation.failures.append(error)
        if in_pass:
            self.operations[model_id] = deque(in_pass)
        self._drop(operations)
        return [operation.command for operation in operations if not operation.in_pass]

    def forget(self, model_id: str) -> None:
        self.served.pop(model_id, None)

    def forget_all(self) -> None:
        """Forget what the worker had, which is gone. What is complete stays to be recorded."""
        self.operations.clear()
        self.passes.clear()
        self.of_images.clear()
        self.tokens_per_pass.clear()
        self.paces.clear()

    def take_complete(self) -> list[ForwardOperation]:
        complete, self.complete = self.complete, []
        return complete

    # ---- Passes

    def send_passes(self, put_off: set[str]) -> None:
        """Give the worker passes: one to compute, and another ahead if that one is half full or has images to decode.

        Models with images to decode have passes of their own, beside which the worker computes those of others. None is ahead of others
        that may take long (`Pace`). Models in `put_off` wait for the database.
        """
        for of_images in (False, True):
            self._send_passes(put_off, of_images)

    def _send_passes(self, put_off: set[str], of_images: bool) -> None:
        while (ahead := sum((number in self.of_images) is of_images for number in self.passes)) < PASSES_AHEAD:
            pieces = self._next_pass(put_off, of_images)
            if not pieces or (ahead and not self._is_worth_waiting(pieces)):
                return
            number = self.next_number()
            if of_images:
                self.of_images.add(number)
            self.passes[number] = pieces
            for piece in pieces:
                piece.operation.in_pass.add(piece.index)
                self.served[piece.operation.command.model_id] = number
            first = pieces[0].operation
            self.served_bases[first.base_model] = number
            named = [(piece.operation.command.request_id, piece.index) for piece in pieces]
            lengths = [piece.tokens for piece in pieces]
            pixels = [piece.pixels for piece in pieces] if any(piece.pixels for piece in pieces) else []
            self.send(RunPass(number, first.base_model, first.backward, named, lengths, pieces[0].together, pixels))

    def _is_worth_waiting(self, pieces: list[Piece]) -> bool:
        """Whether a pass is to wait at the worker for the one before: half full it gains little from what may still come."""
        full = self.tokens_per_pass[pieces[0].operation.base_model]
        is_quick = all(self._is_quick(pass_) for pass_ in (*self.passes.values(), pieces))
        return (is_quick and 2 * sum(piece.tokens for piece in pieces) > full) or any(piece.pixels for piece in pieces)

    def _is_others_turn(self, pieces: list[Piece], put_off: set[str]) -> bool:
        """Whether work that may take long has to let another model go first, whose operation has just begun to be prepared."""
        turn, since = self.served.get(pieces[0].operation.command.model_id, 0), time.monotonic() - PASS_S
        others = (
            queue[0] for model_id, queue in self.operations.items() if self.served.get(model_id, 0) < turn and model_id not in put_off
        )
        return not self._is_quick(pieces) and any(other.prepared is None and other.started_at > since for other in others)

    def _is_quick(self, pieces: list[Piece]) -> bool:
        """Whether passes like this keep nobody waiting for long."""
        if not self.is_shared():
            return True
        base_model = pieces[0].operation.base_model
        pace = self.paces[base_model, pieces[0].operation.backward]
        return self.workers * pace.tokens >= self.tokens_per_pass[base_model] and max(piece.tokens for piece in pieces) <= pace.quick

    def _next_pass(self, put_off: set[str], of_images: bool) -> list[Piece]:
        """Compose a pass on the base model that was served longest ago; among those that never were, on that of the oldest operation.

        A model stays with the passes of images until these are computed, so that its own passes keep their order.
        """
        decoding = {piece.operation.command.model_id for number in self.of_images for piece in self.passes[number]}
        queues = {
            model_id: queue
            for model_id, queue in self.operations.items()
            if model_id not in put_off and (model_id in decoding or any(map(_has_images, queue))) is of_images
        }
        bases: dict[str, list[deque[ForwardOperation]]] = {}
        for queue in sorted(queues.values(), key=lambda queue: queue[0].command.id):
            bases.setdefault(queue[0].base_model, []).append(queue)
        in_turn = sorted(bases, key=lambda name: self.served_bases.get(name, 0))
        passes = (next_pass(bases[name], self._most_tokens(name), self.max_pixels, self.served, self.workers) for name in in_turn)
        return next((pieces for pieces in passes if pieces and not self._is_others_turn(pieces, put_off)), [])

    def _most_tokens(self, base_model: str) -> dict[bool, int]:
        most, is_shared = self.tokens_per_pass[base_model], self.is_shared()
        paces = {each: self.workers * self.paces[base_model, each].tokens for each in (False, True)}
        return {each: int(min(most, tokens)) if is_shared else most for each, tokens in paces.items()}

    # ---- What the worker says

    def take(self, message: Prepared | PrepareFailed | PassDone) -> None:
        """Take in what the worker says of operations and passes."""
        match message:
            case Prepared():
                operation = self._asked_for(message)
                if operation is not None:
                    operation.prepared = message
            case PrepareFailed():
                self._not_prepared(message)
            case PassDone():
                self._pass_done(message)

    def _asked_for(self, message: Prepared | PrepareFailed) -> ForwardOperation | None:
        """Find the operation that this answers, unless it has ended, or was dropped and asked for again."""
        queue = self.operations.get(message.operation.rpartition("/")[0], ())
        return next((operation for operation in queue if operation.number == message.number), None)

    def _not_prepared(self, message: PrepareFailed) -> None:
        operation = self._asked_for(message)
        if operation is None:
            return
        error = error_of(message.error_type, message.error)
        if isinstance(error, StoreUnavailableError):
            self._prepare_again(operation, error)
        else:
            self._remove(operation)
            self.served[operation.command.model_id] = self.next_number()  # or others would wait for a row of operations that are all wrong
            self.fail(operation.command, error, message.backward)

    def _prepare_again(self, operation: ForwardOperation, error: StoreUnavailableError) -> None:
        """Put an operation, and those of its model behind it, back into the queue until the database can be read."""
        model_id = operation.command.model_id
        waiting = self.operations[model_id]
        back = []
        while waiting[-1] is not operation:
            back.append(waiting.pop())
        back.append(waiting.pop())
        if not waiting:
            del self.operations[model_id]
        self._drop(back[:-1])
        self.put_back([taken.command for taken in reversed(back)], error)

    def _pass_done(self, message: PassDone) -> None:
        pieces = self.passes.pop(message.number, [])
        self.of_images.discard(message.number)
        for took in message.took:
            self._learn(*took)
        for piece in pieces:  # those of an operation with a broken image have neither result nor failure
            piece.operation.in_pass.discard(piece.index)
        operations = {piece.operation.command.request_id: piece.operation for piece in pieces}
        for operation in operations.values():
            self.tokens_per_pass[operation.base_model] = message.tokens_per_pass
        numbers = np.frombuffer(message.payload, dtype=np.float64, count=len(message.results) + sum(map(len, message.metrics)))
        offset = numbers.nbytes
        losses, values = numbers[: len(message.results)].tolist(), iter(numbers[len(message.results) :].tolist())
        for (request_id, index, shape), loss, names in zip(message.results, losses, message.metrics, strict=True):
            metrics = dict(zip(names, islice(values, len(names)), strict=True))
            count = int(np.prod(shape))
            logprobs = np.frombuffer(message.payload, dtype=np.float32, count=count, offset=offset).reshape(shape)
            offset += 4 * count
            if request_id in operations:
                operations[request_id].results[index] = DatumOutput(logprobs, loss, metrics)
        for request_id, _, error_type, reason in message.failures:
            if request_id in operations:
                failures, error = operations[request_id].failures, error_of(error_type, reason)
                failures += [] if failures and isinstance(error, GivenUpError) else [error]
        for operation in operations.values():
            if operation.failures and not operation.in_pass:
                self._pass_failed(operation)
        self._collect_complete()

    def _learn(self, base_model: str, backward: bool, lengths: list[int], seconds: float) -> None:
        pace = self.paces[base_model, backward]
        pace.learn(lengths, seconds)
        if len(lengths) == 1 and seconds > PASS_S and lengths[0] > pace.slow:
            pace.slow = lengths[0]
            log.warning(
                "a sequence of %d tokens has kept the device for %.3g s (%s): none is cut, so all others wait for one as long",
                *(*lengths, seconds, base_model),
            )

    def _pass_failed(self, operation: ForwardOperation) -> None:
        """Fail an operation, and the step that it belongs to, which lacks a part of its gradients.

        Nothing of it is left to be computed, so that its gradients are all there when that step clears them.
        """
        errors, operation.failures = operation.failures, []
        unavailable = next((error for error in errors if isinstance(error, StoreUnavailableError)), None)
        final = [error for error in errors if not isinstance(error, StoreUnavailableError)]
        if unavailable is not None and not final:  # its images could not be read, and its datums are still there
            self.put_off(operation.command.model_id, unavailable)
            return
        self._remove(operation)
        self._drop([operation])
        more = f" (and {len(errors) - 1} more of its datums)" if len(errors) > 1 else ""
        self.fail(operation.command, type(final[0])(f"{final[0]}{more}"), operation.backward)

    def _collect_complete(self) -> None:
        before = len(self.complete)
        for model_id in list(self.operations):
            queue = self.operations[model_id]
            while queue and queue[0].is_complete:
                self.complete.append(queue.popleft())
            if not queue:
                del self.operations[model_id]
        self._drop(self.complete[before:])  # each of several workers holds all datums, and has forgotten those alone that it computed

    def _remove(self, operation: ForwardOperation) -> None:
        queue = self.operations[operation.command.model_id]
        queue.remove(operation)
        if not queue:
            del self.operations[operation.command.model_id]

    def _drop(self, operations: list[ForwardOperation]) -> None:
        if operations:
            self.send(Drop([operation.command.request_id for operation in operations]))


def _has_images(operation: ForwardOperation) -> bool:
    """Whether images are to be decoded of what is still to be given to the worker."""
    pixels = operation.prepared.pixels if operation.prepared else []
    return any(pixels) and any(pixels[index] for index in operation.open)
