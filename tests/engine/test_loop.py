"""The engine's loop in this process, on a real store, link and model: a device that computes nothing any more ends it."""

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest
import torch

from tinsmith.config import Config, SamplingConfig
from tinsmith.engine.loop import Engine
from tinsmith.errors import DeviceLostError
from tinsmith.models.device import require_device
from tinsmith.protocol.heartbeat import Heartbeat
from tinsmith.protocol.link import EngineLink, ServerLink
from tinsmith.store.records import Model, NewCommand, Outcome

MODEL = "s:train:0"


@contextmanager
def engine(base_model: Path, data_dir: Path) -> Iterator[Engine]:
    """An engine with one model in the making, and the server's end of its link."""
    config = Config([f"tiny={base_model}"], str(data_dir), sampling=SamplingConfig(kv_cache_gib=0.01))

    async def bound() -> ServerLink:
        return ServerLink()

    server = asyncio.run(bound())
    link = EngineLink(server.address)
    made = Engine(config, link, Heartbeat(server.address))
    made.store.create_session("s", {"tags": [], "user_metadata": None, "sdk_version": "0", "project_id": None, "display_name": None})
    lora = {"rank": 4}
    body = orjson.dumps({"session_id": "s", "model_seq_id": 0, "base_model": "tiny", "lora_config": lora})
    made.store.append([NewCommand(MODEL, 0, "create_model", body, model=Model(MODEL, "s", "tiny", lora, {}, None))])
    try:
        yield made
    finally:
        link.close()
        server.close()


def step(seq_id: int) -> NewCommand:
    body = {"model_id": MODEL, "seq_id": seq_id, "adam_params": {}}
    return NewCommand(MODEL, seq_id, "optim_step", orjson.dumps(body))


def test_a_failure_ends_the_engine_only_if_its_device_is_lost(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(family_dir("qwen3"), tmp_path) as made:
        failures = 0

        def optim_step(*_: object) -> dict[str, float]:
            nonlocal failures
            failures += 1
            if failures == 1:  # the device still computes: the engine takes the next command
                made.store.append([step(2)])
                made._take_commands()
            else:
                made.bases["tiny"].device = torch.device("meta")  # from which nothing can be read
            raise RuntimeError("CUDA error: device-side assert triggered")

        monkeypatch.setattr(made.trainer.operations.bases["tiny"].backend, "optim_step", optim_step)
        made.store.append([step(1)])
        with pytest.raises(DeviceLostError, match="meta computes nothing any more, and only a new process can use it"):
            made.run(os.getppid())
        for seq_id in (1, 2):
            failed = made.store.outcome(f"{MODEL}/{seq_id}")
            assert isinstance(failed, Outcome)
            assert (failed.category, "device-side assert" in str(failed.error)) == ("server", True)


def test_a_device_is_tried_by_computing_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device(torch.device("cpu"))
    with pytest.raises(DeviceLostError, match="computes nothing any more"):
        require_device(torch.device("meta"))

    def starved(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "ones", starved)
    require_device(torch.device("cpu"))
