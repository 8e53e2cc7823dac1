"""Forward work on a worker: checked and measured here or in a thread, computed pass by pass; what is wrong harms its operation alone."""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL.Image import Image

from tests.bases import png
from tests.engine.here import Here
from tinsmith.config import ImagesConfig, TrainingConfig
from tinsmith.errors import StoreUnavailableError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.pictures import PictureInput
from tinsmith.protocol.messages import Message
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.work import PassDone, Prepare, Prepared, PrepareFailed, RunPass, error_of
from tinsmith.rendering.renderer import Renderer
from tinsmith.store.recorded_sequences import RecordedSequence, RecordedSequences
from tinsmith.training.backend import LocalBackend
from tinsmith.training.stable_reinforce import METRICS
from tinsmith.wire import tinker_pb2
from tinsmith.wire.forward_backward import StoredRequest, move_images_out
from tinsmith.worker.background import Background
from tinsmith.worker.passes import SMALL_BYTES, Passes, Trained

LONG_S = 120.0
"""How long anything here may take on a busy machine."""

PICTURE_TOKENS = 6

WHOLE = png(9)
BROKEN = WHOLE[: len(WHOLE) - 30]
"""Its header is right: nobody knows before it is decoded."""


def request(texts: "list[int] | None" = None, pictures: "list[bytes] | None" = None, forward_only: bool = False) -> StoredRequest:
    """A stored request: datums of so many tokens, and datums of a word and a picture."""
    message = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="cross_entropy", forward_only=forward_only)
    for length in texts or []:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(length, dtype="<i4").tobytes()
        add_targets(datum, length)
    for data in pictures or []:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([5], dtype="<i4").tobytes()
        image = datum.model_input.add().image
        image.data, image.format = data, "png"
        add_targets(datum, PICTURE_TOKENS + 1)
    return move_images_out(message)


def add_targets(datum: Any, length: int) -> None:
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense = np.full(length, 1, dtype="<i8").tobytes()
    targets.dtype = tinker_pb2.DTYPE_INT64


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
        self.passes.prepare(Prepare(1, operation, "m", "tiny", [digest.hex() for digest in stored.image_digests], stored.payload))

    def run(self, number: int, *pieces: tuple[str, int], backward: bool = True) -> None:
        self.passes.run(RunPass(number, "tiny", backward, list(pieces), [1] * len(pieces)))

    def settle(self) -> None:
        """Go on until threads and device have nothing left to do."""
        deadline = time.monotonic() + LONG_S
        while self.passes.rendering.running or self.due:
            assert time.monotonic() < deadline
            self.passes.rendering.deliver()
            while self.due:
                self.due.popleft()()
            time.sleep(0.001)

    def answers(self) -> list[Message]:
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
    trained = {"tiny": Trained(backend, renderer, base.max_context)}
    passes = Passes(trained, Background("rendering", 1, lambda: None), sent.append, due.append, recorded.find)
    return Bench(passes, backend, blobs, sent, due)


@pytest.fixture
def bench(text_base: BaseModel, tmp_path: Path) -> Bench:
    return bench_of(text_base, tmp_path)


@pytest.fixture
def gallery(vision_base: BaseModel, tmp_path: Path) -> Bench:
    return bench_of(vision_base, tmp_path)


@contextmanager
def occupied(bench: Bench) -> Iterator[None]:
    """While the body runs, the only thread that renders is at something else."""
    over = threading.Event()
    bench.passes.rendering.run(over.wait, lambda _: None)
    try:
        yield
    finally:
        over.set()


def logprobs(done: PassDone) -> list[NDArray[np.float32]]:
    """Of each result, in order."""
    flat = np.frombuffer(done.payload, np.float32, offset=8 * len(done.results))
    ends = np.cumsum([np.prod(shape, dtype=int) for *_, shape in done.results])
    return np.split(flat, ends[:-1])


# ---- Preparing


