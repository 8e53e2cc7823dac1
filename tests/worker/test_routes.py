"""Which experts a datum follows: those that it brings, or those recorded of a sample that it contains.

Invariant: Experts that a datum brings are checked against the model, token by token; none are looked for where a loss
does not compare with the sampler. Also: `tests/acceptance/test_replay.py`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.bases import image_chunks, random_tokens, renderer
from tests.training.test_replay import random_routes
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.rendering.rendered import image_mark
from tinsmith.wire.chunks import Chunk, ImageChunk
from tinsmith.wire.forward_backward import Datum, ForwardBackwardRequest
from tinsmith.worker.datums import CheckedDatum, prepare
from tinsmith.worker.samples import training_run

Base = Callable[[str], BaseModel]


class Kept:
    """What is recorded, and what was asked for."""

    def __init__(self, *found: NDArray[Any] | None) -> None:
        self.found = list(found)
        self.asked: list[tuple[str, list[list[int]]]] = []

    def __call__(self, run: str, sequences: Sequence[NDArray[np.int64]]) -> list[NDArray[Any] | None]:
        self.asked.append((run, [each.tolist() for each in sequences]))
        return self.found


def datum_of(chunks: list[Chunk], length: int, **inputs: Any) -> Datum:
    ones = np.ones(length, dtype=np.float32)
    given: dict[str, Any] = {"target_tokens": np.arange(length), "logprobs": -ones, "advantages": ones}
    return Datum(chunks, given | inputs)


def prepared(
    base: BaseModel, data: list[Datum], kept: Kept | None = None, loss: str = "importance_sampling"
) -> list[CheckedDatum]:
    request = ForwardBackwardRequest("s:train:0", 1, loss, {}, False, data)
    return prepare("s:train:0", request, renderer(base), lambda names: {}, kept)


def test_recorded_experts_are_those_of_the_first_tokens(family_base: Base) -> None:
    base = family_base("qwen3_moe")
    experts = random_routes(base, 5).astype(np.uint8)
    kept = Kept(experts, None)
    first, second = prepared(base, [datum_of([random_tokens(n, n)], n) for n in (8, 6)], kept)
    words = [random_tokens(n, n).tokens.tolist() for n in (8, 6)]
    assert kept.asked == [("s:train:0", [[*words[0], 7], [*words[1], 5]])]
    work = first.work()
    assert work.rendered.routes is not None
    np.testing.assert_array_equal(work.rendered.routes[:, :5], experts)
    assert (work.rendered.routes[:, 5:] == -1).all()
    assert work.rendered.routes.shape == (len(base.layout.experts), 8, 2)
    assert (work.replayed, second.work().replayed) == (5 / 8, 0.0)
    assert second.work().rendered.routes is None


def test_images_are_told_apart_by_their_bytes_and_not_by_their_tokens(family_base: Base) -> None:
    base = family_base("qwen3_vl_moe")
    chunks = image_chunks(base, 1, 4)
    (image,) = (chunk for chunk in chunks if isinstance(chunk, ImageChunk))
    length, kept = len(renderer(base).render(chunks)), Kept(None)
    (found,) = prepared(base, [datum_of(chunks, length)], kept)
    ((_, (asked,)),) = kept.asked
    np.testing.assert_array_equal(found.work().rendered.identity, asked[:-1])
    marks = [token for token in asked if token < 0]
    assert marks == [image_mark(image.sha256)] * 6
    assert image_mark(b"a" * 32) != image_mark(b"b" * 32)


def test_nothing_is_looked_for_where_nothing_is_compared(family_base: Base) -> None:
    mixture, dense = family_base("qwen3_moe"), family_base("qwen3")
    likely = Datum([random_tokens(1, 4)], {"target_tokens": np.arange(4)})
    for base, data, loss in (
        (mixture, likely, "cross_entropy"),
        (dense, datum_of([random_tokens(1, 4)], 4), "importance_sampling"),
    ):
        kept = Kept(None)
        (found,) = prepared(base, [data], kept, loss)
        assert kept.asked == []
        assert (found.work().replayed, found.work().rendered.routes) == (None, None)
    (found,) = prepared(mixture, [datum_of([random_tokens(1, 4)], 4)])
    assert found.work().replayed == 0.0


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
def test_what_a_datum_brings_goes_before_what_is_recorded(family_base: Base, loss: str) -> None:
    base = family_base("qwen3_moe")
    brought, recorded = random_routes(base, 7, 1), random_routes(base, 8, 2)
    inputs = {"rollout_expert_indices": brought.swapaxes(0, 1).astype(np.int64)}
    data = datum_of([random_tokens(1, 8)], 8, **inputs)
    if loss == "cross_entropy":
        data = Datum(data.chunks, {"target_tokens": np.arange(8), **inputs})
    (found,) = prepared(base, [data], Kept(recorded), loss)
    np.testing.assert_array_equal(found.work().rendered.routes[:, :7], brought)  # type: ignore[index]
    assert found.work().replayed == (7 / 8 if loss == "importance_sampling" else None)


def changed(values: NDArray[np.int64], place: tuple[int, ...], value: int) -> NDArray[np.int64]:
    values = values.copy()
    values[place] = value
    return values


WRONG: dict[str, tuple[Callable[[NDArray[np.int64]], Any], str]] = {
    "dtype": (lambda x: x.astype(np.float32), "rollout_expert_indices is float32; send numbers of experts as int64"),
    "dimensions": (lambda x: x[:, 0], r"rollout_expert_indices has shape \(8, 2\); send .* at most \(8, 2, 2\)"),
    "layers": (lambda x: x[:, :1], r"rollout_expert_indices has shape \(8, 1, 2\); send"),
    "experts of a token": (lambda x: x[..., :1], r"rollout_expert_indices has shape \(8, 2, 1\); send"),
    "more tokens": (lambda x: np.concatenate([x, x]), r"rollout_expert_indices has shape \(16, 2, 2\); send"),
    "no tokens": (lambda x: x[:0], r"rollout_expert_indices has shape \(0, 2, 2\); send"),
    "too large": (lambda x: changed(x, (3, 1, 0), 8), r"at position \(3, 1, 0\) is 8; send numbers in \[0, 8\)"),
    "negative": (lambda x: changed(x, (3, 1, 0), -1), r"at position \(3, 1, 0\) is -1; send numbers in \[0, 8\)"),
    "twice": (
        lambda x: changed(x, (5, 0), 4),
        r"at position \(5, 0\) is \[4, 4\]; send each expert of a token once",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_experts_are_refused(family_base: Base, name: str) -> None:
    base = family_base("qwen3_moe")
    change, message = WRONG[name]
    experts = change(random_routes(base, 8).swapaxes(0, 1).astype(np.int64))
    with pytest.raises(UserError, match=f"datum 0: .*{message}"):
        prepared(base, [datum_of([random_tokens(1, 8)], 8, rollout_expert_indices=experts)])


def test_a_dense_model_refuses_experts(family_base: Base) -> None:
    experts = np.zeros((8, 2, 2), dtype=np.int64)
    with pytest.raises(UserError, match=r"rollout_expert_indices is given, but tiny has no experts .*; leave it out"):
        prepared(family_base("qwen3"), [datum_of([random_tokens(1, 8)], 8, rollout_expert_indices=experts)])


@pytest.mark.parametrize(
    ("weights_id", "run"),
    [
        ("s:train:3/7", "s:train:3"),
        ("s:train:3/inflight", "s:train:3"),
        ("tinker://s:train:3/sampler_weights/final", "s:train:3"),
        (None, None),
    ],
)
def test_sampled_weights_name_their_training_run(weights_id: str | None, run: str | None) -> None:
    assert training_run(weights_id) == run
