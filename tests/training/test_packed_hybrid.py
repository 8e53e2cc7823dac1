"""Hybrid models in packed rows: each sequence has the log-probabilities and gradients that it has alone and in transformers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import datum, picture_chunks, random_adapter, random_tokens, renderer, shifted, transformers_model
from tests.extent import amount
from tests.training.test_against_peft import path_in_network, twin_logprobs
from tests.training.test_backend import gradients
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.layout import LM_HEAD
from tinsmith.models.lora import Adapter
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.optimizer import ModelOptimizer

HARD = [1, 2, 3, 4, 63, 64, 65, 4096]


@pytest.fixture
def hybrid(family_base: Callable[[str], BaseModel]) -> BaseModel:
    return family_base("qwen3_5")


def backend_with(model: BaseModel, **adapters: Adapter) -> LocalBackend:
    """A backend that trains these adapters, in one row however long it is."""
    backend = LocalBackend(model, TrainingConfig())
    for name, adapter in adapters.items():
        backend.optimizers[name] = ModelOptimizer(adapter)
    return backend


def compute(backend: LocalBackend, work: Sequence[DatumWork]) -> list[DatumResult]:
    """The results of one pass, whose gradients the optimizers get."""
    results = backend.run_pass(work, backward=True).results
    assert None not in results
    return [result for result in results if result is not None]


class Twin:
    """transformers' own model on the CPU, whose linears compute with an adapter of ours: W + scale · B A, on all or some outputs."""

    def __init__(self, directory: Path, base: BaseModel, adapter: Adapter) -> None:
        self.network = transformers_model(directory, attn_implementation="sdpa")
        self.leaves = [leaf.detach().cpu().clone().requires_grad_() for leaf in adapter.leaves()]
        pairs = zip(self.leaves[::2], self.leaves[1::2], strict=True)
        weights: dict[str, Tensor] = {}
        for (name, target), (a, b) in zip(((name, base.layout.targets[name]) for name in adapter.masters), pairs, strict=True):
            path = f"{path_in_network(base, name if name == LM_HEAD else target.module)}.weight"
            start, end = target.rows or (0, target.out_features)
            whole = weights.get(path, dict(self.network.named_parameters(remove_duplicate=False))[path].detach())
            weights[path] = torch.cat([whole[:start], whole[start:end] + adapter.scale * b @ a, whole[end:]])
        self.weights = weights

    def __call__(self, **inputs: Any) -> Any:
        return torch.func.functional_call(self.network, self.weights, (), inputs | {"use_cache": False}, tie_weights=False)


