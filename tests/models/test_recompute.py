"""Layers that are computed again, and inputs that wait in host memory: the same bits, and less is kept.

Invariant: Recomputed layers and inputs in host memory change no bit of a gradient; estimates are close to the bytes
that passes take. Also: `tests/training/test_pass_failures.py`.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.bases import datum, load, new_ref, random_adapter, random_tokens, renderer, text, write_family
from tests.counted_memory import CountedMemory
from tests.extent import families, slow
from tests.models.published import SERVED
from tests.models.test_decoder import row_of, run
from tests.training.test_backend import backend_with
from tinsmith.config import ModelsConfig
from tinsmith.memory.pass_memory import PassMemory, Recomputation, pass_memory_of
from tinsmith.memory.sizing import size_of
from tinsmith.models.attention import PackedPlan
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights, new_full_weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.packing import pack
from tinsmith.training.step import run_packed

pytestmark = pytest.mark.usefixtures("two_threads")  # their sums must not depend on what else is computed either

FAMILIES = [
    "qwen3",
    "olmo",
    "gemma2",
    "gemma",
    "gpt_neox",
    "qwen3_vl",
    "qwen3_5",
    "qwen3_moe",
    "qwen3_5_moe",
    "gpt_oss",
]


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
    monkeypatch.setattr("tinsmith.models.decoder.HOST_PIECE", 1000)
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
    assert text_base.active.recompute == 0
    assert text_base.active.full is None


TOKENS, CHUNK = 512, 64
WIDE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "max_position_embeddings": 1024}
"""Sizes of which a row is most of a pass, as it is of real models."""
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 160}
"""Sizes that mixtures of experts read beside them."""


# qwen3 has all that llama has
@pytest.fixture(
    scope="module",
    params=["qwen3", "qwen3_5_text", "ernie4_5", "qwen3_moe", "qwen3_5_moe_text", "gpt_oss", *slow("llama")],
)
def wide_base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> BaseModel:
    """A tiny model of four layers whose row is wide."""
    directory: Path = tmp_path_factory.mktemp("wide")
    write_family(request.param, directory)
    config = AutoConfig.from_pretrained(directory)
    kinds = (
        ["linear_attention", "linear_attention", "linear_attention", "full_attention"]
        if request.param.startswith("qwen3_5")
        else None
    )
    for name, value in (WIDE | EXPERTS | {"layer_types": kinds or ["full_attention"] * 4}).items():
        setattr(config, name, value)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(directory)
    return load(directory, device="cpu")


def memory_of(base: BaseModel) -> PassMemory:
    """The estimate for a loaded model."""
    return pass_memory_of(base.layout, base.text_config, base.dtype)


def test_the_peak_of_a_pass_is_estimated_to_a_fifth(wide_base: BaseModel) -> None:
    backend, memory, peaks = backend_with(wide_base, a=4), memory_of(wide_base), []
    work = [datum("a", renderer(wide_base).render([random_tokens(seed, TOKENS // 2)])) for seed in range(2)]
    for recompute in (0, 3):
        recomputation = Recomputation(recompute)
        with CountedMemory(wide_base.network.parameters()) as counted:
            run_packed(wide_base, work, [backend.optimizers["a"]] * 2, True, CHUNK, recomputation)
        backend.clear_gradients("a")
        assert 0.8 < memory.bytes(TOKENS, CHUNK, recomputation) / counted.peak < 1.2, recompute
        peaks.append(counted.peak)
    assert peaks == sorted(peaks, reverse=True)


@pytest.fixture
def published(tmp_path: Path) -> PassMemory:
    """The estimate for Qwen3.5-4B on a GPU."""
    return size_of(str(SERVED["Qwen/Qwen3.5-4B"].write(tmp_path)), ModelsConfig(device="cpu", dtype="bfloat16")).passes


def test_no_more_is_recomputed_than_the_memory_asks_for(published: PassMemory) -> None:
    sizes = [published.bytes(8192, 1024, Recomputation(count)) for count in range(published.smallest.recompute + 1)]
    assert sizes == sorted(sizes, reverse=True)
    for recompute in (0, 3, published.smallest.recompute):
        assert published.recomputation_for(8192, 1024, sizes[recompute]) == Recomputation(recompute)
    assert published.recomputation_for(8192, 1024, sizes[-1] - 1) is None
