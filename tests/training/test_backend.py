"""Passes: packing, mixing and merging change nothing; what one model does reaches no other.

Invariant: Packed sequences equal sequences one by one; text and images mix; two models in one pass equal each alone; a
NaN stays with its model.
"""

import gc
import math
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from tests.bases import HYBRIDS, datum, image_chunks, new_ref, random_tokens, renderer
from tests.extent import amount
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter, new_adapter
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.store.records import COMPARED
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES

FloatArray = NDArray[np.float32]
STEP = AdamSettings(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, grad_clip_norm=0.0)


def backend_with(base: BaseModel, **ranks: int) -> LocalBackend:
    """A backend with a model for each name: an adapter whose B is far from zero, or with rank 0 all parameters, unlike
    the base's."""
    backend = LocalBackend(base, TrainingConfig(logits_chunk=16))
    for seed, (name, rank) in enumerate(ranks.items()):
        backend.create_model(name, LoraShape(rank, seed))
        weights = backend.optimizers[name].weights
        generator = torch.Generator().manual_seed(seed)
        for tensor in (
            [pair.b for pair in weights.masters.values()] if isinstance(weights, Adapter) else weights.tensors()
        ):
            tensor.add_(torch.randn(tensor.shape, generator=generator).to(tensor.device), alpha=0.05 if rank else 0.02)
        weights.refresh()
    return backend


def gradients(backend: LocalBackend, name: str) -> list[Tensor]:
    """The accumulated gradients, which are then cleared."""
    found = backend.optimizers[name].accumulator.gradients
    assert found is not None
    backend.clear_gradients(name)
    return found


def compute(backend: LocalBackend, work: Sequence[DatumWork]) -> list[DatumResult]:
    """The results of one pass, which does not fail, and whose gradients the optimizers get."""
    outcome = backend.run_pass(work, backward=True)
    assert outcome.failures == {}
    return [result for result in outcome.results if result is not None]


def assert_same(actual: Sequence[Tensor], expected: Sequence[Tensor], bound: float = 1e-5) -> None:
    """Equal to `bound` of the largest gradient."""
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=bound, atol=bound * max(1.0, e.abs().max().item()))


def each_alone(backend: LocalBackend, work: Sequence[DatumWork]) -> tuple[list[DatumResult], dict[str, list[Tensor]]]:
    """The results, and the gradients of each model, of passes with one datum each."""
    results = [result for item in work for result in compute(backend, [item])]
    return results, {name: gradients(backend, name) for name in {item.model_id for item in work}}


@contextmanager
def otherwise_rounded(base: BaseModel) -> Iterator[None]:
    """The embeddings are a few roundings of float32 away from what they were."""
    embeddings = base.language_model.embed_tokens.weight.data
    before = embeddings.clone()
    embeddings.mul_(1 + 1e-6 * torch.randn(before.shape, generator=torch.Generator().manual_seed(0)).to(before.device))
    yield
    embeddings.copy_(before)


