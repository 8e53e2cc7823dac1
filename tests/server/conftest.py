"""Tests here may be coroutines, which run on asyncio."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.server.serving import Served, served


@pytest.fixture(autouse=True)
def anyio_backend() -> str:
    """Where tests and fixtures that are coroutines run."""
    return "asyncio"


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[Served]:
    """A server's application with the configuration that it has by default, and without an engine."""
    async with served(tmp_path) as running:
        yield running
