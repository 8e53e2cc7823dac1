"""Experts in fewer bits: codes as others read them, and training and sampling as with the matrices that they stand for.

Invariant: Quantized experts compute what the matrices compute that their codes stand for, to the last bit, forward,
backward, recomputed and decoded; no product reads what another layer has unpacked. Also:
`tests/kernels/test_quantized.py`, `tests/distributed/test_sharded.py`.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tests.bases import DEVICE, datum, image_chunks, load, on_host, random_adapter, random_tokens, renderer
from tests.extent import families
from tests.models.test_experts import LENGTHS, choice_of, leaves_of, ours, owners_of, segments_of, stack_of
from tests.models.test_recompute import assert_equal_bits
from tests.sampling.local.test_sampler import PARAMS, ask, run, sampler_of
from tests.training.test_backend import backend_with, compute, gradients
from tinsmith.config import ModelsConfig
from tinsmith.errors import ConfigError, UserError
from tinsmith.memory.sizing import loaded_sizes, size_of
from tinsmith.models.base import BaseModel
from tinsmith.models.decoder import ExpertMLP
from tinsmith.models.quantized import FORMATS, QuantizedMatrices, numbers_of, quantize
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.self_check import check_base_model
from tinsmith.training.backend import DatumResult

FAMILIES = ["qwen3_moe", "qwen3_vl_moe", "qwen3_5_moe", "gpt_oss"]
NAMES = list(FORMATS)


def read_back(name: str, weight: Tensor) -> Tensor:
    """The numbers that codes of these stand for."""
    form = FORMATS[name]
    return numbers_of(*quantize(weight, form), torch.tensor(form.values), form.group)


def random_weight(*shape: int) -> Tensor:
    """Numbers of rows of very different sizes; one is all zeros."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(*shape, generator=generator) * torch.rand(*shape[:-1], 1, generator=generator).exp2() ** 8
    weight[0, 0] = 0
    return weight


# The formats


def test_fp8_is_what_pytorch_rounds_each_row_to() -> None:
    weight = random_weight(3, 7, 200)
    codes, scales = quantize(weight, FORMATS["fp8"])
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == (
        (3, 7, 200),
        torch.uint8,
        (3, 7, 1),
        torch.float32,
    )
    for expert in range(3):
        for row in range(7):
            own = weight[expert, row]
            scale = own.abs().max() / 448 if own.any() else torch.tensor(1 / 448)
            rounded = (own / scale).to(torch.float8_e4m3fn)
            assert torch.equal(codes[expert, row].view(torch.float8_e4m3fn).float(), rounded.float())
            assert torch.equal(read_back("fp8", weight)[expert, row], rounded.float() * scale)


def test_nf4_is_the_nearest_of_its_numbers() -> None:
    """Two codes in a byte, the first in the lower half; the scale is the largest of 64 numbers."""
    codes, scales = quantize(torch.tensor([2.0, -2.0, 0.0, 1.0]), FORMATS["nf4"])
    assert (codes.tolist(), scales.tolist()) == ([15 | 0 << 4, 7 | 12 << 4], [2.0])
    weight = random_weight(2, 3, 150).bfloat16()
    codes, scales = quantize(weight, FORMATS["nf4"])
    assert (codes.shape, scales.shape, scales.dtype) == ((2, 3, 75), (2, 3, 3), torch.bfloat16)
    values, wide = torch.tensor(FORMATS["nf4"].values), weight.float()
    for start in (0, 64, 128):
        own = wide[..., start : start + 64]
        most = own.abs().amax(-1, keepdim=True)
        nearest = values[(own / most.clamp(min=1e-30)).unsqueeze(-1).sub(values).abs().argmin(-1)]
        assert torch.equal(read_back("nf4", weight)[..., start : start + 64], nearest * most)


