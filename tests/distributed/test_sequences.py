"""Processes that compute a sequence together act as one; what fails on one of them leaves nothing on any.

Invariant: A sequence that several workers compute together has the log-probabilities, losses, gradients and weights of
one worker; a failure on one fails it on all. Also: `tests/distributed/test_replicas.py`.
"""

import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import datum, image_chunks, random_tokens, renderer, shifted
from tests.distributed.devices import ROUNDING
from tests.distributed.members import Member, in_processes
from tests.extent import amount, slow
from tests.training.test_replay import random_routes
from tinsmith.config import TrainingConfig
from tinsmith.errors import DeviceLostError, NotFoundError, TinsmithError, UserError, WorkersLostError
from tinsmith.memory.pass_memory import Recomputation
from tinsmith.models.base import BaseModel
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES
from tinsmith.training.paged_state import StatePager
from tinsmith.training.parallel import sequence_parallel
from tinsmith.training.parallel.sequence_parallel import SequenceParallelPlan, share_heads, slices_of
from tinsmith.wire.chunks import Chunk

TRAINING = TrainingConfig(logits_chunk=16)
SETTINGS = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1, grad_clip_norm=0.0)
"""eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
LENGTHS = amount((97, 64), (97, 64, 75))
"""Tokens of each step's long sequence (with images, about as many); two or three workers do not divide all of them."""
STEPS = len(LENGTHS)
CASES = {
    "text": ("text", "text", (4, 8)),
    "images": ("image", "images", (4,)),
    "hybrid": ("hybrid", "text", (4, 8)),
    "hybrid images": ("hybrid", "images", (8,)),
    "window": ("window", "text", (4,)),
    "full": ("text", "text", (0,)),
    "full hybrid": ("hybrid", "text", (0,)),
    "gspo": ("text", "gspo", (4,)),
    "many targets": ("text", "many", (4,)),
    "recomputed": ("text", "text", (4,)),
    "recomputed hybrid": ("hybrid", "text", (4,)),
    "experts": ("experts", "images", (4, 8)),
    "full experts": ("experts", "text", (0,)),
    "hybrid experts": ("hybrid experts", "text", (4,)),
    "followed experts": ("experts", "routes", (4,)),
    "sinks": ("sinks", "text", (4,)),
    "full sinks": ("sinks", "text", (0,)),
}
"""Base, what is trained on, and the LoRA ranks of the models that train at the same time; 0 is all parameters."""
WITHIN = 1e-5
"""Of the largest number of a tensor: sums over tokens are added up in another order."""
WITHIN_HYBRID = 5e-4 * ROUNDING
"""Of hybrid models: the tiny one's gradients change so much if its weights change in their last bit.

Its delta nets carry rounding on from token to token. A lost or repeated token changes gradients by a hundredth.
"""
PASSES = itertools.count(1)
"""Numbers of what is computed together."""
SHORT = 9
"""Tokens of what one computes beside it."""


