"""Passes that are replayed: rows of other lengths, other adapters and newer weights, and nothing of the row before.

Invariant: A pass that is replayed as a CUDA graph gives the log-probabilities and gradients of one that is not,
whatever row, adapter and weights came before.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, datum, image_chunks, load, random_tokens, renderer
from tests.training.test_backend import STEP, assert_same, backend_with, compute, gradients
from tinsmith.models.base import BaseModel
from tinsmith.models.lora import Adapter
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training import captured_pass
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.captured_pass import PATIENCE, CapturedPasses
from tinsmith.training.optimizer import ModelOptimizer
from tinsmith.training.paged_state import StatePager


def replaying(base: BaseModel, **ranks: int) -> LocalBackend:
    """A backend whose small passes are replayed: as CUDA graphs on a GPU, elsewhere by calling the same functions on
    the same tensors."""
    backend = backend_with(base, **ranks)
    record = None if DEVICE == "cuda" else lambda function: function
    backend.memory.captured = CapturedPasses(base, backend.passes.memory_retries.memory, 16, record)
    assert backend.memory.captured.possible
    return backend


def work_of(base: BaseModel, model: str, *lengths: int, seed: int = 0) -> list[DatumWork]:
    """Text of these lengths for a model."""
    render = renderer(base).render
    return [datum(model, render([random_tokens(seed + number, length)])) for number, length in enumerate(lengths)]


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe", "gpt_oss"])
def base(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> BaseModel:
    """A text model, in half precision on a GPU, which captures nothing else.

    The biases of Qwen2 make tokens that fill a row differ from 0.
    """
    base = load(family_dir(request.param), dtype="float32" if DEVICE == "cpu" else "bfloat16")
    for name, parameter in base.language_model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_(std=0.3, generator=torch.Generator(parameter.device).manual_seed(0))
    return base


BOUND = 1e-4 if DEVICE == "cpu" else 0.02


def test_replayed_passes_are_those_that_are_not(base: BaseModel) -> None:
    """One kind of pass in a row: its first row is captured, and every later one differs from it in all that is copied
    into the frame."""
    backend, plain = replaying(base, a=4, b=4), backend_with(base, a=4, b=4)
    rows = [("a", (40, 60)), ("a", (7, 120, 30)), ("b", (7, 120, 30)), ("b", (256,)), ("a", (3,)), ("b", (1, 1, 1))]
    for number, (model, lengths) in enumerate([rows[0]] * (PATIENCE - 1) + rows):
        work = work_of(base, model, *lengths, seed=10 * number)
        for found, wanted in zip(compute(backend, work), compute(plain, work), strict=True):
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=BOUND, atol=BOUND)
        assert_same(gradients(backend, model), gradients(plain, model), BOUND)
        compute(backend, work), compute(plain, work)
        for one in (backend, plain):  # the next row is computed with newer weights
            one.optim_step(model, STEP)
    assert [kind.tokens for kind in backend.memory.captured.passes] == [256]


def test_replayed_passes_follow_adapters_that_were_paged_out(base: BaseModel) -> None:
    """What comes back lies elsewhere than where it was captured."""
    backend, plain = replaying(base, a=4, b=4), backend_with(base, a=4, b=4)
    memory, shape = backend.memory, LoraShape(4, 0)
    memory.pager = StatePager(base.device, memory.lora_bytes(shape).training, host_room=2**30)
    for optimizer in backend.optimizers.values():
        assert isinstance(optimizer, ModelOptimizer)
        assert isinstance(optimizer.weights, Adapter)
        memory.pager.add(optimizer, optimizer.weights, memory.lora_bytes(shape))
    memory.pager.leave_only([backend.optimizers["a"]])
    for number, model in enumerate("a" * PATIENCE + "baab"):
        work = work_of(base, model, 40, 60 - number, seed=10 * number)
        for found, wanted in zip(compute(backend, work), compute(plain, work), strict=True):
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=BOUND, atol=BOUND)
        for one in (backend, plain):
            one.optim_step(model, STEP)
    assert memory.pager.page_ins == 3
    assert len(memory.captured.passes) == 1


def test_other_passes_are_computed_as_they_are(base: BaseModel, vision_base: BaseModel) -> None:
    backend = replaying(base, a=4, b=8, full=0)
    mixed = [
        *work_of(base, "a", 20),
        *work_of(base, "b", captured_pass.TOKENS[-1] // 2, captured_pass.TOKENS[-1] // 2, 1),
    ]
    long = work_of(base, "a", *[captured_pass.TOKENS[-1] // 4] * 4, 1)
    for work in (mixed, long, work_of(base, "full", 20)):
        for _ in range(PATIENCE):
            compute(backend, work)
    backend.run_pass(work_of(base, "a", 20), backward=False)
    assert not backend.memory.captured.passes
    assert not CapturedPasses(base, backend.passes.memory_retries.memory, 16).possible or DEVICE == "cuda"
    if DEVICE == "cpu":
        seeing = replaying(vision_base, a=4)
        images = [datum("a", renderer(vision_base).render(image_chunks(vision_base, 0, 20)))]
        for _ in range(PATIENCE):
            compute(seeing, images)
        assert not seeing.memory.captured.passes


def test_small_texts_of_several_adapters_are_replayed_one_by_one(base: BaseModel) -> None:
    """From the second time on, each as its own graph, where that takes no longer than all in one row.

    Replays accumulate.

    A model whose LM head is trained too gets the head's gradient, which no graph computes.
    """
    backend, plain = replaying(base, a=4, b=8), backend_with(base, a=4, b=8)
    for seed in range(PATIENCE + 1):
        work = [
            *work_of(base, "a", 20, 30, seed=seed),
            *work_of(base, "b", 40, seed=seed + 5),
            *work_of(base, "a", 9, seed=seed + 7),
        ]
        for found, wanted in zip(compute(backend, work), compute(plain, work), strict=True):
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=BOUND, atol=BOUND)
        for graph in backend.memory.captured.passes.values():
            graph.seconds = 0.0
    for model in ("a", "b"):
        assert_same(gradients(backend, model), gradients(plain, model), BOUND)
    assert len(backend.memory.captured.passes) == 2


def test_texts_of_a_mixture_are_computed_together_unless_launching_takes_longer(base: BaseModel) -> None:
    """A pass reads its experts once, however many texts are in it: twice the tokens take less than twice the time."""
    backend = replaying(base, a=4, b=8)
    for _ in range(PATIENCE):
        compute(backend, [*work_of(base, "a", 256), *work_of(base, "b", 256)])
    captured = backend.memory.captured
    adapters = [backend.optimizers[name].weights for name in "ab"]
    rows = [([256], adapter) for adapter in adapters if isinstance(adapter, Adapter)]
    assert len(captured.passes) == len(rows) == 2
    for graph in captured.passes.values():
        graph.seconds, graph.launched_s = 1.0, 1.6
    mixture = base.layout.mixture is not None
    assert captured.are_faster_apart(rows) is not mixture
    for graph in captured.passes.values():
        graph.launched_s = 2.0
    assert captured.are_faster_apart(rows)


def test_graphs_give_way_to_passes_that_need_their_memory_and_come_back_after_a_while(
    base: BaseModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured_pass, "PAUSE", 2)
    backend = replaying(base, a=4, b=8)
    work = [*work_of(base, "a", 20), *work_of(base, "b", 20)]
    for _ in range(PATIENCE):
        compute(backend, work)
    assert len(backend.memory.captured.passes) == 2
    assert backend.memory.give_back()
    compute(backend, work)
    assert (len(backend.memory.captured.passes), backend.memory.captured.held) == (0, 0)
    for _ in range(2 + PATIENCE):
        compute(backend, work)
    assert len(backend.memory.captured.passes) == 2


def test_models_with_delta_nets_are_not_captured(hybrid_base: BaseModel) -> None:
    assert not CapturedPasses(
        hybrid_base, backend_with(hybrid_base).passes.memory_retries.memory, 16, lambda function: function
    ).possible


@pytest.mark.parametrize("reason", ["fails", "differs"])
def test_what_cannot_be_captured_is_computed_as_it_is(
    base: BaseModel, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    backend, plain = backend_with(base, a=4), backend_with(base, a=4)

    def record(function: Callable[[], None]) -> Callable[[], None]:
        if reason == "fails":
            raise RuntimeError("operation not permitted when stream is capturing")
        return lambda: None

    backend.memory.captured = CapturedPasses(base, backend.passes.memory_retries.memory, 16, record)
    for seed in range(PATIENCE + 1):
        work = work_of(base, "a", 30, 50, seed=seed)
        compute(backend, work), compute(plain, work)
    assert_same(gradients(backend, "a"), gradients(plain, "a"), BOUND)
    assert not backend.memory.captured.passes
    assert ("not permitted" if reason == "fails" else "computes something else") in caplog.text
