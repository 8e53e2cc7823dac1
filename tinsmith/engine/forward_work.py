"""Forward and forward_backward operations under way: prepared, composed into passes, and completed from the results of passes."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tinsmith.engine.forward_queues import ForwardQueues, PassOrder
from tinsmith.engine.passes import DatumOutput, ForwardOperation, Piece
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Drop, PassDone, Prepare, Prepared, PrepareFailed, RunPass, error_of
from tinsmith.store.records import Command

PREPARED_BYTES = 2**20
"""Bytes of a model's operations that are prepared at a time; the last one may go beyond."""

PASSES_AHEAD = 2
"""Most passes that a worker has: the one that it computes, and the next. As many besides of models with images to decode."""


@dataclass(eq=False)
class ForwardWork:
    """The forward work of all models that was taken from their queues.

    `send` tells the worker. `fail` is told of an operation that has failed, and whether that touches the open step; `put_back` of
    operations that cannot be prepared before the database can be read; `put_off` of a model whose images cannot be read now.
    """

    order: PassOrder
    next_number: Callable[[], int]
    send: Callable[[Message], None]
    fail: Callable[[Command, TinsmithError, bool], None]
    put_back: Callable[[list[Command], StoreUnavailableError], None]
    put_off: Callable[[str, StoreUnavailableError], None]
    operations: ForwardQueues = field(default_factory=ForwardQueues)
    passes: dict[int, list[Piece]] = field(default_factory=dict)
    """Datums of each pass that the worker has, by the number of the pass."""
    of_images: set[int] = field(default_factory=set)
    """Numbers of the passes of models that have images to decode."""
    complete: list[ForwardOperation] = field(default_factory=list)

    def add(self, command: Command, base_model: str, payload: bytes) -> None:
        """Let the worker check and measure an operation."""
        number = self.next_number()
        self.operations.add(ForwardOperation(command, base_model, number))
        digests = [digest.hex() for digest in command.image_digests]
        self.send(Prepare(number, command.request_id, command.model_id, base_model, digests, payload))

    def has_enough(self, model_id: str) -> bool:
        """Whether a model has work for a whole pass, or as much as may be prepared at a time."""
        waiting = self.operations.get(model_id, ())
        preparing = sum(operation.command.payload_bytes for operation in waiting if operation.prepared is None)
        tokens = sum(operation.tokens for operation in waiting)
        return preparing >= PREPARED_BYTES or any(tokens >= self.order.paces.full[operation.base_model] for operation in waiting)

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

    def forget_all(self) -> None:
        """Forget what the worker had, which is gone. What is complete stays to be recorded."""
        self.operations.clear()
        self.passes.clear()
        self.of_images.clear()
        self.order.paces.clear()

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
            while (ahead := sum((number in self.of_images) is of_images for number in self.passes)) < PASSES_AHEAD:
                decoding = {piece.operation.command.model_id for number in self.of_images for piece in self.passes[number]}
                pieces = self.order.next(self.operations, put_off, of_images, decoding)
                if not pieces or (ahead and not self.order.is_worth_waiting(pieces, self.passes.values())):
                    break
                self._send_pass(pieces, of_images)

    def _send_pass(self, pieces: list[Piece], of_images: bool) -> None:
        number = self.next_number()
        if of_images:
            self.of_images.add(number)
        self.passes[number] = pieces
        for piece in pieces:
            piece.operation.in_pass.add(piece.index)
        self.order.given(number, pieces)
        first = pieces[0].operation
        named = [(piece.operation.command.request_id, piece.index) for piece in pieces]
        lengths = [piece.tokens for piece in pieces]
        pixels = [piece.pixels for piece in pieces] if any(piece.pixels for piece in pieces) else []
        self.send(RunPass(number, first.base_model, first.backward, named, lengths, pieces[0].together, pixels))

    # ---- What the worker says

    def take(self, message: Prepared | PrepareFailed | PassDone) -> None:
        """Take in what the worker says of operations and passes."""
        if isinstance(message, PassDone):
            self._pass_done(message)
            return
        operation = self.operations.asked(message)
        if operation is None:
            return
        if isinstance(message, Prepared):
            operation.prepared = message
            return
        error = error_of(message.error_type, message.error)
        if isinstance(error, StoreUnavailableError):
            back = self.operations.take_from(operation)
            self._drop(back[1:])
            self.put_back([taken.command for taken in back], error)
        else:
            self.operations.remove(operation)
            # Or others would wait for a row of operations that are all wrong.
            self.order.served[operation.command.model_id] = self.next_number()
            self.fail(operation.command, error, message.backward)

    def _pass_done(self, message: PassDone) -> None:
        pieces = self.passes.pop(message.number, [])
        self.of_images.discard(message.number)
        for took in message.took:
            self.order.paces.learn(*took)
        for piece in pieces:  # those of an operation with a broken image have neither result nor failure
            piece.operation.in_pass.discard(piece.index)
        operations = {piece.operation.command.request_id: piece.operation for piece in pieces}
        for operation in operations.values():
            self.order.paces.full[operation.base_model] = message.tokens_per_pass
        for request_id, index, output in _outputs(message):
            if request_id in operations:
                operations[request_id].results[index] = output
        for request_id, _, error_type, reason in message.failures:
            if request_id in operations:
                failures, error = operations[request_id].failures, error_of(error_type, reason)
                failures += [] if failures and isinstance(error, GivenUpError) else [error]
        for operation in operations.values():
            if operation.failures and not operation.in_pass:
                self._pass_failed(operation)
        complete = self.operations.take_complete()
        self.complete += complete
        self._drop(complete)  # each of several workers holds all datums, and has forgotten those alone that it computed

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
        self.operations.remove(operation)
        self._drop([operation])
        more = f" (and {len(errors) - 1} more of its datums)" if len(errors) > 1 else ""
        self.fail(operation.command, type(final[0])(f"{final[0]}{more}"), operation.backward)

    def _drop(self, operations: list[ForwardOperation]) -> None:
        if operations:
            self.send(Drop([operation.command.request_id for operation in operations]))


def _outputs(message: PassDone) -> Iterator[tuple[str, int, DatumOutput]]:
    """Yield the results of a pass: operation, index of the datum, and what was computed."""
    numbers = np.frombuffer(message.payload, dtype=np.float64, count=len(message.results) + sum(map(len, message.metrics)))
    offset = numbers.nbytes
    losses, values = numbers[: len(message.results)].tolist(), iter(numbers[len(message.results) :].tolist())
    for (request_id, index, shape), loss, names in zip(message.results, losses, message.metrics, strict=True):
        metrics = dict(zip(names, islice(values, len(names)), strict=True))
        count = int(np.prod(shape))
        logprobs = np.frombuffer(message.payload, dtype=np.float32, count=count, offset=offset).reshape(shape)
        offset += 4 * count
        yield request_id, index, DatumOutput(logprobs, loss, metrics)
