"""Forward and forward_backward operations under way: prepared, composed into passes, and completed."""

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from tinsmith.engine.passes import (
    PASS_S,
    DatumOutput,
    ForwardOperation,
    Paces,
    Piece,
    TenantSeconds,
    first_open,
    next_pass,
)
from tinsmith.errors import GivenUpError, StoreUnavailableError, TinsmithError
from tinsmith.observing.metrics import PASS_ROOM, PASS_SECONDS, PASS_TOKENS, PASSES, direction_of
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import Drop, PassDone, Prepare, Prepared, PrepareFailed, RunPass, error_of
from tinsmith.store.records import LOCAL, Command

# Forward operations of each model, in order, and whose turn it is to have a pass.


class ForwardQueues(dict[str, deque[ForwardOperation]]):
    """Operations of each model, in order; a model without any is absent."""

    def add(self, operation: ForwardOperation) -> None:
        self.setdefault(operation.command.model_id, deque()).append(operation)

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
        return [operation for model_id in list(self) for operation in self.take_complete_of(model_id)]

    def take_complete_of(self, model_id: str) -> list[ForwardOperation]:
        """The same of one model."""
        complete, queue = [], self.get(model_id, deque())
        while queue and queue[0].is_complete:
            complete.append(queue.popleft())
        if not queue:
            self.pop(model_id, None)
        return complete


@dataclass(eq=False)
class PassOrder:
    """Chooses the next pass: tenants get equal seconds, and the models and base models of each take turns."""

    paces: Paces
    max_pixels: int
    """Most pixels of images that a pass decodes."""
    served: dict[str, int] = field(default_factory=dict)
    """Number of the last pass of each model."""
    seconds: TenantSeconds = field(default_factory=TenantSeconds)
    tenant_of: Callable[[str], str] = lambda _: LOCAL
    """Tells the tenant of a model."""
    served_bases: dict[str, int] = field(default_factory=dict)
    """Number of the last pass on a base model."""

    def given(self, number: int, pieces: list[Piece]) -> None:
        """Note that the worker has been given a pass."""
        tokens: Counter[str] = Counter()
        for piece in pieces:
            model_id = piece.operation.command.model_id
            self.served[model_id] = number
            tokens[self.tenant_of(model_id)] += piece.tokens
        base_model = pieces[0].operation.base_model
        self.served_bases[base_model] = number
        self.seconds.given(base_model, tokens)

    def next(
        self, queues: ForwardQueues, put_off: Collection[str], of_images: bool, decoding: Collection[str]
    ) -> list[Piece]:
        """Compose a pass on the base model of the tenant with the fewest seconds.

        Of several it is the one served longest ago; of those never served, that of the oldest operation. Models in
        `put_off` have none. With `of_images` it is one of models with images to decode, or that are `decoding` some: a
        model stays with the passes of images until these are computed, so that its own passes keep their order.
        """
        ready = {model_id for model_id, queue in queues.items() if model_id not in put_off and first_open(queue)}
        self.seconds.wait(set(map(self.tenant_of, ready)))
        able = {
            model_id: queue
            for model_id, queue in queues.items()
            if model_id in ready and (model_id in decoding or any(map(_has_images, queue))) is of_images
        }
        bases: dict[str, list[deque[ForwardOperation]]] = {}
        for queue in sorted(able.values(), key=lambda queue: queue[0].command.id):
            bases.setdefault(queue[0].base_model, []).append(queue)

        def turn(name: str) -> tuple[float, int]:
            tenants = {self.tenant_of(queue[0].command.model_id) for queue in bases[name]}
            return min(map(self.seconds.of, tenants)), self.served_bases.get(name, 0)

        workers = self.paces.workers
        passes = (
            next_pass(
                *(bases[name], self.paces.most_tokens(name), self.max_pixels, self.served, workers),
                *(self.tenant_of, self.seconds.of),
            )
            for name in sorted(bases, key=turn)
        )
        return next((pieces for pieces in passes if pieces and not self._is_others_turn(pieces, queues, put_off)), [])

    def is_worth_waiting(self, pieces: list[Piece], ahead: Collection[list[Piece]]) -> bool:
        """Whether a pass is to wait at the worker behind those `ahead`, rather than for more datums to join it.

        It is if all are quick and it is over half full, or if it has images to decode.
        """
        full = self.paces.full[pieces[0].operation.base_model]
        is_quick = all(self._is_quick(pass_) for pass_ in (*ahead, pieces))
        return (is_quick and 2 * sum(piece.tokens for piece in pieces) > full) or any(piece.pixels for piece in pieces)

    def _is_others_turn(self, pieces: list[Piece], queues: ForwardQueues, put_off: Collection[str]) -> bool:
        """Whether a slow pass has to let another model go first, whose operation has just begun to be prepared."""
        turn, since = self.served.get(pieces[0].operation.command.model_id, 0), time.monotonic() - PASS_S
        others = (
            queue[0]
            for model_id, queue in queues.items()
            if self.served.get(model_id, 0) < turn and model_id not in put_off
        )
        return not self._is_quick(pieces) and any(
            other.prepared is None and other.started_at > since for other in others
        )

    def _is_quick(self, pieces: list[Piece]) -> bool:
        first = pieces[0].operation
        return self.paces.is_quick(first.base_model, first.backward, max(piece.tokens for piece in pieces))


