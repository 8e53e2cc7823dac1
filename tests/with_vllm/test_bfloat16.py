"""Trainer and vLLM in bfloat16, where both round: they stay close on average.

Full weights get there as between two GPUs.
"""

import os
import re
import signal
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.acceptance.talking import image_input, numbers, text_input, train
from tests.extent import slow
from tests.with_vllm.serving import ON_GPU, process_of, sampling_with_vllm, vllm_pids, wait_for_vllm, write_changed
from tests.with_vllm.talking import FREE, learn, sample, snapshot, trainers_logprobs
from tinsmith.models.tiny import write_tiny_model

FARTHEST = 0.035
"""Mean |difference| of log-probabilities. Missing weights or images change them by whole nats.

On these models' texts transformers in bfloat16 lies 0.023 from its own float32, on average; two computations that round
on their own may differ by sqrt(2) times that.
"""


def check(model: Path, directory: Path, *options: str, images: bool) -> None:
    """vLLM agrees with the trainer on the base model, an adapter, a trained one and trained full weights."""
    with sampling_with_vllm(directory, "--base-model", f"tiny={model}", "--dtype", "bfloat16", *options) as server:
        wait_for_vllm(server)
        # vLLM 0.26 applies none to the output projection of Qwen3.5
        left_out = re.findall("applies no adapters to ([^;]*)", server.log.read_text())
        assert left_out in ([], ["lm_head"])
        with tinker.ServiceClient(base_url=server.url, api_key="tml-bfloat16") as service:
            for rank, steps in ((8, 0), (8, 1), (0, 1)):
                client = train(service, "tiny", rank=rank, train_unembed=not (rank and left_out))
                learn(client, steps=steps, images=images)
                assert (
                    mean_difference(client, text_input(1, 30), *((image_input(client, 2),) if images else ()))
                    < FARTHEST
                )


def mean_difference(client: tinker.TrainingClient, *prompts: types.ModelInput) -> float:
    """Mean |difference| between the log-probabilities of samples of a model as it is now, and the trainer's."""
    sampler = snapshot(client)
    differences: list[float] = []
    for prompt in prompts:
        for sequence in sample(sampler, prompt, FREE, 8).sequences:
            differences += np.abs(
                numbers(sequence.logprobs) - trainers_logprobs(client, prompt, sequence.tokens)
            ).tolist()
    return float(np.mean(differences))


# In float32 `test_agreement.py` has the others.
@pytest.mark.parametrize("kind", ("qwen3-vl", "qwen3", "qwen3-5") if ON_GPU else slow("qwen3-5", "qwen3"))
def test_base_adapter_and_full_weights(kind: Literal["qwen3", "qwen3-vl", "qwen3-5"], tmp_path: Path) -> None:
    """On a text model too: vLLM names the parts of its fused layers in another way there.

    On a hybrid model with vLLM's own kernels.
    """
    write_tiny_model(kind, tmp_path / "model")
    transfer = () if ON_GPU else ("--vllm-transfer", "broadcast")
    if kind == "qwen3-5":  # vLLM's kernels of gated delta nets take no heads of 16
        heads = 128 if ON_GPU else 64
        write_changed(tmp_path / "model", linear_key_head_dim=heads, linear_value_head_dim=heads)
    check(tmp_path / "model", tmp_path, *transfer, images=kind != "qwen3")


@pytest.mark.skipif(
    not ON_GPU or torch.cuda.device_count() < 2, reason="NCCL connects trainer and vLLM if each has a GPU"
)
def test_full_weights_get_to_the_next_server_when_one_has_died_or_hangs(tmp_path: Path) -> None:
    """Each is a new process, which NCCL connects with the trainer anew.

    `test_servers.py` and `test_a_sampler.py` have more on CPUs.
    """
    write_tiny_model("qwen3", tmp_path / "model")
    options = ("--base-model", f"tiny={tmp_path / 'model'}", "--dtype", "bfloat16", "--vllm-hung-s", "20")
    with sampling_with_vllm(tmp_path, *options) as server:
        wait_for_vllm(server)
        with tinker.ServiceClient(base_url=server.url, api_key="tml-bfloat16") as service:
            client = train(service, "tiny", rank=0)
            learn(client, seed=0, images=False)
            assert mean_difference(client, text_input(1, 30)) < FARTHEST
            for seed, blow in enumerate((signal.SIGKILL, signal.SIGSTOP, signal.SIGKILL), 1):
                (group,) = vllm_pids(server)
                os.kill(process_of(group, "EngineCore"), blow)
                learn(client, seed=seed, images=False)
                assert mean_difference(client, text_input(1, 30)) < FARTHEST
                assert group not in vllm_pids(server)


@pytest.mark.skipif(
    not ON_GPU or torch.cuda.device_count() < 4, reason="two workers and a vLLM server of two need four GPUs"
)
@pytest.mark.parametrize(("shard", "transfer"), [("none", "auto"), ("none", "file"), ("weights", "auto")])
def test_several_gpus_train_and_several_sample(shard: str, transfer: str, tmp_path: Path) -> None:
    """Weights get to both GPUs of a vLLM server: from replicas by broadcast or as a file, divided ones as a file.

    `test_several_workers.py` is the same on CPUs.
    """
    write_tiny_model("qwen3-vl", tmp_path / "model")
    several = (
        "--workers",
        "2",
        "--shard",
        shard,
        "--tokens-per-pass",
        "64",
        "--vllm-tensor-parallel",
        "2",
        "--vllm-transfer",
        transfer,
    )
    check(tmp_path / "model", tmp_path, *several, images=True)
