"""zstd bodies: what clients send, and bombs."""

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tinsmith.errors import UserError
from tinsmith.wire.compression import TooLargeError, decompress


@given(st.lists(st.binary(max_size=3000), max_size=4))
def test_frames_are_joined(parts: list[bytes]) -> None:
    compressor = zstandard.ZstdCompressor()
    assert decompress(b"".join(compressor.compress(part) for part in parts), 20_000) == b"".join(parts)


def test_a_large_body() -> None:
    data = bytes(range(256)) * 20_000
    assert decompress(zstandard.ZstdCompressor().compress(data), len(data)) == data


def test_the_limit_is_exact() -> None:
    data = zstandard.ZstdCompressor().compress(b"x" * 1000)
    assert len(decompress(data, 1000)) == 1000
    with pytest.raises(TooLargeError, match="larger than 999 bytes"):
        decompress(data, 999)


@pytest.mark.parametrize("write_content_size", [True, False])
def test_a_bomb_stops_early(write_content_size: bool) -> None:
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=write_content_size)
    bomb = compressor.compress(b"\0" * 2**28)
    assert len(bomb) < 100_000
    with pytest.raises(TooLargeError):
        decompress(bomb * 50, 2**20)


@pytest.mark.parametrize("data", [b"not zstd", zstandard.ZstdCompressor().compress(b"x" * 100) + b"tail"])
def test_broken_data_is_refused(data: bytes) -> None:
    with pytest.raises(UserError, match="zstd"):
        decompress(data, 1000)


def test_a_cut_body_is_refused() -> None:
    whole = zstandard.ZstdCompressor().compress(bytes(range(256)) * 10)
    with pytest.raises(UserError, match="middle of a frame"):
        decompress(whole[:-3], 10_000)


def test_a_window_beyond_what_http_allows_is_refused() -> None:
    parameters = zstandard.ZstdCompressionParameters.from_level(3, window_log=27)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    wide = compressor.compress(bytes(100)) + compressor.flush()
    with pytest.raises(UserError, match="not valid zstd"):
        decompress(wide, 1000)
