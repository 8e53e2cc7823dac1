"""Full weights that do not arrive: the sample fails and says why, and nothing else does."""

import resource
from pathlib import Path

import httpx
import pytest
import tinker
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.acceptance.talking import image_input, text_input, train
from tests.running import Server
from tests.with_vllm.talking import learn, sample, snapshot, worst_difference

TOO_SMALL = 400_000
"""Bytes of a file, where the tiny model needs more than a million."""


def test_weights_that_do_not_arrive_fail_their_sample_alone(server: Server, service: tinker.ServiceClient) -> None:
    full, adapter = train(service, "tiny", rank=0), train(service, "tiny")
    learn(full, seed=6)
    learn(adapter, seed=7)
    of_full, of_adapter = snapshot(full), snapshot(adapter)
    prompt = image_input(full, 1)
    assert worst_difference(adapter, prompt, sample(of_adapter, prompt)) < 1e-4
    former = resource.prlimit(server.engine_pid(), resource.RLIMIT_FSIZE, (TOO_SMALL, resource.RLIM_INFINITY))
    try:
        with pytest.raises(tinker.RequestFailedError, match="weights for vLLM do not fit into"):
            sample(of_full, prompt)
    finally:
        resource.prlimit(server.engine_pid(), resource.RLIMIT_FSIZE, former)
    assert worst_difference(adapter, text_input(3, 9), sample(of_adapter, text_input(3, 9))) < 1e-4
    assert worst_difference(full, prompt, sample(of_full, prompt)) < 1e-4


def test_an_update_that_fails_half_way_leaves_nothing_to_the_next(
    server: Server, socket: str, service: tinker.ServiceClient, vision_dir: Path, tmp_path: Path
) -> None:
    """A part of a layer that vLLM makes of two has been loaded then."""
    full, adapter = train(service, "tiny", rank=0), train(service, "tiny")
    learn(full, seed=8)
    learn(adapter, seed=9)
    of_full, of_adapter = snapshot(full), snapshot(adapter)
    prompt = image_input(full, 1)
    sample(of_adapter, prompt)
    with safe_open(vision_dir / "model.safetensors", framework="pt") as file:
        (gate,) = (name for name in sorted(file.keys()) if name.endswith("language_model.layers.0.mlp.gate_proj.weight"))
        half = {gate: torch.ones_like(file.get_tensor(gate))}
    save_file(half | {gate.replace("gate_proj", "down_proj"): torch.ones(3, 3)}, tmp_path / "half.safetensors")
    transport = httpx.HTTPTransport(uds=socket.removeprefix("unix:"), verify=False, trust_env=False)
    with httpx.Client(transport=transport, trust_env=False, base_url="http://vllm", timeout=60) as vllm:
        assert vllm.post("/pause", params={"mode": "wait", "clear_cache": "false"}).status_code == 200
        assert vllm.post("/start_weight_update").status_code == 200
        failed = vllm.post("/update_weights", json={"update_info": {"path": str(tmp_path / "half.safetensors")}})
        assert failed.status_code == 500
        assert vllm.post("/resume").status_code == 200
    for client, sampler in ((full, of_full), (adapter, of_adapter)):
        assert worst_difference(client, prompt, sample(sampler, prompt)) < 1e-4