def distance(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return max(float((one - other).norm()) for one, other in zip(some, others, strict=True))


def assert_each_alone(backend: LocalBackend, work: Sequence[DatumWork], hybrid: bool = False) -> None:
    """In one pass data have the log-probabilities, and models the gradients, of passes with one datum each.

    Chunks of a delta net begin elsewhere in a packed row, and its sums are rounded otherwise. Where a key is at right
    angles to its query, the norm behind makes much of that: then the gradients move as far when the embeddings are
    rounded otherwise.
    """
    alone, expected = each_alone(backend, work)
    if hybrid:
        with otherwise_rounded(backend.base):
            _, rounded = each_alone(backend, work)
    for one, together in zip(alone, compute(backend, work), strict=True):
        np.testing.assert_allclose(together.logprobs, one.logprobs, rtol=2e-6, atol=1e-4 if hybrid else 1e-5)
    for name, wanted in expected.items():
        if hybrid:
            largest = max(float(tensor.abs().max()) for tensor in wanted)
            assert distance(gradients(backend, name), wanted) <= 1e-4 * largest + 10 * distance(rounded[name], wanted)
        else:
            assert_same(gradients(backend, name), wanted)


@pytest.mark.parametrize(
    ("family", "examples"),
    [("qwen3", amount(4, 20)), ("qwen3_5", amount(3, 100)), ("qwen3_moe", amount(4, 20)), ("gpt_oss", amount(4, 20))],
)
def test_packed_equals_one_by_one(family_base: Callable[[str], BaseModel], family: str, examples: int) -> None:
    base = family_base(family)
    backend, render = backend_with(base, a=4, b=8), renderer(base)

    @settings(max_examples=examples, deadline=None)
    @given(lengths=st.lists(st.integers(1, 70), min_size=2, max_size=6), seed=st.integers(0, 1000))
    def check(lengths: list[int], seed: int) -> None:
        chosen = np.random.default_rng(seed).integers(0, 2, len(lengths))
        rendered = [render.render([random_tokens(seed + i, n)]) for i, n in enumerate(lengths)]
        assert_each_alone(
            backend, [datum("ab"[chosen[i]], own, seed + i) for i, own in enumerate(rendered)], family in HYBRIDS
        )

    check()


@pytest.mark.parametrize(
    ("family", "ranks"),
    [
        ("qwen3", {"a": 4, "b": 16}),
        ("qwen3", {"a": 0, "lora": 4, "b": 0, "other": 8}),
        ("qwen3_vl", {"a": 4}),
        ("qwen3_vl", {"a": 0}),
        ("qwen2_5_vl", {"a": 4}),
        ("qwen3_5", {"a": 3, "b": 8, "c": 0}),
        ("qwen3_moe", {"a": 4, "full": 0, "b": 12, "other": 0}),
        ("gpt_oss", {"a": 4, "full": 0, "b": 12, "other": 0}),
        ("qwen3_vl_moe", {"a": 4, "b": 12}),
        ("qwen3_5_moe", {"a": 4, "b": 12, "c": 0}),
    ],
)
def test_models_and_their_texts_and_images_in_one_pass_equal_each_alone(
    family_base: Callable[[str], BaseModel], family: str, ranks: Mapping[str, int]
) -> None:
    base = family_base(family)
    backend, render = backend_with(base, **ranks), renderer(base)
    inputs = [render.render([random_tokens(i, 5 + 4 * i)]) for i in range(2 * len(ranks))]
    if base.family.takes_images:
        inputs.insert(1, render.render(image_chunks(base, 2, 6)))
        inputs.insert(3, render.render([*image_chunks(base, 4, 4, width=64, height=160), *image_chunks(base, 6, 5)]))
    names = [list(ranks)[i % len(ranks)] for i in range(len(inputs))]
    assert_each_alone(
        backend,
        [datum(name, own, i) for i, (name, own) in enumerate(zip(names, inputs, strict=True))],
        family in HYBRIDS,
    )


def test_targets_of_different_width_share_a_pass(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4), renderer(text_base)
    generator = np.random.default_rng(0)
    rendered = [render.render([random_tokens(i, 6)]) for i in range(3)]
    widths = [None, generator.integers(0, 2048, (6, 3)), generator.integers(0, 2048, (6, 1))]
    work = [datum("a", own, i, targets) for i, (own, targets) in enumerate(zip(rendered, widths, strict=True))]
    assert [result.logprobs.shape for result in compute(backend_with(text_base, a=4), work)] == [(6,), (6, 3), (6, 1)]
    assert_each_alone(backend, work)


def with_loss(item: DatumWork, name: str) -> DatumWork:
    """The datum with another loss, which gets its numbers from the weights."""
    weights = item.loss_inputs["weights"]
    given = {
        "logprobs": weights - 3,
        "advantages": weights,
        "sequence_ratio_mask": np.ones_like(weights),
        "weights": weights,
    }
    loss = LOSSES[name]
    return replace(item, loss=loss, loss_inputs={key: given[key] for key in loss.inputs})


def compared(item: DatumWork, logprobs: FloatArray) -> dict[str, float]:
    """What `COMPARED` says, in plain Python."""
    if "logprobs" not in item.loss_inputs:
        return {}
    sampled = item.loss_inputs["advantages"]
    if item.loss.name == "dro":  # a token without advantage counts if it has a log-probability
        sampled = sampled + item.loss_inputs["logprobs"] * (sampled == 0)
    pairs = [
        (float(p), float(q))
        for p, q, each in zip(
            logprobs, item.loss_inputs["logprobs"], item.loss_inputs.get("sequence_ratio_mask", sampled), strict=True
        )
        if each
    ]
    found = [float(len(pairs)), sum(q - p for p, q in pairs), sum(math.exp(p - q) - 1 - (p - q) for p, q in pairs)]
    return dict(zip(COMPARED, found, strict=True))


def test_results_are_those_of_their_datums_whatever_losses_share_a_row(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    plain = [datum("ab"[i % 2], render.render([random_tokens(i, 5 + i % 4)]), i) for i in range(12)]
    work = [with_loss(item, sorted(LOSSES)[i % len(LOSSES)]) for i, item in enumerate(plain)]
    for item, result in zip(work, compute(backend, work), strict=True):
        (alone,) = compute(backend, [item])
        np.testing.assert_allclose(result.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
        assert result.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-4)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-3, abs=1e-4)
        assert set(result.metrics) == set(item.loss.metrics)
        assert dict(result.compared) == pytest.approx(compared(item, result.logprobs), rel=1e-12, abs=1e-12)


def test_many_targets_of_one_model_cost_another_no_memory(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    wide = np.zeros((1, 2**18), dtype=np.int64)
    work = [
        datum("a", render.render([random_tokens(1, 1)]), targets=wide),
        datum("b", render.render([random_tokens(2, 999)])),
    ]
    tracemalloc.start()
    try:
        compute(backend, work)
        assert tracemalloc.get_traced_memory()[1] < 20 * wide.nbytes
    finally:
        tracemalloc.stop()


def test_a_pass_without_gradients_gives_the_same_bits_and_leaves_gradients_alone(hybrid_base: BaseModel) -> None:
    backend, render = backend_with(hybrid_base, a=4), renderer(hybrid_base)
    work = [
        datum("a", render.render([random_tokens(0, 8)])),
        datum("a", render.render(image_chunks(hybrid_base, 2, 6))),
    ]
    trained = compute(backend, work)
    before = [gradient.clone() for gradient in backend.optimizers["a"].accumulator.gradients or []]
    for result, scored in zip(trained, backend.run_pass(work, backward=False).results, strict=True):
        assert scored is not None
        np.testing.assert_array_equal(scored.logprobs, result.logprobs)
    assert_same(gradients(backend, "a"), before)


@pytest.mark.parametrize(
    ("family", "rank"),
    [("qwen3", 4), ("qwen3", 0), ("qwen3_5", 4), ("qwen3_moe", 4), ("qwen3_moe", 0), ("gpt_oss", 4), ("gpt_oss", 0)],
)
def test_a_nan_stays_with_its_model(family_base: Callable[[str], BaseModel], family: str, rank: int) -> None:
    base = family_base(family)
    backend, render = backend_with(base, sick=rank, well=rank, lora=4), renderer(base)
    work = [
        datum(name, render.render([random_tokens(i, 33)]), i)
        for i, name in enumerate(["sick", "well", "lora", "sick", "well"])
    ]
    well = [i for i, item in enumerate(work) if item.model_id != "sick"]
    alone = compute(backend, [work[i] for i in well])
    expected = {name: gradients(backend, name) for name in ("well", "lora")}
    for tensor in backend.optimizers["sick"].weights.tensors():
        tensor.fill_(torch.nan)
    backend.optimizers["sick"].weights.refresh()
    results = compute(backend, work)
    assert np.isnan(results[0].logprobs).all()
    for i, one in zip(well, alone, strict=True):
        np.testing.assert_allclose(results[i].logprobs, one.logprobs, rtol=2e-6, atol=1e-5)
    for name, wanted in expected.items():
        assert_same(gradients(backend, name), wanted, 1e-4 if family in HYBRIDS else 1e-5)


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_5_moe"])
def test_training_changes_nothing_of_base_neighbours_and_snapshots(
    family_base: Callable[[str], BaseModel], family: str
) -> None:
    """Of a mixture of experts neither what chooses them."""
    base = family_base(family)
    render = renderer(base)
    before = {name: tensor.clone() for name, tensor in base.network.state_dict().items()}
    backend = backend_with(base, lora=4, full=0, idle=4, idle_full=0)
    inputs = [render.render([random_tokens(1, 17)]), render.render(image_chunks(base, 3, 6))]
    full_names = set(backend.optimizers["full"].weights.working)
    assert not any(f".{gate}." in name for name in full_names for gate in ("mlp.gate", "mlp.shared_expert_gate"))
    idle = [datum(name, own) for own in inputs for name in ("idle", "idle_full")]
    scored = compute(backend, idle)
    kept = [tensor.clone() for item in idle for tensor in backend.optimizers[item.model_id].weights.tensors()]
    snapshots = {name: backend.snapshot(name, new_ref()) for name in ("lora", "full")}
    frozen = {name: [tensor.clone() for tensor in snapshot.tensors()] for name, snapshot in snapshots.items()}
    for _ in range(2):
        compute(backend, [datum(name, own) for own in inputs for name in ("lora", "full")])
        for name in ("lora", "full"):
            backend.optim_step(name, STEP)
    after = base.network.state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert not any(parameter.requires_grad for parameter in base.network.parameters())
    now = [tensor for item in idle for tensor in backend.optimizers[item.model_id].weights.tensors()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    for name, tensors in frozen.items():
        assert all(torch.equal(a, b) for a, b in zip(tensors, snapshots[name].tensors(), strict=True))
        assert not any(
            torch.equal(a, b) for a, b in zip(tensors, backend.optimizers[name].weights.tensors(), strict=True)
        )
    for one, other in zip(scored, compute(backend, idle), strict=True):
        np.testing.assert_array_equal(one.logprobs, other.logprobs)


def test_a_model_that_is_deleted_frees_its_tensors(text_base: BaseModel) -> None:
    names = ("lora", "full")
    backend = backend_with(text_base, lora=4, full=0)
    work = [datum(name, renderer(text_base).render([random_tokens(0, 9)])) for name in names]
    compute(backend, work)
    alive: list[weakref.ref[Tensor]] = []
    for name in names:
        backend.optim_step(name, STEP)
    compute(backend, work)
    for name in names:
        optimizer: Any = backend.optimizers[name]
        held = [
            *optimizer.weights.leaves(),
            *optimizer.weights.buffers(),
            *optimizer.moments().values(),
            *optimizer.accumulator.totals,
        ]
        alive += [weakref.ref(tensor) for tensor in held]
        del optimizer, held
        backend.delete_model(name)
    gc.collect()
    assert not [tensor for tensor in alive if tensor() is not None]


@pytest.mark.parametrize(
    ("shape", "trained"),
    [
        (LoraShape(2, 0), {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}),
        (LoraShape(2, 0, train_unembed=False, train_mlp=False), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (LoraShape(2, 0, train_attn=False), {"gate_proj", "up_proj", "down_proj", "lm_head"}),
    ],
)
def test_the_client_chooses_what_is_trained(vision_base: BaseModel, shape: LoraShape, trained: set[str]) -> None:
    names = new_adapter(shape, vision_base.layout, vision_base.device, vision_base.dtype).masters
    assert {name.rpartition(".")[2] for name in names} == trained
    assert not any("visual" in name for name in names)
