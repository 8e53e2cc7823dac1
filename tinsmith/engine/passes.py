"""Composes forward work of many models into passes under a token budget, and learns how long passes take.

An operation may need several passes and a pass may serve several operations. Tenants take turns of half a pass, first
the one that has had the device for the least time, and so do the models of each; those go first that were served
longest ago, so a long operation does not hold up a short one of another model. A turn is not a single datum: each
adapter of a pass costs multiplications of its own, which are fast only over many tokens.
"""

import logging
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from math import inf

import numpy as np
from numpy.typing import NDArray

from tinsmith.errors import TinsmithError
from tinsmith.protocol.work import Prepared
from tinsmith.store import ids
from tinsmith.store.records import COMPARED, Command

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class DatumOutput:
    """Result of a pass for one datum."""

    logprobs: NDArray[np.float32]
    """Log-probabilities of the target tokens, in their shape."""
    loss: float
    metrics: Mapping[str, float]
    """Of its loss, and the sums `COMPARED` if the loss compares."""


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
    in_journal: set[int] = field(default_factory=set)
    """Datums that the engine before had results of: the replay of their passes gives them again."""
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
        return [
            index
            for index in range(len(self.prepared.lengths))
            if index not in self.results and index not in self.in_pass
        ]

    @property
    def is_at_worker(self) -> bool:
        """Whether the worker is doing something for it."""
        return (self.prepared is None and not self.in_journal) or bool(self.in_pass)

    @property
    def has_results(self) -> bool:
        """Whether gradients of it are in the model, or will be when that is back."""
        return bool(self.results or self.in_journal)

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
        means = {
            f"{name}:mean": sum(result.metrics[name] for result in results) / len(results)
            for name in results[0].metrics
            if name not in COMPARED
        }
        return {"loss:sum": self.loss} | means

    @property
    def measured(self) -> dict[str, float]:
        """Metrics for curves: those of the reply, and what was compared with the sampler."""
        results = self.in_order
        compared = [name for name in COMPARED if name in results[0].metrics]
        return self.metrics | {f"{name}:sum": sum(result.metrics[name] for result in results) for name in compared}


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
    def routed(self) -> int:
        """Tokens of it whose experts are given."""
        assert self.operation.prepared is not None
        return self.operation.prepared.routed[self.index] if self.operation.prepared.routed else 0

    @property
    def pixels(self) -> dict[str, int]:
        """Pixels of its images that are still to be decoded, by digest."""
        assert self.operation.prepared is not None
        return self.operation.prepared.pixels[self.index]


def next_pass(
    queues: Sequence[deque[ForwardOperation]],
    most_tokens: Mapping[bool, int],
    max_pixels: int,
    served: Mapping[str, int],
    workers: int,
    tenant_of: Callable[[str], str],
    seconds_of: Callable[[str], float],
) -> list[Piece]:
    """Choose the next pass: datums of the model served longest ago, and others that fit beside, in one direction.

    `queues` hold the operations of one model each, in order, all on one base model; none is empty. `served` says in
    which pass a model was last served; among those that never were, the oldest operation goes first. `most_tokens` are
    those of a pass of all `workers`, forward and (True) with backward.

    Tenants take turns, those with the fewest seconds first (`seconds_of`), and their models in turns of their own: each
    tenant has an equal part, however many models it has. Nothing is returned if none can be computed now.
    """
    ready = [(queue, operation) for queue in queues if (operation := first_open(queue)) is not None]
    ready.sort(key=lambda pair: (served.get(pair[1].command.model_id, 0), pair[1].command.id))
    if not ready:
        return []
    of_tenants: dict[str, list[tuple[deque[ForwardOperation], ForwardOperation]]] = {}
    for each in ready:
        of_tenants.setdefault(tenant_of(each[1].command.model_id), []).append(each)
    in_turn = [of_tenants[name] for name in sorted(of_tenants, key=seconds_of)]
    ready = [each for turn in zip_longest(*in_turn) for each in turn if each is not None]
    backward = ready[0][1].backward
    return list(_choose([_pieces(queue, backward) for queue, _ in ready], most_tokens[backward], max_pixels, workers))


def first_open(queue: deque[ForwardOperation]) -> ForwardOperation | None:
    """Return a model's first operation with an open datum; None if there is none, or one before it is not prepared."""
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

    The first datum always fits. So do others that are no longer than it, while there are `workers` that would have
    nothing to do beside it. A pass decodes no more pixels than one image may have: pixel values take a hundred times
    the memory of an encoded image, and a client cannot choose how many datums the SDK puts into a request. A datum that
    all workers compute together has a pass of its own.
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


# What each tenant has had.

SOME_S = 1e-4
"""Seconds that a token is said to take while none have been told."""


