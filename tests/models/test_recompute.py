"""Layers that are computed again, and inputs that wait in host memory: the same bits, and less is kept.

Invariant: Recomputed layers and inputs in host memory change no bit of a gradient; estimates are close to the bytes that passes take.
Also: `tests/models/test_pass_memory.py`, `tests/training/test_pass_failures.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bases import load, new_ref, random_adapter, renderer, text
from tests.extent import families
from tests.models.test_decoder import row_of, run
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, new_full_weights
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.packing import pack

pytestmark = pytest.mark.usefixtures("two_threads")  # their sums must not depend on what else is computed either

FAMILIES = ["qwen3", "olmo", "gemma2", "gemma", "gpt_neox", "qwen3_vl", "qwen3_5"]


def assert_equal_bits(base: BaseModel, owners: list[Weights]) -> None:
    """Every number of recomputed layers, with and without host memory, gives what keeping everything gives."""
    layers = base.text_config.num_hidden_layers
    hidden, gradients = run(base, owners)
    assert sum(bool(gradient.any()) for gradient in gradients) > layers
    for recompute, offload in [*((count, False) for count in range(1, layers + 1)), (layers, True)]:
        again, found = run(base, owners, recompute=recompute, offload=offload)
        assert torch.equal(again, hidden)
        assert all(torch.equal(one, other) for one, other in zip(found, gradients, strict=True)), (recompute, offload)


def full_weights(base: BaseModel) -> FullWeights:
    """Other weights than the base's: a backward that read those would be noticed."""
    shape = LoraShape(0, 0)
    weights = new_full_weights(shape, base.full_targets(shape), base.dtype)
    for master in weights.tensors():
        master.mul_(1.25)
    weights.refresh()
    return weights


@pytest.mark.parametrize("kind", ["adapters", "full weights"])
@pytest.mark.parametrize("family", families(FAMILIES))
def test_weights_get_the_same_bits(family_base: Callable[[str], BaseModel], family: str, kind: str) -> None:
    """The backward puts full weights into the layers again while it computes; then they are no part of the base."""
    base = family_base(family)
    before = [parameter.data_ptr() for parameter in base.network.parameters()]
    adapters = [random_adapter(base, seed=1), random_adapter(base, rank=8, seed=2)]
    assert_equal_bits(base, [*adapters] if kind == "adapters" else [full_weights(base)] * 2)
    assert [parameter.data_ptr() for parameter in base.network.parameters()] == before


def test_inputs_that_wait_in_pieces_come_back_as_they_were_also_in_bfloat16(
    family_dir: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith.models.recompute.HOST_PIECE", 1000)
    base = load(family_dir("qwen3"), dtype="bfloat16")
    assert_equal_bits(base, [random_adapter(base, seed=1), random_adapter(base, seed=2)])


def test_passes_without_gradients_and_passes_that_fail_leave_nothing_switched_on(text_base: BaseModel) -> None:
    adapter = random_adapter(text_base, ref=new_ref())
    row = row_of(text_base, [adapter])
    plan = PackedPlan(row.lengths, text_base.device, text_base.dtype)
    with torch.no_grad():
        assert torch.equal(text_base.hidden_states(row, plan, 2), text_base.hidden_states(row, plan))
    broken = pack([renderer(text_base).render([text(5)])], [adapter], text_base.device)
    with pytest.raises((RuntimeError, IndexError)):
        text_base.hidden_states(broken, plan, 2)
    assert text_base.active.segments == []
    assert text_base.recomputed_layers.count == 0
    assert text_base.recomputed_layers.full is None
