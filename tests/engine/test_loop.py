"""The engine's loop with a real worker: a device that computes nothing any more ends the worker, never the engine."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.bases import load
from tests.engine.here import Here
from tinsmith.errors import DeviceLostError
from tinsmith.kernels.device import require_device
from tinsmith.models.base import BaseModel
from tinsmith.protocol.serving import Ready, Recovering, Wake


def test_a_failure_ends_the_worker_only_if_its_device_is_lost(
    family_dir: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = load(family_dir("qwen3"))
    here = Here({"tiny": base}, tmp_path)
    here.create("a")
    here.settle()
    failures = 0

    def optim_step(*_: object) -> dict[str, float]:
        nonlocal failures
        failures += 1
        if failures == 2:
            base.device = torch.device("meta")  # from which nothing can be read
        raise RuntimeError("CUDA error: device-side assert triggered")

    monkeypatch.setattr(here.backend(), "optim_step", optim_step)
    here.optim("a", 1)
    here.settle()
    assert here.process.is_ready  # the device still computes: the worker takes the next call
    here.optim("a", 2)
    here.optim("a", 3)
    here.until(lambda: not here.process.is_ready)
    (recovering,) = [message for message in here.said if isinstance(message, Recovering)]
    assert "meta computes nothing any more, and only a new process can use it" in recovering.reason
    for seq in (1, 2):
        failed = here.outcome("a", seq)
        assert (failed.category, "device-side assert" in str(failed.error)) == ("server", True)
    base.device = torch.device("cpu")
    here.new_worker()
    here.settle()
    assert here.error("a", 3) is None  # the next worker brings the model back and takes the step


def test_a_device_is_tried_by_computing_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device(torch.device("cpu"))
    with pytest.raises(DeviceLostError, match="computes nothing any more"):
        require_device(torch.device("meta"))

    def starved(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "ones", starved)
    require_device(torch.device("cpu"))


def test_what_came_while_an_engine_started_is_found_when_the_server_says_so(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """The server wakes an engine only once it is ready, and then does not say which models have commands."""
    here = Here({"tiny": text_base}, tmp_path)
    here.process.is_ready = False
    here.turn()
    here.create("a")
    here.engine.log_reader.unread.clear()
    here.new_worker()
    here.turn()
    assert any(isinstance(message, Ready) for message in here.said)
    here.say(Wake([]))
    here.settle()
    assert here.error("a", 0) is None
