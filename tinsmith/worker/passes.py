"""Forward and forward_backward operations on the worker: checks their datums and computes passes.

Operations are checked and measured as they come, and threads decode the images of a pass, so that the device never
waits for what a processor could have done before.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tinsmith.errors import GivenUpError, TinsmithError, UserError
from tinsmith.kernels.device import Stopwatch
from tinsmith.observing.metrics import WORKER_TIME, direction_of
from tinsmith.observing.spans import PASSES, SPANS
from tinsmith.protocol.boundary import failing_into, result_or_error
from tinsmith.protocol.messages import Message
from tinsmith.protocol.work import PassDone, Prepare, Prepared, PrepareFailed, RunPass, type_of
from tinsmith.rendering.renderer import Renderer
from tinsmith.store import ids
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.wire.compression import unpacked_size
from tinsmith.wire.forward_backward import decode_stored
from tinsmith.worker.background import SMALL_BYTES, Background
from tinsmith.worker.datums import CheckedDatum, FindRecorded, FindRoutes, check_lengths, prepare

log = logging.getLogger(__name__)


Piece = tuple[str, int]
"""An operation, and the index of one of its datums."""
Rendered = tuple[Piece, DatumWork | TinsmithError]
"""A datum whose images are decoded, or why one cannot be used."""


@dataclass(frozen=True)
class TrainingBase:
    """Trainer of one base model."""

    backend: LocalBackend
    renderer: Renderer
    longest: int
    """Most tokens of a sequence that trains, on this device or on those of all workers together."""
    longest_alone: int | None = None
    """Most tokens of a sequence that one worker computes, all computing longer ones together; None if they never do."""
    workers: int = 1

    def together(self, datums: Sequence[CheckedDatum]) -> list[int]:
        """Indices of datums that all workers compute together."""
        return [
            index
            for index, datum in enumerate(datums)
            if self.longest_alone is not None and len(datum) > self.longest_alone
        ]


@dataclass(eq=False)
class Passes:
    """Prepared operations and the passes over them. `enqueue` lets the device's thread do something.

    `dropped` returns, in the middle of a pass, the operations that the engine has dropped meanwhile.
    """

    bases: Mapping[str, TrainingBase]
    rendering: Background
    images: Background
    send: Callable[[Message], None]
    enqueue: Callable[[Callable[[], None]], None]
    find_recorded: FindRecorded
    find_routes: FindRoutes | None = None
    """Finds the experts that computed sampled tokens; None where none are recorded."""
    dropped: Callable[[], Collection[str]] = tuple
    noticed: set[str] = field(default_factory=set)
    """Notices of losses that were already logged."""
    datums: dict[str, dict[int, CheckedDatum]] = field(default_factory=dict)
    """Datums that are not computed yet, by operation and index."""
    preparing: dict[str, Prepare] = field(default_factory=dict)
    """Operations that threads are preparing and that are still wanted."""
    passes: dict[int, RunPass] = field(default_factory=dict)
    """Passes that the device has not been given, by number and in order."""
    rendered: dict[int, list[Rendered | None]] = field(default_factory=dict)
    """Datums of these passes; None while images are being decoded."""
    of_images: set[int] = field(default_factory=set)
    """Numbers of passes with images that the device has not computed."""
    behind: dict[int, list[Callable[[], None]]] = field(default_factory=dict)
    """Work for the device behind a pass, by the pass's number."""
    timed: deque[tuple[RunPass, Stopwatch]] = field(default_factory=deque)
    """Computed passes whose seconds the engine has not heard."""

    def prepare(self, message: Prepare) -> None:
        """Check an operation, here or in a thread, and answer."""
        self.preparing[message.operation] = message
        asks = self.find_routes is not None and self.bases[message.base_model].renderer.base.follows_experts
        if unpacked_size(message.payload, len(message.payload)) > SMALL_BYTES or message.image_digests or asks:
            session = ids.session_of(message.model_id)
            self.rendering.run(
                partial(self._check, message), lambda checked: self._answer(message, *checked.result()), session
            )
        else:
            self._answer(message, *self._check(message))

    def _check(self, message: Prepare) -> tuple[Prepared | PrepareFailed, list[CheckedDatum]]:
        """Return the reply, and the datums of an operation that can be run."""
        failures: list[TinsmithError] = []
        backward = True  # of a request that cannot be read: it may have been one
        with failing_into(failures.append):
            request = decode_stored(message.payload, [bytes.fromhex(digest) for digest in message.image_digests])
            backward = not request.forward_only
            trained = self.bases[message.base_model]
            datums = prepare(message.model_id, request, trained.renderer, self.find_recorded, self.find_routes)
            if backward:
                check_lengths(datums, trained.longest, trained.workers)
            self._notice(datums[0].loss.notice)
            pixels = [{digest.hex(): size for digest, size in datum.undecoded.items()} for datum in datums]
            lengths = [len(datum) for datum in datums]
            routed = [0 if datum.routes is None else int(datum.routes.shape[1]) for datum in datums]
            together = trained.together(datums)
            return Prepared(
                *(message.number, message.operation, backward, lengths, pixels, together),
                routed=routed if any(routed) else [],
            ), datums
        return PrepareFailed(message.number, message.operation, backward, type_of(failures[0]), str(failures[0])), []

    def _notice(self, notice: str) -> None:
        if notice and notice not in self.noticed:
            self.noticed.add(notice)
            log.warning("%s", notice)

    def _answer(self, message: Prepare, reply: Prepared | PrepareFailed, datums: list[CheckedDatum]) -> None:
        if self.preparing.get(message.operation) is not message:  # it was given up, and perhaps begun anew
            return
        del self.preparing[message.operation]
        if datums:
            self.datums[message.operation] = dict(enumerate(datums))
        self.send(reply)

    def drop(self, operations: Sequence[str]) -> None:
        """Forget operations of which nothing more is run."""
        for operation in operations:
            self.datums.pop(operation, None)
            self.preparing.pop(operation, None)

    def run(self, message: RunPass) -> None:
        """Let a pass be computed when threads have decoded its images, those of each datum in a job of its own."""
        pieces = [((operation, index), self.datums[operation][index]) for operation, index in message.pieces]
        self.passes[message.number] = message
        late = [place for place, (_, datum) in enumerate(pieces) if datum.undecoded]
        self.rendered[message.number] = [
            None if place in late else _render(*piece) for place, piece in enumerate(pieces)
        ]
        if late:
            self.of_images.add(message.number)
        for place in late:
            session = ids.session_of(pieces[place][1].model_id)
            self.images.run(partial(_render, *pieces[place]), partial(self._take, message, place), session)
        self._enqueue()

    def _take(self, message: RunPass, place: int, ended: Future[Rendered]) -> None:
        """One datum of a pass is rendered."""
        self.rendered[message.number][place] = ended.result()
        self._enqueue()

    def _enqueue(self) -> None:
        """Give the device what can be computed now.

        Passes of a model keep their order, because another would round the sums of its gradients otherwise, and so do
        all around one that exchanges something. Of passes with images the device has one at a time: what comes
        meanwhile goes ahead of the next.
        """
        waiting: set[str] = set()
        """Models of passes whose images are being decoded, or that wait for such."""
        for number, message in list(self.passes.items()):
            models = {operation.rpartition("/")[0] for operation, _ in message.pieces}
            rendered = [datum for datum in self.rendered[number] if datum is not None]
            is_held = waiting and (self._exchanges(message) or not waiting.isdisjoint(models))
            has_one = (
                number in self.of_images and not self._exchanges(message) and not self.of_images <= self.passes.keys()
            )
            if is_held or has_one or len(rendered) < len(self.rendered[number]):
                if self._exchanges(message):
                    return
                waiting |= models
                continue
            del self.rendered[number], self.passes[number]
            self.enqueue(partial(self._compute, message, rendered))
            for work in self.behind.pop(number, ()):
                self.enqueue(work)

    def in_turn(self, work: Callable[[], None]) -> None:
        """Let the device's thread do something behind all passes before it that exchange something with other workers.

        All workers must take these in one order, and images may be decoded here sooner than there.
        """
        last = next((number for number in reversed(self.passes) if self._exchanges(self.passes[number])), None)
        if last is None:
            self.enqueue(work)
        else:
            self.behind.setdefault(last, []).append(work)

    def _exchanges(self, message: RunPass) -> bool:
        return message.together or self.bases[message.base_model].backend.needs_all

    def _compute(self, message: RunPass, rendered: "list[Rendered]") -> None:
        direction, began, started = direction_of(message.backward), time.time(), time.monotonic()
        with WORKER_TIME.during(direction):
            self._compute_timed(message, rendered)
        requests = list(dict.fromkeys(request_id for request_id, _ in message.pieces))
        SPANS.note(direction, PASSES, began, time.monotonic() - started, requests=requests, tokens=sum(message.lengths))

    def _compute_timed(self, message: RunPass, rendered: "list[Rendered]") -> None:
        backend = self.bases[message.base_model].backend
        watch, exchanges = Stopwatch(backend.base.device), self._exchanges(message)
        if message.together:
            results, failures = _compute_together(backend, message, rendered)
        else:  # one that exchanges something is to be computed by all workers or by none
            results, failures = _compute_share(
                backend, message, rendered, None if exchanges else partial(self._look, message)
            )
        watch.stop()
        if not exchanges and not failures:
            self.timed.append((message, watch))
        self.of_images.discard(message.number)
        self._enqueue()
        for piece in [piece for piece, result in results.items() if np.isnan(result.logprobs).any()]:
            del results[piece]
            failures[piece] = UserError(
                f"datum {piece[1]}: a log-probability is NaN, so the model's weights are not finite, "
                "or what they compute; "
                "go on from a checkpoint of before that"
            )
        self._forget(results)
        numbers = [result.loss for result in results.values()]
        told = [{**result.metrics, **result.compared} for result in results.values()]
        numbers += [value for metrics in told for value in metrics.values()]
        self.send(
            PassDone(
                message.number,
                [(*piece, list(result.logprobs.shape)) for piece, result in results.items()],
                [(*piece, type_of(error), str(error)) for piece, error in failures.items()],
                backend.passes.tokens_per_pass,
                [list(metrics) for metrics in told],
                self._took(),
                b"".join(
                    [
                        np.array(numbers, dtype=np.float64).tobytes(),
                        *(result.logprobs.tobytes() for result in results.values()),
                    ]
                ),
            )
        )

    def _took(self) -> list[tuple[str, bool, list[int], float]]:
        took = []
        while self.timed and (seconds := self.timed[0][1].seconds) is not None:
            message, _ = self.timed.popleft()
            took.append((message.base_model, message.backward, message.lengths, seconds))
        return took

    def _look(self, message: RunPass) -> None:
        """Raise GivenUpError if all operations of a pass have been dropped."""
        dropped = self.dropped()
        if all(operation in dropped or operation not in self.datums for operation, _ in message.pieces):
            raise GivenUpError("the pass was given up: none of its operations is wanted any more")

    def _forget(self, computed: Iterable[Piece]) -> None:
        for operation, index in computed:
            left = self.datums.get(operation)
            if left is not None:  # or the operation was dropped while the pass ran
                left.pop(index, None)
                if not left:
                    del self.datums[operation]


