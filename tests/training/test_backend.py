"""Passes: packing, mixing and merging change nothing; failures stay with their model."""

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.bases import datum, picture_chunks, random_tokens, renderer, text
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.optimizer import ModelOptimizer

STEP = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)


def backend_with(base: BaseModel, **ranks: int) -> LocalBackend:
    """A backend with a model for each name, whose B is far from zero."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=16))
    for seed, (name, rank) in enumerate(ranks.items()):
        backend.create_model(name, LoraShape(rank, seed))
        generator = torch.Generator().manual_seed(seed)
        for pair in adapter_of(backend, name).masters.values():
            pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.05)
        backend.optimizers[name].weights.refresh()
    return backend


def adapter_of(backend: LocalBackend, name: str) -> Adapter:
    """What a LoRA model trains."""
    weights = backend.optimizers[name].weights
    assert isinstance(weights, Adapter)
    return weights


@pytest.mark.parametrize("rank", [4, 0])
def test_a_model_that_is_deleted_frees_its_tensors(text_base: BaseModel, rank: int) -> None:
    backend = LocalBackend(text_base, TrainingConfig())
    backend.create_model("gone", LoraShape(rank, seed=0))
    backend.run_pass([datum("gone", renderer(text_base).render([random_tokens(0, 9)]))], backward=True)
    backend.optim_step("gone", STEP)
    backend.run_pass([datum("gone", renderer(text_base).render([random_tokens(1, 9)]))], backward=True)
    optimizer = backend.optimizers["gone"]
    assert isinstance(optimizer, ModelOptimizer)
    moments = [tensor for state in optimizer.adamw.state.values() for tensor in state.values()]
    held = [*optimizer.weights.leaves(), *optimizer.weights.buffers(), *moments, *(optimizer.totals or [])]
    alive = [weakref.ref(tensor) for tensor in held]
    del optimizer, held, moments
    backend.delete_model("gone")
    gc.collect()
    assert not [tensor for tensor in alive if tensor() is not None]


def gradients(backend: LocalBackend, name: str) -> list[Tensor]:
    """The accumulated gradients, which are then cleared."""
    found = backend.optimizers[name].gradients
    assert found is not None
    backend.clear_gradients(name)
    return found


def run_alone(backend: LocalBackend, work: Sequence[DatumWork]) -> list[np.ndarray]:
    """Each datum in a pass of its own."""
    logprobs = []
    for item in work:
        (result,) = backend.run_pass([item], backward=True).results
        assert result is not None
        logprobs.append(result.logprobs)
    return logprobs


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Equal to 1e-5 of the largest gradient."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5 * max(1.0, e.abs().max().item()))


@settings(max_examples=8, deadline=None)
@given(lengths=st.lists(st.integers(1, 40), min_size=2, max_size=6), seed=st.integers(0, 1000))
def test_packed_equals_one_by_one(text_base: BaseModel, lengths: list[int], seed: int) -> None:
    backend = backend_with(text_base, a=4)
    render = renderer(text_base)
    work = [datum("a", render.render([random_tokens(seed + i, n)]), seed + i) for i, n in enumerate(lengths)]
    alone = run_alone(backend, work)
    expected = gradients(backend, "a")
    packed = backend.run_pass(work, backward=True)
    for one, together in zip(alone, packed.results, strict=True):
        assert together is not None
        np.testing.assert_allclose(together.logprobs, one, rtol=2e-6, atol=1e-5)
    assert_same(gradients(backend, "a"), expected)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_text_and_image_datums_together_equal_each_alone(family_base: Callable[[str], BaseModel], family: str) -> None:
    base = family_base(family)
    backend, render = backend_with(base, a=4), renderer(base)
    inputs = [
        render.render([random_tokens(1, 9)]),
        render.render(picture_chunks(base, 2, 6)),
        render.render([*picture_chunks(base, 4, 4, width=64, height=160), *picture_chunks(base, 6, 5)]),
        render.render([random_tokens(8, 9)]),
    ]
    work = [datum("a", rendered, seed) for seed, rendered in enumerate(inputs)]
    alone = run_alone(backend, work)
    expected = gradients(backend, "a")
    mixed = backend.run_pass(work, backward=True)
    for one, together in zip(alone, mixed.results, strict=True):
        assert together is not None
        np.testing.assert_allclose(together.logprobs, one, rtol=2e-6, atol=1e-5)
    assert_same(gradients(backend, "a"), expected)


def test_two_models_of_different_rank_in_one_pass_equal_each_alone(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4, b=16), renderer(text_base)
    inputs = [render.render([random_tokens(i, 7 + 3 * i)]) for i in range(4)]
    work = [datum("ab"[i % 2], rendered, i) for i, rendered in enumerate(inputs)]
    alone = run_alone(backend, work)
    expected = {name: gradients(backend, name) for name in "ab"}
    merged = backend.run_pass(work, backward=True)
    for one, together in zip(alone, merged.results, strict=True):
        assert together is not None
        np.testing.assert_allclose(together.logprobs, one, rtol=2e-6, atol=1e-5)
    for name in "ab":
        assert_same(gradients(backend, name), expected[name])


def test_targets_of_different_width_share_a_pass(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4), renderer(text_base)
    generator = np.random.default_rng(0)
    rendered = [render.render([random_tokens(i, 6)]) for i in range(3)]
    work = [
        datum("a", rendered[0], 0),
        datum("a", rendered[1], 1, generator.integers(0, 2048, (6, 3))),
        datum("a", rendered[2], 2, generator.integers(0, 2048, (6, 1))),
    ]
    alone = run_alone(backend, work)
    expected = gradients(backend, "a")
    together = backend.run_pass(work, backward=True).results
    assert [r.logprobs.shape for r in together if r] == [(6,), (6, 3), (6, 1)]
    for one, other in zip(alone, together, strict=True):
        assert other is not None
        np.testing.assert_allclose(other.logprobs, one, rtol=2e-6, atol=1e-5)
    assert_same(gradients(backend, "a"), expected)


def test_many_targets_of_one_model_cost_another_no_memory(text_base: BaseModel) -> None:
    backend = backend_with(text_base, a=4, b=4)
    wide = np.zeros((1, 2**18), dtype=np.int64)
    work = [
        datum("a", renderer(text_base).render([random_tokens(1, 1)]), targets=wide),
        datum("b", renderer(text_base).render([random_tokens(2, 999)])),
    ]
    tracemalloc.start()
    try:
        assert backend.run_pass(work, backward=True).failures == {}
        assert tracemalloc.get_traced_memory()[1] < 20 * wide.nbytes
    finally:
        tracemalloc.stop()


def test_forward_leaves_the_gradients_alone(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4), renderer(text_base)
    work = [datum("a", render.render([random_tokens(0, 8)]))]
    trained = backend.run_pass(work, backward=True).results[0]
    before = [g.clone() for g in backend.optimizers["a"].gradients or []]
    scored = backend.run_pass(work, backward=False).results[0]
    assert trained is not None
    assert scored is not None
    np.testing.assert_array_equal(scored.logprobs, trained.logprobs)
    assert_same(backend.optimizers["a"].gradients or [], before)


def test_a_nan_in_one_model_does_not_reach_another(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, sick=4, well=4), renderer(text_base)
    work = [datum(name, render.render([random_tokens(i, 9)]), i) for i, name in enumerate(["sick", "well", "sick", "well"])]
    run_alone(backend, [work[1], work[3]])
    expected = gradients(backend, "well")
    for pair in adapter_of(backend, "sick").masters.values():
        pair.b.fill_(float("nan"))
    backend.optimizers["sick"].weights.refresh()
    results = backend.run_pass(work, backward=True).results
    assert results[0] is not None
    assert np.isnan(results[0].logprobs).all()
    assert_same(gradients(backend, "well"), expected)


def test_only_the_work_that_fails_gets_the_error(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, guilty=4, innocent=4), renderer(text_base)
    rendered = render.render([random_tokens(0, 6)])
    good = datum("innocent", rendered)
    bad = replace(datum("guilty", rendered), loss_inputs={"weights": np.ones(7, np.float32)})  # for 6 positions
    run_alone(backend, [good])
    expected = gradients(backend, "innocent")
    outcome = backend.run_pass([bad, good, bad], backward=True)
    assert list(outcome.failures) == [0, 2]
    assert "the pass failed: ValueError: cannot reshape array of size 7 into shape (6" in outcome.failures[0]
    assert [result is None for result in outcome.results] == [True, False, True]
    assert backend.optimizers["guilty"].gradients is None
    assert_same(gradients(backend, "innocent"), expected)


def test_training_never_changes_the_base(text_base: BaseModel) -> None:
    before = {name: tensor.clone() for name, tensor in text_base.network.state_dict().items()}
    backend, render = backend_with(text_base, a=4), renderer(text_base)
    for _ in range(3):
        backend.run_pass([datum("a", render.render([random_tokens(0, 12)]))], backward=True)
        backend.optim_step("a", STEP)
    after = text_base.network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_one_seed_gives_one_adapter(text_base: BaseModel) -> None:
    backend = LocalBackend(text_base, TrainingConfig())
    for name, seed in {"a": 5, "b": 5, "c": 6}.items():
        backend.create_model(name, LoraShape(8, seed))
    a, b, c = (backend.optimizers[name].weights.tensors() for name in "abc")
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert not torch.equal(a[0], c[0])


@pytest.mark.parametrize(
    ("shape", "trained"),
    [
        (LoraShape(2, 0), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
        (LoraShape(2, 0, train_unembed=False, train_mlp=False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (LoraShape(2, 0, train_unembed=False, train_attn=False), {"gate_proj", "up_proj", "down_proj"}),
        (LoraShape(2, 0, train_mlp=False, train_attn=False), {"lm_head"}),
    ],
)
def test_the_client_chooses_what_is_trained(vision_base: BaseModel, shape: LoraShape, trained: set[str]) -> None:
    backend = LocalBackend(vision_base, TrainingConfig())
    backend.create_model("a", shape)
    names = backend.optimizers["a"].weights.masters
    assert {name.rpartition(".")[2] for name in names} == trained
    assert not any("visual" in name for name in names)


def test_it_learns_a_sentence_with_and_without_the_head(text_base: BaseModel) -> None:
    sentence = text_base.tokenizer("The tinsmith mends one small kettle.")["input_ids"]
    for train_unembed in (True, False):
        backend = LocalBackend(text_base, TrainingConfig())
        backend.create_model("a", LoraShape(16, 0, train_unembed=train_unembed))
        rendered = renderer(text_base).render([text(*sentence[:-1])])
        work = [datum("a", rendered, targets=np.array(sentence[1:], dtype=np.int64))]
        work[0].loss_inputs["weights"][:] = 1.0
        for _ in range(60):
            result = backend.run_pass(work, backward=True).results[0]
            backend.optim_step("a", STEP)
        assert result is not None
        assert result.loss / len(rendered) < 0.05
