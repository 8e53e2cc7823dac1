"""The canary refuses other weights whatever the size of the logits, and probes show what of an adapter a server
applies.

What is written for a server or merged into weights is what an adapter computes.

Invariant: Trainer and vLLM agree on text and images, for base, adapters and full weights side by side; wrong weights
are never sampled, however little they differ. Also: `tests/with_vllm/test_agreement.py`,
`tests/with_vllm/test_parameters.py`, `tests/with_vllm/test_bfloat16.py`, `tests/with_vllm/test_a_sampler.py`,
`tests/with_vllm/test_transfers.py`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.bases import load, random_adapter, renderer
from tests.sampling.vllm.answering import scores
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights
from tinsmith.models.tiny import write_tiny_model
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.vllm.verify import Canary, Expectation, kind_of, make_probes
from tinsmith.sampling.vllm.weights import WeightFiles

SHAPE = LoraShape(rank=0, seed=0)
FINAL_NORM = "norm.weight"
"""Logits are as large as the gain of the last norm makes them."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model."""
    written = tmp_path_factory.mktemp("canary")
    write_tiny_model("qwen3", written)
    return written


def replies(canary: Canary, logprobs: np.ndarray) -> list[Any]:
    """The prompt_logprobs of a server that has computed these for the text tokens but the first."""
    values = np.zeros(len(canary.rendered))
    values[canary.text] = logprobs
    return scores(canary.rendered.token_ids.tolist(), values[1:].tolist())


def with_larger_logits(base: BaseModel, factor: float, **changed: torch.Tensor) -> FullWeights:
    """The base's weights with logits that are `factor` times as large, and some of them exchanged."""
    own = {name: parameter.detach().clone() for name, parameter in base.full_targets(SHAPE).items()}
    own[FINAL_NORM] = own[FINAL_NORM] * factor
    return FullWeights(SHAPE, own | changed, base.dtype)


@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_correct_weights_that_bfloat16_rounds_are_sampled_from(factor: float, directory: Path) -> None:
    """Float32 stands for a server that rounds elsewhere.

    With logits of 100 that is more than any constant limit would take.
    """
    exact, rounded = load(directory), load(directory, dtype="bfloat16")
    canary = Canary(rounded, renderer(rounded))
    with_float32 = Canary(exact, renderer(exact)).expected(with_larger_logits(exact, factor))
    expected = canary.expected(with_larger_logits(rounded, factor))
    canary.compare(replies(canary, with_float32.logprobs), expected, "these weights")
    assert factor == 1 or canary.difference(replies(canary, with_float32.logprobs), expected) > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("factor", [1.0, 64.0])
def test_slightly_wrong_weights_are_refused(factor: float, dtype: str, directory: Path) -> None:
    """One matrix of one layer is left out, is that of another layer, or is off by a third of its standard deviation."""
    base = load(directory, dtype=dtype)
    canary = Canary(base, renderer(base))
    right = with_larger_logits(base, factor)
    expected, own = canary.expected(right), right.working
    left_out, other, off = (
        "layers.1.self_attn.q_proj.weight",
        "layers.1.self_attn.k_proj.weight",
        "layers.1.mlp.up_proj.weight",
    )
    noise = torch.randn(own[off].shape, generator=torch.Generator().manual_seed(0)) * own[off].float().std() / 3
    for changed in (
        {left_out: torch.zeros_like(own[left_out])},
        {other: own[other.replace("layers.1", "layers.0")]},
        {off: (own[off] + noise).to(base.dtype)},
    ):
        wrong = canary.expected(with_larger_logits(base, factor, **changed))
        with pytest.raises(
            TinsmithError, match="vLLM computes other log-probabilities than the trainer with these weights"
        ):
            canary.compare(replies(canary, wrong.logprobs), expected, "these weights")
    canary.compare(replies(canary, expected.logprobs), expected, "these weights")


