"""Files that are locked: nothing is written to them, and a link in their place is refused."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tinsmith.errors import ConfigError
from tinsmith.store.lock import is_used, only_user
from tinsmith.store.recorded_sequences import RecordedSequences


def recording(data_dir: Path) -> AbstractContextManager[RecordedSequences]:
    return nullcontext(RecordedSequences(data_dir, 1e6))


def asking(data_dir: Path) -> AbstractContextManager[bool]:
    return nullcontext(is_used(data_dir))


@pytest.mark.parametrize(
    ("name", "open_it"), [("server.lock", only_user), ("server.lock", asking), ("recorded_sequences.sqlite.lock", recording)]
)
def test_what_a_link_in_the_place_of_a_lock_leads_to_stays_as_it_is(
    tmp_path: Path, name: str, open_it: Callable[[Path], AbstractContextManager[Any]]
) -> None:
    precious = tmp_path / "precious"
    precious.write_text("content")
    lock = tmp_path / name
    lock.symlink_to(precious)
    with pytest.raises(ConfigError, match=rf"{name} cannot be locked: it is a link; remove it"), open_it(tmp_path):
        pass
    assert precious.read_text() == "content"


def test_only_one_has_a_data_directory(tmp_path: Path) -> None:
    with only_user(tmp_path) as first, only_user(tmp_path) as second:
        assert (first, second) == (True, False)
        assert is_used(tmp_path)
    assert not is_used(tmp_path)
    with only_user(tmp_path) as third:
        assert third