def assert_transformers_agrees(base: BaseModel, directory: Path, inputs: Sequence[RenderedInput]) -> None:
    """In one row: log-probabilities and gradients of an adapter are those of transformers, sequence by sequence."""
    adapter = random_adapter(base, rank=4, seed=1)
    backend = backend_with(base, a=adapter)
    work = [datum("a", rendered, seed) for seed, rendered in enumerate(inputs)]
    results = compute(backend, work)
    twin = Twin(directory, base, adapter)
    for item, result in zip(work, results, strict=True):
        expected = twin_logprobs(twin, base, item.rendered, shifted(item.rendered))
        np.testing.assert_allclose(result.logprobs, expected.detach().cpu().numpy(), rtol=1e-5, atol=1e-4)
        weights = torch.from_numpy(item.loss_inputs["weights"]).to(expected)
        (-(weights * expected).sum()).backward(retain_graph=True)
    for got, leaf in zip(backend.optimizers["a"].gradients or [], twin.leaves, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(got.cpu(), leaf.grad, rtol=1e-3, atol=1e-4 * max(1.0, leaf.grad.abs().max().item()))


def test_hard_lengths_in_one_row(hybrid: BaseModel, family_dir: Callable[[str], Path]) -> None:
    render = renderer(hybrid)
    inputs = [render.render([random_tokens(seed, length)]) for seed, length in enumerate(HARD)]
    assert_transformers_agrees(hybrid, family_dir("qwen3_5"), inputs)


def test_pictures_among_texts(hybrid: BaseModel, family_dir: Callable[[str], Path]) -> None:
    render = renderer(hybrid)
    inputs = [
        render.render([random_tokens(1, 30)]),
        render.render([*picture_chunks(hybrid, 3, 6), *picture_chunks(hybrid, 5, 70, width=64, height=128)]),
    ]
    inputs += [render.render(picture_chunks(hybrid, 9, 5)), render.render([random_tokens(2, 65)])]
    assert_transformers_agrees(hybrid, family_dir("qwen3_5"), inputs)


def test_random_packings(hybrid: BaseModel) -> None:
    """A hundred rows of some of twelve sequences, of two adapters."""
    generator = np.random.default_rng(0)
    adapters = {"a": random_adapter(hybrid, rank=4, seed=1), "b": random_adapter(hybrid, rank=8, seed=2)}
    render = renderer(hybrid)
    work = []
    for seed, length in enumerate([1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 64, 66]):
        work.append(datum("ab"[seed % 2], render.render([random_tokens(seed, length)]), seed))
    alone, found = [], []
    for item in work:
        backend = backend_with(hybrid, **adapters)
        alone.append(compute(backend, [item])[0].logprobs)
        found.append(gradients(backend, item.model_id))
    for _ in range(amount(5, 100)):
        chosen = generator.permutation(len(work))[: generator.integers(2, 7)]
        backend = backend_with(hybrid, **adapters)
        for index, result in zip(chosen, compute(backend, [work[i] for i in chosen]), strict=True):
            np.testing.assert_allclose(result.logprobs, alone[index], atol=1e-4)
        for name in {work[i].model_id for i in chosen}:
            mine = [found[i] for i in chosen if work[i].model_id == name]
            for got, *parts in zip(gradients(backend, name), *mine, strict=True):
                expected = torch.stack(parts).sum(0)
                torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4 * max(1.0, expected.abs().max().item()))


def test_two_ranks_and_the_base_in_one_pass(hybrid: BaseModel) -> None:
    adapters = {"a": random_adapter(hybrid, rank=3, seed=1), "b": random_adapter(hybrid, rank=8, seed=2), "base": base_alike(hybrid)}
    render = renderer(hybrid)
    work = [datum(name, render.render([random_tokens(seed, 20 + 9 * seed)]), seed) for seed, name in enumerate(("a", "base", "b", "a"))]
    backend = backend_with(hybrid, **adapters)
    results = compute(backend, work)
    for name, adapter in adapters.items():
        mine = [i for i, item in enumerate(work) if item.model_id == name]
        apart = backend_with(hybrid, **{name: adapter})
        for i, result in zip(mine, compute(apart, [work[i] for i in mine]), strict=True):
            np.testing.assert_allclose(results[i].logprobs, result.logprobs, rtol=1e-6, atol=1e-5)
        for got, expected in zip(gradients(backend, name), gradients(apart, name), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * max(1.0, expected.abs().max().item()))


def base_alike(base: BaseModel) -> Adapter:
    """An adapter that adds nothing."""
    adapter = random_adapter(base, rank=2, seed=5)
    for pair in adapter.masters.values():
        pair.b.zero_()
    adapter.refresh()
    return adapter


def test_a_nan_stays_with_its_model(hybrid: BaseModel) -> None:
    render = renderer(hybrid)
    well, sick = random_adapter(hybrid, rank=4, seed=1), random_adapter(hybrid, rank=4, seed=2)
    for pair in sick.masters.values():
        pair.b.fill_(float("nan"))
    sick.refresh()
    work = [datum(name, render.render([random_tokens(seed, 33)]), seed) for seed, name in enumerate(("sick", "well", "sick"))]
    backend = backend_with(hybrid, sick=sick, well=well)
    results = compute(backend, work)
    assert np.isnan(results[0].logprobs).all()
    apart = backend_with(hybrid, well=well)
    np.testing.assert_allclose(results[1].logprobs, compute(apart, [work[1]])[0].logprobs, rtol=1e-6, atol=1e-5)
    for got, expected in zip(gradients(backend, "well"), gradients(apart, "well"), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5 * max(1.0, expected.abs().max().item()))