@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
@pytest.mark.parametrize("where", ["logprobs", "limit"])
def test_an_expectation_that_is_not_finite_lets_nothing_pass(value: float, where: str, text_base: BaseModel) -> None:
    """Infinity is not more than infinity, so a limit that is infinite would let anything pass.

    One such weight makes all so.
    """
    canary = Canary(text_base, renderer(text_base))
    right = canary.expected(None)
    gain = text_base.full_targets(SHAPE)[FINAL_NORM].detach() * value
    assert not canary.expected(with_larger_logits(text_base, 1.0, **{FINAL_NORM: gain})).is_finite
    logprobs = right.logprobs.copy()
    if where == "logprobs":
        logprobs[0] = value
    expected = Expectation(logprobs, value if where == "limit" else right.limit)
    for answered in (right.logprobs, logprobs, np.full_like(logprobs, value)):
        with pytest.raises(
            TinsmithError, match="the trainer itself computes infinite or NaN log-probabilities with these weights"
        ):
            canary.compare(replies(canary, answered), expected, "these weights")


MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
ATTENTION = {f"self_attn.{part}_proj" for part in "qkvo"}
DELTA_NET = {
    f"linear_attn.{name}" for name in ("in_proj_qkv.q", "in_proj_qkv.k", "in_proj_qkv.v", "in_proj_z", "out_proj")
}


@pytest.mark.parametrize(
    ("base", "kinds"),
    [("vision_base", {"lm_head"} | MLP | ATTENTION), ("hybrid_base", {"lm_head"} | MLP | ATTENTION | DELTA_NET)],
)
def test_each_kind_of_layer_has_a_probe_that_shows(
    base: str, kinds: set[str], request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Far more than the largest difference with which weights are sampled, and in the layers of one kind."""
    model: BaseModel = request.getfixturevalue(base)
    canary, files = Canary(model, renderer(model)), WeightFiles(model, str(tmp_path))
    probes = make_probes(canary, files)
    assert {probe.kind for probe in probes} == kinds
    for probe in probes:
        changed = {kind_of(name) for name, pair in probe.adapter.masters.items() if pair.b.any()}
        assert changed == {probe.kind}
        assert probe.allowed > 10 * probe.expected.limit
        np.testing.assert_array_equal(probe.bare.logprobs, canary.expected(None).logprobs)
        assert probe.change > probe.allowed
        assert probe.is_shown_by(0.9 * probe.allowed)
        assert not any(probe.is_shown_by(difference) for difference in (1.1 * probe.allowed, math.nan, math.inf))
    for value in (-math.inf, math.nan):  # its change is infinite too, and infinity is not more than infinity
        wrong = Expectation(np.full_like(probes[0].bare.logprobs, value), probes[0].bare.limit)
        for broken in (replace(probes[0], expected=wrong), replace(probes[0], bare=wrong)):
            assert not any(broken.is_shown_by(difference) for difference in (0.0, math.inf, math.nan))
    files.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_written_as_passes_read_it(dtype: str, family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    base = load(family_dir("qwen3"), dtype=dtype)
    adapter, files = random_adapter(base), WeightFiles(base, str(tmp_path))
    directory = files.write(adapter)
    written, config = (
        load_file(directory / "adapter_model.safetensors"),
        json.loads((directory / "adapter_config.json").read_text()),
    )
    assert config["lora_alpha"] / config["r"] == adapter.scale
    assert len(written) == len(adapter.leaves())
    for name, pair in adapter.working.items():
        for side, matrix in (("A", pair.a), ("B", pair.b)):
            found = written[f"base_model.model.{base.layout.module_name(name)}.lora_{side}.weight"]
            assert found.dtype == base.dtype
            assert torch.equal(found, matrix.detach())
    files.close()


@torch.no_grad()
@pytest.mark.parametrize("base", ["text_base", "vision_base", "hybrid_base"])
def test_merged_weights_compute_what_an_adapter_does(base: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    model: BaseModel = request.getfixturevalue(base)
    canary, files = Canary(model, renderer(model)), WeightFiles(model, str(tmp_path))
    before = {name: parameter.clone() for name, parameter in files.parameters.items()}
    adapter = random_adapter(model, seed=1, train_unembed=False)
    merged = files.parameters | files.merged(adapter)
    full = FullWeights(LoraShape(rank=0, seed=0), merged, model.dtype)
    expected = canary.expected(adapter).logprobs
    assert np.abs(expected - canary.expected(None).logprobs).mean() > 0.1
    np.testing.assert_allclose(canary.expected(full).logprobs, expected, atol=5e-4)
    assert set(files.tensors(adapter)) == set(files.tensors(None))
    assert all(torch.equal(parameter, before[name]) for name, parameter in files.parameters.items())
    with pytest.raises(UserError, match="its part on the output projection cannot be merged"):
        files.tensors(random_adapter(model, seed=1))
    files.close()
