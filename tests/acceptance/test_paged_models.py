"""Several models, through the SDK, on a server whose device has room for one.

The processor stands for a small GPU: a module that each Python process imports tells the worker how much room it has.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from tests.acceptance.conftest import connect
from tests.acceptance.talking import RAW_STEP, datum, logprobs, text_input, train
from tests.running import REAL_PROGRAM, Server, serving

SMALL_DEVICE = """
import sys

if "tinsmith.worker" in sys.orig_argv:
    from tinsmith.worker.device_memory import DeviceMemory

    DeviceMemory.paged_room = 2**30
    DeviceMemory.state_room = property(lambda self: 3 * next(iter(self.plans.values())).model.training // 2)
"""


@pytest.fixture
def small_server(tmp_path: Path, text_only: list[str], monkeypatch: pytest.MonkeyPatch) -> "Any":
    (tmp_path / "sitecustomize.py").write_text(SMALL_DEVICE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with serving(tmp_path, *text_only, "--planned-rank", "8", program=REAL_PROGRAM) as running:
        running.wait_for_health()
        yield running


def test_models_in_turns_are_those_of_a_server_with_room_for_all(
    small_server: Server, server: Server, family_dir: Callable[[str], Path]
) -> None:
    """Log-probabilities, samples and checkpoints, with gradients that are open while other models train."""
    with connect(small_server) as paged, connect(server) as whole:
        for found, expected in zip(session(paged), session(whole), strict=True):
            np.testing.assert_array_equal(found, expected)
    paging = small_server.wait_for_status(lambda status: status["paging"].get("page_ins", 0) >= 18)["paging"]
    assert paging["on_device"] <= 1
    assert paging["page_outs"] >= paging["page_ins"] > 0
    with connect(server):
        assert server.wait_for_status(lambda status: bool(status["workers"]))["paging"] == {}


def session(service: tinker.ServiceClient) -> list[np.ndarray]:
    """All numbers that a client sees of three models that train in turns."""
    clients = [train(service, "text", seed=seed) for seed in range(3)]
    found = []
    for turn in range(2):
        for part in range(2):
            for number, client in enumerate(clients):
                data = [datum(text_input(10 * turn + 3 * part + number, 20))]
                found += logprobs(client.forward_backward(data, "cross_entropy").result())
        for client in clients:
            client.optim_step(RAW_STEP).result()
    samplers = [client.save_weights_and_get_sampling_client() for client in clients]
    saved = clients[0].save_state("kept").result().path
    clients[1] = service.create_training_client_from_state_with_optimizer(saved).result()
    for client, sampler in zip(clients, samplers, strict=True):
        found += logprobs(client.forward([datum(text_input(50, 20))], "cross_entropy").result())
        params = types.SamplingParams(max_tokens=8, seed=1, stop=[])
        reply = sampler.sample(text_input(3, 5), 1, params).result().sequences[0]
        found += [np.array(reply.tokens), np.array(reply.logprobs)]
    return found
