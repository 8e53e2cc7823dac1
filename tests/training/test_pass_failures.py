"""A pass that fails: only the datum whose fault it is, and no gradient counts twice; where memory ends, layers are
recomputed.

It really runs out in processes of their own, whose address space is limited.

Invariant: Memory that runs out anywhere in a pass counts no gradient twice.
"""

import ctypes
import math
import re
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bases import DEVICE, datum, load, random_tokens, renderer, write_decoder
from tests.counted_memory import CountedMemory
from tests.training.test_against_peft import SETTINGS, full_backend, step_all
from tests.training.test_backend import assert_same, backend_with, compute, gradients
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError
from tinsmith.memory.budget import full_bytes
from tinsmith.memory.pass_memory import KEEP_ALL, PassMemory, Recomputation
from tinsmith.memory.retries import PATIENCE, MemoryRetries
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.checkpoint import read_state, write_state
from tinsmith.training.step import run_packed

on_cpu = pytest.mark.skipif(DEVICE != "cpu", reason="counts or limits the memory of the CPU")

ERRORS: dict[str, Exception | str] = {
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "torch": RuntimeError("The size of tensor a (6) must match the size of tensor b (7)"),
    "python": IndexError("index 9 is out of bounds"),
    "shape": "the pass failed: ValueError: cannot reshape array of size 8 into shape (7",
    "gone": "model gone is not loaded; create it anew",
}
"""What torch raises, or what is said of numbers for another length and of a model that memory had no room for."""


