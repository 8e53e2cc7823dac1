"""Engines and workers in one process, with a model that is ready."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.here import Here
from tinsmith.config import TrainingConfig
from tinsmith.models.base import BaseModel


@pytest.fixture
def make(
    text_base: BaseModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Here]:
    """Makes engines with one model that is ready, each with a data directory of its own."""
    monkeypatch.setattr("tinsmith.engine.loop.DATABASE_BUSY_S", 0.05)

    def made(name: str = "data", kept_copies_gib: float = 32.0, replay_s: float = 0.0) -> Here:
        if "database" in request.fixturenames:
            request.getfixturevalue("database")(tmp_path / name)
        training = TrainingConfig(tokens_per_pass=64, kept_copies_gib=kept_copies_gib, replay_s=replay_s)
        here = Here({"tiny": text_base}, tmp_path / name, training=training)
        here.create("a")
        here.settle()
        return here

    return made