def work_of(base: BaseModel, model_id: str, what: str, seed: int, length: int) -> DatumWork:
    """A datum of about `length` tokens."""
    chunks: list[Chunk] = [random_tokens(seed, length)]
    if what == "images":  # several, one of them cut by the slices of two workers and of three
        chunks = [chunk for part in range(6) for chunk in image_chunks(base, seed + part, length // 6 - 8)]
    rendered = renderer(base).render(chunks)
    if what == "routes":  # the last tokens choose freely
        routes = random_routes(base, length, seed)
        routes[:, -30:] = -1
        rendered = replace(rendered, routes=routes)
    generator = np.random.default_rng(seed)
    count = len(rendered)
    if what == "many":
        return datum(model_id, rendered, seed, np.stack([shifted(rendered), generator.integers(0, 1500, count)], 1))
    if what == "gspo":
        mask = (np.arange(count) > 5).astype(np.float32)
        advantages = (mask * generator.normal(size=count)).astype(np.float32)
        sampled = np.full(count, -7.6, dtype=np.float32)
        inputs = {"logprobs": sampled, "advantages": advantages, "sequence_ratio_mask": mask}
        return DatumWork(model_id, rendered, shifted(rendered), LOSSES["gspo"], inputs)
    return datum(model_id, rendered, seed)


def create_models(backend: LocalBackend, ranks: tuple[int, ...]) -> list[str]:
    """Models of these ranks; the B of an adapter is away from 0, so that its A has gradients too."""
    for rank in ranks:
        backend.create_model(f"m{rank}", LoraShape(rank, seed=rank))
        if rank:
            weights: Any = backend.optimizers[f"m{rank}"].weights
            generator = torch.Generator().manual_seed(rank)
            for pair in weights.masters.values():
                pair.b.copy_(torch.randn(pair.b.shape, generator=generator) * 0.05)
            weights.refresh()
    return [f"m{rank}" for rank in ranks]


def train(
    backend: LocalBackend, case: str, long: Callable[[DatumWork, bool], DatumResult], has_short: bool = True
) -> dict[str, Any]:
    """Train the models of a case.

    `long` computes a long datum; short ones beside it are one worker's, which others leave out.

    Returns log-probabilities, losses, gradients, norms and weights.
    """
    _, what, ranks = CASES[case]
    models = create_models(backend, ranks)
    found: dict[str, Any] = {"logprobs": [], "losses": [], "gradients": [], "norms": [], "weights": []}
    for step in range(STEPS):
        for number, model_id in enumerate(models):
            seed = 10 * step + number
            for backward in (False, True):
                result = long(work_of(backend.base, model_id, what, seed, LENGTHS[step]), backward)
                found["logprobs"].append(torch.from_numpy(result.logprobs.copy()))
                found["losses"].append(result.loss)
            if has_short:
                assert not backend.run_pass(
                    [work_of(backend.base, model_id, "text", seed + 5, SHORT)], backward=True
                ).failures
        for model_id in models:
            totals = backend.optimizers[model_id].accumulator.totals
            assert totals is not None
            found["gradients"] += [total.to("cpu", copy=True) for total in totals]
            found["norms"].append(backend.optim_step(model_id, SETTINGS)["grad_norm"])
    for model_id in models:
        found["weights"] += [
            leaf.detach().to("cpu", copy=True) for leaf in backend.optimizers[model_id].weights.leaves()
        ]
        backend.delete_model(model_id)
    return found


def train_alone(base: BaseModel, case: str) -> dict[str, Any]:
    """What one worker finds in a case."""
    backend = LocalBackend(base, TRAINING)

    def long(work: DatumWork, backward: bool) -> DatumResult:
        (result,) = backend.run_pass([work], backward).results
        assert result is not None
        return result

    return train(backend, case, long)


@contextmanager
def noted_rows(base: BaseModel) -> Iterator[list[int]]:
    """The lengths of the rows that go through the layers of this process while the body runs."""
    lengths, plain = [], base.hidden_states

    def noted(row: Any, *arguments: Any, **keywords: Any) -> Tensor:
        lengths.append(len(row.token_ids))
        return plain(row, *arguments, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(base, "hidden_states", noted)
        yield lengths


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@in_processes(2, *slow(3))  # which heads each of any number computes is tested below
def test_everything_is_as_one_worker_computes_it(member: Member) -> None:
    """Logprobs, losses, all gradients and weights, beside short sequences that one process computes.

    Each computes its slice and no more.
    """
    bases = {name: member.base(name) for name, _, _ in CASES.values()}
    for case, (name, what, ranks) in CASES.items():
        backend = LocalBackend(bases[name], TRAINING, member.group)
        assert backend.sequences is not None
        if case.startswith("recomputed"):
            backend.sequences.memory_retries.first = lambda *_: Recomputation(1)  # type: ignore[method-assign]
        with noted_rows(bases[name]) as rows:
            own = train(backend, case, partial(together, backend), has_short=member.rank == 0)
        all_found = member.of_all(own)
        for lengths in zip(*member.of_all([row for row in rows if row != SHORT]), strict=True):
            assert max(lengths) - min(lengths) <= 1
            assert what == "images" or sum(lengths) in LENGTHS
        assert len(rows) == (3 if member.rank == 0 else 2) * STEPS * len(ranks)
        for found in all_found:
            for kind in ("logprobs", "weights"):
                assert all(torch.equal(one, other) for one, other in zip(found[kind], own[kind], strict=True))
            assert (found["losses"], found["norms"]) == (own["losses"], own["norms"])
        if member.rank == 0:
            alone, within = train_alone(bases[name], case), WITHIN_HYBRID if name.startswith("hybrid") else WITHIN
            for kind in ("logprobs", "weights"):
                assert max(far(one, other) for one, other in zip(own[kind], alone[kind], strict=True)) < within
            for expected, *parts in zip(alone["gradients"], *(found["gradients"] for found in all_found), strict=True):
                assert expected.any()
                assert far(sum(parts, torch.zeros(())), expected) < within
            assert own["norms"] == pytest.approx(alone["norms"], rel=within)
            for loss, expected, logprobs in zip(own["losses"], alone["losses"], alone["logprobs"], strict=True):
                assert loss == pytest.approx(expected, abs=within * float(logprobs.abs().sum()))  # it sums them up


def together(
    backend: LocalBackend, work: DatumWork | TinsmithError, backward: bool = True, apart: int = 0
) -> DatumResult:
    return backend.run_together(next(PASSES) + apart, work, backward)


class _Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, error: Exception | None, left: list[int]) -> Tensor:
        ctx.error, ctx.left = error, left
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.left[0] > 0:
            ctx.left[0] -= 1
            if ctx.error is None:
                os._exit(0)
            raise ctx.error
        return grads[0], None, None


@contextmanager
def failing_in(where: str, error: Exception | None, times: int, rank: int) -> Iterator[None]:
    """Rank 1 fails `times` times in layer 1's attention, forward or backward; without an error it ends there."""
    plain = sequence_parallel.SequenceParallelPlan.attend
    left = [times]

    def attend(plan: sequence_parallel.SequenceParallelPlan, layer: int, query: Tensor, *others: Any) -> Tensor:
        if rank == 1 and layer == 1 and where == "attend" and error is not None and left[0] > 0:
            left[0] -= 1
            raise error
        if rank == 1 and layer == 1 and where == "backward":
            failing: Any = _Failing.apply
            query = failing(query, error, left)
        return plain(plan, layer, query, *others)

    sequence_parallel.SequenceParallelPlan.attend = attend  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        sequence_parallel.SequenceParallelPlan.attend = plain  # type: ignore[method-assign]


@in_processes(2)
def test_what_one_cannot_compute_fails_on_all_and_leaves_no_gradient(member: Member) -> None:
    """Processes at different passes end instead of mixing them."""
    backend, is_second = LocalBackend(member.base("text"), TRAINING, member.group), member.rank == 1
    (model_id,) = create_models(backend, (4,))
    good, short = (work_of(backend.base, model_id, "text", 1, length) for length in (97, 20))
    if not is_second:
        backend.create_model("there", LoraShape(4, seed=1))
    missing = work_of(backend.base, "there", "text", 1, 97)

    def fails(error: type[TinsmithError], says: str, work: DatumWork | TinsmithError, apart: int = 0) -> None:
        with pytest.raises(TinsmithError, match=f"^{says}") as raised:
            together(backend, work, apart=apart)
        assert raised.type is error
        assert all(optimizer.accumulator.totals is None for optimizer in backend.optimizers.values())

    fails(UserError, "image 3 is broken", UserError("image 3 is broken") if is_second else good)
    fails(TinsmithError, "a sequence of 20 tokens is too short to be divided among 2 workers", short)
    fails(NotFoundError, "model there is not loaded; create it anew", missing)
    for where in ("attend", "backward"):
        with failing_in(where, RuntimeError("no kernel"), 1, member.rank):
            fails(TinsmithError, "the pass failed: RuntimeError: no kernel", good)
    needs = "a sequence of 97 tokens needs more memory than 2 workers together have left"
    with failing_in("attend", torch.OutOfMemoryError("no memory"), 10, member.rank):
        fails(TinsmithError, f"the pass failed: {needs}: no memory", good)
    fails(
        DeviceLostError,
        r"the workers are not the same any more: the pass that comes next is \[",
        good,
        apart=member.rank,
    )


@in_processes(2)
def test_where_memory_ends_on_one_all_recompute_more(member: Member) -> None:
    """In one's backward, while the others are in theirs; the second attempt gives what one without failure would."""
    backend = LocalBackend(member.base("text"), TRAINING, member.group)
    (model_id,) = create_models(backend, (4,))
    good, optimizer, found = work_of(backend.base, model_id, "text", 1, 97), backend.optimizers[model_id], []
    for failures in (1, 0):
        with (
            noted_rows(backend.base) as rows,
            failing_in("backward", torch.OutOfMemoryError("no memory"), failures, member.rank),
        ):
            found.append(
                (together(backend, good).loss, [total.clone() for total in optimizer.accumulator.totals or []])
            )
        assert len(rows) == 1 + failures
        backend.clear_gradients(model_id)
    (again, totals), (loss, expected) = found
    assert again == pytest.approx(loss, rel=1e-6)
    assert expected
    assert all(far(one, other) < WITHIN for one, other in zip(totals, expected, strict=True))


@in_processes(2)
def test_where_memory_ends_on_one_other_models_leave_before_the_sequence_is_refused(member: Member) -> None:
    """They left the device of the first worker before: it computes again all the same."""
    backend, plain = LocalBackend(member.base("text"), TRAINING, member.group), SequenceParallelPlan.attend
    backend.memory.pager = pager = StatePager(backend.base.device, 2**40, host_room=2**30)
    model_id, other = create_models(backend, (4, 8))
    good = work_of(backend.base, model_id, "text", 1, 97)
    expected = together(backend, good).loss
    backend.clear_gradients(model_id)
    if member.rank == 0:
        pager.leave_only([backend.optimizers[model_id]])

    def attend(plan: SequenceParallelPlan, *given: Any) -> Tensor:
        if pager.is_on_device(backend.optimizers[other]):
            raise torch.OutOfMemoryError("no memory")
        return plain(plan, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SequenceParallelPlan, "attend", attend)
        assert together(backend, good).loss == pytest.approx(expected, rel=1e-6)
    assert not pager.is_on_device(backend.optimizers[other])
    assert backend.optimizers[model_id].accumulator.totals is not None


@in_processes(2)
def test_who_finds_the_others_gone_in_the_middle_says_so(member: Member) -> None:
    """All but the first end without a word in the middle of a backward; the first notices in its next exchange.

    This comes last.
    """
    backend = LocalBackend(member.base("text"), TRAINING, member.group)
    (model_id,) = create_models(backend, (4,))
    with (
        failing_in("backward", None, 1, min(member.rank, 1)),
        pytest.raises(WorkersLostError, match=r"^worker 0 of 2 cannot reach"),
    ):
        together(backend, work_of(backend.base, model_id, "text", 1, 97))
    assert backend.optimizers[model_id].accumulator.totals is None


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(("heads", "shared"), [(4, 2), (4, 1), (14, 2), (32, 8), (6, 6), (8, 4)])
def test_every_head_is_computed_once_beside_those_that_it_shares(heads: int, shared: int, count: int) -> None:
    shares = share_heads(heads, shared, count)
    assert [head for part in shares.heads for head in range(heads)[part]] == list(range(heads))
    counts = [part.stop - part.start for part in shares.heads]
    assert max(counts) - min(counts) <= (heads // shared if shared >= count else 1)
    for own, theirs, places in zip(shares.heads, shares.shared, shares.places, strict=True):
        wanted = [head // (heads // shared) for head in range(heads)[own]]
        there = list(range(shared)[theirs])
        assert there == sorted(set(wanted))
        repeated = (
            [each for each in there for _ in range(len(wanted) // len(there))] if places is None and there else []
        )
        assert (repeated if places is None else [there[place] for place in places]) == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_cover_a_sequence(count: int) -> None:
    slices = slices_of(50, count)
    assert [token for part in slices for token in range(50)[part]] == list(range(50))
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= 1
