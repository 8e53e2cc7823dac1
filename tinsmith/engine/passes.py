"""Composes forward and forward_backward operations of many models into passes under a token budget.

An operation may need several passes and a pass may serve several operations. Models take turns of half a pass, and those go first that
were served longest ago, so a long operation does not hold up a short one of another model. A turn is not a single datum: each adapter of
a pass costs multiplications of its own, which are fast only over many tokens.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError
from tinsmith.protocol.work import Prepared
from tinsmith.store.records import Command


@dataclass(frozen=True, eq=False)
class DatumOutput:
    """Result of a pass for one datum."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the target tokens, in their shape."""
    loss: float
    metrics: Mapping[str, float]


@dataclass(eq=False)
class ForwardOperation:
    """A forward or forward_backward operation that is being prepared or computed."""

    command: Command
    base_model: str
    number: int
    """The number under which the worker was asked to prepare it."""
    prepared: Prepared | None = None
    """The worker's measurements; None while it prepares the operation."""
    in_pass: set[int] = field(default_factory=set)
    results: dict[int, DatumOutput] = field(default_factory=dict)
    failures: list[TinsmithError] = field(default_factory=list)
    """Errors of its datums. Then no more of it is computed, and it ends when none of it is in a pass any more."""
    started_at: float = field(default_factory=time.monotonic)

    @property
    def backward(self) -> bool:
        """Whether it contributes gradients; True while it is not prepared, because nobody knows."""
        return self.prepared is None or self.prepared.backward

    @property
    def tokens(self) -> int:
        """Tokens of all its datums, once it is prepared."""
        return 0 if self.prepared is None else sum(self.prepared.lengths)

    @property
    def is_complete(self) -> bool:
        return self.prepared is not None and len(self.results) == len(self.prepared.lengths)

    @property
    def open(self) -> list[int]:
        """Indices of the datums that are in no pass and still to be computed."""
        if self.prepared is None or self.failures:
            return []
        return [index for index in range(len(self.prepared.lengths)) if index not in self.results and index not in self.in_pass]

    @property
    def is_at_worker(self) -> bool:
        """Whether the worker is doing something for it."""
        return self.prepared is None or bool(self.in_pass)

    @property
    def has_begun(self) -> bool:
        """Whether any of it is computed, or is being computed now."""
        return bool(self.results or self.in_pass)

    @property
    def in_order(self) -> list[DatumOutput]:
        return [self.results[index] for index in range(len(self.results))]

    @property
    def loss(self) -> float:
        return sum(result.loss for result in self.in_order)

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the reply, once it is complete: the loss, and means over its datums."""
        results = self.in_order
        means = {f"{name}:mean": sum(result.metrics[name] for result in results) / len(results) for name in results[0].metrics}
        return {"loss:sum": self.loss} | means


@dataclass(frozen=True)
class Piece:
    """One datum of a pass."""

    operation: ForwardOperation
    index: int

    @property
    def tokens(self) -> int:
        assert self.operation.prepared is not None
        return self.operation.prepared.lengths[self.index]

    @property
    def together(self) -> bool:
        """Whether all workers compute it together, each a slice of its tokens."""
        assert self.operation.prepared is not None
        return self.index in self.operation.prepared.together

    @property
    def pixels(self) -> dict[str, int]:
        """Pixels of its images that are still to be decoded, by digest."""
        assert self.operation.prepared is not None
        return self.operation.prepared.pixels[self.index]


def next_pass(
    queues: Sequence[deque[ForwardOperation]], most_tokens: Mapping[bool, int], max_pixels: int, served: Mapping[str, int], workers: int = 1
) -> list[Piece]:
    """Choose the datums of the next pass: of the model that was served longest ago, and others that fit beside, in one direction.

    `queues` hold the operations of one model each, in order, all on one base model; none is empty. `served` says in which pass a model
    was last served; among those that never were, the oldest operation goes first. `most_tokens` are those of a pass, forward and (True)
    with backward, of all `workers`. Nothing is returned if none can be computed now.
    """
    ready = [(queue, operation) for queue in queues if (operation := _first_open(queue)) is not None]
    ready.sort(key=lambda pair: (served.get(pair[1].command.model_id, 0), pair[1].command.id))
    if not ready:
        return []
    backward = ready[0][1].backward
    return list(_choose([_pieces(queue, backward) for queue, _ in ready], most_tokens[backward], max_pixels, workers))


def _first_open(queue: deque[ForwardOperation]) -> ForwardOperation | None:
    """Return a model's first operation with a datum that is in no pass; None if one before it is not prepared, or there is none."""
    for operation in queue:
        if operation.prepared is None:
            return None
        if operation.open:
            return operation
    return None


def _pieces(queue: deque[ForwardOperation], backward: bool) -> Iterator[Piece]:
    """Yield a model's next datums: those of its leading operations of that direction."""
    for operation in queue:
        left = operation.open
        if operation.prepared is None or (left and operation.backward is not backward):
            return
        yield from (Piece(operation, index) for index in left)


def _choose(sources: list[Iterator[Piece]], tokens_per_pass: int, max_pixels: int, workers: int) -> Iterator[Piece]:
    """Yield half a pass of each source in turn; a source ends when its next datum no longer fits.

    The first datum always fits. So do others that are no longer than it, while there are `workers` that would have nothing to do beside
    it. A pass decodes no more pixels than one image may have: pixel values take a hundred times the memory of an encoded image, and a
    client cannot choose how many datums the SDK puts into a request. A datum that all workers compute together has a pass of its own.
    """
    tokens, pixels, first, count = 0, dict[str, int](), 0, 0
    waiting = deque((next(source, None), source) for source in sources)
    while waiting:
        piece, source = waiting.popleft()
        turn = 0
        while piece is not None:
            new = piece.pixels.items() - pixels.items()
            fits = not new or sum(pixels.values()) + sum(size for _, size in new) <= max_pixels
            has_room = tokens + piece.tokens <= tokens_per_pass or (count < workers and piece.tokens <= first)
            if tokens and (piece.together or not (has_room and fits)):
                break
            if turn and 2 * (turn + piece.tokens) > tokens_per_pass:
                waiting.append((piece, source))
                break
            first, count = first or piece.tokens, count + 1
            tokens, turn = tokens + piece.tokens, turn + piece.tokens
            pixels.update(new)
            yield piece
            if piece.together:
                return
            piece = next(source, None)
