"""What is computed together, and when: images pass by pass, and a second pass ahead where that helps.

What of it fails, and with whom.

Invariant: A datum that fails fails its operation only, and every result is its own datum's.
Also: `tests/training/test_pass_failures.py`.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL.Image import Image

from tests.bases import png
from tests.engine.forwarding import Device
from tests.engine.here import IMAGE_TOKENS, LONG_S, Here
from tinsmith.config import ImagesConfig, TrainingConfig
from tinsmith.engine.passes import PASS_S
from tinsmith.memory.pass_memory import Recomputation
from tinsmith.models.base import BaseModel
from tinsmith.models.vision_tower import ImageInput
from tinsmith.protocol.serving import EndSession, Sample
from tinsmith.protocol.work import PassDone, Prepared
from tinsmith.rendering.processor import LocalProcessor
from tinsmith.rendering.renderer import Renderer
from tinsmith.training.backend import DatumResult, DatumWork, PassResult
from tinsmith.wire import tinker_pb2


@pytest.fixture
def device() -> Device:
    return Device()


IMAGE_DATUM = IMAGE_TOKENS + 1

GUILTY = 9
"""Length of the datum that fails."""


def renderer_of(here: Here) -> Renderer:
    return here.worker.passes.bases["tiny"].renderer


def held_images(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No image is decoded before this is set."""
    released, process = threading.Event(), LocalProcessor.__call__

    def held(processor: LocalProcessor, sha256: bytes, image: Image) -> ImageInput:
        assert released.wait(LONG_S)
        return process(processor, sha256, image)

    monkeypatch.setattr(LocalProcessor, "__call__", held)
    return released


def gallery(base: BaseModel, data_dir: Path, **images: int) -> Here:
    """An engine for a vision model, two of whose images make a pass, with a model that is ready."""
    training = TrainingConfig(tokens_per_pass=2 * IMAGE_DATUM)
    made = Here({"tiny": base}, data_dir, training=training, images=ImagesConfig(**images))
    made.create("a")
    made.settle()
    return made


@pytest.fixture
def here(vision_base: BaseModel, tmp_path: Path) -> Here:
    return gallery(vision_base, tmp_path)


