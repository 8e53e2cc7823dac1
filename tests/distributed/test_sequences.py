"""Processes that compute a sequence together give and learn what one does; what fails on one of them leaves nothing on any.

Each is `python -m tests.distributed.test_sequences RANK COUNT DIRECTORY`; tiny models lie below DIRECTORY/bases.

Invariant: A sequence that several workers compute together has the log-probabilities, losses, gradients and weights of one worker; a
failure on one fails it on all.
Also: `tests/distributed/test_replicas.py`.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.bases import datum, load, picture_chunks, random_tokens, renderer, shifted
from tests.distributed.conftest import Processes
from tests.distributed.devices import ROUNDING, Member, here
from tests.extent import amount, slow
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training import sliced_plan
from tinsmith.training.backend import DatumResult, DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES
from tinsmith.training.sequence_slices import share_heads, slices_of
from tinsmith.wire.chunks import Chunk

SETTINGS = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1, grad_clip_norm=0.0)
"""eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
LENGTHS = amount((97, 64), (97, 64, 75))
"""Tokens of the long sequence of each step, or about as many where it has pictures; two or three workers do not divide all of them."""
STEPS = len(LENGTHS)
CASES = {
    "text": ("text", "text", (4, 8)),
    "pictures": ("image", "pictures", (4,)),
    "hybrid": ("hybrid", "text", (4, 8)),
    "hybrid pictures": ("hybrid", "pictures", (8,)),
    "window": ("window", "text", (4,)),
    "full": ("text", "text", (0,)),
    "full hybrid": ("hybrid", "text", (0,)),
    "gspo": ("text", "gspo", (4,)),
    "many targets": ("text", "many", (4,)),
    "recomputed": ("text", "text", (4,)),
    "recomputed hybrid": ("hybrid", "text", (4,)),
}
"""Base, what is trained on, and the LoRA ranks of the models that train at the same time; 0 is all parameters."""


