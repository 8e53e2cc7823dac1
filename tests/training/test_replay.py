"""Training follows given experts: forward, recomputation, replayed passes, and sequences of several workers.

Invariant: A token that follows experts has their values and gradients, with the weights that the router gives them now;
others choose freely, whatever they are packed with. Also: `tests/distributed/test_sequences.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import linear, softmax

from tests.bases import DEVICE, HYBRIDS, datum, image_chunks, load, random_tokens, renderer
from tests.extent import families
from tests.models.test_decoder import wide
from tests.models.test_experts import computed, loop, ours, owners_of, segments_of, stack_of, tokens_of
from tests.training.test_backend import assert_same, backend_with, compute, gradients
from tests.training.test_captured_pass import BOUND, replaying
from tinsmith.memory.pass_memory import Recomputation
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.captured_pass import PATIENCE
from tinsmith.training.step import run_packed

FAMILIES = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe"]


class NotedPlan(PackedPlan):
    """A plan that notes the experts of each mixture."""

    def choose(self, mixture: int, chosen: Tensor) -> Tensor:
        followed = super().choose(mixture, chosen)
        self.noted = {**getattr(self, "noted", {}), mixture: followed.cpu().numpy()}
        return followed


@torch.no_grad()
def free_routes(base: BaseModel, rendered: RenderedInput, weights: Any = None) -> NDArray[np.int16]:
    """The experts that the routers choose: [mixtures, n, per_token]."""
    row = pack([rendered], [weights], base.device)
    plan = NotedPlan(row.lengths, base.device, base.dtype, routes=row.routes)
    base.hidden_states(row, plan)
    return np.stack([plan.noted[number] for number in range(len(base.layout.experts))]).astype(np.int16)


def random_routes(base: BaseModel, tokens: int, seed: int = 0) -> NDArray[np.int16]:
    """Experts of each token, each once."""
    kind, generator = base.layout.mixture, np.random.default_rng(seed)
    assert kind is not None
    order = generator.random((len(base.layout.experts), tokens, kind.count)).argsort(-1)
    return order[..., : kind.per_token].astype(np.int16)


def following(work: DatumWork, routes: NDArray[np.int16] | None) -> DatumWork:
    return replace(work, rendered=replace(work.rendered, routes=routes))


def texts(base: BaseModel, *lengths: int, model: str = "a") -> list[DatumWork]:
    return [datum(model, renderer(base).render([random_tokens(n, n)]), n) for n in lengths]


@pytest.mark.parametrize("family", families(FAMILIES))
def test_to_follow_what_routers_choose_changes_no_bit(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    backend = backend_with(base, a=4)
    (work,) = texts(base, 50)
    if base.family.takes_images:
        work = datum("a", renderer(base).render(image_chunks(base, 1, 30)))
    free = compute(backend, [work])[0].logprobs, gradients(backend, "a")
    chosen = free_routes(base, work.rendered, backend.optimizers["a"].weights)
    assert len(np.unique(chosen)) > 4
    (found,) = compute(backend, [following(work, chosen)])
    assert np.array_equal(found.logprobs, free[0])
    assert all(torch.equal(one, other) for one, other in zip(gradients(backend, "a"), free[1], strict=True))


@pytest.mark.parametrize("normalized", [True, False])
def test_other_experts_have_the_values_and_gradients_of_a_loop(family_dir: Any, normalized: bool) -> None:
    """The weights are the router's own of these experts, and their gradients reach the router's input."""
    base = wide(family_dir("qwen3_moe"))
    stack = stack_of(base)
    stack = replace(stack, kind=replace(stack.kind, normalized=normalized))
    segments, h = segments_of(owners_of(base)), tokens_of(base)
    given = torch.from_numpy(random_routes(base, len(h))[0]).long().to(DEVICE)

    def routed(own: Any, x: Tensor, chosen: Tensor) -> Tensor:
        """By hand, token by token."""
        rows = []
        for token in range(len(x)):
            scores = softmax(linear(x[token], own.router), -1, dtype=torch.float32)[chosen[token]]
            rows.append((scores / scores.sum() if normalized else scores).to(x.dtype))
        return torch.stack(rows)

    def hand(own: Any, x: Tensor, _: Tensor, chosen: Tensor, where: Any) -> Tensor:
        return loop(own, x, routed(own, x, chosen), chosen, where)

    def follow(own: Any, x: Tensor, _: Tensor, chosen: Tensor, where: Any) -> Tensor:
        weights, followed = own.route(x, lambda free: chosen)
        return ours(own, x, weights, followed, where)

    choice = torch.zeros(len(h), stack.kind.per_token, dtype=h.dtype, device=DEVICE), given
    expected, found = (computed(how, stack, h, choice, segments) for how in (hand, follow))
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    for name, gradient in expected[1].items():
        assert gradient.any() or name == "weights"
        torch.testing.assert_close(found[1][name], gradient, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("family", families(FAMILIES))
def test_data_with_and_without_experts_share_a_pass_as_if_alone(
    family_base: Callable[[str], BaseModel], family: str
) -> None:
    """Also where only the first tokens of one follow some."""
    base = family_base(family)
    backend = backend_with(base, a=4, b=8)
    work = [*texts(base, 20, 41, 33), *texts(base, 25, 37, model="b")]
    part = random_routes(base, 41, 1)
    part[:, 30:] = -1
    work = [
        work[0],
        following(work[1], part),
        following(work[2], random_routes(base, 33, 2)),
        following(work[3], random_routes(base, 25, 3)),
        work[4],
    ]
    alone = [compute(backend, [one])[0] for one in work]
    expected = {name: gradients(backend, name) for name in ("a", "b")}
    bound = 1e-4 if family in HYBRIDS else 1e-5
    for one, other in zip(compute(backend, work), alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=1e-5, atol=bound)
    for name in ("a", "b"):
        assert_same(gradients(backend, name), expected[name], 5e-3 if family in HYBRIDS else 1e-5)
    free = compute(backend, [replace(one, rendered=replace(one.rendered, routes=None)) for one in work])
    apart = [float(np.abs(one.logprobs - other.logprobs).max()) for one, other in zip(free, alone, strict=True)]
    assert [distance > 0.01 for distance in apart] == [False, True, True, True, False]


def with_recomputation(backend: LocalBackend, work: Sequence[DatumWork], recompute: int) -> tuple[Any, list[Tensor]]:
    optimizers = [backend.optimizers[one.model_id] for one in work]
    found = run_packed(backend.base, work, optimizers, True, 16, Recomputation(recompute))
    return [one.logprobs for one in found], gradients(backend, "a")


def test_what_is_recomputed_follows_the_same_experts(family_base: Callable[[str], BaseModel]) -> None:
    base = family_base("qwen3_moe")
    backend = backend_with(base, a=4)
    work = [following(one, random_routes(base, len(one.rendered))) for one in texts(base, 20, 41)]
    kept, again = (with_recomputation(backend, work, layers) for layers in (0, len(base.layout.layers)))
    for one, other in zip(kept[0], again[0], strict=True):
        assert np.array_equal(one, other)
    assert_same(again[1], kept[1], 1e-6)
    free = with_recomputation(backend, texts(base, 20, 41), 0)
    assert np.abs(free[0][0] - kept[0][0]).max() > 0.01


def test_a_replayed_pass_follows_experts_and_forgets_those_of_the_row_before(
    family_dir: Callable[[str], Path],
) -> None:
    """In half precision on a GPU, which captures nothing else."""
    base = load(family_dir("qwen3_moe"), dtype="float32" if DEVICE == "cpu" else "bfloat16")
    backend, plain = replaying(base, a=4), backend_with(base, a=4)
    part = random_routes(base, 30, 5)
    part[:, 7:] = -1
    rows = [texts(base, 40, 60)] * (PATIENCE - 1)
    rows += [
        [following(one, random_routes(base, len(one.rendered), seed)) for one in texts(base, *lengths)]
        for seed, lengths in enumerate([(40, 60), (90, 7, 30)])
    ]
    rows += [texts(base, 9, 70), [following(texts(base, 30)[0], part)], texts(base, 30)]
    for work in rows:
        for found, wanted in zip(compute(backend, work), compute(plain, work), strict=True):
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=BOUND, atol=BOUND)
        assert_same(gradients(backend, "a"), gradients(plain, "a"), BOUND)
    assert len(backend.memory.captured.passes) == 1


def test_a_part_of_a_sequence_keeps_its_experts(family_base: Callable[[str], BaseModel]) -> None:
    (work,) = texts(family_base("qwen3_moe"), 20)
    routes = random_routes(family_base("qwen3_moe"), 20)
    cut = replace(work.rendered, routes=routes).part(5, 12)
    assert cut.routes is not None
    np.testing.assert_array_equal(cut.routes, routes[:, 5:12])
