"""One server for the learning runs, that of the other tests of RL, and where their curves go."""

from pathlib import Path

import pytest

from tests.rl.conftest import server_url

__all__ = ["server_url"]  # a fixture

OUTPUT = Path("rl-output").absolute()


@pytest.fixture(scope="session")
def curves() -> Path:
    """The folder of the images."""
    OUTPUT.mkdir(exist_ok=True)
    return OUTPUT
