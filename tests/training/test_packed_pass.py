"""What a pass gives to the device: as much for many datums as for few."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from tests.bases import datum, random_tokens, renderer
from tests.training.test_backend import backend_with
from tinsmith.models.base import BaseModel
from tinsmith.training.loss_groups import DatumWork
from tinsmith.training.losses import LOSSES


class Counted(TorchDispatchMode):
    """Counts the operations that compute or copy something."""

    def __init__(self) -> None:
        begin: Any = super().__init__
        begin()
        self.count: int = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 0 if function.is_view else 1
        return function(*args, **(kwargs or {}))


def with_loss(item: DatumWork, name: str) -> DatumWork:
    """The datum with another loss, which gets its numbers from the weights."""
    weights = item.loss_inputs["weights"]
    given = {"logprobs": weights - 3, "advantages": weights, "sequence_ratio_mask": np.ones_like(weights), "weights": weights}
    loss = LOSSES[name]
    return replace(item, loss=loss, loss_inputs={key: given[key] for key in loss.inputs})


@pytest.mark.parametrize("names", [("cross_entropy",), ("gspo",), ("stable_reinforce", "ppo")])
def test_many_datums_take_as_many_operations_as_few(text_base: BaseModel, names: tuple[str, ...]) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    backend.config.logits_chunk = 1024  # more than there are positions

    def operations(datums: int) -> int:
        work = [datum("ab"[i % 2], render.render([random_tokens(i, 8)]), i) for i in range(datums)]
        with Counted() as counted:
            outcome = backend.run_pass([with_loss(item, names[i // 2 % len(names)]) for i, item in enumerate(work)], backward=True)
        assert not outcome.failures
        for name in "ab":
            backend.clear_gradients(name)
        return int(counted.count)

    operations(8)
    assert operations(64) == operations(8)


def test_results_are_those_of_their_datums_whatever_losses_share_a_row(text_base: BaseModel) -> None:
    backend, render = backend_with(text_base, a=4, b=4), renderer(text_base)
    plain = [datum("ab"[i % 2], render.render([random_tokens(i, 5 + i % 4)]), i) for i in range(12)]
    work = [with_loss(item, sorted(LOSSES)[i % len(LOSSES)]) for i, item in enumerate(plain)]
    together = backend.run_pass(work, backward=False).results
    for item, result in zip(work, together, strict=True):
        (alone,) = backend.run_pass([item], backward=False).results
        assert alone is not None
        assert result is not None
        np.testing.assert_allclose(result.logprobs, alone.logprobs, rtol=1e-5, atol=1e-5)
        assert result.loss == pytest.approx(alone.loss, rel=1e-4, abs=1e-4)
        assert result.metrics == pytest.approx(alone.metrics, rel=1e-3, abs=1e-4)
        assert set(result.metrics) == set(item.loss.metrics)