class TenantSeconds:
    """Seconds of devices that tenants have had for passes, so that those who wait get equal parts.

    One that comes begins where the one with the fewest of those who wait is: it is owed nothing for the time when it
    wanted nothing. Passes count as long as tokens took before, until their seconds are told: of those that fail, or in
    which workers exchange something, they never are.
    """

    def __init__(self) -> None:
        self._had: dict[str, float] = {}
        """Of those who wait, and of those who had more than `_least`."""
        self._least = 0.0
        """What the one with the fewest seconds had of those who waited last."""
        self._per_token: dict[str, float] = {}
        """Seconds of a token on each base model."""
        self._untold: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """Tokens in passes whose seconds are not told, by base model and tenant."""

    def of(self, tenant: str) -> float:
        """Seconds that a tenant has had, and those that it is getting."""
        getting = (self._per_token.get(name, SOME_S) * tokens[tenant] for name, tokens in self._untold.items())
        return self._had.get(tenant, self._least) + sum(getting)

    def wait(self, tenants: set[str]) -> None:
        """Take in which tenants have something that could be computed now."""
        for tenant in tenants:
            self._had.setdefault(tenant, self._least)
        if tenants:
            self._least = min(map(self.of, tenants))
        self._had = {each: had for each, had in self._had.items() if self.of(each) > self._least or each in tenants}

    def given(self, base_model: str, tokens: Mapping[str, int]) -> None:
        """Note that a pass has begun, with so many tokens of each tenant."""
        self._untold[base_model].update(tokens)

    def told(self, base_model: str, tenant: str, tokens: int) -> None:
        """Note that so many tokens of a tenant are in what is now paid."""
        untold = self._untold[base_model]
        untold[tenant] = max(0, untold[tenant] - tokens)

    def workers_ended(self) -> None:
        self._untold.clear()

    def paid(self, base_model: str, tenant: str, tokens: int, seconds: float) -> None:
        """Take in what a tenant's tokens have taken."""
        self._per_token[base_model] = seconds / tokens
        self._had[tenant] = self._had.get(tenant, self._least) + seconds


# How long passes take, and how long they may be: short where sessions wait for each other.

SAMPLING_S = 600.0
"""Seconds after a session's sample in which another is expected, so that passes are kept short."""

PASS_S = 1.0
"""Most seconds of the device for a pass, because others wait for its end. A sequence is not divided."""


@dataclass
class Pace:
    """Estimates how long passes of one direction on a base model take, or a worker's share of them.

    Nothing is known before the first one, nor of sequences longer than those computed.
    """

    tokens: float = inf
    """Most tokens of a pass of about `PASS_S`."""
    quick: int = 0
    """The longest sequence of a pass that took less than half of that: two of them may be at the worker."""
    slow: int = 0
    """The longest sequence that took more than `PASS_S` by itself."""

    def learn(self, lengths: Sequence[int], seconds: float) -> None:
        """Take in what a pass of sequences of these lengths took."""
        total, rate = sum(lengths), sum(lengths) / seconds
        if seconds > PASS_S:
            self.tokens = max(1, rate * PASS_S)
        else:
            self.tokens = max(self.tokens, min(2 * total, rate * PASS_S))
        if seconds < PASS_S / 2:
            self.quick = max(self.quick, *lengths)
        else:
            self.quick = min(self.quick, max(lengths) - 1)


class Paces:
    """The paces of all base models."""

    def __init__(self, tokens_per_pass: int, workers: int, is_shared: Callable[[], bool]) -> None:
        """A pass has at most `tokens_per_pass` tokens, of all `workers`.

        `is_shared` says whether sessions may wait for each other. One that is alone is divided into passes in the same
        way each time.
        """
        self.full: defaultdict[str, int] = defaultdict(lambda: tokens_per_pass)
        """Most tokens of a pass on each base model: fewer than configured after its worker ran out of memory."""
        self.workers = workers
        self._is_shared = is_shared
        self._paces: defaultdict[tuple[str, bool], Pace] = defaultdict(Pace)
        """Pace of each base model, forward and (True) with backward."""

    def clear(self) -> None:
        self.full.clear()
        self._paces.clear()

    def learn(self, base_model: str, backward: bool, lengths: list[int], seconds: float) -> None:
        """Take in what a pass, or a worker's share of it, took."""
        pace = self._paces[base_model, backward]
        pace.learn(lengths, seconds)
        if len(lengths) == 1 and seconds > PASS_S and lengths[0] > pace.slow:
            pace.slow = lengths[0]
            log.warning(
                (
                    "a sequence of %d tokens has kept the device for %.3g s (%s): "
                    "none is cut, so all others wait for one as long"
                ),
                *(*lengths, seconds, base_model),
            )

    def is_quick(self, base_model: str, backward: bool, longest: int) -> bool:
        """Whether passes with sequences of up to `longest` tokens keep nobody waiting for long."""
        if not self._is_shared():
            return True
        pace = self._paces[base_model, backward]
        return self.workers * pace.tokens >= self.full[base_model] and longest <= pace.quick

    def most_tokens(self, base_model: str) -> dict[bool, int]:
        """Most tokens of the next pass, forward and (True) with backward."""
        most, is_shared = self.full[base_model], self._is_shared()
        tokens = {each: self.workers * self._paces[base_model, each].tokens for each in (False, True)}
        return {each: int(min(most, paced)) if is_shared else most for each, paced in tokens.items()}


class ActiveSessions:
    """Sessions that train or sample, and may wait for each other."""

    def __init__(self, loaded: Callable[[], Iterable[str]]) -> None:
        """`loaded` returns the ids of loaded models."""
        self._loaded = loaded
        self.sampling: dict[str, float] = {}
        """Sessions that sample, and when they last did (monotonic time), longest ago first."""

    def sampled(self, session_id: str) -> None:
        self.ended(session_id)
        self.sampling[session_id] = time.monotonic()

    def ended(self, session_id: str) -> None:
        self.sampling.pop(session_id, None)

    def are_several(self) -> bool:
        while self.sampling and next(iter(self.sampling.values())) < time.monotonic() - SAMPLING_S:
            del self.sampling[next(iter(self.sampling))]
        return len({*self.sampling, *map(ids.session_of, self._loaded())}) > 1
