"""Passes that find too little memory: what they recompute, that it changes nothing, and what is learnt from them."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.bases import DEVICE, datum, load, random_tokens, renderer
from tests.counted_memory import CountedMemory
from tests.training.test_backend import backend_with, gradients
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import KEEP_ALL, Effort, PassMemory
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.efforts import PATIENCE, Efforts
from tinsmith.training.packed_pass import run_packed

MEMORY = PassMemory(kept=(100, 100, 100, 100), input=10, transient=20, ends=0, logits=0)
"""A model of four layers."""
TOKENS = 2**20


def efforts(device: str = "cpu", free: int = 2**50) -> Efforts:
    """The decisions where so many bytes of this machine's memory are not promised to others."""
    return Efforts(MEMORY, torch.device(device), 1, lambda: int(-free / 0.95))


def peak_of(backend: LocalBackend, base: BaseModel, work: Sequence[DatumWork], effort: Effort) -> int:
    """What a pass takes at once."""
    counted = CountedMemory(base.network.parameters())
    with counted:
        run_packed(base, work, [backend.optimizers[item.model_id] for item in work], True, backend.config.logits_chunk, effort)
    return counted.peak


@pytest.mark.skipif(DEVICE != "cpu", reason="counts the memory of the CPU")
def test_a_sequence_that_does_not_fit_is_recomputed_with_the_same_gradients(family_dir: Callable[[str], Path]) -> None:
    base = load(family_dir("qwen3_5"))
    backend = backend_with(base, a=4)
    work = [datum("a", renderer(base).render([random_tokens(0, 300)]))]
    kept, recomputed = (peak_of(backend, base, work, effort) for effort in (KEEP_ALL, backend.efforts.memory.smallest))
    assert recomputed < 0.6 * kept
    backend.clear_gradients("a")
    backend.run_pass(work, backward=True)
    expected = gradients(backend, "a")
    with CountedMemory(base.network.parameters(), limit=(kept + recomputed) / 2) as limited:
        outcome = backend.run_pass(work, backward=True)
    assert limited.refused == 1
    assert outcome.failures == {}
    assert all(torch.equal(one, other) for one, other in zip(gradients(backend, "a"), expected, strict=True))
    assert backend.tokens_per_pass == backend.config.tokens_per_pass
    with CountedMemory(base.network.parameters(), limit=recomputed / 2):
        refused = backend.run_pass(work, backward=True)
    assert "a sequence of 300 tokens needs more memory than cpu has left" in refused.failures[0]
    assert backend.optimizers["a"].gradients is None


@pytest.mark.skipif(DEVICE != "cuda", reason="limits the memory of a GPU")
def test_a_gpu_that_runs_out_of_memory_computes_the_same_gradients(family_dir: Callable[[str], Path]) -> None:
    """Its allocator really refuses: a pass that keeps everything does not fit, one that recomputes does."""
    base = load(family_dir("qwen3"), dtype="bfloat16")
    tokens = 2**18  # so many that other tensors of this process count for little
    base.max_context = tokens
    backend = LocalBackend(base, TrainingConfig())
    backend.create_model("a", LoraShape(4, 0))
    work = [datum("a", renderer(base).render([random_tokens(0, tokens)]))]
    allocated, reserved = [], []
    for effort in (KEEP_ALL, backend.efforts.memory.smallest):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run_packed(base, work, [backend.optimizers["a"]], True, backend.config.logits_chunk, effort)
        allocated.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
        backend.clear_gradients("a")
    kept, recomputed = allocated[0], reserved[1]  # with less than the one it fails, and with the other it does not
    assert recomputed < kept
    backend.run_pass(work, backward=True)
    expected = gradients(backend, "a")
    backend.clear_gradients("a")
    backend.efforts.first = lambda tokens, backward: KEEP_ALL  # type: ignore[method-assign]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction((kept + recomputed) / 2 / torch.cuda.get_device_properties(0).total_memory)
    try:
        assert backend.run_pass(work, backward=True).failures == {}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert backend.efforts.factor > 1  # it ran out once
    for one, other in zip(gradients(backend, "a"), expected, strict=True):
        assert float((one - other).norm()) <= 0.01 * float(other.norm())  # attention's sums on a GPU have no fixed order


def test_the_free_memory_decides_how_much_is_recomputed() -> None:
    plenty, scarce = efforts(), efforts(free=-(2**60))
    assert plenty.first(TOKENS, backward=True) == KEEP_ALL
    assert scarce.first(TOKENS, backward=True) == MEMORY.smallest
    assert scarce.first(TOKENS, backward=False) == KEEP_ALL
    assert scarce.first(100, backward=True) == KEEP_ALL  # nothing that anybody would notice


def test_what_passes_took_corrects_the_estimate() -> None:
    decisions = efforts()
    estimated = decisions.estimate(TOKENS, KEEP_ALL)
    decisions.learn(expected=100, before=1000, former=1100, peak=1150)
    assert decisions.estimate(TOKENS, KEEP_ALL) == pytest.approx(1.5 * estimated)
    decisions.learn(expected=100, before=200, former=1150, peak=1150)  # it took at most 950, and perhaps little
    assert decisions.factor == 1.5
    for _ in range(100):
        decisions.learn(expected=100, before=1070, former=1150, peak=1150)
    assert decisions.estimate(TOKENS, KEEP_ALL) == pytest.approx(0.8 * estimated, rel=1e-3)


def test_after_an_out_of_memory_more_is_recomputed_and_in_the_end_nothing_helps() -> None:
    decisions = efforts("cuda")
    assert decisions.more(KEEP_ALL, 100, alone=False) == Effort(3)
    assert decisions.more(Effort(3), 100, alone=False) is None
    assert decisions.more(Effort(3), 100, alone=True) == Effort(4, offload=True)
    assert decisions.more(Effort(4, offload=True), 100, alone=True) is None
    assert decisions.more(Effort(3), 2**50, alone=True) is None  # which the host has no room for
    assert decisions.factor > 1
    assert efforts().more(Effort(3), 100, alone=True) is None


def test_a_sequence_that_waited_in_host_memory_may_do_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps pinned memory, which the machine does not count as free until it is given back."""
    decisions, needed = efforts("cuda", free=0), MEMORY.host_bytes(TOKENS, Effort(4, offload=True))
    free = [needed // 2]
    monkeypatch.setattr("tinsmith.training.efforts.free_memory", lambda device: free[-1])
    assert decisions.more(Effort(3), TOKENS, alone=True) is None
    monkeypatch.setattr("tinsmith.training.efforts.give_back_pinned_memory", lambda: free.append(2 * needed))
    assert decisions.more(Effort(3), TOKENS, alone=True) == Effort(4, offload=True)
    assert decisions.more(Effort(3), TOKENS, alone=True) == Effort(4, offload=True)
    assert len(free) == 2  # what is pinned stays so where there is room


def test_passes_grow_again_after_a_while(text_base: BaseModel) -> None:
    backend, work = backend_with(text_base, a=4), [datum("a", renderer(text_base).render([random_tokens(0, 5)]))]
    whole = backend.config.tokens_per_pass
    backend.tokens_per_pass = whole // 4
    found = []
    for _ in range(2 * PATIENCE):
        found.append(backend.tokens_per_pass)
        backend.run_pass(work, backward=False)
    assert found == [whole // 4] * PATIENCE + [whole // 2] * PATIENCE
    assert backend.tokens_per_pass == whole
