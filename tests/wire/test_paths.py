"""Paths of checkpoints."""

from typing import get_args

import pytest

from tinsmith.errors import UserError
from tinsmith.wire.paths import CheckpointKind, CheckpointPath, check_name, parse_path


@pytest.mark.parametrize("kind", get_args(CheckpointKind))
@pytest.mark.parametrize("name", ["a", "step-10", "000010", "final v2", "ünïcode", "x" * 200])
def test_a_path_is_read_as_it_was_written(kind: CheckpointKind, name: str) -> None:
    path = CheckpointPath("0a:train:0", kind, name)
    assert parse_path(str(path)) == path


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "a\\b", "a?b", "a#b", "a%2fb", "a\nb", "a\0", " a", "a ", "x" * 201]
)
def test_a_name_is_one_printable_segment(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a checkpoint"):
        check_name(name)


@pytest.mark.parametrize(
    "text",
    ["", "m/weights/a", "tinker://m/weights", "tinker://m/other/a", "tinker:///weights/a", "tinker://m/weights/a/b"],
)
def test_other_texts_are_no_paths(text: str) -> None:
    with pytest.raises(UserError, match="is not tinker://MODEL_ID"):
        parse_path(text)
