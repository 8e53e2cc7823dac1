"""What most tests of the store begin with."""

from pathlib import Path

import pytest

from tinsmith.store.store import Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """An empty store."""
    return Store.open(tmp_path)
