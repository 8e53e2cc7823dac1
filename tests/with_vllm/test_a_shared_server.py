"""A second engine at the vLLM server of the first.

These tests run first: once full weights were transferred to it, a server is one engine's alone.
"""

from pathlib import Path

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.talking import image_input, scores, text_input, train, with_inputs
from tests.bases import png
from tests.running import Server
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm
from tests.with_vllm.talking import learn, sample, snapshot
from tinsmith.models.tiny import write_tiny_model


def test_rendering_by_vllm_equals_ours(server: Server, socket: str, vision_dir: Path, tmp_path: Path) -> None:
    """One server whose engine processes pictures, one that lets vLLM do it: the same losses, the same counts."""
    options = ("--base-model", f"tiny={vision_dir}", "--vllm-url", socket, "--renderer", "vllm")
    with (
        sampling_with_vllm(tmp_path, *options) as other,
        tinker.ServiceClient(base_url=server.url, api_key="tml-a") as ours,
        tinker.ServiceClient(base_url=other.url, api_key="tml-b") as theirs,
    ):
        wait_for_vllm(other)
        found = []
        for service in (ours, theirs):
            client = train(service, "tiny")
            prompts = [image_input(client, seed) for seed in range(3)] + [text_input(1, 9)]
            data = [with_inputs(p, target_tokens=list(range(p.length)), weights=[1.0] * p.length) for p in prompts]
            found.append(scores(client, data))
        for one, two in zip(*found, strict=True):
            np.testing.assert_allclose(one, two, atol=1e-5)
        wrong = types.ImageChunk(data=png(0), format="png", expected_tokens=7)
        with pytest.raises(tinker.RequestFailedError, match="expected_tokens is 7, but the image takes 6 tokens"):
            scores(client, [with_inputs(types.ModelInput(chunks=[wrong]), target_tokens=[0] * 7, weights=[1.0] * 7)])


def test_a_server_with_other_weights_is_never_sampled(server: Server, socket: str, tmp_path: Path) -> None:
    write_tiny_model("qwen3-vl", tmp_path / "other", seed=1)
    with (
        sampling_with_vllm(tmp_path, "--base-model", f"tiny={tmp_path / 'other'}", "--vllm-url", socket) as other,
        tinker.ServiceClient(base_url=other.url, api_key="tml-c") as service,
    ):
        client = train(service, "tiny")
        with pytest.raises(tinker.RequestFailedError, match="vLLM computes other log-probabilities than the trainer with adapter"):
            sample(snapshot(client), text_input(1, 6))
        learn(client)  # training needs no vLLM
