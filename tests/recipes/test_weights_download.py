"""The cookbook's `weights` tools on downloads from a server: adapters and models that they build have our logprobs.

A base model for each of the ways in which the tools name things: an output projection of its own, one that is the
embedding, a vision model, a vision model whose files have other names than transformers, one with gated delta nets,
whose fused layer has three adapters, and mixtures of experts.

Invariant: What the cookbook's `weights` tools build from a download has the model's logprobs, or is refused by them.
Also: `tests/training/test_peft_format.py`.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, scores
from tests.recipes.workshop import PYTHON, Workshop

CASES = {
    ("untied", True): (True, True),
    ("tied", True): (True, False),
    ("tied", False): (True, True),
    ("vision", True): (False, False),
    ("vision", False): (False, True),
    ("vision-renamed", True): (True, False),
    ("vision-hybrid", False): (False, True),
    ("experts", False): (False, True),
    ("experts-in-turns", True): (False, True),
    ("vision-experts", False): (False, True),
}
"""(Base model, whether the LM head is trained): (PEFT takes the download as it is, the cookbook can merge).

It cannot merge an output projection that is the embedding.
"""
LACKING = ("vision-hybrid", "vision-experts", "experts-in-turns")
"""Base models of which the cookbook's PEFT adapter lacks something."""
TOOLS = """
import json, sys
from tinker_cookbook import weights
failures = {}
for path, base, out in json.loads(sys.argv[1]):
    adapter = weights.download(tinker_path=path, output_dir=f"{out}/download")
    try:
        if base:
            weights.build_lora_adapter(base_model=base, adapter_path=adapter, output_path=f"{out}/adapter")
            weights.build_hf_model(base_model=base, adapter_path=adapter, output_path=f"{out}/model")
    except Exception as error:
        failures[out] = str(error)
print(json.dumps(failures))
"""
"""Download each, then build adapter and model, if there is a base for them; prints what failed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What belongs to a case is in `place / name / str(train_unembed)`."""
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def trained(random_models: Workshop, place: Path) -> tuple[dict[Any, np.ndarray], dict[str, str]]:
    """The logprobs of models after two steps that were saved, downloaded and built, and the failures, by case."""
    key, expected, asked = "tml-recipes", {}, []
    with tinker.ServiceClient(base_url=random_models.url, api_key=key) as service:
        for name, train_unembed in CASES:
            client = service.create_lora_training_client(
                base_model=name, rank=8, seed=3, train_unembed=train_unembed
            ).result()
            before = scores(client, [ITEM])[0]
            for _ in range(2):
                client.forward_backward([ITEM], "cross_entropy")
                client.optim_step(RAW_STEP).result()
            expected[name, train_unembed] = scores(client, [ITEM])[0]
            assert np.abs(expected[name, train_unembed] - before).max() > 0.1
            path, out = client.save_weights_external("out").result().path, place / name / str(train_unembed)
            asked.append((path, str(random_models.directory / name), str(out)))
            if (name, train_unembed) == ("tied", True):
                asked.append((client.save_state("out").result().path, "", str(place / "to train on")))
        environment = os.environ | {"TINKER_BASE_URL": random_models.url, "TINKER_API_KEY": key}
        command = [str(PYTHON), "-c", TOOLS, json.dumps(asked)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=800)
    assert done.returncode == 0, done.stderr
    return expected, json.loads(done.stdout.splitlines()[-1])


def network(directory: Path, name: str) -> Any:
    auto: Any = AutoModelForImageTextToText if name.startswith("vision") else AutoModelForCausalLM
    return auto.from_pretrained(directory)


@pytest.mark.parametrize(("name", "train_unembed"), CASES)
def test_what_the_cookbook_builds_has_our_logprobs(
    random_models: Workshop,
    place: Path,
    trained: tuple[dict[Any, np.ndarray], dict[str, str]],
    name: str,
    train_unembed: bool,
) -> None:
    """The cookbook merges a fused layer's three adapters; its PEFT adapter lacks them, as docs/checkpoints.md says.

    The experts of Qwen3.5 and GPT-OSS too.
    """
    expected, own = trained[0][name, train_unembed], place / name / str(train_unembed)
    takes_download, merges = CASES[name, train_unembed]

    def difference(adapter: str) -> float:
        """How far transformers and PEFT are from us with an adapter folder."""
        with_adapter = PeftModel.from_pretrained(network(random_models.directory / name, name), str(own / adapter))
        return float(np.abs(transformers_logprobs(with_adapter) - expected).max())

    assert difference("adapter") > 0.01 if name in LACKING else difference("adapter") < 1e-4
    if takes_download:
        assert difference("download") < 1e-4
    else:
        with pytest.raises(ValueError, match="not found in the base model"):
            difference("download")
    if merges:
        np.testing.assert_allclose(transformers_logprobs(network(own / "model", name)), expected, atol=1e-4)
    else:
        assert "does not exist in the model state dict" in trained[1][str(own)]
    assert (own / "model").exists() == merges


def test_a_downloaded_checkpoint_to_train_on_is_loaded_by_peft(
    random_models: Workshop, place: Path, trained: tuple[dict[Any, np.ndarray], dict[str, str]]
) -> None:
    """It comes encrypted, and nothing of the download stays at the server."""
    adapter = place / "to train on" / "download"
    assert sorted(file.name for file in adapter.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = PeftModel.from_pretrained(network(random_models.directory / "tied", "tied"), str(adapter))
    np.testing.assert_allclose(transformers_logprobs(loaded), trained[0]["tied", True], atol=1e-4)
    kept = (
        tinker.RestClient(base_url=random_models.url, api_key="tml-recipes")
        .list_user_checkpoints()
        .result()
        .checkpoints
    )
    assert not [checkpoint for checkpoint in kept if checkpoint.checkpoint_id == "external_weights/download"]
