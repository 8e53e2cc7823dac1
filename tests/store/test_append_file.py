"""Records that are appended to a file, and what is read of it after something went wrong.

Invariant: Damage to one record of a journal costs no other.
Also: `tests/server/test_sampling.py`.
"""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.store.append_file import AppendFile, Content, encode, read

RECORDS: list[Any] = [{"a": 1}, ["é", None, "\U00010ffff"], "text", 4.5, {}]


def test_records_come_out_as_they_went_in(tmp_path: Path) -> None:
    path = tmp_path / "file.log"
    file = AppendFile(path, RECORDS[:2])
    for record in RECORDS[2:]:
        file.append(record)
    assert read(path.read_bytes()) == Content(RECORDS, 0)
    assert file.size == path.stat().st_size
    write = file.rewriting(RECORDS[3:])
    file.append("meanwhile")
    write()
    file.append("meanwhile too")
    file.switch()
    file.append("more")
    assert read(path.read_bytes()) == Content([*RECORDS[3:], "meanwhile", "meanwhile too", "more"], 0)
    assert file.size == path.stat().st_size > file.rewritten_size
    assert list(tmp_path.iterdir()) == [path]
    assert read(b"") == Content([], 0)


@given(st.lists(st.text(), min_size=1), st.integers(1, 200))
def test_a_record_that_was_cut_off_is_left_out_without_complaint(texts: list[str], missing: int) -> None:
    last = encode(texts[-1])
    whole = b"".join(map(encode, texts[:-1]))
    assert read(whole + last[: max(0, len(last) - missing)]) == Content(texts[:-1], 0)


@given(st.lists(st.text()), st.binary(min_size=1), st.lists(st.text(), min_size=1))
def test_what_is_damaged_costs_no_other_record(before: list[str], garbage: bytes, after: list[str]) -> None:
    data = b"".join([*map(encode, before), garbage, *map(encode, after)])
    assert read(data) == Content(before + after, 1)


@pytest.mark.parametrize("after", [["last"], []])
def test_a_bit_that_flips_costs_one_record(after: list[str]) -> None:
    """In the last record one of its length is taken for a record that was cut off."""
    first, damaged = encode("first"), encode("some text")
    for place in range(0 if after else 12, len(damaged)):
        data = bytearray(b"".join([first, damaged, *map(encode, after)]))
        data[len(first) + place] ^= 4
        assert read(bytes(data)) == Content(["first", *after], 1), place