def test_mxfp4_is_read_as_transformers_reads_it_and_rounds_to_even() -> None:
    given = torch.tensor([6.0, 0.25, 0.75, -1.25, 1.75, 2.5, -3.5, 5.0, 7.9, 0.26] + 22 * [0.0])
    expected = torch.tensor([6.0, 0.0, 1.0, -1.0, 2.0, 2.0, -4.0, 4.0, 6.0, 0.5] + 22 * [0.0])
    for power in (-120.0, -20.0, 0.0, 90.0):
        assert torch.equal(read_back("mxfp4", given * 2.0**power), expected * 2.0**power)
    weight = random_weight(2, 6, 96)
    codes, scales = quantize(weight, FORMATS["mxfp4"])
    assert (codes.shape, scales.shape, scales.dtype) == ((2, 6, 48), (2, 6, 3), torch.uint8)
    theirs = convert_moe_packed_tensors(codes.unflatten(2, (3, 16)), scales, dtype=torch.float32)
    assert torch.equal(read_back("mxfp4", weight), theirs.transpose(1, 2))
    apart = (theirs.transpose(1, 2) - weight).abs().unflatten(2, (3, 32))
    most = weight.abs().unflatten(2, (3, 32)).amax(-1, keepdim=True)
    assert (apart <= most / 4).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("spoiled", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_so(name: str, spoiled: float) -> None:
    weight = random_weight(2, 3, 64)
    weight[1, 2, 5] = spoiled
    found = read_back(name, weight)
    assert not found[1, 2, 5].isfinite()
    assert found[0].isfinite().all()
    assert found[1, :2].isfinite().all()


@pytest.mark.parametrize(("name", "bound"), [("fp8", 0.027), ("nf4", 0.095), ("mxfp4", 0.12)])
def test_errors_of_normal_numbers(name: str, bound: float) -> None:
    weight = torch.randn(4, 64, 2048, generator=torch.Generator().manual_seed(0))
    error = (read_back(name, weight) - weight).square().mean().sqrt()
    assert bound / 1.2 < error < bound


# Base models


def quantized(directory: Path, name: str, **models: str) -> BaseModel:
    return load(directory, expert_dtype=name, **models)


def matrices(base: BaseModel, layer: int = 1) -> list[QuantizedMatrices]:
    stack = stack_of(base, layer)
    found = [own for own in (stack.gate_up, stack.down) if isinstance(own, QuantizedMatrices)]
    assert len(found) == 2
    return found


def twin_of(base: BaseModel, directory: Path) -> BaseModel:
    """An ordinary model with the matrices that the codes of a quantized one stand for."""
    twin = load(directory, device=str(base.device))
    for layer, kind in base.layout.experts.items():
        for parameter, own in zip(("gate_up_proj", "down_proj"), matrices(base, layer), strict=True):
            module = twin.language_model.get_submodule(f"layers.{layer}.mlp.experts")
            before, numbers = module.get_parameter(parameter), own.copied()
            if kind.clamped is not None:
                numbers = numbers.transpose(1, 2)
            assert not torch.equal(before, numbers)
            before.data.copy_(numbers)
    return twin


@pytest.fixture(scope="module", params=families(FAMILIES))
def directory(request: pytest.FixtureRequest, family_dir: Callable[[str], Path]) -> Path:
    return family_dir(request.param)


Found = tuple[list[DatumResult], list[Tensor], list[tuple[list[int], list[float]]]]


def found_by(base: BaseModel) -> Found:
    """Results and gradients of a pass of two ranks, with pictures, and samples of both and of the base in one batch."""
    make, backend = renderer(base), backend_with(base, a=4, b=12)
    rendered = [make.render([random_tokens(seed, length)]) for seed, length in enumerate((30, 7, 19))]
    if base.family.takes_images:
        rendered.append(make.render(image_chunks(base, 7, 9)))
    results = compute(backend, [datum("ab"[i % 2], own, i) for i, own in enumerate(rendered)])
    sampler = sampler_of(base)
    for number, adapter in enumerate((None, random_adapter(base, 4), random_adapter(base, 12, seed=1))):
        sampler.add(str(number), ask(replace(PARAMS, seed=number)), rendered[-1], adapter)
    answers = run(sampler)
    return (
        results,
        [*gradients(backend, "a"), *gradients(backend, "b")],
        [(answer.tokens, answer.logprobs) for i in range(3) for answer in answers[str(i)].sequences],
    )


@pytest.mark.parametrize("name", NAMES)
def test_it_trains_and_samples_as_the_matrices_that_it_stands_for(directory: Path, name: str) -> None:
    base = quantized(directory, name)
    results, mine, answers = found_by(base)
    expected, theirs, wanted = found_by(twin_of(base, directory))
    # GPT-OSS's own matrices lie the other way round, and their products are rounded otherwise: on a GPU, which adds up
    # more numbers at a time, losses of 21 by 2e-5.
    apart = (1e-5 if DEVICE == "cpu" else 1e-4) if base.family.model_type == "gpt_oss" else 0
    for one, other in zip(results, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, abs=apart)
        np.testing.assert_allclose(one.logprobs, other.logprobs, rtol=0, atol=apart)
    for gradient, other_gradient in zip(mine, theirs, strict=True):
        assert gradient.any()
        torch.testing.assert_close(gradient, other_gradient, rtol=0, atol=apart * float(gradient.abs().max()))
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(answers, wanted, strict=True):
        assert tokens == other_tokens
        np.testing.assert_allclose(logprobs, other_logprobs, rtol=0, atol=apart)


def test_layers_that_are_recomputed_give_the_same_bits(directory: Path) -> None:
    base = quantized(directory, "nf4")
    assert_equal_bits(base, [random_adapter(base, seed=1), random_adapter(base, rank=8, seed=2)])


@pytest.mark.parametrize("name", NAMES)
def test_no_product_reads_what_others_have_unpacked(family_dir: Callable[[str], Path], name: str) -> None:
    """Backward of one layer behind the forward of another; what no row needs may be anything there."""
    base = quantized(family_dir("qwen3_moe"), name)
    stacks, twin = [stack_of(base, layer) for layer in (0, 1)], twin_of(base, family_dir("qwen3_moe"))
    segments, h = segments_of(owners_of(base)), random_rows(base)
    outs, wanted = [], []
    scratch = matrices(base)[0].scratch
    assert all(own.scratch is scratch for layer in (0, 1) for own in matrices(base, layer))
    for number, stack in enumerate(stacks):
        scratch.numbers.fill_(torch.nan)
        weights, chosen = (
            part.to(h.dtype) if part.is_floating_point() else part for part in choice_of(stack, [1, 4, 6])
        )
        x = h.clone().requires_grad_()
        outs.append((ours(stack, x, weights, chosen, segments), [x, *leaves_of(stack, segments).values()]))
        other = x.detach().clone().requires_grad_()
        out = ours(stack_of(twin, number), other, weights, chosen, segments)
        wanted.append((out, [other, *leaves_of(stack, segments).values()]))
    for (out, leaves), (expected, others) in zip(outs, wanted, strict=True):
        scratch.numbers.fill_(torch.nan)
        assert torch.equal(out, expected)
        found = torch.autograd.grad(out.square().sum(), leaves)
        theirs = torch.autograd.grad(expected.square().sum(), others)
        assert all(torch.equal(one, other) for one, other in zip(found, theirs, strict=True))


def random_rows(base: BaseModel) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(sum(LENGTHS), base.text_config.hidden_size, generator=generator).to(DEVICE)


@pytest.mark.parametrize("name", NAMES)
def test_it_is_held_once_and_as_large_as_planned(directory: Path, name: str) -> None:
    """The network has the same tensors, and none of the matrices beside them."""
    base, models = quantized(directory, name), ModelsConfig(device=DEVICE, dtype="float32", expert_dtype=name)
    held = {tensor.data_ptr(): tensor.nbytes for tensor in (*base.network.parameters(), *base.network.buffers())}
    for layer in base.layout.experts:
        for own in matrices(base, layer):
            assert {own.codes.data_ptr(), own.scales.data_ptr()} <= held.keys()
    read, loaded, whole = size_of(str(directory), models), loaded_sizes(base, 1), loaded_sizes(load(directory), 1)
    scratch = matrices(base)[0].scratch.numbers.nbytes
    rope = base.language_model.rotary_emb.inv_freq.nbytes
    assert 0 <= sum(held.values()) + scratch - read.weight_bytes <= 8 * rope
    for sizes in (loaded, whole):
        assert (sizes.parameters, sizes.layer_parameters) == (read.parameters, read.layer_parameters)
    assert (loaded.weight_bytes, loaded.scratch_bytes) == (read.weight_bytes, scratch)
    assert read.weight_bytes < whole.weight_bytes


@pytest.mark.parametrize("name", NAMES)
def test_it_does_not_matter_how_many_numbers_are_quantized_at_a_time(
    family_dir: Callable[[str], Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, found = quantized(family_dir("qwen3_moe"), name), []
    monkeypatch.setattr("tinsmith.models.quantized.AT_ONCE", 3 * 96 * 64)  # of eight experts three, or six
    other = quantized(family_dir("qwen3_moe"), name)
    for mine, theirs in zip(matrices(one), matrices(other), strict=True):
        assert torch.equal(mine.codes, theirs.codes)
        assert torch.equal(mine.scales, theirs.scales)
        found.append(mine.copied())
    monkeypatch.undo()
    assert all(torch.equal(copy, own.copied()) for copy, own in zip(found, matrices(one), strict=True))


@pytest.mark.parametrize("family", ["qwen3_5_moe", "gpt_oss"])
@pytest.mark.parametrize("name", NAMES)
def test_layers_in_host_memory_are_the_same(family_dir: Callable[[str], Path], name: str, family: str) -> None:
    directory = family_dir(family)
    there, whole = on_host(directory, device=DEVICE, expert_dtype=name), quantized(directory, name)
    backends, rendered = (
        [backend_with(each, m=4) for each in (there, whole)],
        renderer(whole).render([random_tokens(0, 20)]),
    )
    (one,), (other,) = (compute(backend, [datum("m", rendered)]) for backend in backends)
    np.testing.assert_array_equal(one.logprobs, other.logprobs)
    pairs = zip(*(gradients(backend, "m") for backend in backends), strict=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
    layers = there.language_model.layers
    assert {tensor.device.type for tensor in (*layers.parameters(), *layers.buffers())} == {"cpu"}


@pytest.mark.parametrize("name", NAMES)
def test_the_self_check_passes_and_looks_at_the_codes(family_dir: Callable[[str], Path], name: str) -> None:
    base = quantized(family_dir("qwen3_moe"), name)
    check_base_model(base, samples=True)
    assert base.decoder is not None
    first, *others = base.decoder.layers
    assert isinstance(first.mlp, ExpertMLP)
    gate_up, _ = matrices(base, 0)
    wrong = replace(gate_up, codes=gate_up.codes.roll(1, 0))
    mlp = replace(first.mlp, stack=replace(first.mlp.stack, gate_up=wrong))
    base.decoder = replace(base.decoder, layers=(replace(first, mlp=mlp), *others))
    with pytest.raises(ConfigError, match="transformers computes other log-probabilities"):
        check_base_model(base, samples=False)


# What is refused


def test_a_model_that_is_no_mixture_is_refused(family_dir: Callable[[str], Path]) -> None:
    with pytest.raises(
        ConfigError, match="--expert-dtype fp8 is for mixtures of experts, and this qwen3 is none; omit"
    ):
        quantized(family_dir("qwen3"), "fp8")
    with pytest.raises(ConfigError, match="--expert-dtype nf4 is for mixtures of experts"):
        size_of(str(family_dir("qwen3")), ModelsConfig(device="cpu", expert_dtype="nf4"))


def test_experts_of_odd_widths_have_no_codes_of_four_bits(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    config = json.loads((family_dir("qwen3_moe") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"moe_intermediate_size": 47}))
    for name in ("nf4", "mxfp4"):
        with pytest.raises(ConfigError, match=f"--expert-dtype {name}: its experts have a width of 47, an odd number"):
            size_of(str(tmp_path), ModelsConfig(device="cpu", expert_dtype=name))
    assert size_of(str(tmp_path), ModelsConfig(device="cpu", expert_dtype="fp8")).weight_bytes


def test_all_parameters_are_not_trained_nor_loaded(family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    """By name, and before anything is made; the server goes on."""
    backend = backend_with(quantized(family_dir("qwen3_moe"), "fp8"), adapter=4)
    refused = (
        "tiny has no full parameters .rank 0. to train or sample: its experts are held in fp8; use adapters, or start"
    )
    with pytest.raises(UserError, match=refused):
        backend.create_model("full", LoraShape(0, 0))
    whole = backend_with(load(family_dir("qwen3_moe")), full=0)
    with pytest.raises(UserError, match=refused):
        backend.restore("full", whole.copy_state("full", optimizer=False))
    assert list(backend.optimizers) == ["adapter"]
