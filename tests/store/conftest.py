"""What most tests of the store begin with."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tinsmith.store.store import Store


@pytest.fixture
def store(database: object, tmp_path: Path) -> Iterator[Store]:
    """An empty store, on both databases."""
    with closing(Store.open(tmp_path)) as opened:
        yield opened
