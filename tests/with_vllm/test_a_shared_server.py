"""A second engine at the vLLM server of the first.

This runs first: once full weights were transferred to it, a server is one engine's alone.
"""

from pathlib import Path

import pytest
import tinker

from tests.acceptance.talking import text_input, train
from tests.with_vllm.serving import sampling_with_vllm
from tests.with_vllm.talking import learn, sample, snapshot
from tinsmith.models.tiny import write_tiny_model


def test_a_server_with_other_weights_is_never_sampled(socket: str, tmp_path: Path) -> None:
    write_tiny_model("qwen3-vl", tmp_path / "other", seed=1)
    with (
        sampling_with_vllm(tmp_path, "--base-model", f"tiny={tmp_path / 'other'}", "--vllm-url", socket) as other,
        tinker.ServiceClient(base_url=other.url, api_key="tml-c") as service,
    ):
        client = train(service, "tiny")
        with pytest.raises(tinker.RequestFailedError, match="vLLM computes other log-probabilities than the trainer with the base weights"):
            sample(snapshot(client), text_input(1, 6))
        learn(client)  # training needs no vLLM
