"""zstd bodies: what clients send, and bombs."""

import random

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import UserError
from tinsmith.wire.compression import (
    HEADER_BYTES,
    TooLargeError,
    decompress,
    decompress_beginning,
    packed,
    unpacked,
    unpacked_size,
)


@given(st.lists(st.binary(max_size=3000), max_size=4))
def test_frames_are_joined(parts: list[bytes]) -> None:
    compressor = zstandard.ZstdCompressor()
    assert decompress(b"".join(compressor.compress(part) for part in parts), 20_000) == b"".join(parts)


@given(st.one_of(st.binary(max_size=100), st.integers(0, 2**18).map(bytes), st.just(zstandard.compress(bytes(9)))))
def test_what_is_stored_says_its_size_and_comes_out_again(data: bytes) -> None:
    stored = packed(data)
    assert unpacked(stored) == data
    assert unpacked_size(stored[:HEADER_BYTES], len(stored)) == len(data)
    assert len(stored) <= 64 * 1024


@pytest.mark.parametrize("body", [b"ab" * 10**6, random.Random(0).randbytes(10**6), bytes(range(20)) * 7, b""], ids=len)
def test_a_beginning_is_that_of_the_whole(body: bytes) -> None:
    assert decompress_beginning(zstandard.compress(body), 100) == body[:100]


def test_the_limit_is_exact() -> None:
    whole = bytes(range(256)) * 20_000
    data = zstandard.ZstdCompressor().compress(whole)
    assert decompress(data, len(whole)) == whole
    with pytest.raises(TooLargeError, match="larger than 5119999 bytes"):
        decompress(data, len(whole) - 1)


@pytest.mark.parametrize("write_content_size", [True, False])
def test_a_bomb_stops_early(write_content_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=write_content_size)
    bomb = compressor.compress(b"\0" * 2**26)
    assert len(bomb) < 25_000
    with pytest.raises(TooLargeError):
        decompress(bomb * 50, 2**20)


def wide() -> bytes:
    """A frame whose window is larger than HTTP allows."""
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(bytes(100)) + compressor.flush()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"not zstd", "zstd"),
        (zstandard.ZstdCompressor().compress(b"x" * 100) + b"tail", "zstd"),
        (zstandard.ZstdCompressor().compress(bytes(range(256)) * 10)[:-3], "middle of a frame"),
        (wide(), "not valid zstd"),
    ],
)
def test_broken_data_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        decompress(data, 10_000)
    if data == b"not zstd":
        with pytest.raises(UserError, match="not valid zstd"):
            decompress_beginning(data, 100)
