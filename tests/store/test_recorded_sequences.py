"""What is kept of sampled sequences for a day: found by id, lost with its session, its day and its place; whatever
became of the file."""

import logging
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tinsmith.errors import ConfigError, StoreUnavailableError, TinsmithError
from tinsmith.store import recorded_sequences
from tinsmith.store.recorded_sequences import FILE_NAME, LIFETIME_S, RecordedSequences
from tinsmith.store.records import RecordedSequence

MIB = 2**20


class Clock:
    """What `time.time` and `time.monotonic` say."""

    def __init__(self) -> None:
        self.now = 1e9

    def time(self) -> float:
        return self.now

    monotonic = time


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(recorded_sequences, "time", clock)
    return clock


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[RecordedSequences]:
    recorded = RecordedSequences(tmp_path, MIB)
    yield recorded
    recorded.close()


def sequence(length: int = 3, seed: int = 0) -> RecordedSequence:
    generator = np.random.default_rng(seed)
    return RecordedSequence(
        7,
        generator.integers(0, 2**31 - 1, length).astype(np.int32),
        generator.standard_normal(length).astype(np.float32),
    )


def name(index: int, session: str = "s") -> str:
    return f"{session}:sample:0/4/{index}"


def same(one: RecordedSequence, other: RecordedSequence) -> bool:
    arrays = ((one.tokens, other.tokens), (one.logprobs, other.logprobs))
    return one.prompt_length == other.prompt_length and all(
        np.array_equal(a, b) and a.dtype == b.dtype for a, b in arrays
    )


def test_sequences_come_back_as_they_were_sampled_also_from_another_process(
    tmp_path: Path, recorded: RecordedSequences
) -> None:
    sampled = {name(i): sequence(length=i % 7, seed=i) for i in range(1200)}
    recorded.put(sampled)
    other = RecordedSequences(tmp_path, 100 * MIB)
    for reader in (recorded, other):
        found = reader.find([*sampled, "s:sample:0/4/5000", "nothing"])
        assert found.keys() == sampled.keys()
        assert all(same(found[key], sampled[key]) for key in sampled)
    other.close()


def test_a_sample_that_is_sent_again_replaces_what_it_gave_before(recorded: RecordedSequences) -> None:
    recorded.put({name(0): sequence(seed=1)})
    recorded.put({name(0): sequence(length=5, seed=2)})
    assert same(recorded.find([name(0)])[name(0)], sequence(length=5, seed=2))


def test_a_sequence_stays_for_a_day_that_begins_anew_when_it_is_used(
    clock: Clock, tmp_path: Path, recorded: RecordedSequences
) -> None:
    """Then it leaves the file."""
    recorded.put({name(0): sequence(), name(1): sequence()})
    clock.now += LIFETIME_S - 1
    assert list(recorded.find([name(0)])) == [name(0)]
    clock.now += 2
    assert list(recorded.find([name(0), name(1)])) == [name(0)]
    clock.now += LIFETIME_S + 1
    assert recorded.find([name(0)]) == {}
    recorded.put({name(2): sequence()})
    assert stored(tmp_path) == [name(2)]


def test_a_session_that_ends_takes_its_sequences_along(tmp_path: Path, recorded: RecordedSequences) -> None:
    recorded.put({name(0, "one"): sequence(), name(1, "one"): sequence(), name(0, "two"): sequence()})
    recorded.forget_session("one")
    assert stored(tmp_path) == [name(0, "two")]


def test_beyond_the_limit_the_least_recently_used_go(
    clock: Clock, tmp_path: Path, recorded: RecordedSequences, caplog: pytest.LogCaptureFixture
) -> None:
    """A sequence of 10,000 tokens takes 80,000 bytes, so 13 are at most 1 MiB; then a tenth is made free as well."""
    for index in range(13):
        clock.now += 1
        recorded.put({name(index): sequence(10_000)})
    assert len(stored(tmp_path)) == 13
    clock.now += 1
    recorded.find([name(0)])
    clock.now += 1
    with caplog.at_level(logging.WARNING):
        recorded.put({name(13): sequence(10_000)})
    assert stored(tmp_path) == sorted([name(0), *map(name, range(4, 14))])
    says = (
        "deleted the 3 least recently used recorded sequences: they take more than 0.0009766 GiB "
        "(--recorded-sequences-gib)"
    )
    assert says in caplog.text