def _render(piece: Piece, datum: CheckedDatum) -> Rendered:
    """Decode the images of a datum."""
    return piece, result_or_error(datum.work)


Outcome = tuple[dict[Piece, DatumResult], dict[Piece, TinsmithError]]
"""Results and errors of a pass by datum."""


def _compute_share(
    backend: LocalBackend, message: RunPass, rendered: "list[Rendered]", look: Callable[[], None] | None
) -> Outcome:
    """Compute a pass, or this worker's share of one; an operation with a broken image contributes nothing."""
    failures = {
        piece: type(work)(f"datum {piece[1]}: {work}") for piece, work in rendered if isinstance(work, TinsmithError)
    }
    broken = {operation for operation, _ in failures}
    chosen = [(piece, work) for piece, work in rendered if isinstance(work, DatumWork) and piece[0] not in broken]
    results: dict[Piece, DatumResult] = {}
    if chosen or backend.needs_all:
        with failing_into(lambda error: failures.update({piece: error for piece, _ in chosen})):
            if look:
                look()
            outcome = backend.run_pass([work for _, work in chosen], message.backward, look)
            for i, ((piece, _), result) in enumerate(zip(chosen, outcome.results, strict=True)):
                if result is None:
                    failures[piece] = TinsmithError(f"datum {piece[1]}: {outcome.failures[i]}")
                else:
                    results[piece] = result
    return results, failures


def _compute_together(backend: LocalBackend, message: RunPass, rendered: "list[Rendered]") -> Outcome:
    """Compute a sequence with all workers, even if its images are broken here, so that the others hear of it."""
    ((piece, work),) = rendered
    results: dict[Piece, DatumResult] = {}
    failures: dict[Piece, TinsmithError] = {}
    with failing_into(lambda error: failures.update({piece: type(error)(f"datum {piece[1]}: {error}")})):
        results[piece] = backend.run_together(message.number, work, message.backward)
    return results, failures
