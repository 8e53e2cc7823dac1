"""A server that was started with --train none refuses to train at submit time, and says so wherever it is asked.

Invariant: A server that only samples refuses to train when it is asked to, plans no memory for it, has the trainer's
numbers for what another server saves, and changes nothing of that. Also: `tests/store/test_shared.py`,
`tests/worker/test_device_memory.py`, `tests/acceptance/test_sampling_only.py`.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.serving import Served, served
from tests.store.test_shared import PATH, saved
from tinsmith.config import Config
from tinsmith.store.files import CheckpointFiles

OPERATIONS = ("create_model", "forward_backward", "create_custom_loss", "optim_step", "load_weights")
SAVES = ("save_weights", "save_weights_external", "save_weights_for_sampler")


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """Such a server, which may look into the checkpoints of another one."""
    config = Config(checkpoint_root=str(tmp_path / "root"))
    config.training.train = "none"
    (tmp_path / "root").mkdir()
    async with served(tmp_path / "own", config) as running:
        yield running


@pytest.mark.parametrize("path", OPERATIONS + SAVES)
async def test_training_is_refused_at_once(path: str, server: Served) -> None:
    body = {
        "session_id": await server.new_session(),
        "model_seq_id": 0,
        "base_model": "tiny",
        "model_id": "m",
        "seq_id": 1,
    }
    reason = await server.refusal(path, body)
    assert "it was started with --train none" in reason
    assert "send training operations to a server that was started without it" in reason
    assert server.queued() == []


async def test_it_says_that_it_only_samples(server: Served) -> None:
    (model,) = (await server.shown("get_server_capabilities"))["supported_models"]
    assert (model["trainable"], model["sampleable"]) == (False, True)
    server.hub.engine.state = "ready"
    assert await server.shown("healthz") == {"status": "ok", "detail": "it samples only (--train none)"}
    assert (await server.shown("status"))["trains"] is False


async def test_a_checkpoint_of_another_server_has_a_sampling_session(server: Served, tmp_path: Path) -> None:
    row = saved(CheckpointFiles(tmp_path / "other", str(tmp_path / "root")))
    asked = {"session_id": await server.new_session(), "base_model": "tiny", "sampling_session_seq_id": 0}
    assert "sampling_session_id" in await server.answer(
        "create_sampling_session", asked | {"model_path": row.tinker_path}
    )
    missing = asked | {"model_path": PATH + "b", "sampling_session_seq_id": 1}
    assert f"{PATH}b does not exist" in await server.refusal("create_sampling_session", missing, 404)
