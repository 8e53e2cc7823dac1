"""Back-pressure of training: bytes of queued operations, by session and in all."""

from pathlib import Path

import httpx
import pytest

from tests.server.serving import Served, served
from tinsmith.config import Config, ServerConfig
from tinsmith.errors import BackpressureError
from tinsmith.server.queued_operations import QueuedOperations
from tinsmith.store.records import Outcome
from tinsmith.wire import tinker_pb2

MIB = 2**20
A, B = "a:train:0", "b:train:0"


def queued(session_mib: int, total_mib: int) -> QueuedOperations:
    return QueuedOperations(ServerConfig(max_queued_session_mib=session_mib, max_queued_mib=total_mib))


def taken(operations: QueuedOperations, model_id: str, last: int) -> None:
    """Operations up to `last` have been queued and have ended."""
    for seq_id in range(last + 1):
        assert operations.admit(model_id, seq_id, 1)
        operations.end(f"{model_id}/{seq_id}")


def test_each_session_and_all_together_have_a_limit() -> None:
    operations = queued(3, 5)
    taken(operations, A, last=0)
    assert operations.admit(A, 1, 2 * MIB)
    with pytest.raises(BackpressureError, match=r"session a has 2097152 bytes .* 2097152 more are over 3145728 \(max_queued_session_mib\)"):
        operations.admit(A, 2, 2 * MIB)
    assert operations.admit(B, 1, 3 * MIB)
    with pytest.raises(BackpressureError, match=r"all sessions have 5242880 bytes .* \(max_queued_mib\)"):
        operations.admit("c:train:0", 1, 1)
    operations.end(f"{B}/1")
    assert operations.admit("c:train:0", 1, 1)
    operations.clear()
    assert operations.admit(A, 2, 2 * MIB)


def test_a_repeat_is_counted_once() -> None:
    operations = queued(3, 5)
    assert operations.admit(A, 1, 2 * MIB)
    assert not operations.admit(A, 1, 2 * MIB)
    operations.end(f"{A}/1")
    operations.end(f"{A}/1")
    assert operations.admit(A, 2, 3 * MIB)


def test_all_parts_of_a_call_are_taken_that_is_larger_than_the_limit_of_its_session() -> None:
    """The SDK sends the first part when the server has the others: refused, they would wait for one another."""
    operations = queued(3, 20)
    taken(operations, A, last=4)
    for seq_id in (7, 6, 9, 8, 5):
        assert operations.admit(A, seq_id, 2 * MIB)
    with pytest.raises(BackpressureError, match="max_queued_session_mib"):
        operations.admit(A, 10, 1)
    assert operations.admit(B, 5, 2 * MIB)
    with pytest.raises(BackpressureError, match="max_queued_mib"):
        operations.admit(B, 6, 9 * MIB)


def test_what_others_wait_for_is_always_taken() -> None:
    operations = queued(3, 3)
    taken(operations, A, last=0)
    assert operations.admit(A, 2, 2 * MIB)  # the SDK sends the first part of a call last
    assert operations.admit(A, 1, 2 * MIB)
    with pytest.raises(BackpressureError):
        operations.admit(A, 3, 2 * MIB)


def test_a_save_that_is_still_written_changes_nothing_for_the_operations_behind_it() -> None:
    """They begin when its copy is there, and may end before it."""
    operations = queued(3, 3)
    taken(operations, A, last=0)
    assert operations.admit(A, 1, 1)
    assert operations.admit(A, 2, 1)
    operations.end(f"{A}/2")
    for seq_id in (5, 4, 3):  # a call in parts, of which the first comes last
        assert operations.admit(A, seq_id, MIB)
    operations.end(f"{A}/1")
    with pytest.raises(BackpressureError):
        operations.admit(A, 6, 1)


def test_one_operation_may_be_larger_than_the_limit() -> None:
    operations = queued(1, 1)
    assert operations.admit(A, 1, 5 * MIB)
    operations.end(f"{A}/1")
    assert operations.admit(A, 2, 5 * MIB)


async def submit(server: Served, model_id: str, seq_id: int, mib: float) -> httpx.Response:
    message = tinker_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id)
    message.data.add().loss_fn_inputs["target_tokens"].dense = bytes(round(mib * MIB))
    headers = {"Content-Type": "application/x-protobuf"}
    return await server.client.post("/api/v1/forward_backward", content=message.SerializeToString(), headers=headers)


async def test_an_operation_that_has_to_wait_is_answered_429_and_taken_later_in_its_place(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_queued_session_mib=2))) as server:
        model_id, other = [await server.new_model(await server.new_session()) for _ in range(2)]
        assert [(await submit(server, model_id, seq_id, 0.9)).status_code for seq_id in (1, 2)] == [200, 200]
        refused = await submit(server, model_id, 3, 0.9)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "max_queued_session_mib" in refused.json()["detail"]
        assert (await submit(server, other, 1, 0.9)).status_code == 200  # another session is not held up
        assert (await submit(server, model_id, 2, 0.9)).status_code == 200  # nor is a repeat
        server.finish(Outcome(f"{model_id}/1", b"{}", "json", None, None))
        assert (await submit(server, model_id, 3, 0.9)).json()["request_id"] == f"{model_id}/3"
        assert [c.seq_id for c in server.queued() if c.model_id == model_id] == [0, 2, 3]


async def test_what_the_log_does_not_take_is_not_counted(tmp_path: Path) -> None:
    async with served(tmp_path, Config(server=ServerConfig(max_queued_session_mib=1))) as server:
        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}})
        for seq_id in (1, 2, 3):  # each fails at once
            assert (await submit(server, model_id, seq_id, 0.9)).status_code == 200