def stable_request(*names: str) -> StoredRequest:
    """A datum of the loss stable_reinforce for each sequence: two tokens of its prompt, and the two that were sampled."""
    message = tinker_pb2.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn="stable_reinforce")
    for name in names:
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = np.array([1, 2, 5], dtype="<i4").tobytes()
        for key, values in (("target_tokens", np.array([2, 5, 6])), ("advantages", np.array([0, 1, -1], dtype=np.float32))):
            tensor = datum.loss_fn_inputs[key]
            tensor.dense = values.tobytes()
            tensor.dtype = tinker_pb2.DTYPE_INT64 if key == "target_tokens" else tinker_pb2.DTYPE_FLOAT32
        for field, prompt, sampled in ((datum.model_input_spans, (0, 2), 1), (datum.loss_fn_input_spans, (1, 1), 2)):
            field.add().prompt_tokens.CopyFrom(tinker_pb2.PromptProvenanceSpan(sequence_id=name, offset=prompt[0], length=prompt[1]))
            field.add().sampled_tokens.CopyFrom(tinker_pb2.SampledProvenanceSpan(sequence_id=name, length=sampled))
    return move_images_out(message)


def test_stable_reinforce_compares_with_what_was_recorded_and_says_whose_formula_it_is(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    """The first sequence was sampled with the log-probabilities of the model as it is, the second with others."""
    recorded: dict[str, RecordedSequence] = {}
    bench.passes.find_recorded = lambda names: {name: recorded[name] for name in names & recorded.keys()}
    bench.backend.create_model("s:train:0", LoraShape(4, seed=1))
    sequence = RecordedSequence(2, np.array([5, 6], dtype=np.int32), np.zeros(2, dtype=np.float32))
    recorded |= {"s:sample:0/0/0": sequence, "s:sample:0/0/1": sequence}

    def computed(operation: str) -> PassDone:
        message = Prepare(1, operation, "s:train:0", "tiny", [], stable_request(*recorded).payload)
        bench.passes.prepare(message)
        assert bench.answer() == Prepared(1, operation, True, [3, 3], [{}, {}])
        bench.run(1, (operation, 0), (operation, 1))
        done: PassDone = bench.answer()
        return done

    first = computed("s:train:0/1")
    now = np.frombuffer(first.payload, np.float32)[-3:]  # log-probabilities of the second datum
    recorded["s:sample:0/0/0"] = replace(sequence, logprobs=now[1:].copy())
    done = computed("s:train:0/2")
    assert done.metrics == [list(METRICS)] * 2
    numbers = np.frombuffer(done.payload, np.float64, count=8)
    (agreed, far), metrics = numbers[:2], numbers[2:].reshape(2, 3)
    assert agreed == pytest.approx(0.0, abs=1e-6)  # -(1 - 1)
    assert metrics[0] == pytest.approx([1.0, 0.0, 0.0], abs=1e-5)
    weights = 0.2 * np.exp(now[1:])  # log-ratios below -1: the drift is 1
    assert max(now[1:]) < -1
    assert far == pytest.approx(-weights[0], rel=1e-4)  # the other has moved the way that its advantage wants
    assert metrics[1] == pytest.approx([weights[0] / 2, 0.5, 1.0], rel=1e-4)
    assert caplog.text.count("this formula is Tinsmith's own") == 1


def test_a_sequence_that_is_not_recorded_fails_the_operation_that_names_it(bench: Bench) -> None:
    bench.passes.prepare(Prepare(1, "s:train:0/1", "s:train:0", "tiny", [], stable_request("s:sample:0/0/0").payload))
    failed = bench.answer()
    assert (failed.backward, failed.error_type) == (True, "UserError")
    assert "datum 0: provenance span 0 of model_input names sequence 's:sample:0/0/0', which is not recorded" in failed.error


def test_an_operation_waits_for_recordings_that_cannot_be_read(bench: Bench) -> None:
    def locked(names: Any) -> Any:
        raise StoreUnavailableError("locked")

    bench.passes.find_recorded = locked
    bench.prepare("s:train:0/1", stable_request("s:sample:0/0/0"))
    assert isinstance(error_of(bench.answer().error_type, ""), StoreUnavailableError)


def test_a_small_request_is_measured_at_once(bench: Bench) -> None:
    with occupied(bench):
        bench.prepare("m/1", request([3, 5]))
        bench.prepare("m/2", request([4], forward_only=True))
        assert bench.sent == [Prepared(1, "m/1", True, [3, 5], [{}, {}]), Prepared(1, "m/2", False, [4], [{}])]
    assert bench.passes.preparing == {}


def test_a_large_request_is_measured_in_a_thread(bench: Bench) -> None:
    stored = request([500] * 20)
    assert len(stored.payload) > SMALL_BYTES
    with occupied(bench):
        bench.prepare("m/1", stored)
        assert bench.sent == []
    assert bench.answer() == Prepared(1, "m/1", True, [500] * 20, [{}] * 20)


def test_a_request_with_pictures_is_measured_in_a_thread_and_none_is_decoded(gallery: Bench) -> None:
    stored = request(pictures=[WHOLE, BROKEN])
    assert len(stored.payload) < SMALL_BYTES
    with occupied(gallery):
        gallery.prepare("m/1", stored)
        assert gallery.sent == []
    pixels = [{hashlib.sha256(data).hexdigest(): 96 * 64} for data in (WHOLE, BROKEN)]
    assert gallery.answer() == Prepared(1, "m/1", True, [PICTURE_TOKENS + 1] * 2, pixels)
    assert len(gallery.passes.bases["tiny"].renderer.cache) == 0


@pytest.mark.parametrize(
    ("stored", "backward", "error"),
    [
        (request([]), True, "data is empty"),
        (request([3, 5000]), True, "datum 1: "),
        (request([3, 5000], forward_only=True), False, "datum 1: "),
        (StoredRequest(b"\xff no protobuf", [], {}), True, "protobuf"),
    ],
    ids=["empty", "long", "forward", "unreadable"],
)
def test_what_is_wrong_with_a_request_is_answered(bench: Bench, stored: StoredRequest, backward: bool, error: str) -> None:
    bench.prepare("m/1", stored)
    answer = bench.answer()
    assert isinstance(answer, PrepareFailed)
    assert (answer.operation, answer.backward) == ("m/1", backward)
    assert error in answer.error
    assert isinstance(error_of(answer.error_type, answer.error), UserError)
    assert (bench.passes.datums, bench.passes.preparing) == ({}, {})


def test_a_picture_that_cannot_be_read_now_is_told_apart(gallery: Bench) -> None:
    def busy(digest: bytes) -> bytes:
        raise StoreUnavailableError("the database is locked")

    gallery.passes.bases["tiny"].renderer.read_blob = busy
    gallery.prepare("m/1", request(pictures=[WHOLE]))
    answer = gallery.answer()
    assert isinstance(answer, PrepareFailed)
    assert isinstance(error_of(answer.error_type, answer.error), StoreUnavailableError)


def test_an_operation_that_is_dropped_while_it_is_prepared_is_not_heard_of_again(bench: Bench) -> None:
    with occupied(bench):
        for number in (1, 2):
            bench.prepare(f"m/{number}", request([500] * 20))
        bench.passes.drop(["m/1"])
    assert [message.operation for message in bench.answers() if isinstance(message, Prepared)] == ["m/2"]
    assert (list(bench.passes.datums), bench.passes.preparing) == (["m/2"], {})
    bench.passes.drop(["m/2", "m/1", "m/3"])
    assert bench.passes.datums == {}


def test_an_operation_that_is_dropped_and_prepared_again_is_answered_once(bench: Bench) -> None:
    with occupied(bench):
        bench.prepare("m/1", request([500] * 20))
        bench.passes.drop(["m/1"])
        bench.prepare("m/1", request([400] * 20))
    assert bench.answer() == Prepared(1, "m/1", True, [400] * 20, [{}] * 20)
    assert len(bench.passes.datums["m/1"][0]) == 400


# ---- Passes


def test_a_pass_gives_each_datum_its_own_numbers_and_leaves_nothing_behind(bench: Bench) -> None:
    bench.prepare("m/1", request([3, 5]))
    bench.prepare("m/2", request([4]))
    bench.answers()
    bench.run(7, ("m/1", 1), ("m/2", 0))
    together = bench.answer()
    assert isinstance(together, PassDone)
    assert (together.number, together.results, together.failures) == (7, [("m/1", 1, [5]), ("m/2", 0, [4])], [])
    assert list(bench.passes.datums) == ["m/1"]
    bench.run(8, ("m/1", 0))
    alone = bench.answer()
    assert bench.passes.datums == {}
    bench.prepare("again", request([3, 5, 4]))
    bench.answers()
    bench.run(9, ("again", 0), ("again", 1), ("again", 2), backward=False)
    again = bench.answer()
    for found, expected in zip([*logprobs(alone), *logprobs(together)], logprobs(again), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-5)
    losses = np.frombuffer(again.payload, np.float64, count=3)
    np.testing.assert_allclose(losses, [-values.sum() for values in logprobs(again)], rtol=1e-5)


def test_a_broken_picture_fails_its_operation_alone(gallery: Bench) -> None:
    gallery.prepare("bad", request([3], [WHOLE, BROKEN]))
    gallery.prepare("good", request([4], [WHOLE]))
    gallery.answers()
    gallery.run(1, *[("bad", index) for index in range(3)], ("good", 0), ("good", 1))
    done = gallery.answer()
    assert isinstance(done, PassDone)
    assert [(operation, index) for operation, index, _ in done.results] == [("good", 0), ("good", 1)]
    ((operation, index, error_type, error),) = done.failures
    assert (operation, index, error_type) == ("bad", 2, "UserError")
    assert error.startswith("datum 2: chunk 1: the png image of 96 x 64 pixels is broken")


def test_passes_are_computed_in_their_order_however_long_their_pictures_take(gallery: Bench) -> None:
    gallery.prepare("pictures", request(pictures=[WHOLE]))
    gallery.prepare("text", request([3, 4]))
    gallery.answers()
    with occupied(gallery):
        gallery.run(1, ("text", 0))
        gallery.run(2, ("pictures", 0))
        gallery.run(3, ("text", 1))
        assert len(gallery.due) == 1  # the device begins with what needs no thread
    assert [message.number for message in gallery.answers() if isinstance(message, PassDone)] == [1, 2, 3]
    assert (gallery.passes.passes, gallery.passes.rendered) == ({}, {})


def test_what_is_to_be_done_in_turn_waits_for_the_pictures_of_passes_before_it(gallery: Bench) -> None:
    """So that all workers do the same things in the same order, however long each of them decodes."""
    done: list[str] = []
    gallery.prepare("pictures", request(pictures=[WHOLE]))
    gallery.prepare("text", request([3, 4]))
    gallery.answers()
    gallery.backend.needs_all = True
    gallery.passes.in_turn(lambda: done.append("before"))
    with occupied(gallery):
        gallery.run(1, ("text", 0))
        gallery.passes.in_turn(lambda: done.append("between"))
        gallery.run(2, ("pictures", 0))
        for name in ("behind", "last"):
            gallery.passes.in_turn(partial(done.append, name))
        gallery.run(3, ("text", 1))
        while gallery.due:
            gallery.due.popleft()()
        assert done == ["before", "between"]
    ended = gallery.sent
    gallery.passes.send = lambda message: done.append(f"pass {message.number}")  # type: ignore[attr-defined]
    gallery.settle()
    assert [message.number for message in ended if isinstance(message, PassDone)] == [1]
    assert done == ["before", "between", "pass 2", "behind", "last", "pass 3"]
    assert gallery.passes.behind == {}


def test_steps_keep_their_place_behind_sequences_of_all_workers(gallery: Bench) -> None:
    """Other workers may have decoded their pictures sooner: what exchanges must have one order on all."""
    order: list[object] = []
    gallery.passes.send = lambda message: order.append(message.number if isinstance(message, PassDone) else message)
    gallery.prepare("pictures", request(pictures=[WHOLE, png(3)]))
    gallery.prepare("text", request([3, 4]))
    gallery.settle()
    order.clear()
    with occupied(gallery):
        gallery.run(1, ("pictures", 0))
        gallery.passes.in_turn(lambda: order.append("before"))  # behind a share of a pass nobody needs to wait
        gallery.passes.run(RunPass(2, "tiny", True, [("text", 0)], [3], together=True))
        gallery.passes.in_turn(lambda: order.append("step"))
        gallery.passes.run(RunPass(3, "tiny", True, [("pictures", 1)], [7], together=True))
        gallery.passes.in_turn(lambda: order.append("next step"))
        gallery.run(4, ("text", 1))
        assert len(gallery.due) == 1
    gallery.settle()
    gallery.passes.in_turn(lambda: order.append("last"))
    gallery.settle()
    assert order == ["before", 1, 2, "step", 3, "next step", 4, "last"]
    assert gallery.passes.behind == {}


@pytest.mark.parametrize("backward", [True, False])
def test_sequences_that_are_too_long_for_one_worker_are_named(bench: Bench, backward: bool) -> None:
    bench.passes.bases["tiny"] = replace(bench.passes.bases["tiny"], longest_alone=4, longest=8, workers=3)  # type: ignore[index]
    bench.prepare("m/1", request([3, 5, 4, 8], forward_only=not backward))
    assert bench.answer() == Prepared(1, "m/1", backward, [3, 5, 4, 8], [{}] * 4, [1, 3])
    bench.prepare("m/2", request([3, 9]))
    refused = "datum 1: the model input holds 9 tokens, and the memory of the devices of this server's 3 workers trains together up to 8; "
    assert bench.answer().error.startswith(refused)


def test_pictures_of_one_pass_are_decoded_side_by_side(gallery: Bench) -> None:
    """Neither of two threads goes on before the other has a picture too; the texts between them keep their places."""
    gallery.passes.rendering = Background("rendering", 2, lambda: None)
    renderer, both = gallery.passes.bases["tiny"].renderer, threading.Barrier(2, timeout=LONG_S)
    processor = renderer.processor
    assert processor is not None

    def together(sha256: bytes, image: Image) -> PictureInput:
        both.wait()
        return processor(sha256, image)

    renderer.processor = together
    gallery.prepare("m/1", request(texts=[3], pictures=[png(1), png(2)]))
    gallery.prepare("m/2", request(texts=[9]))
    gallery.answers()
    gallery.run(1, ("m/1", 1), ("m/2", 0), ("m/1", 2), ("m/1", 0))
    done = gallery.answer()
    assert [(operation, index, *shape) for operation, index, shape in done.results] == [
        ("m/1", 1, PICTURE_TOKENS + 1),
        ("m/2", 0, 9),
        ("m/1", 2, PICTURE_TOKENS + 1),
        ("m/1", 0, 3),
    ]
    assert done.failures == []


def test_an_operation_that_is_dropped_while_it_is_in_a_pass_harms_no_other(gallery: Bench) -> None:
    gallery.prepare("dropped", request(pictures=[WHOLE]))
    gallery.prepare("kept", request(pictures=[png(3)]))
    gallery.answers()
    with occupied(gallery):
        gallery.run(1, ("dropped", 0), ("kept", 0))
        gallery.passes.drop(["dropped"])
    done = gallery.answer()
    assert ("kept", 0, [PICTURE_TOKENS + 1]) in done.results
    assert (done.failures, gallery.passes.datums) == ([], {})


# ---- With the engine


def here_with(base: BaseModel, data_dir: Path) -> Here:
    here = Here({"tiny": base}, data_dir)
    for model in "ab":
        here.create(model)
    here.settle()
    return here


def show(here: Here, model: str, seq: int, *pictures: bytes) -> None:
    """A forward_backward with these pictures, which the store has."""
    stored = request(pictures=list(pictures))
    here.add(model, seq, "forward_backward", stored.payload, image_digests=stored.image_digests, images=stored.images)


def test_all_datums_of_an_operation_with_a_broken_picture_are_accounted_for(vision_base: BaseModel, tmp_path: Path) -> None:
    here = here_with(vision_base, tmp_path)
    show(here, "a", 1, WHOLE, BROKEN, png(1))
    show(here, "b", 1, WHOLE)
    for model in "ab":
        here.optim(model, 2)
    here.settle()
    assert str(here.error("a", 1)).startswith("datum 1: chunk 1: the png image of 96 x 64 pixels is broken")
    assert "the gradients are cleared" in str(here.error("a", 2))
    assert (here.error("b", 1), here.error("b", 2)) == (None, None)


def test_pictures_that_cannot_be_read_for_a_while_delay_their_operation_only(
    vision_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = here_with(vision_base, tmp_path)
    renderer = here.worker.passes.bases["tiny"].renderer
    read, asked = renderer.read_blob, []

    def busy_at_first(digest: bytes) -> bytes:
        asked.append(digest)
        if digest == hashlib.sha256(png(1)).digest() and asked.count(digest) < 4:
            raise StoreUnavailableError("the database is locked")
        return read(digest)

    monkeypatch.setattr(renderer, "read_blob", busy_at_first)
    show(here, "a", 1, WHOLE, png(1), png(2))
    show(here, "b", 1, png(3))
    here.settle()
    assert (here.error("a", 1), here.error("b", 1)) == (None, None)
    assert asked.count(hashlib.sha256(png(1)).digest()) == 4
    output = tinker_pb2.ForwardBackwardOutput.FromString(here.outcome("a", 1).result or b"")
    assert output.loss_fn_outputs
