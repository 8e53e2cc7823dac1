"""Files that are locked: nothing is written to them, and a link in their place is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigError
from tinsmith.store.disk import is_used, only_user
from tinsmith.store.recorded_sequences import RecordedSequences

LOCKS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "use": ("server.lock", lambda data_dir: only_user(data_dir).__enter__()),
    "ask": ("server.lock", is_used),
    "record": ("recorded_sequences.sqlite.lock", lambda data_dir: RecordedSequences(data_dir, 1e6)),
}
"""Files that are locked, and what does it."""


@pytest.mark.parametrize("what", LOCKS)
def test_what_a_link_in_the_place_of_a_lock_leads_to_stays_as_it_is(tmp_path: Path, what: str) -> None:
    name, lock = LOCKS[what]
    precious = tmp_path / "precious"
    precious.write_text("content")
    (tmp_path / name).symlink_to(precious)
    with pytest.raises(ConfigError, match=rf"{name} cannot be locked: it is a link; remove it"):
        lock(tmp_path)
    assert precious.read_text() == "content"


def test_only_one_has_a_data_directory(tmp_path: Path) -> None:
    with only_user(tmp_path) as first, only_user(tmp_path) as second:
        assert (first, second) == (True, False)
        assert is_used(tmp_path)
    assert not is_used(tmp_path)
    with only_user(tmp_path) as third:
        assert third