def test_many_threads_use_one_file(tmp_path: Path, recorded: RecordedSequences) -> None:
    def use(session: str) -> None:
        for index in range(20):
            recorded.put({name(index, session): sequence(seed=index)})
            assert same(recorded.find([name(index, session)])[name(index, session)], sequence(seed=index))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(use, [f"s{number}" for number in range(4)]))
    assert len(stored(tmp_path)) == 80


def spoil(directory: Path, kind: bytes) -> None:
    """Write over the cells of all pages of this kind but the first page: 10 are those of indexes, 13 those of rows."""
    file = directory / FILE_NAME
    content = bytearray(file.read_bytes())
    pages = [start for start in range(4096, len(content), 4096) if content[start : start + 1] == kind]
    assert pages
    for start in pages:
        content[start + 1 : start + 4096] = b"\xff" * 4095
    file.write_bytes(content)


MANY = {name(index): sequence(length=50, seed=index) for index in range(200)}


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A directory with a closed file of many sequences."""
    with closing(RecordedSequences(tmp_path, MIB)) as first:
        first.put(MANY)
    return tmp_path


def version_99(directory: Path) -> None:
    with sqlite3.connect(directory / FILE_NAME) as connection:
        connection.execute("PRAGMA user_version = 99")


SPOILED: dict[str, tuple[Callable[[Path], object], str]] = {
    "no database": (
        lambda directory: (directory / FILE_NAME).write_bytes(b"this is no database" * 100),
        "is replaced by an empty file",
    ),
    "nothing": (lambda directory: (directory / FILE_NAME).write_bytes(b""), ""),
    "indexes": (partial(spoil, kind=b"\x0a"), "is replaced by an empty file"),
    "rows": (partial(spoil, kind=b"\x0d"), "is replaced by an empty file"),
    "version": (version_99, "it has version 99, this program writes 1"),
}
"""Ways to spoil a file, and what is said of it."""


@pytest.mark.parametrize("how", SPOILED)
def test_a_file_that_is_damaged_or_of_another_version_is_replaced(
    filled: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    do_it, says = SPOILED[how]
    do_it(filled)
    with closing(RecordedSequences(filled, MIB)) as recorded:
        assert recorded.find(MANY) == {}
        recorded.put({name(0): sequence(seed=1)})
        assert same(recorded.find([name(0)])[name(0)], sequence(seed=1))
    assert says in caplog.text
    assert bool(says) == bool(caplog.text)


@pytest.mark.parametrize("use", ["put", "forget"])
def test_damage_that_shows_while_it_is_used_costs_what_was_recorded_before(
    filled: Path, use: str, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(RecordedSequences(filled, MIB)) as recorded:
        recorded.put(MANY)
        with sqlite3.connect(filled / FILE_NAME) as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        spoil(filled, b"\x0a")
        recorded._connection.execute("PRAGMA cache_size = 0")
        if use == "put":
            recorded.put({name(500): sequence(seed=1)})
        else:
            recorded.forget_session("s")
        assert list(recorded.find([*MANY, name(500)])) == [name(500)] * (use == "put")
    assert "is replaced by an empty file" in caplog.text


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, recorded: RecordedSequences) -> None:
    """One that is locked, one without its table, and a directory in its place."""
    recorded._connection.execute("PRAGMA busy_timeout = 1")
    with sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailableError, match="another program has locked it"):
            recorded.put({name(0): sequence()})
        other.execute("ROLLBACK")
        recorded.put({name(0): sequence()})
        assert list(recorded.find([name(0)])) == [name(0)]
        other.execute("DROP TABLE recorded")
    with pytest.raises(
        TinsmithError, match=f"{FILE_NAME} cannot be used: no such table.*; stop the server, delete the file"
    ):
        recorded.find([name(0)])
    (tmp_path / "other" / FILE_NAME).mkdir(parents=True)
    with pytest.raises(ConfigError, match=f"{FILE_NAME} cannot be used: "):
        RecordedSequences(tmp_path / "other", MIB)


def stored(directory: Path) -> list[str]:
    """The ids in the file."""
    with sqlite3.connect(directory / FILE_NAME) as connection:
        return sorted(row[0] for row in connection.execute("SELECT sequence_id FROM recorded"))
