"""Back-pressure of training: bytes of queued operations, by session and in all."""

from pathlib import Path

import httpx
import pytest

from tests.server.serving import Served, served
from tinsmith.config import ServerConfig
from tinsmith.errors import BackpressureError
from tinsmith.server.queued_operations import QueuedOperations
from tinsmith.store.records import ApiKey, Unfinished
from tinsmith.wire import tinker_pb2

MIB = 2**20
A, B, C = "a:train:0", "b:train:0", "c:train:0"


class Queue(QueuedOperations):
    """Limits in MiB of each session and of all, and operations of `A` that have been queued and have ended."""

    def __init__(self, session_mib: int, total_mib: int, ended: int = 0) -> None:
        super().__init__(ServerConfig(max_queued_session_mib=session_mib, max_queued_mib=total_mib))
        for seq_id in range(ended):
            self.take(A, seq_id)
            self.end(f"{A}/{seq_id}")

    def take(self, model_id: str, seq_id: int, size: int = 1) -> None:
        assert self.admit(model_id, seq_id, size)

    def refuse(self, model_id: str, seq_id: int, size: int, message: str) -> None:
        with pytest.raises(BackpressureError, match=message):
            self.admit(model_id, seq_id, size)


def test_each_session_and_all_together_have_a_limit() -> None:
    queue = Queue(3, 5, ended=1)
    queue.take(A, 1, 2 * MIB)
    queue.refuse(
        A, 2, 2 * MIB, r"session a has 2097152 bytes .* 2097152 more are over 3145728 \(max_queued_session_mib\)"
    )
    queue.take(B, 1, 3 * MIB)
    queue.refuse(C, 1, 1, r"all sessions have 5242880 bytes .* \(max_queued_mib\)")
    queue.end(f"{B}/1")
    queue.take(C, 1)
    queue.replace([])
    queue.take(A, 2, 2 * MIB)


def test_a_repeat_is_counted_once_and_one_operation_may_be_larger_than_the_limit() -> None:
    queue = Queue(3, 5)
    queue.take(A, 1, 5 * MIB)
    assert not queue.admit(A, 1, 5 * MIB)
    for _ in range(2):
        queue.end(f"{A}/1")
    queue.take(A, 2, 3 * MIB)


def test_all_parts_of_a_call_are_taken_that_is_larger_than_the_limit_of_its_session() -> None:
    """The SDK sends the first part when the server has the others: refused, they would wait for one another."""
    queue = Queue(3, 20, ended=5)
    for seq_id in (7, 6, 9, 8, 5):
        queue.take(A, seq_id, 2 * MIB)
    queue.refuse(A, 10, 1, "max_queued_session_mib")
    queue.take(B, 5, 2 * MIB)
    queue.refuse(B, 6, 9 * MIB, "max_queued_mib")
    queue = Queue(3, 3, ended=1)
    for seq_id in (2, 1):  # what another waits for is taken beyond all limits
        queue.take(A, seq_id, 2 * MIB)


def test_a_client_that_counts_down_comes_to_the_end_of_all_limits() -> None:
    """Each operation comes before all that are queued, and so they would wait for it."""
    queue = Queue(3, 5, ended=1)
    for seq_id in range(100, 94, -1):
        queue.take(A, seq_id, MIB)
    queue.refuse(A, 94, MIB, r"session a has 6291456 bytes .* \(max_queued_mib\)")
    queue, key = Queue(3, 5, ended=1), ApiKey("team", "", b"", "team", "member", max_parallel=3)
    for seq_id in range(1000, 1000 - 3 - 2 * 256, -1):
        assert queue.admit(A, seq_id, 1, key)
    with pytest.raises(BackpressureError, match=f"515 operations of model {A} are unfinished, and key 'team' allows 3"):
        queue.admit(A, 400, 1, key)


def test_a_save_that_is_still_written_changes_nothing_for_the_operations_behind_it() -> None:
    """They begin when its copy is there, and may end before it."""
    queue = Queue(3, 3, ended=1)
    queue.take(A, 1)
    queue.take(A, 2)
    queue.end(f"{A}/2")
    for seq_id in (5, 4, 3):
        queue.take(A, seq_id, MIB)
    queue.end(f"{A}/1")
    queue.refuse(A, 6, 1, "max_queued")


async def submit(server: Served, model_id: str, seq_id: int) -> httpx.Response:
    """An operation of 0.9 MiB."""
    message = tinker_pb2.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id)
    message.data.add().loss_fn_inputs["target_tokens"].dense = bytes(9 * MIB // 10)
    return await server.train(message.SerializeToString())


async def test_an_operation_that_has_to_wait_is_answered_429_and_taken_later_in_its_place(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_session_mib=2) as server:
        model_id, other = [await server.new_model() for _ in range(2)]
        assert [(await submit(server, model_id, seq_id)).status_code for seq_id in (1, 2)] == [200, 200]
        refused = await submit(server, model_id, 3)
        assert (refused.status_code, refused.headers["retry-after"], "max_queued_session_mib" in refused.text) == (
            429,
            "1",
            True,
        )
        assert (await submit(server, other, 1)).status_code == 200  # another session is not held up
        assert (await submit(server, model_id, 2)).status_code == 200  # nor is a repeat
        server.end(f"{model_id}/1")
        assert (await submit(server, model_id, 3)).json()["request_id"] == f"{model_id}/3"
        assert [command.seq_id for command in server.queued() if command.model_id == model_id] == [0, 2, 3]


async def test_what_the_log_does_not_take_is_not_counted(tmp_path: Path) -> None:
    async with served(tmp_path, max_queued_session_mib=1) as server:
        session_id = await server.new_session()
        model_id = await server.new_model(session_id)
        await server.end_session(session_id)
        # Each fails at once
        assert [(await submit(server, model_id, seq_id)).status_code for seq_id in (1, 2, 3)] == [200] * 3


def test_what_an_engine_has_left_counts_and_nothing_else() -> None:
    """Also at a server that has just started."""
    queue = Queue(3, 20)
    queue.take(A, 1, MIB)
    queue.take(B, 1, 3 * MIB)
    left = [Unfinished(f"{A}/1", 5, "local", "tiny"), Unfinished(f"{A}/2", 2 * MIB, "local", "tiny")]
    queue.replace(left)
    assert queue.size == 3 * MIB  # of what this server has taken it knows the images too
    queue.take(B, 2, 3 * MIB)
    queue.refuse(A, 3, 1, "session a has 3145728 bytes")
    queue.end(f"{A}/2")
    queue.take(A, 3)
