"""The process that parses large bodies, as a process.

Invariant: No session delays another by what it sends: bodies are parsed, images decoded and texts sampled in turn.
Also: `tests/worker/test_background.py`, `tests/worker/test_samples.py`.
"""

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import zstandard

from tests.preloaded import process_behind
from tests.running import serving
from tests.server.serving import parsers
from tests.server.test_training import forward_backward_body
from tinsmith.config import RequestsConfig
from tinsmith.errors import EngineUnavailableError, UserError
from tinsmith.models.tiny import write_tiny_model
from tinsmith.server.parser_process import ParserProcess
from tinsmith.wire.compression import TooLargeError
from tinsmith.wire.forward_backward import decode_stored, receive

LIMITS = RequestsConfig()


@contextmanager
def parser() -> Iterator[ParserProcess]:
    parser = ParserProcess()
    try:
        yield parser
    finally:
        parser.close()
        assert parsers() == []


async def test_a_body_is_parsed_as_here_plain_or_compressed() -> None:
    body = forward_backward_body("s:train:0", 7)

    with parser() as other:
        plain = await other.run(receive, body, "identity", 2**20, LIMITS)
        packed = await other.run(receive, zstandard.compress(body), "zstd", 2**20, LIMITS)
    here = receive(body, LIMITS)
    for there in (plain, packed):
        assert there == here
    assert (here.key.seq_id, len(decode_stored(plain.stored.payload, plain.stored.image_digests).data)) == (7, 1)


async def test_a_body_that_is_stored_as_it_came_is_not_copied_back() -> None:
    body = b"\x0a\x01m\x10\x01" + b"\x2a\x00" * 10_000

    with parser() as other:
        assert (await other.run(receive, body, "identity", 2**20, LIMITS)).stored.payload is body


async def test_what_is_wrong_with_a_body_is_raised_here_and_the_next_is_parsed() -> None:
    with parser() as other:
        with pytest.raises(UserError, match="is not a protobuf ForwardBackwardRequest"):
            await other.run(receive, b"\xff\xff", "identity", 2**20, LIMITS)
        with pytest.raises(TooLargeError, match="larger than 1024 bytes after decompression"):
            await other.run(receive, zstandard.compress(bytes(2000)), "zstd", 1024, LIMITS)
        too_many = await other.run(receive, b"\x0a\x01m" + b"\x1a\x00" * 5000, "identity", 2**20, LIMITS)
        assert (too_many.key.model_id, too_many.stored.payload) == ("m", b"")
        assert too_many.refused is not None
        assert "max_datums" in too_many.refused


async def test_sessions_take_turns_and_one_that_gives_up_takes_none() -> None:
    body, order = forward_backward_body("s:train:0", 1), list[str]()
    with parser() as other:

        async def ask(session: str) -> None:
            await other.run(receive, body, "identity", 2**20, LIMITS, session=session)
            order.append(session)

        asked = [asyncio.create_task(ask(session)) for session in ("first", "many", "many", "gone", "many", "few")]
        await asyncio.sleep(0)
        asked[3].cancel()
        await asyncio.wait(asked)
        assert order == ["first", "many", "few", "many", "many"]
        await ask("again")


async def test_a_client_with_many_sessions_has_no_more_turns_than_one_with_a_single_session() -> None:
    body, order = forward_backward_body("s:train:0", 1), list[str]()
    with parser() as other:

        async def ask(client: str, session: str) -> None:
            await other.run(receive, body, "identity", 2**20, LIMITS, client=client, session=session)
            order.append(session)

        sessions = [("crowd", "a"), ("crowd", "b"), ("crowd", "c"), ("crowd", "c"), ("crowd", "d"), ("one", "x"), ("one", "x")]
        await asyncio.gather(*(asyncio.create_task(ask(*each)) for each in sessions))
        assert order == ["a", "b", "x", "c", "x", "d", "c"]


async def test_after_its_death_it_is_started_again() -> None:
    body = forward_backward_body("s:train:0", 1)

    with parser() as other:
        assert (await other.run(receive, body, "identity", 2**20, LIMITS)).key.seq_id == 1
        (child,) = parsers()
        os.kill(process_behind(child.pid), signal.SIGKILL)
        with pytest.raises(EngineUnavailableError, match="ended with exit code -9 at this one; send the request again"):
            await other.run(receive, body, "identity", 2**20, LIMITS)
        assert (await other.run(receive, body, "identity", 2**20, LIMITS)).key.seq_id == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_it_ends_with_its_server(tmp_path: Path, number: signal.Signals) -> None:
    write_tiny_model("qwen3", tmp_path / "model")
    with serving(tmp_path, "--base-model", f"tiny={tmp_path / 'model'}") as server:
        server.wait_for_health()
        (child,) = (process for process in psutil.Process(server.pid).children() if "tinsmith.server.parser_process" in process.cmdline())
        os.kill(server.pid, number)
        child.wait(timeout=600)
