"""Full weights that do not arrive, or are others: the sample fails and says why, and nothing else does."""

import resource
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from safetensors.torch import load_file, save_file

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.serving import client_of
from tests.with_vllm.talking import learn, sample, snapshot, worst_difference
from tinsmith.sampling.inside_vllm.identity import identity

TOO_SMALL = 400_000
"""Bytes of a file, where the tiny model needs more than a million."""


def test_weights_that_do_not_arrive_fail_their_sample_alone(server: Server, service: tinker.ServiceClient) -> None:
    full, adapter = train(service, "tiny", rank=0), train(service, "tiny")
    learn(full, seed=6)
    learn(adapter, seed=7)
    of_full, of_adapter = snapshot(full), snapshot(adapter)
    prompt = image_input(full, 1)
    assert worst_difference(adapter, prompt, sample(of_adapter, prompt)) < 1e-4
    former = resource.prlimit(server.worker_pid(), resource.RLIMIT_FSIZE, (TOO_SMALL, resource.RLIM_INFINITY))
    try:
        with pytest.raises(tinker.RequestFailedError, match="weights for vLLM do not fit into"):
            sample(of_full, prompt)
    finally:
        resource.prlimit(server.worker_pid(), resource.RLIMIT_FSIZE, former)
    assert worst_difference(adapter, text_input(3, 9), sample(of_adapter, text_input(3, 9))) < 1e-4
    assert worst_difference(full, prompt, sample(of_full, prompt)) < 1e-4


def test_weights_that_are_others_than_was_said_are_refused(socket: str, vision_dir: Path, tmp_path: Path) -> None:
    """One bit of one value is enough. The base's own weights travel here, so that they are there in the end."""
    tensors = load_file(vision_dir / "model.safetensors")
    right, others = identity(tensors.items()), {name: tensor.clone() for name, tensor in tensors.items()}
    next(iter(others.values())).view(torch.int32).view(-1)[5] ^= 1

    def post(path: str, expected: tuple[int, ...] = (200,), **body: Any) -> str:
        with client_of(socket) as vllm:  # one for each request: vLLM closes the connection on which it failed
            reply = vllm.post(path, json=body or None)
        assert reply.status_code in expected, (path, reply.text)
        return reply.text

    post("/pause?mode=wait")
    for name, sent, status in (("others", others, 500), ("right", tensors, 200)):
        save_file(sent, tmp_path / name, metadata={"format": "pt"})
        post("/start_weight_update")
        said = post("/update_weights", (status,), update_info={"path": str(tmp_path / name), "identity": right})
        assert (f"their identity is {identity(others.items())}, not {right}" in said) == (name == "others")
        post("/finish_weight_update", (200, status))
    post("/reset_prefix_cache?reset_running_requests=true")
    post("/resume")
