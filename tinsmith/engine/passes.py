"""Forward and forward_backward commands of many models -> packed passes under a token budget.

A command may need several passes and a pass may serve several commands. Every model gives one datum in turn until the budget is full, so a
long command of one model does not hold up a short one of another.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from tinsmith.engine.datums import CheckedDatum
from tinsmith.errors import TinsmithError
from tinsmith.protocol.boundary import failing_into
from tinsmith.store.records import Command
from tinsmith.training.backend import Backend, DatumResult, DatumWork


@dataclass(eq=False)
class ForwardOperation:
    """A forward or forward_backward command that is being computed."""

    command: Command
    work: list[CheckedDatum]
    backward: bool
    results: dict[int, DatumResult] = field(default_factory=dict)
    """Of the datums that are computed, by index in `work`."""
    started_at: float = field(default_factory=time.monotonic)
    """Monotonic time."""

    @property
    def tokens(self) -> int:
        """Positions of all its datums."""
        return sum(len(datum) for datum in self.work)

    @property
    def is_complete(self) -> bool:
        """Whether every datum has its result."""
        return len(self.results) == len(self.work)

    @property
    def in_order(self) -> list[DatumResult]:
        """The results of all datums, once it is complete."""
        return [self.results[index] for index in range(len(self.work))]

    @property
    def loss(self) -> float:
        """Sum over its datums, once it is complete."""
        return sum(result.loss for result in self.in_order)


@dataclass(frozen=True)
class Piece:
    """One datum of a pass: which one of which operation."""

    operation: ForwardOperation
    index: int

    @property
    def datum(self) -> CheckedDatum:
        """The datum itself."""
        return self.operation.work[self.index]


Rendered = tuple[Piece, DatumWork]
"""A piece whose pictures are decoded."""


def next_pass(queues: Sequence[deque[ForwardOperation]], tokens_per_pass: int) -> list[Piece]:
    """What to compute next: work of the oldest operation and whatever fits beside it, all of one direction.

    `queues` hold the operations of one model each, in order, all on one backend; none is empty.
    """
    oldest_first = sorted(queues, key=lambda queue: queue[0].command.id)
    backward = oldest_first[0][0].backward
    return list(_choose([_pieces(queue, backward) for queue in oldest_first], tokens_per_pass))


def render(pieces: Sequence[Piece]) -> tuple[list[Rendered], dict[ForwardOperation, TinsmithError]]:
    """Decode the pictures of one pass. Returns what can be computed, and the error of each operation that has a broken picture."""
    rendered: list[Rendered] = []
    broken: dict[ForwardOperation, TinsmithError] = {}
    for piece in pieces:
        with failing_into(partial(_note, broken, piece)):
            rendered.append((piece, piece.datum.work()))
    return [(piece, work) for piece, work in rendered if piece.operation not in broken], broken


def _note(broken: dict[ForwardOperation, TinsmithError], piece: Piece, error: TinsmithError) -> None:
    broken.setdefault(piece.operation, type(error)(f"datum {piece.index}: {error}"))


def run_pass(backend: Backend, rendered: Sequence[Rendered]) -> dict[ForwardOperation, str]:
    """Compute one pass. Results are added to their operations; returns why an operation failed, naming its datum, for those that did."""
    outcome = backend.run_pass([work for _, work in rendered], rendered[0][0].operation.backward)
    failures: defaultdict[ForwardOperation, list[str]] = defaultdict(list)
    for i, ((piece, _), result) in enumerate(zip(rendered, outcome.results, strict=True)):
        if result is None:
            failures[piece.operation].append(f"datum {piece.index}: {outcome.failures[i]}")
        else:
            piece.operation.results[piece.index] = result
    return {operation: _first_of(reasons) for operation, reasons in failures.items()}


def _first_of(reasons: list[str]) -> str:
    return reasons[0] if len(reasons) == 1 else f"{reasons[0]} (and {len(reasons) - 1} more of its datums)"


def _pieces(queue: deque[ForwardOperation], backward: bool) -> Iterator[Piece]:
    """What is next of one model: datums of its leading operations of that direction."""
    for operation in queue:
        if operation.backward is not backward:
            return
        for index in range(len(operation.work)):
            if index not in operation.results:
                yield Piece(operation, index)


def _choose(sources: list[Iterator[Piece]], tokens_per_pass: int) -> Iterator[Piece]:
    """One datum of each source in turn; a source ends when its next datum no longer fits. The first datum always fits.

    A pass decodes no more pixels than one picture may have, because decoding holds up everybody else; a request may hold more, because a
    client cannot choose how many datums the SDK puts into it.
    """
    tokens, pixels = 0, dict[bytes, int]()
    turn = deque(sources)
    while turn:
        source = turn.popleft()
        piece = next(source, None)
        if piece is None:
            continue
        datum = piece.datum
        new = datum.undecoded.items() - pixels.items()
        fits = not new or sum(pixels.values()) + sum(size for _, size in new) <= datum.renderer.limits.max_image_pixels
        if tokens == 0 or (tokens + len(datum) <= tokens_per_pass and fits):
            tokens += len(datum)
            pixels.update(new)
            turn.append(source)
            yield piece
