"""Bodies of megabytes that arrive together."""

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import zstandard

from tests.server.serving import parsers, served
from tests.server.test_training import PROTOBUF, forward_backward_body
from tinsmith.store.store import Store
from tinsmith.wire.forward_backward import decode_stored

PARTS, PART_BYTES = 6, 32 * 1024


def test_large_bodies_are_read_in_turns_and_one_that_stops_keeps_no_other_waiting(tmp_path: Path) -> None:
    asked: list[int] = []
    """Whose next part the server asked for, in order."""

    async def run() -> None:
        async with served(tmp_path) as server:
            model_id = await server.new_model(await server.new_session())
            never = asyncio.Event()

            async def parts(seq_id: int) -> AsyncIterator[bytes]:
                padding = b"\x2a\x00" * (PARTS * PART_BYTES // 2)
                body = forward_backward_body(model_id, seq_id) + padding
                for start in range(0, PARTS * PART_BYTES, PART_BYTES):
                    asked.append(seq_id)
                    yield body[start : start + PART_BYTES]
                    if seq_id == 1:
                        await never.wait()
                yield body[PARTS * PART_BYTES :]

            async def post(seq_id: int) -> int:
                return (await server.client.post("/api/v1/forward_backward", content=parts(seq_id), headers=PROTOBUF)).status_code

            slow = asyncio.create_task(post(1))
            assert await asyncio.gather(*(post(seq_id) for seq_id in range(2, 10))) == [200] * 8
            assert not slow.done()
            slow.cancel()

    asyncio.run(run())
    so_far: Counter[int] = Counter()
    for seq_id in asked:
        so_far[seq_id] += 1
        if so_far.total() > 9:  # all have begun
            others = [so_far[other] for other in range(2, 10)]
            assert max(others) - min(others) <= 2
    assert so_far[1] == 1


def test_what_is_small_once_decompressed_does_not_wait_for_what_is_large(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            model_id = await server.new_model(await server.new_session())
            headers = PROTOBUF | {"Content-Encoding": "zstd"}
            padding = b"\x2a\x00" * 10_000
            small, rest = zstandard.compress(forward_backward_body(model_id, 1)), zstandard.compress(padding)
            for seq_id, body, children in ((1, small, 0), (2, zstandard.compress(forward_backward_body(model_id, 2)) + rest, 1)):
                reply = await server.client.post("/api/v1/forward_backward", content=body, headers=headers)
                assert reply.json()["request_id"] == f"{model_id}/{seq_id}"
                assert len(parsers()) == children
            command = server.store.queued(server.store.queued_models()[0])[-1]
            stored = decode_stored(server.store.payload(command), command.image_digests)
            assert stored.loss_fn_config == {"": 0.0}  # from the second frame
            broken = await server.client.post("/api/v1/forward_backward", content=small[:-1], headers=headers)
            assert (broken.status_code, broken.json()["detail"]) == (400, "the zstd body ends in the middle of a frame")

    asyncio.run(run())


def test_a_heartbeat_waits_for_nothing_that_is_written(tmp_path: Path) -> None:
    """A session is looked up once: its second heartbeat does not even wait for those who read."""

    async def run() -> None:
        async with served(tmp_path) as server:
            session_id = await server.new_session()
            written = threading.Event()
            started = threading.Event()

            def write(_store: Store) -> None:
                started.set()
                written.wait()

            writing = asyncio.create_task(server.hub.store.write(write))
            await asyncio.to_thread(started.wait)
            assert (await server.post("session_heartbeat", {"session_id": session_id})).status_code == 200
            assert (await server.post("session_heartbeat", {"session_id": "x"})).status_code == 410
            assert not writing.done()
            reading = [asyncio.create_task(server.hub.store.read(write)) for _ in range(8)]
            assert (await server.post("session_heartbeat", {"session_id": session_id})).status_code == 200
            written.set()
            await asyncio.gather(writing, *reading)
            await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
            assert (await server.post("session_heartbeat", {"session_id": session_id})).status_code == 410

    asyncio.run(run())