def work_of(base: BaseModel, model_id: str, what: str, seed: int, length: int) -> DatumWork:
    """A datum of about `length` tokens."""
    chunks: list[Chunk] = [random_tokens(seed, length)]
    if what == "pictures":  # several, one of them cut by the slices of two workers and of three
        chunks = [chunk for part in range(6) for chunk in picture_chunks(base, seed + part, length // 6 - 8)]
    rendered = renderer(base).render(chunks)
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
    base: BaseModel, backend: LocalBackend, case: str, long: Callable[[DatumWork, bool], Any], has_short: bool = True
) -> dict[str, Any]:
    """Train the models of a case. `long` computes a long datum; short ones beside it are one worker's, which others leave out."""
    _, what, ranks = CASES[case]
    models = create_models(backend, ranks)
    found: dict[str, Any] = {}
    for step in range(STEPS):
        for number, model_id in enumerate(models):
            seed = 10 * step + number
            for backward in (False, True):
                result = long(work_of(base, model_id, what, seed, LENGTHS[step]), backward)
                found[f"{model_id} {step} {backward}"] = torch.from_numpy(result.logprobs.copy()), result.loss
            if has_short:
                assert not backend.run_pass([work_of(base, model_id, "text", seed + 5, 9)], backward=True).failures
        for model_id in models:
            totals = backend.optimizers[model_id].totals
            assert totals is not None
            found[f"{model_id} {step} gradients"] = [total.to("cpu", copy=True) for total in totals]
            found[f"{model_id} {step} norm"] = backend.optim_step(model_id, SETTINGS)["grad_norm"]
    for model_id in models:
        found[f"{model_id} weights"] = [leaf.detach().to("cpu", copy=True) for leaf in backend.optimizers[model_id].weights.leaves()]
        backend.delete_model(model_id)
    return found


class Slicing(Member):
    """One process that computes sequences with others."""

    def __init__(self) -> None:
        super().__init__()
        names = {name for name, _, _ in CASES.values()}
        self.bases = {name: load(self.directory / "bases" / name, device=str(here())) for name in names}
        self.number = 0
        self.computed: list[int] = []
        """Tokens of each row that went through the layers of this process."""

    @contextmanager
    def backend_of(self, name: str) -> Iterator[LocalBackend]:
        """A backend, of which the rows are noted while the body runs."""
        base = self.bases[name]
        plain = base.hidden_states

        def noted(row: Any, *arguments: Any, **keywords: Any) -> Tensor:
            self.computed.append(len(row.token_ids))
            return plain(row, *arguments, **keywords)

        base.hidden_states = noted  # type: ignore[method-assign]
        yield LocalBackend(base, TrainingConfig(logits_chunk=16), self.group)
        del base.hidden_states

    def together(self, backend: LocalBackend, work: DatumWork | TinsmithError, backward: bool = True) -> Any:
        self.number += 1
        return backend.run_together(self.number, work, backward)

    def trained(self) -> None:
        for case, (name, _, _) in CASES.items():
            self.computed = []
            with self.backend_of(name) as backend:
                assert backend.sequences is not None
                if case.startswith("recomputed"):
                    backend.sequences.efforts.first = lambda *_: Effort(1)  # type: ignore[method-assign]
                self.found[case] = train(
                    backend.base, backend, case, lambda work, backward: self.together(backend, work, backward), has_short=self.rank == 0
                )
                self.found[f"{case} computed"] = list(self.computed)

    def refused(self) -> None:
        """What fails on the second process alone fails on all, and leaves nothing."""
        with self.backend_of("text") as backend:
            base = backend.base
            (model_id,) = create_models(backend, (4,))
            good = work_of(base, model_id, "text", 1, 97)
            broken = UserError("image 3 is broken") if self.rank == 1 else good
            self.failed("broken", backend, broken)
            self.failed("short", backend, work_of(base, model_id, "text", 1, 20))
            if self.rank != 1:
                backend.create_model("there", LoraShape(4, seed=1))
            self.failed("missing", backend, work_of(base, "there", "text", 1, 97))
            with failing_in("attend", RuntimeError("no kernel"), 1, self.rank):
                self.failed("forward", backend, good)
            with failing_in("backward", RuntimeError("no kernel"), 1, self.rank):
                self.failed("backward", backend, good)
            with failing_in("attend", torch.OutOfMemoryError("no memory"), 10, self.rank):
                self.failed("no memory", backend, good)
            self.computed.clear()
            with failing_in("backward", torch.OutOfMemoryError("no memory"), 1, self.rank):
                self.found["again"] = self.together(backend, good).loss, len(self.computed)
            backend.clear_gradients(model_id)
            self.found["good"] = self.together(backend, good).loss, backend.optimizers[model_id].totals is not None
            backend.clear_gradients(model_id)
            self.number += self.rank
            self.failed("another pass", backend, good)
            self.number -= self.rank

    def alone(self) -> None:
        """All but the first end without a word in the middle of a backward; the first notices in its next exchange."""
        with self.backend_of("text") as backend:
            (model_id,) = create_models(backend, (4,))
            with failing_in("backward", None, 1, min(self.rank, 1)):
                self.failed("alone", backend, work_of(backend.base, model_id, "text", 1, 97))

    def failed(self, name: str, backend: LocalBackend, work: DatumWork | TinsmithError) -> None:
        try:
            self.together(backend, work)
        except TinsmithError as error:
            clean = all(optimizer.totals is None for optimizer in backend.optimizers.values())
            self.found[name] = type(error).__name__, str(error), clean


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
    """The second process fails so many times in the attention of the second layer, forward or backward; without an error it ends there."""
    plain = sliced_plan.SlicedPlan.attend
    left = [times]

    def attend(plan: sliced_plan.SlicedPlan, layer: int, query: Tensor, *others: Any) -> Tensor:
        if rank == 1 and layer == 1 and where == "attend" and error is not None and left[0] > 0:
            left[0] -= 1
            raise error
        if rank == 1 and layer == 1 and where == "backward":
            failing: Any = _Failing.apply
            query = failing(query, error, left)
        return plain(plan, layer, query, *others)

    sliced_plan.SlicedPlan.attend = attend  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        sliced_plan.SlicedPlan.attend = plain  # type: ignore[method-assign]


def main() -> None:
    """Go through all cases; the last one ends all processes but the first."""
    slicing = Slicing()
    slicing.trained()
    slicing.refused()
    slicing.save()
    slicing.alone()
    slicing.save()
    os._exit(0)  # the others are gone: there is nobody to take leave of


WITHIN = 1e-5
"""Of the largest number of a tensor: sums over tokens are added up in another order."""
WITHIN_HYBRID = 5e-4 * ROUNDING
"""Of hybrid models. So much the gradients of the tiny one change if its weights change in their last bit: its delta nets hand on from token
to token what is rounded in another way. A token that is lost or counted twice changes them by a hundredth."""


@pytest.fixture(scope="module")
def alone(bases: Path) -> Callable[[str], dict[str, Any]]:
    """What one worker finds in a case."""

    @cache
    def run(case: str) -> dict[str, Any]:
        base = load(bases / CASES[case][0])
        backend = LocalBackend(base, TrainingConfig(logits_chunk=16))

        def long(work: DatumWork, backward: bool) -> DatumResult:
            (result,) = backend.run_pass([work], backward).results
            assert result is not None
            return result

        return train(base, backend, case, long)

    return run


def far(found: Tensor, expected: Tensor) -> float:
    """The largest difference, of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("count", [2, *slow(3)])  # which heads each of any number computes is tested below
@pytest.mark.parametrize("case", CASES)
def test_everything_is_as_one_worker_computes_it(
    processes: Processes, alone: Callable[[str], dict[str, Any]], case: str, count: int
) -> None:
    """Log-probabilities, losses, the gradient of every parameter, and weights, with short sequences that one process computes.

    Each computes its slice and no more.
    """
    name, what, ranks = CASES[case]
    _, found = processes("test_sequences", count)
    all_found = [of_process[case] for of_process in found]
    for key, expected in alone(case).items():
        of_each = [of_process[key] for of_process in all_found]
        within = WITHIN_HYBRID if name == "hybrid" else WITHIN
        if key.endswith("gradients"):
            for number, parts in enumerate(zip(expected, *of_each, strict=True)):
                assert parts[0].any(), (key, number)
                assert far(sum(parts[1:], torch.zeros(())), parts[0]) < within, (key, number)
        elif key.endswith("weights"):
            for number, (one, first) in enumerate(zip(expected, of_each[0], strict=True)):
                assert far(first, one) < within, (key, number)
                assert all(torch.equal(other[number], first) for other in of_each)
        elif key.endswith("norm"):
            assert of_each == [pytest.approx(expected, rel=within)] * count
            assert len(set(of_each)) == 1
        else:
            (logprobs, loss), (one, one_loss) = of_each[0], expected
            assert far(logprobs, one) < within
            assert loss == pytest.approx(one_loss, abs=within * float(one.abs().sum()))  # the sum of these with weights of either sign
            assert all(torch.equal(other, logprobs) and other_loss == loss for other, other_loss in of_each)
    assert len([key for key in alone(case) if key.endswith("gradients")]) == STEPS * len(ranks)

    rows = [[row for row in of_process[f"{case} computed"] if row != 9] for of_process in found]  # without the short datums of the first
    assert len(rows[0]) == 2 * STEPS * len(ranks)
    for lengths in zip(*rows, strict=True):
        assert max(lengths) - min(lengths) <= 1
    if what != "pictures":
        assert {sum(lengths) for lengths in zip(*rows, strict=True)} == set(LENGTHS)


def test_what_one_cannot_compute_fails_on_all_and_leaves_no_gradient(processes: Processes) -> None:
    """Processes at different passes end instead of mixing them, and who finds the others gone in the middle says so."""
    expected = {
        "broken": ("UserError", "image 3 is broken"),
        "short": ("TinsmithError", "a sequence of 20 tokens is too short to be divided among 2 workers"),
        "missing": ("NotFoundError", "model there is not loaded; create it anew"),
        "forward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
        "backward": ("TinsmithError", "the pass failed: RuntimeError: no kernel"),
        "another pass": ("DeviceLostError", "the workers are not the same any more: the pass that comes next is ["),
        "alone": ("WorkersLostError", "worker 0 of 2 cannot reach the others: "),
    }
    needs = "a sequence of 97 tokens needs more memory than 2 workers together have left"
    expected["no memory"] = ("TinsmithError", f"the pass failed: {needs}: OutOfMemoryError: no memory")
    for rank, found in enumerate(processes("test_sequences", 2)[1]):
        for name, (error, message) in expected.items():
            if rank == 0 or name != "alone":
                assert found[name][::2] == (error, True), name
                assert found[name][1].startswith(message), name


def test_where_memory_ends_on_one_all_recompute_more(processes: Processes) -> None:
    """In the backward of one process, when the others are in theirs: the second attempt gives what none would have failed with."""
    for found in processes("test_sequences", 2)[1]:
        assert found["again"] == (pytest.approx(found["good"][0], rel=1e-6), 2)
        assert found["good"][1]


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
        repeated = [each for each in there for _ in range(len(wanted) // len(there))] if places is None and there else []
        assert (repeated if places is None else [there[place] for place in places]) == wanted


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_slices_cover_a_sequence(count: int) -> None:
    slices = slices_of(50, count)
    assert [token for part in slices for token in range(50)[part]] == list(range(50))
    lengths = [part.stop - part.start for part in slices]
    assert max(lengths) - min(lengths) <= 1


if __name__ == "__main__":
    main()