def _has_images(operation: ForwardOperation) -> bool:
    """Whether images are to be decoded of what is still to be given to the worker."""
    pixels = operation.prepared.pixels if operation.prepared else []
    return any(pixels) and any(pixels[index] for index in operation.open)


# The way of the operations: to the worker that prepares them, into passes, and back with results.

PREPARED_BYTES = 2**20
"""Bytes of a model's operations that are prepared at a time; the last one may go beyond."""

PASSES_AHEAD = 2
"""Most passes that a worker has: the one it computes, and the next. As many besides of models with images to decode."""


@dataclass(eq=False)
class ForwardWork:
    """The forward work of all models that was taken from their queues.

    `send` tells the worker. `fail` is told of an operation that has failed, and whether that touches the open step;
    `put_back` of operations that cannot be prepared before the database can be read; `put_off` of a model whose images
    cannot be read now; `passed` of a pass, its datums that have results, and when (monotonic) it was sent.
    """

    order: PassOrder
    next_number: Callable[[], int]
    send: Callable[[Message], None]
    fail: Callable[[Command, TinsmithError, bool], None]
    put_back: Callable[[list[Command], StoreUnavailableError], None]
    put_off: Callable[[str, StoreUnavailableError], None]
    passed: Callable[[RunPass, list[Piece], float], None]
    operations: ForwardQueues = field(default_factory=ForwardQueues)
    passes: dict[int, list[Piece]] = field(default_factory=dict)
    """Datums of each pass that the worker has, by the number of the pass."""
    sent: dict[int, tuple[RunPass, float]] = field(default_factory=dict)
    """What the worker was sent for each pass, and when (monotonic)."""
    of_images: set[int] = field(default_factory=set)
    """Numbers of the passes of models that have images to decode."""
    complete: list[ForwardOperation] = field(default_factory=list)
    paid: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds of devices for passes, by model (`Outcomes.gpu_seconds`)."""
    shares: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Tokens of models in passes whose seconds are not known yet, by base model."""
    last_shares: dict[str, Counter[str]] = field(default_factory=dict)

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
        return preparing >= PREPARED_BYTES or any(
            tokens >= self.order.paces.full[operation.base_model] for operation in waiting
        )

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

    def workers_ended(self, runs_again: Callable[[Command, bool], bool]) -> list[Command]:
        """Forget what the workers had, which is gone; returns operations of which nothing is computed.

        Results stay: their passes are replayed. `runs_again` is asked for each operation, and told whether a worker was
        at it; it fails those that it refuses.
        """
        back: list[Command] = []
        for model_id, queue in list(self.operations.items()):
            for operation in list(queue):
                is_under_way = operation.is_at_worker
                operation.in_pass.clear()
                if operation.failures:
                    self._pass_failed(operation)
                elif not runs_again(operation.command, is_under_way):
                    self.operations.remove(operation)
            left = list(self.operations.pop(model_id, ()))
            begun = max((place for place, operation in enumerate(left, 1) if operation.has_results), default=0)
            back += [operation.command for operation in left[begun:]]
            if begun:
                self.operations[model_id] = deque(left[:begun])
        self.passes.clear()
        self.sent.clear()
        self.of_images.clear()
        self.order.paces.clear()
        self.order.seconds.workers_ended()
        return back

    def take_complete(self) -> list[ForwardOperation]:
        complete, self.complete = self.complete, []
        return complete

    def take_again(self, model_id: str, replayed: PassDone) -> None:
        """Take in what a replayed pass gives for operations of which an engine has died that had it."""
        operations = {each.command.request_id: each for each in self.operations.get(model_id, ())}
        for request_id, index, output in _outputs(replayed):
            if request_id in operations:
                operations[request_id].results.setdefault(index, output)

    def complete_those_of(self, model_id: str) -> None:
        """Let the operations of a model that is back end, if all of them is computed."""
        complete = self.operations.take_complete_of(model_id)
        self.complete += complete
        self._drop(complete)

    # ---- Passes

    def send_passes(self, put_off: set[str]) -> None:
        """Give the worker passes: one to compute, and another ahead if that one is half full or has images to decode.

        Models with images to decode have passes of their own, beside which the worker computes those of others. None is
        ahead of others that may take long (`Pace`). Models in `put_off` wait for the database.
        """
        for of_images in (False, True):
            while (ahead := sum((number in self.of_images) is of_images for number in self.passes)) < PASSES_AHEAD:
                decoding = {
                    piece.operation.command.model_id for number in self.of_images for piece in self.passes[number]
                }
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
        self._count(first, sum(piece.tokens for piece in pieces))
        named = [(piece.operation.command.request_id, piece.index) for piece in pieces]
        lengths = [piece.tokens for piece in pieces]
        pixels = [piece.pixels for piece in pieces] if any(piece.pixels for piece in pieces) else []
        call = RunPass(number, first.base_model, first.backward, named, lengths, pieces[0].together, pixels)
        self.sent[number] = call, time.monotonic()
        self.send(call)

    def _count(self, first: ForwardOperation, tokens: int) -> None:
        labels = first.base_model, direction_of(first.backward)
        room = self.order.paces.most_tokens(first.base_model)[first.backward]
        PASSES.labels(*labels).inc()
        PASS_TOKENS.labels(*labels).inc(tokens)
        PASS_ROOM.labels(*labels).inc(max(room, tokens))

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
            base_model, backward, _, seconds = took
            PASS_SECONDS.labels(base_model, direction_of(backward)).inc(seconds)
        self._share(pieces, message)
        for piece in pieces:  # those of an operation with a broken image have neither result nor failure
            piece.operation.in_pass.discard(piece.index)
        operations = {piece.operation.command.request_id: piece.operation for piece in pieces}
        for operation in operations.values():
            self.order.paces.full[operation.base_model] = message.tokens_per_pass
        self._take_results(message, pieces, operations)
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

    def _share(self, pieces: list[Piece], message: PassDone) -> None:
        """Divide the seconds of devices that are told among the models of the passes since seconds were last told."""
        for piece in pieces:
            self.shares[piece.operation.base_model][piece.operation.command.model_id] += piece.tokens
        for base_model, _, _, seconds in message.took:
            told = self.shares.pop(base_model, Counter())
            for model_id, tokens in told.items():
                self.order.seconds.told(base_model, self.order.tenant_of(model_id), tokens)
            shares = self.last_shares[base_model] = told or self.last_shares.get(base_model, Counter())
            for model_id, tokens in shares.items():
                paid = seconds * tokens / shares.total()
                self.paid[model_id] += paid
                self.order.seconds.paid(base_model, self.order.tenant_of(model_id), tokens, paid)

    def _take_results(self, message: PassDone, pieces: list[Piece], operations: dict[str, ForwardOperation]) -> None:
        for request_id, index, output in _outputs(message):
            if request_id in operations:
                operations[request_id].results[index] = output
        if message.number in self.sent:
            call, sent_at = self.sent.pop(message.number)
            self.passed(call, [piece for piece in pieces if piece.index in piece.operation.results], sent_at)

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
    numbers = np.frombuffer(
        message.payload, dtype=np.float64, count=len(message.results) + sum(map(len, message.metrics))
    )
    offset = numbers.nbytes
    losses, values = numbers[: len(message.results)].tolist(), iter(numbers[len(message.results) :].tolist())
    for (request_id, index, shape), loss, names in zip(message.results, losses, message.metrics, strict=True):
        metrics = dict(zip(names, islice(values, len(names)), strict=True))
        count = int(np.prod(shape))
        logprobs = np.frombuffer(message.payload, dtype=np.float32, count=count, offset=offset).reshape(shape)
        offset += 4 * count
        yield request_id, index, DatumOutput(logprobs, loss, metrics)