def test_images_are_decoded_as_their_pass_comes(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """When a pass is computed, its own are decoded, and at most those of one more."""
    backend, cache, decoded = here.backend(), renderer_of(here).cache, list[tuple[int, int]]()
    run = backend.run_pass

    def noting(work: Sequence[DatumWork], *more: Any) -> PassResult:
        decoded.append((len(work), len(cache)))
        return run(work, *more)

    monkeypatch.setattr(backend, "run_pass", noting)
    here.forward("a", 1, images=[png(seed) for seed in range(9)])
    here.settle()
    assert here.error("a", 1) is None
    assert sorted(images for images, _ in decoded) == [1, 2, 2, 2, 2]
    before = 0
    for images, count in decoded:
        assert before + images <= count <= before + 4
        before += images


def test_a_pass_decodes_no_more_pixels_than_one_image_may_have(vision_base: BaseModel, tmp_path: Path) -> None:
    """An operation may hold any number: the SDK puts 5 MB of datums into one, and some images compress well."""
    here = gallery(vision_base, tmp_path, max_image_pixels=96 * 64, max_input_pixels=96 * 64)
    here.forward("a", 1, images=[png(seed) for seed in range(3)])
    here.forward("a", 2, images=[png(20)] * 4)
    here.settle()
    assert (here.error("a", 1), here.error("a", 2)) == (None, None)
    assert sorted(tokens for _, tokens, _ in here.process.computed) == [7, 7, 7, 14, 14]
    assert len(renderer_of(here).cache) == 4


def test_a_sequence_of_all_workers_has_a_pass_of_its_own(device: Device) -> None:
    """Wherever it stands: those before it and behind it go together, those of another model go on beside them."""
    asked = device.prepared("a", [3, 90, 4])
    device.forward.take(replace(asked, together=[1]))
    device.train("b", [5, 6])
    assert [sorted(each.lengths) for each, _ in device.computed()] == [[3, 5, 6], [90], [4]]


def test_a_tenant_has_an_equal_part_of_the_passes_however_many_models_it_has(device: Device) -> None:
    """With turns of models alone, the one model of `one` would get an eleventh."""
    device.forward.order.tenant_of = lambda model_id: model_id.rstrip("0123456789")
    for number in range(10):
        device.train(f"many{number}", [100] * 20)
    device.train("one", [100] * 20)
    passes = [asked for asked, _ in device.computed()]
    tokens: Counter[str] = Counter()
    for asked in passes:
        if tokens["one"] == 2000:
            break
        for (operation, _), length in zip(asked.pieces, asked.lengths, strict=True):
            tokens[operation.rpartition("/")[0].rstrip("0123456789")] += length
    assert tokens["one"] == 2000
    assert tokens["many"] <= 3000
    assert sum(map(len, (asked.pieces for asked in passes))) == 11 * 20


def seconds_until_ended(device: Device, ended: str) -> dict[str, float]:
    """Compute until a tenant has nothing left; the seconds that each has had, by its part of the tokens."""
    seconds = defaultdict[str, float](float)
    for asked, took in device.computed():
        for (operation, _), length in zip(asked.pieces, asked.lengths, strict=True):
            seconds[operation.rpartition("/")[0]] += took * length / sum(asked.lengths)
        if ended not in device.forward.operations:
            break
    return seconds


@pytest.mark.parametrize("base", ["tiny", "other"])
def test_tenants_get_equal_seconds_of_a_device_whatever_they_send(device: Device, base: str) -> None:
    """In turns of passes, the one with long sequences would get nine tenths."""
    device.forward.order.tenant_of = lambda model_id: model_id
    device.train("long", [900] * 30, base=base)
    device.train("short", [100] * 300)
    seconds = seconds_until_ended(device, "short")
    assert seconds["short"] == pytest.approx(60, abs=2)
    assert seconds["long"] == pytest.approx(60, abs=10)  # a pass of one of its sequences takes 9 s


def test_a_tenant_that_comes_is_owed_nothing_for_the_time_before(device: Device) -> None:
    device.forward.order.tenant_of = lambda model_id: model_id
    device.train("first", [100] * 800)
    before = list(islice(device.computed(), 50))
    assert sum(took for _, took in before) >= 20
    device.train("second", [100] * 100)
    assert seconds_until_ended(device, "second") == pytest.approx({"first": 20, "second": 20}, abs=2)


@pytest.mark.parametrize("timed", ["", "second"])
def test_a_tenant_whose_passes_are_not_timed_holds_nobody_off(device: Device, timed: str) -> None:
    """As those that fail, or in which workers exchange something."""
    device.forward.order.tenant_of = lambda model_id: model_id.partition("-")[0]
    device.train("second-0", [100])
    list(device.computed())
    for number in range(10):
        device.train(f"first-{number}", [900] * 5)
    device.train("second-0", [900] * 10)
    given: list[str] = []
    while len(given) < 12:
        (asked,) = device.given()
        given.append(asked.pieces[0][0].partition("-")[0])
        if given[-1] == timed:
            device.compute(asked)
        else:
            results = [(*piece, [0]) for piece in asked.pieces]
            zeros = np.zeros(len(results)).tobytes()
            device.forward.take(PassDone(asked.number, results, [], 1000, [[] for _ in results], [], zeros))
    assert Counter(given) == {"first": 6, "second": 6}


def test_a_session_that_samples_counts_for_ten_minutes_also_after_its_end(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samplers outlive it. They would count for ever, each that there ever was."""
    passed, now = 0.0, time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + passed)
    scheduler = here.engine.scheduler
    here.say(EndSession("other", save=False))
    for session in ("other", "s", "third", "other"):
        here.say(Sample(f"{session}:sample:0/0", 1, "nothing", None, 1, False, b""))
        passed += 200
    assert scheduler.sessions.are_several()
    assert list(scheduler.sessions.sampling) == ["third", "other"]
    passed += 401
    assert not scheduler.sessions.are_several()
    assert scheduler.sessions.sampling == {}


def test_passes_are_cut_where_they_take_long_and_grow_again_where_they_do_not(
    device: Device, caplog: pytest.LogCaptureFixture
) -> None:
    """At first one pass takes what it takes, as after a change.

    Nothing lies ahead of what others come that would keep them waiting.
    """
    device.train("m", [400] * 6)
    assert [took for _, took in device.computed()] == [4.0, *4 * [2.0]]
    told = (
        "a sequence of 400 tokens has kept the device for 2 s (tiny): none is cut, so all others wait for one as long"
    )
    assert caplog.messages == [told]  # once for a length
    device.train("m", [100] * 20)
    taken = [took for _, took in device.computed()]
    assert (max(taken) <= PASS_S, sum(taken) == pytest.approx(4.0), len(taken) <= 10) == (True, True, True)
    device.train("m", [10] * 300)
    taken = [took for _, took in device.computed()]
    assert (PASS_S / 3 < max(taken) <= PASS_S, len(taken) < 10) == (True, True)


def test_of_several_workers_each_has_its_share_of_a_pass_that_is_cut(device: Device) -> None:
    """Sequences that take longer by themselves go one to each worker; of short ones each gets about a second's work."""
    device.forward.order.paces.workers, device.forward.order.paces.full["tiny"] = 4, 4000
    for length, count, passes in ((400, 24, [6.0, 2.0, 2.0, 2.0, 2.0]), (100, 80, [0.4, 0.8, 1.0, 1.0, 0.8])):
        device.train("m", [length] * count)
        assert [took for _, took in device.computed(4000)] == pytest.approx(passes)


def test_nothing_is_cut_where_one_session_is_alone(device: Device) -> None:
    """So its requests are computed in the same passes, and its gradients rounded in the same way, each time."""
    device.is_shared = False
    for _ in range(2):
        device.train("m", [400] * 6)
        assert [each.lengths for each, _ in device.computed()] == [[400, 400]] * 3


def test_a_pass_is_ahead_of_others_only_if_both_are_known_to_be_quick(device: Device) -> None:
    device.train("m", [20] * 10)
    (first,) = device.given()
    device.compute(first, most=200)
    device.train("m", [20] * 30)
    full, ahead = device.given()
    assert [sum(each.lengths) for each in (full, ahead)] == [200, 200]
    assert device.compute(full, 200) + device.compute(ahead, 200) < PASS_S
    assert sum(each.lengths[0] == 20 for each in device.given()) == 1
    device.train("m", [21] * 30)
    assert device.given() == []


def test_what_takes_long_waits_for_what_is_prepared_behind_its_last_pass(device: Device) -> None:
    """A busy worker prepares nothing. Who was served last lets others go first, and only once."""
    for model in ("m", "other"):
        device.train(model, [5])
    (both,) = device.given()
    device.compute(both)
    device.train("m", [900, 900, 900])
    (first,) = device.given()
    coming = device.prepared("other", [5])
    device.compute(first)
    assert device.given() == []
    device.forward.take(coming)
    (short,) = device.given()
    assert short.lengths == [5]
    device.prepared("other", [5])
    device.compute(short)
    assert [each.lengths for each in device.given()] == [[900]]


def test_an_answer_to_a_dropped_request_is_not_taken_for_that_of_the_next(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would be told to compute datums that it does not have yet."""
    released = threading.Event()
    renderer = renderer_of(here)
    read = renderer.read_blob

    def late(digest: bytes) -> bytes:
        assert released.wait(LONG_S)
        return read(digest)

    monkeypatch.setattr(renderer, "read_blob", late)
    here.forward("a", 1, images=[png(1)])
    here.until(lambda: here.worker.passes.preparing)
    (message,) = here.worker.passes.preparing.values()
    here.engine.scheduler.take(Prepared(message.number - 1, message.operation, True, [7], [{}]))
    here.turn()
    assert here.process.passes == []
    released.set()
    here.settle()
    assert here.error("a", 1) is None


# ---- Passes that fail: each result is its own datum's, and the operation that fails is the guilty one


def fail_on_guilty(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every pass with the guilty datum raises, where torch would."""
    run = here.backend().passes._run

    def failing(work: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> list[DatumResult]:
        if any(len(datum.rendered) == GUILTY for datum in work):
            raise RuntimeError("a kernel failed")
        return run(work, backward, recomputation)

    monkeypatch.setattr(here.backend().passes, "_run", failing)


def logprobs(here: Here, seq: int) -> NDArray[np.float32]:
    """Of all datums of a forward of `a`, one after the other."""
    (record,) = tinker_pb2.ForwardBackwardOutput.FromString(here.outcome("a", seq).result or b"").loss_fn_outputs
    return np.frombuffer(record.fields["logprobs"].data, np.float32)


def test_a_datum_that_fails_fails_its_operation_and_its_neighbours_have_their_own_results(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here({"tiny": text_base}, tmp_path, training=TrainingConfig(tokens_per_pass=64))
    here.create("a")
    for seq, lengths in enumerate([[3, 4], [5, 6]], start=1):
        here.forward("a", seq, lengths, forward_only=True)
    here.settle()
    fail_on_guilty(here, monkeypatch)
    for seq, lengths in enumerate([[3, 4], [GUILTY, 4], [5, GUILTY], [5, 6]], start=3):
        here.forward("a", seq, lengths, forward_only=True)
    here.settle()
    for seq, index in ((4, 0), (5, 1)):
        assert str(here.error("a", seq)).startswith(f"datum {index}: the pass failed: ")
    for seq, alone in ((3, 1), (6, 2)):
        assert here.error("a", seq) is None
        np.testing.assert_allclose(logprobs(here, seq), logprobs(here, alone), rtol=2e-6, atol=1e-5)


@pytest.mark.parametrize("is_late", [False, True])
def test_gradients_of_a_part_of_an_operation_that_failed_are_never_applied(
    here: Here, monkeypatch: pytest.MonkeyPatch, is_late: bool
) -> None:
    """Nor those of a part whose image is still being decoded: the worker has it already, as passes come ahead."""
    released = held_images(monkeypatch)
    fail_on_guilty(here, monkeypatch)
    here.forward("a", 1, [GUILTY] if is_late else [4, GUILTY], images=[png(1)] if is_late else [])
    here.forward("a", 2, [5])
    here.optim("a", 3)
    before = [tensor.clone() for tensor in here.backend().optimizers["s:train:a"].weights.tensors()]
    here.until(lambda: here.process.computed)
    assert not is_late or len(here.process.passes) > len(here.process.computed)
    for _ in range(10):
        here.turn()
    released.set()
    here.settle()
    assert f"datum {0 if is_late else 1}: the pass failed" in str(here.error("a", 1))
    assert here.error("a", 2) is None
    assert "the step was refused and the gradients are cleared, because an operation before it failed: seq_id 1" in str(
        here.error("a", 3)
    )
    optimizer = here.backend().optimizers["s:train:a"]
    assert optimizer.accumulator.gradients is None
    assert all(torch.equal(old, new) for old, new in zip(before, optimizer.weights.tensors(), strict=True))


@pytest.mark.parametrize(
    "place", ["tinsmith.training.backend.LocalBackend.run_pass", "tinsmith.engine.outcomes.encode_output"]
)
def test_an_error_beside_the_passes_fails_what_took_part_and_the_trainer_goes_on(
    here: Here, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """As where a result is too large to be encoded."""

    def broken(*_: object) -> None:
        raise ValueError("the message exceeds 2 GB")

    with monkeypatch.context() as patch:
        patch.setattr(place, broken)
        here.forward("a", 1, [4])
        here.settle()
    assert "the message exceeds 2 GB" in str(here.error("a", 1))
    here.optim("a", 2)
    here.forward("a", 3, [4])
    here.settle()
    assert "an operation before it failed: seq_id 1" in str(here.error("a", 2))
    assert here.error("a", 3) is None
