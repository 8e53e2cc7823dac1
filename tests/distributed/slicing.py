"""One of several processes that compute sequences together: `python -m tests.distributed.slicing RANK COUNT DIRECTORY`.

Tiny models lie below DIRECTORY/bases.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.bases import datum, load, picture_chunks, random_tokens, renderer, shifted
from tests.distributed.devices import Member, here
from tinsmith.config import TrainingConfig
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.pass_memory import Effort
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.training import sliced_plan
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES
from tinsmith.wire.chunks import Chunk

SETTINGS = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1.0, weight_decay=0.1, grad_clip_norm=0.0)
"""eps=1 keeps a gradient near 0 from moving a weight by its sign alone."""
LENGTHS = (97, 64, 75)
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


if __name__ == "__main__":
    main()
