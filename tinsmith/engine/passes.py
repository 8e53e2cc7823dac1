"""Forward and forward_backward commands of many models -> packed passes under a token budget.

A command may need several passes and a pass may serve several commands. Every model gives one datum in turn until the budget is full, so a
long command of one model does not hold up a short one of another.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tinsmith.store.records import Command
from tinsmith.training.backend import Backend, DatumResult, DatumWork


@dataclass(eq=False)
class ForwardOperation:
    """A forward or forward_backward command that is being computed."""

    command: Command
    work: list[DatumWork]
    backward: bool
    results: list[DatumResult] = field(default_factory=list)
    """Of the first datums of `work`; complete when there is one for each."""
    started_at: float = field(default_factory=time.time)

    @property
    def tokens(self) -> int:
        """Positions of all its datums."""
        return sum(len(datum.rendered) for datum in self.work)

    @property
    def is_complete(self) -> bool:
        """Whether every datum has its result."""
        return len(self.results) == len(self.work)

    @property
    def loss(self) -> float:
        """Sum over its datums."""
        return sum(result.loss for result in self.results)


Piece = tuple[ForwardOperation, DatumWork]
"""One datum of a pass and the operation it belongs to."""


def run_pass(backend: Backend, queues: Sequence[deque[ForwardOperation]], tokens_per_pass: int) -> dict[str, str]:
    """Compute one pass for the oldest operation and whatever fits beside it.

    `queues` hold the operations of one model each, in order, all on this backend; none is empty. Results are added to the operations.
    Returns why a model failed, by model; its operations that took part stay incomplete.
    """
    oldest_first = sorted(queues, key=lambda queue: queue[0].command.id)
    backward = oldest_first[0][0].backward
    pieces = list(_choose([_datums(queue, backward) for queue in oldest_first], tokens_per_pass))
    outcome = backend.run_pass([datum for _, datum in pieces], backward)
    for (operation, _), result in zip(pieces, outcome.results, strict=True):
        if result is not None:
            operation.results.append(result)
    return outcome.failures


def _datums(queue: deque[ForwardOperation], backward: bool) -> Iterator[Piece]:
    """What is next of one model: datums of its leading operations of that direction."""
    for operation in queue:
        if operation.backward is not backward:
            return
        for datum in operation.work[len(operation.results) :]:
            yield operation, datum


def _choose(sources: list[Iterator[Piece]], tokens_per_pass: int) -> Iterator[Piece]:
    """One datum of each source in turn; a source ends when its next datum no longer fits. The first datum always fits."""
    tokens = 0
    turn = deque(sources)
    while turn:
        source = turn.popleft()
        piece = next(source, None)
        if piece is not None and (tokens == 0 or tokens + len(piece[1].rendered) <= tokens_per_pass):
            tokens += len(piece[1].rendered)
            turn.append(source)
            yield piece
