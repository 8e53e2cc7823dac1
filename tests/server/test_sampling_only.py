"""A server that was started with --train none refuses to train at submit time, and says so wherever it is asked.

Invariant: A server that only samples refuses to train when it is asked to, plans no memory for it, has the trainer's numbers for what
another server saves, and changes nothing of that.
Also: `tests/store/test_shared.py`, `tests/worker/test_device_memory.py`, `tests/acceptance/test_sampling_only.py`.
"""

from pathlib import Path

import pytest

from tests.server.serving import served
from tests.store.test_shared import PATH, saved
from tinsmith.config import Config
from tinsmith.store.files import CheckpointFiles

OPERATIONS = (
    "create_model",
    "forward_backward",
    "create_custom_loss",
    "optim_step",
    "save_weights",
    "save_weights_external",
    "load_weights",
    "save_weights_for_sampler",
)


def sampling_only(root: str = "") -> Config:
    """The configuration of such a server."""
    config = Config(checkpoint_root=root)
    config.training.train = "none"
    return config


@pytest.mark.parametrize("path", OPERATIONS)
async def test_training_is_refused_at_once(path: str, tmp_path: Path) -> None:
    async with served(tmp_path, sampling_only()) as server:
        body = {"session_id": await server.new_session(), "model_seq_id": 0, "base_model": "tiny", "model_id": "m", "seq_id": 1}
        reply = await server.post(path, body)
        assert reply.status_code == 400
        assert "it was started with --train none" in reply.json()["detail"]
        assert "send training operations to a server that was started without it" in reply.json()["detail"]
        assert server.queued() == []


async def test_it_says_that_it_only_samples(tmp_path: Path) -> None:
    async with served(tmp_path, sampling_only()) as server:
        (model,) = (await server.client.get("/api/v1/get_server_capabilities")).json()["supported_models"]
        assert (model["trainable"], model["sampleable"]) == (False, True)
        server.hub.engine.state = "ready"
        reply = (await server.client.get("/api/v1/healthz")).json()
        assert reply == {"status": "ok", "detail": "it samples only (--train none)"}
        assert (await server.client.get("/api/v1/status")).json()["trains"] is False


async def test_a_checkpoint_of_another_server_has_a_sampling_session(tmp_path: Path) -> None:
    root = str(tmp_path / "root")
    row = saved(CheckpointFiles(tmp_path / "other", root))
    async with served(tmp_path / "own", sampling_only(root)) as server:
        session = await server.new_session()
        asked = {"session_id": session, "base_model": "tiny", "sampling_session_seq_id": 0}
        reply = await server.post("create_sampling_session", asked | {"model_path": row.tinker_path})
        assert reply.status_code == 200
        missing = await server.post("create_sampling_session", asked | {"model_path": PATH + "b", "sampling_session_seq_id": 1})
        assert (missing.status_code, f"{PATH}b does not exist" in missing.json()["detail"]) == (404, True)
