"""The cookbook's `weights` tools, on what they download from a server: the adapters and models that they build have our log-probabilities.

A base model for each of the ways in which the tools name things: an output projection of its own, one that is the embedding, a vision
model, a vision model whose files have other names than transformers, and one with gated delta nets, whose fused layer has three adapters.

Invariant: What the cookbook's `weights` tools build from a download has the model's logprobs, or is refused by them.
Also: `tests/training/test_peft_format.py`.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, scores
from tests.bases import write_family
from tests.recipes.conftest import CACHE
from tests.recipes.workshop import PYTHON
from tests.running import serving

KEY = "tml-recipes"
FAMILIES = {"untied": "llama", "tied": "qwen3", "vision": "qwen3_vl", "vision-renamed": "qwen2_5_vl"}
HYBRID = {"vision-hybrid": "qwen3_5"}
TOOLS = """
import json, sys
from tinker_cookbook import weights
path, base, out = sys.argv[1:]
adapter = weights.download(tinker_path=path, output_dir=f"{out}/download")
calls = {
    "adapter": lambda output: weights.build_lora_adapter(base_model=base, adapter_path=adapter, output_path=output),
    "model": lambda output: weights.build_hf_model(base_model=base, adapter_path=adapter, output_path=output),
}
failures = {}
for name, build in calls.items():
    try:
        build(f"{out}/{name}")
    except Exception as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""
"""Download, then build both; prints what failed."""


@dataclass(frozen=True)
class Bases:
    """A server and the directories of its base models."""

    url: str
    directory: Path


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bases]:
    """A server with all of them."""
    place = tmp_path_factory.mktemp("bases")
    for name, family in (FAMILIES | HYBRID).items():
        write_family(family, place / name)
    options = [option for name in FAMILIES | HYBRID for option in ("--base-model", f"{name}={place / name}")]
    with serving(place, *options, *CACHE) as server:
        server.wait_for_health()
        yield Bases(server.url, place)


def built(bases: Bases, name: str, directory: Path, train_unembed: bool = True) -> tuple[np.ndarray, dict[str, str]]:
    """Train the model for two steps, save, download and build: the log-probabilities here, and what could not be built."""
    with tinker.ServiceClient(base_url=bases.url, api_key=KEY) as service:
        client = service.create_lora_training_client(base_model=name, rank=8, seed=3, train_unembed=train_unembed).result()
        before = scores(client, [ITEM])[0]
        for _ in range(2):
            client.forward_backward([ITEM], "cross_entropy")
            client.optim_step(RAW_STEP).result()
        expected = scores(client, [ITEM])[0]
        assert np.abs(expected - before).max() > 0.1
        path = client.save_weights_external("out").result().path
        environment = os.environ | {"TINKER_BASE_URL": bases.url, "TINKER_API_KEY": KEY}
        command = [str(PYTHON), "-c", TOOLS, path, str(bases.directory / name), str(directory)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    failures: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return expected, failures


def network(directory: Path, name: str) -> Any:
    auto: Any = AutoModelForImageTextToText if name.startswith("vision") else AutoModelForCausalLM
    return auto.from_pretrained(directory)


def with_adapter(bases: Bases, name: str, adapter: Path) -> np.ndarray:
    """What transformers and PEFT compute with an adapter folder."""
    return transformers_logprobs(PeftModel.from_pretrained(network(bases.directory / name, name), str(adapter)))


@pytest.mark.parametrize("name", FAMILIES)
def test_peft_loads_the_adapter_that_the_cookbook_builds(bases: Bases, name: str, tmp_path: Path) -> None:
    """Trained with the default switches, so with the output projection. A model of the same can be built only where the base has its own.

    The download itself is loaded by PEFT too, or refused where the cookbook has to rename it.
    """
    expected, failures = built(bases, name, tmp_path)
    np.testing.assert_allclose(with_adapter(bases, name, tmp_path / "adapter"), expected, atol=1e-4)
    if name == "vision":
        with pytest.raises(ValueError, match="not found in the base model"):
            with_adapter(bases, name, tmp_path / "download")
    else:
        np.testing.assert_allclose(with_adapter(bases, name, tmp_path / "download"), expected, atol=1e-4)
    if name == "untied":
        assert failures == {}
        np.testing.assert_allclose(transformers_logprobs(network(tmp_path / "model", name)), expected, atol=1e-4)
    else:
        assert list(failures) == ["model"]
        assert "does not exist in the model state dict" in failures["model"]
        assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["tied", "vision"])
def test_without_the_output_projection_the_cookbook_merges_into_tied_models_too(bases: Bases, name: str, tmp_path: Path) -> None:
    expected, failures = built(bases, name, tmp_path, train_unembed=False)
    assert failures == {}
    np.testing.assert_allclose(with_adapter(bases, name, tmp_path / "adapter"), expected, atol=1e-4)
    np.testing.assert_allclose(transformers_logprobs(network(tmp_path / "model", name)), expected, atol=1e-4)


def test_the_cookbook_merges_the_three_adapters_of_a_fused_layer(bases: Bases, tmp_path: Path) -> None:
    """Of its PEFT adapter PEFT leaves these three out without a word, as docs/checkpoints.md says."""
    expected, failures = built(bases, "vision-hybrid", tmp_path, train_unembed=False)
    assert failures == {}
    np.testing.assert_allclose(transformers_logprobs(network(tmp_path / "model", "vision-hybrid")), expected, atol=1e-4)
    assert np.abs(with_adapter(bases, "vision-hybrid", tmp_path / "adapter") - expected).max() > 0.01
    with pytest.raises(ValueError, match="not found in the base model"):
        with_adapter(bases, "vision-hybrid", tmp_path / "download")
