"""Trainer and vLLM in bfloat16, where both round: they stay close on average. Full weights get there as between two GPUs."""

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tinker

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.with_vllm.serving import ON_GPU, sampling_with_vllm, wait_for_vllm
from tests.with_vllm.talking import FREE, learn, sample, snapshot, trainers_logprobs
from tinsmith.models.tiny import write_tiny_model


@pytest.mark.parametrize("kind", ["qwen3-vl", "qwen3"])
def test_base_adapter_and_full_weights(kind: Literal["qwen3", "qwen3-vl"], tmp_path: Path) -> None:
    """On a text model too: vLLM names the parts of its fused layers in another way there."""
    write_tiny_model(kind, tmp_path / "model")
    pictures = kind == "qwen3-vl"
    options = ("--dtype", "bfloat16") if ON_GPU else ("--dtype", "bfloat16", "--vllm-transfer", "broadcast")
    with sampling_with_vllm(tmp_path, "--base-model", f"tiny={tmp_path / 'model'}", *options) as server:
        wait_for_vllm(server)
        with tinker.ServiceClient(base_url=server.url, api_key="tml-bfloat16") as service:
            for rank, steps in ((8, 0), (8, 1), (0, 1)):
                client = train(service, "tiny", rank=rank)
                learn(client, steps=steps, pictures=pictures)
                sampler = snapshot(client)
                differences: list[float] = []
                for prompt in (text_input(1, 30), *((image_input(client, 2),) if pictures else ())):
                    for sequence in sample(sampler, prompt, FREE, 8).sequences:
                        expected = trainers_logprobs(client, prompt, sequence.tokens)
                        differences += np.abs(numbers(sequence.logprobs) - expected).tolist()
                assert np.mean(differences) < 0.02
