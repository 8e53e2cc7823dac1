"""Pictures of an operation: decoded pass by pass, and a broken one found late fails its operation alone."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.bases import png
from tests.engine.test_trainer import Bench
from tinsmith.models.base import BaseModel
from tinsmith.wire import tinker_pb2

PICTURE_TOKENS = 6


class Gallery:
    """A bench for a vision model, the pictures that its store holds, and how many are decoded and not computed."""

    def __init__(self, base: BaseModel, data_dir: Path) -> None:
        self.bench = Bench(base, data_dir, tokens_per_pass=2 * (PICTURE_TOKENS + 1))
        self.blobs: dict[bytes, bytes] = {}
        self.renderer = self.bench.trainer.operations.bases["tiny"].renderer
        self.renderer.read_blob = self.blobs.__getitem__
        self.renderer.cache.clear()

    def forward(self, model: str, seq: int, pictures: list[bytes]) -> None:
        """One datum for each picture, with a word before it."""
        message = tinker_pb2.ForwardBackwardRequest(model_id=f"s:train:{model}", seq_id=seq, loss_fn="cross_entropy")
        for data in pictures:
            digest = hashlib.sha256(data).digest()
            self.blobs[digest] = data
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = np.array([5], dtype="<i4").tobytes()
            image = datum.model_input.add().image
            image.data, image.format = digest, "png"
            targets = datum.loss_fn_inputs["target_tokens"]
            targets.dense = np.full(PICTURE_TOKENS + 1, 1, dtype="<i8").tobytes()
            targets.dtype = tinker_pb2.DTYPE_INT64
        self.bench.add(model, seq, "forward_backward", message.SerializeToString())


@pytest.fixture
def gallery(vision_base: BaseModel, tmp_path: Path) -> Iterator[Gallery]:
    made = Gallery(vision_base, tmp_path)
    yield made
    made.renderer.cache.clear()


def test_pictures_are_decoded_as_their_pass_comes(gallery: Gallery) -> None:
    bench = gallery.bench
    bench.create("a")
    bench.settle()
    gallery.forward("a", 1, [png(seed) for seed in range(5)])
    for decoded in (2, 4, 5):
        bench.trainer.turn()
        assert len(gallery.renderer.cache) == decoded
    assert bench.error("a", 1) is None
    assert [tokens for _, tokens, _ in bench.backend.passes] == [14, 14, 7]


def test_a_broken_picture_in_a_late_pass_fails_its_operation_and_step_and_no_other(gallery: Gallery) -> None:
    bench = gallery.bench
    whole = png(9)
    for model in "ab":
        bench.create(model)
    gallery.forward("a", 1, [*[png(seed) for seed in range(4)], whole[: len(whole) - 30]])
    gallery.forward("b", 1, [whole])
    for model in "ab":
        bench.optim(model, 2)
    bench.settle()
    failed = bench.outcomes["s:train:a/1"]
    assert failed.category == "user"
    assert failed.error is not None
    assert failed.error.startswith("datum 4: chunk 1: the png image of 96 x 64 pixels is broken")
    assert "the gradients are cleared" in str(bench.error("a", 2))
    assert (bench.error("b", 1), bench.error("b", 2)) == (None, None)


def test_a_pass_decodes_no_more_pixels_than_one_picture_may_have(gallery: Gallery, monkeypatch: pytest.MonkeyPatch) -> None:
    """How many an operation holds is no reason to refuse it: the SDK puts 5 MB of datums into one, and some pictures compress well."""
    bench = gallery.bench
    for name in ("max_image_pixels", "max_input_pixels"):
        monkeypatch.setattr(gallery.renderer.limits, name, 96 * 64)
    bench.create("a")
    bench.settle()
    gallery.forward("a", 1, [png(seed) for seed in range(3)])
    gallery.forward("a", 2, [png(20)] * 4)
    bench.settle()
    assert (bench.error("a", 1), bench.error("a", 2)) == (None, None)
    assert [tokens for _, tokens, _ in bench.backend.passes] == [7, 7, 7, 14, 14]
    assert len(gallery.renderer.cache) == 4
