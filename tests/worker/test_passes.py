"""Forward work on a worker: checked and measured here or in a thread, computed pass by pass; what is wrong harms its
operation alone.

Invariant: Steps and sequences of all workers have the same order on every worker, however long images take to decode.
Also: `tests/engine/test_worker_group.py`.

Invariant: A pass that no client waits for ends between layers, and no step counts what it added; long passes are cut,
and none is queued ahead of other sessions. Also: `tests/worker/test_loop.py`, `tests/engine/test_passes.py`.

Invariant: A model's passes are computed in their order, however long their images take to decode, and no other model's
texts wait for these.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, png
from tests.engine.here import IMAGE_TOKENS, LONG_S, forward_request
from tinsmith.config import ImagesConfig, TrainingConfig
from tinsmith.errors import StoreUnavailableError, UserError
from tinsmith.kernels.device import Stopwatch
from tinsmith.models.base import BaseModel
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import PassDone, Prepare, Prepared, RunPass, error_of
from tinsmith.rendering.renderer import Renderer
from tinsmith.store.recorded_sequences import RecordedSequences
from tinsmith.training.backend import LocalBackend
from tinsmith.wire import tinker_pb2
from tinsmith.wire.compression import unpacked_size
from tinsmith.wire.forward_backward import StoredRequest, move_images_out
from tinsmith.worker.background import SMALL_BYTES, Background
from tinsmith.worker.passes import Passes, TrainingBase

WHOLE = png(9)
BROKEN = WHOLE[: len(WHOLE) - 30]
"""Its header is right: nobody knows before it is decoded."""


@dataclass
class Bench:
    """Passes over a model "m", and what they answer."""

    passes: Passes
    backend: LocalBackend
    blobs: dict[bytes, bytes]
    sent: list[Message]
    due: deque[Callable[[], None]]

    def prepare(self, operation: str, stored: StoredRequest) -> None:
        self.blobs.update(stored.images)
        self.passes.prepare(
            Prepare(1, operation, "m", "tiny", [digest.hex() for digest in stored.image_digests], stored.payload)
        )

    def run(self, number: int, *pieces: tuple[str, int], backward: bool = True) -> None:
        self.passes.run(RunPass(number, "tiny", backward, list(pieces), [1] * len(pieces)))

    def settle(self) -> None:
        """Go on until threads and device have nothing left to do."""
        deadline = time.monotonic() + LONG_S
        while self.passes.rendering.running or self.passes.images.running or self.due:
            assert time.monotonic() < deadline
            self.passes.rendering.deliver()
            self.passes.images.deliver()
            while self.due:
                self.due.popleft()()
            time.sleep(0.001)

    def answers(self) -> list[Any]:
        """What was said since this was last asked."""
        self.settle()
        sent = self.sent[:]
        self.sent.clear()
        return sent

    def answer(self) -> Any:
        """The only thing that was said."""
        (message,) = self.answers()
        return message


def bench_of(base: BaseModel, directory: Path) -> Bench:
    blobs: dict[bytes, bytes] = {}
    sent: list[Message] = []
    due: deque[Callable[[], None]] = deque()
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("m", LoraShape(4, seed=1))
    recorded = RecordedSequences(directory, 2**20)
    renderer = Renderer(base, ImagesConfig(), lambda digest: blobs[digest])
    trained = {"tiny": TrainingBase(backend, renderer, base.max_context)}
    rendering, images = (Background(name, 1, lambda: None) for name in ("rendering", "images"))
    passes = Passes(trained, rendering, images, sent.append, due.append, recorded.find)
    return Bench(passes, backend, blobs, sent, due)


@pytest.fixture
def bench(text_base: BaseModel, tmp_path: Path) -> Bench:
    return bench_of(text_base, tmp_path)


@pytest.fixture
def gallery(vision_base: BaseModel, tmp_path: Path) -> Bench:
    return bench_of(vision_base, tmp_path)


@contextmanager
def occupied(background: Background) -> Iterator[None]:
    """While the body runs, the only thread of this pool is at something else."""
    over = threading.Event()
    background.run(over.wait, lambda _: None)
    try:
        yield
    finally:
        over.set()


# ---- Preparing


def test_an_operation_waits_for_recordings_that_cannot_be_read(bench: Bench) -> None:
    def locked(names: Any) -> Any:
        raise StoreUnavailableError("locked")

    message = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="stable_reinforce")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2, 5], dtype="<i4").tobytes()
    sampled = tinker_pb2.SampledProvenanceSpan(sequence_id="s:sample:0/0/0", length=2)
    datum.loss_fn_input_spans.add().sampled_tokens.CopyFrom(sampled)
    bench.passes.find_recorded = locked
    bench.prepare("s:train:0/1", move_images_out(message))
    assert isinstance(error_of(bench.answer().error_type, ""), StoreUnavailableError)


def test_small_requests_are_measured_at_once_and_others_in_a_thread_which_decodes_no_image(gallery: Bench) -> None:
    stored, images = forward_request([500] * 20), forward_request(images=[WHOLE, BROKEN])
    assert unpacked_size(stored.payload, 0) > SMALL_BYTES > max(len(stored.payload), len(images.payload))
    with occupied(gallery.passes.rendering):
        gallery.prepare("m/1", stored)
        gallery.prepare("m/2", images)
        gallery.prepare("m/3", forward_request([3, 5]))
        gallery.prepare("m/4", forward_request([4], forward_only=True))
        assert gallery.sent == [Prepared(1, "m/3", True, [3, 5], [{}, {}]), Prepared(1, "m/4", False, [4], [{}])]
        gallery.sent.clear()
        assert len(gallery.passes.preparing) == 2
    pixels = [{hashlib.sha256(data).hexdigest(): 96 * 64} for data in (WHOLE, BROKEN)]
    assert gallery.answers() == [
        Prepared(1, "m/1", True, [500] * 20, [{}] * 20),
        Prepared(1, "m/2", True, [IMAGE_TOKENS + 1] * 2, pixels),
    ]
    assert len(gallery.passes.bases["tiny"].renderer.cache) == 0
    assert gallery.passes.preparing == {}


@pytest.mark.parametrize(
    ("stored", "backward", "error"),
    [
        (forward_request([]), True, "data is empty"),
        (forward_request([3, 5000]), True, "datum 1: "),
        (forward_request([3, 5000], forward_only=True), False, "datum 1: "),
        (StoredRequest(b"\xff no protobuf", [], {}), True, "protobuf"),
    ],
    ids=["empty", "long", "forward", "unreadable"],
)
def test_what_is_wrong_with_a_request_is_answered(
    bench: Bench, stored: StoredRequest, backward: bool, error: str
) -> None:
    bench.prepare("m/1", stored)
    answer = bench.answer()
    assert (answer.operation, answer.backward) == ("m/1", backward)
    assert error in answer.error
    assert isinstance(error_of(answer.error_type, answer.error), UserError)
    assert (bench.passes.datums, bench.passes.preparing) == ({}, {})


def test_an_operation_that_is_dropped_while_it_is_prepared_is_answered_only_if_it_is_asked_for_again(
    bench: Bench,
) -> None:
    """Once: the engine does so when an operation before it cannot be read, and threads may still be at work on the
    first request."""
    with occupied(bench.passes.rendering):
        for number in range(3):
            bench.prepare(f"m/{number}", forward_request([500] * 20))
        bench.passes.drop(["m/0", "m/1"])
        bench.prepare("m/1", forward_request([400] * 20))
    assert [(message.operation, message.lengths[0]) for message in bench.answers()] == [("m/2", 500), ("m/1", 400)]
    assert bench.passes.datums.keys() == {"m/1", "m/2"}
    assert bench.passes.preparing == {}
    assert len(bench.passes.datums["m/1"][0]) == 400
    bench.passes.drop(["m/2", "m/1", "m/3"])
    assert bench.passes.datums == {}


# ---- Passes


def test_passes_of_other_models_go_ahead_of_images_and_those_of_the_same_keep_their_order(gallery: Bench) -> None:
    """So does what is in one pass with it.

    Another order of a model's passes would round the sums of its gradients otherwise.
    """
    gallery.prepare("a/1", forward_request(images=[WHOLE]))
    for operation in ("a/2", "b/1", "b/2", "c/1"):
        gallery.prepare(operation, forward_request([4]))
    gallery.answers()
    with occupied(gallery.passes.images):
        gallery.run(1, ("a/1", 0))
        gallery.run(2, ("a/2", 0), ("b/1", 0))
        gallery.run(3, ("b/2", 0))
        gallery.run(4, ("c/1", 0))
        assert len(gallery.due) == 1
    assert [done.number for done in gallery.answers()] == [4, 1, 2, 3]


@pytest.mark.parametrize("backward", [True, False])
def test_log_probabilities_that_are_no_numbers_are_errors_of_their_datums(bench: Bench, backward: bool) -> None:
    """A client would take them for a reference. The step of a forward_backward that has failed is refused."""
    bench.backend.create_model("sick", LoraShape(4, seed=1))
    weights = bench.backend.optimizers["sick"].weights
    for tensor in weights.tensors():
        tensor.fill_(np.nan)
    weights.refresh()
    bench.prepare("m/1", forward_request([3, 5]))
    bench.passes.prepare(Prepare(1, "sick/1", "sick", "tiny", [], forward_request([4, 4]).payload))
    bench.answers()
    bench.run(1, ("m/1", 0), ("sick/1", 1), ("m/1", 1), backward=backward)
    done = bench.answer()
    assert [result[:2] for result in done.results] == [("m/1", 0), ("m/1", 1)]
    ((operation, index, error_type, error),) = done.failures
    assert (operation, index, error_type) == ("sick/1", 1, "UserError")
    assert error.startswith("datum 1: a log-probability is NaN")


@pytest.mark.parametrize("where", ["before", "forward", "backward"])
def test_a_pass_that_nobody_waits_for_is_given_up_between_layers_and_adds_no_gradient(bench: Bench, where: str) -> None:
    looks, wanted_until = 0, 10**9

    def dropped() -> list[str]:
        nonlocal looks
        looks += 1
        return ["m/1"] if looks <= wanted_until else ["m/1", "m/2"]

    bench.passes.dropped = dropped
    for operation in ("m/0", "m/1", "m/2"):
        bench.prepare(operation, forward_request([3, 5]))
    bench.answers()
    bench.run(6, ("m/0", 0), ("m/1", 0))
    whole = bench.answer()
    assert (len(whole.results), whole.failures) == (2, [])  # one of its operations is wanted
    before = [total.clone() for total in bench.backend.optimizers["m"].accumulator.totals or ()]
    assert before
    wanted_until = {"before": 0, "forward": 2, "backward": looks - 1}[where]
    looks = 0
    bench.run(7, ("m/1", 1), ("m/2", 0))
    done = bench.answer()
    assert looks == wanted_until + 1
    assert done.results == []
    assert [failure[:3] for failure in done.failures] == [("m/1", 1, "GivenUpError"), ("m/2", 0, "GivenUpError")]
    after = bench.backend.optimizers["m"].accumulator.totals or ()
    assert all(map(torch.equal, before, after))
    wanted_until = 10**9
    bench.run(8, ("m/2", 1))
    last = bench.answer()
    assert last.failures == []
    first, *others = whole.took + done.took + last.took  # of a GPU the last may be told with the next
    assert first[:3] == ("tiny", True, [1, 1])
    assert first[3] > 0
    assert [lengths for _, _, lengths, _ in others] in ([[1]], [])  # and not that which was given up


@pytest.mark.skipif(DEVICE == "cpu", reason="only a GPU is still computing when it has been given everything")
def test_a_stopwatch_counts_what_a_gpu_still_computes() -> None:
    matrix = torch.ones(4096, 4096, device=DEVICE)
    (matrix @ matrix).sum().item()  # libraries are loaded
    watch, began = Stopwatch(matrix.device), time.monotonic()
    for _ in range(100):
        matrix = matrix @ matrix
    watch.stop()
    assert watch.seconds is None
    torch.cuda.synchronize()
    waited = time.monotonic() - began
    assert watch.seconds is not None
    assert waited / 2 < watch.seconds < waited


@pytest.mark.parametrize("needs_all", [False, True])
def test_steps_keep_their_place_behind_passes_that_all_workers_compute_together(
    gallery: Bench, needs_all: bool
) -> None:
    """Others may have decoded their images sooner: what exchanges must have one order on all.

    Where weights are divided, all does.
    """
    order: list[object] = []
    gallery.passes.send = lambda message: order.append(message.number if isinstance(message, PassDone) else message)
    gallery.prepare("images", forward_request(images=[WHOLE, png(3)]))
    gallery.prepare("text", forward_request([3, 4, 5]))
    gallery.settle()
    order.clear()
    gallery.backend.needs_all = needs_all
    gallery.run(0, ("text", 2))
    gallery.passes.in_turn(lambda: order.append("at once"))  # nothing is decoded for what is before it
    gallery.settle()
    with occupied(gallery.passes.images):
        gallery.run(1, ("images", 0))
        gallery.passes.in_turn(lambda: order.append("share"))  # behind a share of a pass nobody else needs to wait
        gallery.passes.run(RunPass(2, "tiny", True, [("text", 0)], [3], together=True))
        gallery.passes.in_turn(lambda: order.append("step"))
        gallery.passes.run(RunPass(3, "tiny", True, [("images", 1)], [7], together=True))
        gallery.passes.in_turn(lambda: order.append("next step"))
        gallery.run(4, ("text", 1))
        assert len(gallery.due) == (0 if needs_all else 1)
    gallery.settle()
    gallery.passes.in_turn(lambda: order.append("last"))
    gallery.settle()
    first = [1, "share"] if needs_all else ["share", 1]
    assert order == [0, "at once", *first, 2, "step", 3, "next step", 4, "last"]
    assert (gallery.passes.behind, gallery.passes.passes, gallery.passes.rendered) == ({}, {}, {})


@pytest.mark.parametrize("backward", [True, False])
def test_sequences_that_are_too_long_for_one_worker_are_named_and_those_for_all_refused(
    bench: Bench, backward: bool
) -> None:
    trained = bench.passes.bases["tiny"]
    bench.passes.bases = {"tiny": replace(trained, longest_alone=4, longest=8, workers=3)}
    bench.prepare("m/1", forward_request([3, 5, 4, 8], forward_only=not backward))
    assert bench.answer() == Prepared(1, "m/1", backward, [3, 5, 4, 8], [{}] * 4, [1, 3])
    bench.prepare("m/2", forward_request([3, 9]))
    refused = (
        "datum 1: the model input holds 9 tokens, and the memory of the devices of this server's 3 workers trains "
        "together up to 8; "
    )
    assert bench.answer().error.startswith(refused)
    bench.passes.bases = {"tiny": replace(trained, longest=6)}
    bench.prepare("m/3", forward_request([6, 7]))
    assert (
        "datum 1: the model input holds 7 tokens, and the memory of this server's device trains up to 6"
        in bench.answer().error
    )
    bench.prepare("m/4", forward_request([9], forward_only=True))  # nothing is kept of it
    assert isinstance(bench.answer(), Prepared)


def test_an_operation_that_is_dropped_while_it_is_in_a_pass_harms_no_other(gallery: Bench) -> None:
    gallery.prepare("dropped", forward_request(images=[WHOLE]))
    gallery.prepare("kept", forward_request(images=[png(3)]))
    gallery.answers()
    with occupied(gallery.passes.images):
        gallery.run(1, ("dropped", 0), ("kept", 0))
        gallery.passes.drop(["dropped"])
    done = gallery.answer()
    assert ("kept", 0, [IMAGE_TOKENS + 1]) in done.results
    assert (done.failures, gallery.passes.datums) == ([], {})
