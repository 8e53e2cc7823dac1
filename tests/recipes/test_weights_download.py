"""The cookbook's `weights.download`: a checkpoint to train on, which comes encrypted. External weights: `test_weights_tools.py`."""

import os
import subprocess
from pathlib import Path

import numpy as np
import tinker
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.acceptance.elsewhere import ITEM, transformers_logprobs
from tests.acceptance.talking import RAW_STEP, scores, train
from tests.recipes.workshop import PYTHON, TEXT_ONLY_MODEL, Workshop

DOWNLOAD = "import sys; from tinker_cookbook import weights; weights.download(tinker_path=sys.argv[1], output_dir=sys.argv[2])"


def test_a_downloaded_checkpoint_to_train_on_is_loaded_by_peft(random_models: Workshop, tmp_path: Path) -> None:
    key = "tml-recipes"
    environment = os.environ | {"TINKER_BASE_URL": random_models.url, "TINKER_API_KEY": key}
    with tinker.ServiceClient(base_url=random_models.url, api_key=key) as service:
        client = train(service, TEXT_ONLY_MODEL)
        client.forward_backward([ITEM], "cross_entropy")
        client.optim_step(RAW_STEP).result()
        expected = scores(client, [ITEM])[0]
        path = client.save_state("out").result().path
        command = [str(PYTHON), "-c", DOWNLOAD, path, str(tmp_path / "adapter")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0, done.stderr
    assert sorted(file.name for file in (tmp_path / "adapter").iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    base = AutoModelForCausalLM.from_pretrained(random_models.directory / TEXT_ONLY_MODEL)
    network = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    np.testing.assert_allclose(transformers_logprobs(network), expected, atol=1e-4)
    kept = tinker.RestClient(base_url=random_models.url, api_key=key).list_user_checkpoints().result().checkpoints
    assert not [checkpoint for checkpoint in kept if checkpoint.checkpoint_id == "external_weights/download"]