@pytest.mark.parametrize("kind", sorted(ERRORS))
def test_one_bad_datum_fails_alone_and_the_results_of_the_others_are_their_own(
    text_base: BaseModel, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    work = [datum("ab"[i % 2], render.render([random_tokens(i, 5 + i)]), i) for i in range(7)]
    alone = [result for item in work if item is not work[2] for result in compute(backend, [item])]
    expected = {name: gradients(backend, name) for name in "ab"}
    run, error = backend.passes._run, ERRORS[kind]

    def failing(some: Sequence[DatumWork], backward: bool, recomputation: Recomputation) -> list[DatumResult]:
        if isinstance(error, Exception) and any(item is work[2] for item in some):
            raise error
        return run(some, backward, recomputation)

    monkeypatch.setattr(backend.passes, "_run", failing)
    if kind == "gone":
        work[2] = replace(work[2], model_id="gone")
    elif kind == "shape":
        work[2] = replace(work[2], loss_inputs={"weights": np.ones(8, np.float32)})

    outcome = backend.run_pass(work, backward=True)

    assert list(outcome.failures) == [2]
    assert str(error) in outcome.failures[2]
    assert outcome.results[2] is None
    for one, together in zip(alone, [result for i, result in enumerate(outcome.results) if i != 2], strict=True):
        assert together is not None
        np.testing.assert_allclose(together.logprobs, one.logprobs, rtol=2e-6, atol=1e-5)
    for name in "ab":
        assert_same(gradients(backend, name), expected[name])
    assert (backend.passes.tokens_per_pass < backend.config.tokens_per_pass) == (kind == "memory")


@pytest.mark.parametrize(
    ("family", "dtype", "passes_before"),
    [("qwen3", "float32", 0), ("qwen3", "bfloat16", 1), ("qwen3_moe", "float32", 1), ("gpt_oss", "float32", 1)],
)
def test_memory_that_runs_out_at_any_operation_of_a_pass_counts_no_gradient_twice(
    family_dir: Callable[[str], Path], family: str, dtype: str, passes_before: int
) -> None:
    base = load(family_dir(family), dtype=dtype)
    backend, render = backend_with(base, a=4, b=4), renderer(base)
    work = [datum("ab"[i % 2], render.render([random_tokens(i, 6)]), i) for i in range(4)]

    def run(fails: int) -> tuple[int, dict[str, list[torch.Tensor]]]:
        for _ in range(passes_before):
            compute(backend, work)
        with CountedMemory(fails=fails) as memory:
            assert len(compute(backend, work)) == 4
        return memory.operations, {name: gradients(backend, name) for name in "ab"}

    total, expected = run(fails=0)
    # The copy to the host, what makes the sums of both models ready, the end of the backward pass, and far inside of
    # the pass.
    for at in (total, total - 1, total - 20, total - 50, total // 2):
        _, found = run(at)
        for name in "ab":
            for gradient, wanted in zip(found[name], expected[name], strict=True):
                # Halves round otherwise than the whole does; a gradient that counted twice would be off by all of
                # itself.
                assert (gradient - wanted).norm() <= 0.05 * wanted.norm()


MEMORY = PassMemory(kept=(100, 100, 100, 100), input=10, transient=20, ends=0, logits=0)
"""A model of four layers."""
TOKENS = 2**20


def memory_retries(device: str = "cpu", free: int = 2**50) -> MemoryRetries:
    """The decisions where so many bytes of this machine's memory are not promised to others."""
    return MemoryRetries(MEMORY, torch.device(device), 1, lambda: int(-free / 0.95))


@on_cpu
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_sequence_that_does_not_fit_is_recomputed_with_the_same_gradients(
    family_dir: Callable[[str], Path], family: str
) -> None:
    base = load(family_dir(family))
    backend = backend_with(base, a=4)
    work = [datum("a", renderer(base).render([random_tokens(0, 300)]))]
    peaks = []
    for recomputation in (KEEP_ALL, backend.passes.memory_retries.memory.smallest):
        with CountedMemory(base.network.parameters()) as counted:
            run_packed(base, work, [backend.optimizers["a"]], True, backend.config.logits_chunk, recomputation)
        peaks.append(counted.peak)
    kept, recomputed = peaks
    assert recomputed < 0.6 * kept
    backend.clear_gradients("a")
    backend.run_pass(work, backward=True)
    expected = gradients(backend, "a")
    with CountedMemory(base.network.parameters(), limit=(kept + recomputed) / 2) as limited:
        outcome = backend.run_pass(work, backward=True)
    assert limited.refused == 1
    assert outcome.failures == {}
    assert all(torch.equal(one, other) for one, other in zip(gradients(backend, "a"), expected, strict=True))
    assert backend.passes.tokens_per_pass == backend.config.tokens_per_pass
    with CountedMemory(base.network.parameters(), limit=recomputed / 2):
        refused = backend.run_pass(work, backward=True)
    assert "a sequence of 300 tokens needs more memory than cpu has left" in refused.failures[0]
    assert backend.optimizers["a"].accumulator.gradients is None


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
    for recomputation in (KEEP_ALL, backend.passes.memory_retries.memory.smallest):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        run_packed(base, work, [backend.optimizers["a"]], True, backend.config.logits_chunk, recomputation)
        allocated.append(torch.cuda.max_memory_allocated())
        reserved.append(torch.cuda.max_memory_reserved())
        backend.clear_gradients("a")
    kept, recomputed = allocated[0], reserved[1]  # with less than the one it fails, and with the other it does not
    assert recomputed < kept
    backend.run_pass(work, backward=True)
    expected = gradients(backend, "a")
    backend.clear_gradients("a")
    retries = backend.passes.memory_retries
    chosen, more = [], retries.more
    retries.first = lambda tokens, backward: KEEP_ALL  # type: ignore[method-assign]
    retries.more = lambda recomputation, *rest, **how: chosen.append(recomputation) or more(recomputation, *rest, **how)  # type: ignore[func-returns-value,method-assign]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (kept + recomputed) / 2 / torch.cuda.get_device_properties(0).total_memory
    )
    try:
        assert backend.run_pass(work, backward=True).failures == {}
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert chosen == [KEEP_ALL]
    for one, other in zip(gradients(backend, "a"), expected, strict=True):
        # attention's sums on a GPU have no fixed order
        assert float((one - other).norm()) <= 0.01 * float(other.norm())


def test_the_free_memory_decides_how_much_is_recomputed() -> None:
    plenty, scarce = memory_retries(), memory_retries(free=-(2**60))
    assert plenty.first(TOKENS, backward=True) == KEEP_ALL
    assert scarce.first(TOKENS, backward=True) == MEMORY.smallest
    assert scarce.first(TOKENS, backward=False) == KEEP_ALL
    assert scarce.first(100, backward=True) == KEEP_ALL  # nothing that anybody would notice


def test_after_an_out_of_memory_more_is_recomputed_and_in_the_end_nothing_helps() -> None:
    decisions = memory_retries("cuda")
    assert decisions.more(KEEP_ALL, 100, alone=False) == Recomputation(3)
    assert decisions.more(Recomputation(3), 100, alone=False) is None
    assert decisions.more(Recomputation(3), 100, alone=True) == Recomputation(4, offload=True)
    assert decisions.more(Recomputation(4, offload=True), 100, alone=True) is None
    assert decisions.more(Recomputation(3), 2**50, alone=True) is None  # which the host has no room for
    assert decisions.factor > 1
    assert memory_retries().more(Recomputation(3), 100, alone=True) is None


def test_a_sequence_that_waited_in_host_memory_may_do_so_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch keeps pinned memory, which the machine does not count as free until it is given back."""
    decisions, needed = memory_retries("cuda", free=0), MEMORY.host_bytes(TOKENS, Recomputation(4, offload=True))
    free = [needed // 2]
    monkeypatch.setattr("tinsmith.memory.retries.free_memory", lambda device: free[-1])
    assert decisions.more(Recomputation(3), TOKENS, alone=True) is None
    monkeypatch.setattr("tinsmith.memory.retries.give_back_pinned_memory", lambda: free.append(2 * needed))
    assert decisions.more(Recomputation(3), TOKENS, alone=True) == Recomputation(4, offload=True)
    assert decisions.more(Recomputation(3), TOKENS, alone=True) == Recomputation(4, offload=True)
    assert len(free) == 2  # what is pinned stays so where there is room


def test_passes_grow_again_after_a_while(text_base: BaseModel) -> None:
    backend, work = backend_with(text_base, a=4), [datum("a", renderer(text_base).render([random_tokens(0, 5)]))]
    whole = backend.config.tokens_per_pass
    backend.passes.tokens_per_pass = whole // 4
    found = []
    for _ in range(2 * PATIENCE):
        found.append(backend.passes.tokens_per_pass)
        backend.run_pass(work, backward=False)
    assert found == [whole // 4] * PATIENCE + [whole // 2] * PATIENCE
    assert backend.passes.tokens_per_pass == whole


@pytest.fixture
def leave() -> Callable[[float], None]:
    """Leaves so many bytes to this process, or all there are.

    What is freed goes back to the system: no limit finds room in it.
    """
    ctypes.CDLL(None).mallopt(-3, 2**16)  # M_MMAP_THRESHOLD
    unlimited = resource.getrlimit(resource.RLIMIT_AS)

    def limit(spare: float) -> None:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, unlimited if spare == math.inf else (used + int(spare), unlimited[1]))

    return limit


@on_cpu
@pytest.mark.alone
def test_a_pass_is_split_and_gives_the_same_gradients_and_what_can_never_fit_is_refused(
    text_base: BaseModel, leave: Callable[[float], None]
) -> None:
    """Passes with less and less memory: 8 x 512 tokens, then one sequence of 8000, until one is too large."""
    backend, render = backend_with(text_base, a=4, b=8), renderer(text_base)
    backend.config.logits_chunk = 64
    work = [datum("ab"[i % 2], render.render([random_tokens(i, 512)]), i) for i in range(8)]
    for item in work:
        backend.run_pass([item], backward=True)
    expected = {name: gradients(backend, name) for name in "ab"}

    def run_short_of_memory(work: Sequence[DatumWork]) -> Mapping[int, str]:
        for mib in (32, 16, 8, 4, 2, 1, 0):
            backend.passes.tokens_per_pass = 8192
            for name in backend.optimizers:
                backend.clear_gradients(name)
            leave(mib * 2**20)
            outcome = backend.run_pass(work, backward=True)
            leave(math.inf)
            if outcome.failures or backend.passes.tokens_per_pass < 8192:
                break
        return outcome.failures

    assert run_short_of_memory(work) == {}
    assert backend.passes.tokens_per_pass <= 2048
    for name in "ab":
        assert_same(gradients(backend, name), expected[name], 1e-4)
    failures = run_short_of_memory([datum("a", render.render([random_tokens(0, 8000)]))])
    assert "a sequence of 8000 tokens needs more memory than cpu has left" in failures[0]


@on_cpu
@pytest.mark.alone
def test_a_step_without_memory_changes_nothing_and_the_model_goes_on(
    tmp_path: Path, leave: Callable[[float], None]
) -> None:
    """So many rows that no memory freed before has room for the moments of the embedding."""
    write_decoder("qwen3", tmp_path, vocab_size=200_000, num_hidden_layers=1, tie_word_embeddings=True)
    backend = full_backend(base := load(tmp_path), "starved", "fed")
    work = [datum(name, renderer(base).render([random_tokens(0, 9)])) for name in ("starved", "fed")]
    backend.run_pass(work[:1], backward=True)
    starved, fed = (backend.optimizers[name] for name in ("starved", "fed"))
    before = [tensor.clone() for tensor in starved.weights.tensors()]
    leave(2**24)
    with pytest.raises(
        TinsmithError,
        match=r"^the step was refused, the gradients are cleared and the weights stay as .*: it needs more memory",
    ):
        backend.optim_step("starved", SETTINGS)
    leave(math.inf)
    assert all(torch.equal(a, b) for a, b in zip(before, starved.weights.tensors(), strict=True))
    assert (starved.accumulator.gradients, starved.moments()) == (None, {})
    step_all(backend, work)
    assert all(torch.equal(a, b) for a, b in zip(fed.weights.tensors(), starved.weights.tensors(), strict=True))


@on_cpu
@pytest.mark.alone
def test_models_that_do_not_fit_beside_the_others_are_refused_with_both_numbers(
    text_base: BaseModel, tmp_path: Path, leave: Callable[[float], None]
) -> None:
    backend = full_backend(text_base, "first")
    first = backend.optimizers["first"]
    write_state(backend.copy_state("first", optimizer=False), tmp_path / "saved")

    def refused(needed: int, spare: int, make: Callable[[], object]) -> None:
        leave(spare)
        with pytest.raises(
            TinsmithError, match=r" needs (\S+) GiB of memory on cpu, of which (\S+) GiB are free; "
        ) as error:
            make()
        said, free = map(float, re.findall(r"(\S+) GiB", str(error.value))[:2])
        assert said == pytest.approx(needed / 2**30, rel=0.1)
        assert 0 < free < said

    needed = full_bytes(first.weights.parameter_count, text_base.dtype, "float32").device
    for make in (
        lambda: backend.create_model("second", LoraShape(0, 0)),
        lambda: backend.restore("second", read_state(tmp_path / "saved", text_base)),
    ):
        refused(needed, first.unclaimed + needed // 2, make)
    assert list(backend.optimizers) == ["first"]
    leave(needed + first.unclaimed * 3 // 4)
    backend.restore("first", read_state(tmp_path / "saved", text_base))  # beside what it held itself there was no room
    first = backend.optimizers["first"]
    copied = first.weights.nbytes
    refused(copied, first.unclaimed + copied // 2, lambda: backend.copy_state("first", optimizer=False))
