"""What is written for a server or merged into weights is what an adapter computes; probes change what they say by so much that it shows."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.bases import load, random_adapter, renderer
from tinsmith.errors import UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.sampling.vllm.canary import Canary, Expectation
from tinsmith.sampling.vllm.probes import kind_of, make_probes
from tinsmith.sampling.vllm.weights import WeightFiles

MLP = {"mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
ATTENTION = {f"self_attn.{part}_proj" for part in "qkvo"}
DELTA_NET = {f"linear_attn.{name}" for name in ("in_proj_qkv.q", "in_proj_qkv.k", "in_proj_qkv.v", "in_proj_z", "out_proj")}


@pytest.mark.parametrize(
    ("base", "kinds"), [("vision_base", {"lm_head"} | MLP | ATTENTION), ("hybrid_base", {"lm_head"} | MLP | ATTENTION | DELTA_NET)]
)
def test_each_kind_of_layer_has_a_probe_that_shows(base: str, kinds: set[str], request: pytest.FixtureRequest, tmp_path: Path) -> None:
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
    files.close()


@pytest.mark.parametrize("value", [-math.inf, math.nan])
def test_a_probe_that_is_not_finite_shows_nothing(value: float, text_base: BaseModel, tmp_path: Path) -> None:
    """Its change is infinite too, and infinity is not more than infinity."""
    files = WeightFiles(text_base, str(tmp_path))
    probe = make_probes(Canary(text_base, renderer(text_base)), files)[0]
    files.close()
    assert probe.is_shown_by(0.0)
    wrong = Expectation(np.full_like(probe.bare.logprobs, value), probe.bare.limit)
    for broken in (replace(probe, expected=wrong), replace(probe, bare=wrong)):
        assert not any(broken.is_shown_by(difference) for difference in (0.0, math.inf, math.nan))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_is_written_as_passes_read_it(dtype: str, family_dir: Callable[[str], Path], tmp_path: Path) -> None:
    base = load(family_dir("qwen3"), dtype=dtype)
    adapter, files = random_adapter(base), WeightFiles(base, str(tmp_path))
    directory = files.write(adapter)
    written, config = load_file(directory / "adapter_model.safetensors"), json.loads((directory / "adapter_config.json").read_text())
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
