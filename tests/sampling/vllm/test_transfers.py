"""Full weights on their way to a server that does not take them.

`tests/with_vllm/test_transfers.py` has those that arrive.

On GPUs (TINSMITH_TEST_DEVICE=cuda) the trainer has the first, and the server's worker the second.
"""

import asyncio
import multiprocessing
import threading
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tests.sampling.inside_vllm.test_transfer_group import ON_GPU, SENT, device_of, ended, told, values_of, work
from tests.sampling.vllm.answering import answering, in_a_loop
from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TRAINER, TransferGroup
from tinsmith.sampling.vllm.protocol import Connection, RefusedError, ServerFailedError
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, BroadcastTransfer

TRAINER_DEVICE = device_of(TRAINER)

pytestmark = pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="trainer and server need a GPU each")


class Stub:
    """A server whose first worker joins and receives nothing; the next receives its weights."""

    def __init__(self, comes: bool = True) -> None:
        self.comes = comes  # whether a worker comes to the meeting at all
        self.workers: list[Any] = []
        self.pipes: list[Any] = []
        self.answers = asyncio.Event()
        self.answers.set()  # it refuses an update; while it is cleared, it answers nothing to the first

    async def answer(self, request: web.Request) -> web.Response:
        """What it says to any request."""
        if request.path == "/init_weight_transfer_engine":
            if self.comes:
                meeting_point = (await request.json())["init_info"]["meeting_point"]
                ours, theirs = multiprocessing.Pipe()
                arguments = (meeting_point, FIRST_WORKER, 2, theirs, ["receives"] if self.workers else ["leaves"])
                self.workers.append(
                    multiprocessing.get_context("spawn").Process(target=work, args=arguments, daemon=True)
                )
                self.workers[-1].start()
                self.pipes.append(ours)
            return web.Response()
        if len(self.workers) > 1:
            return web.Response()
        await self.answers.wait()
        return web.json_response({"error": {"message": "no memory left"}}, status=400)


@asynccontextmanager
async def connected(directory: Path, stub: Stub) -> AsyncIterator[Connection]:
    try:
        async with answering(directory, stub.answer) as connection:
            yield connection
    finally:
        for worker in stub.workers:
            worker.kill()


LARGE = torch.ones(1 << 22, device=TRAINER_DEVICE)
REFUSED, SILENT, NOT_SENT = "the server refuses", "the server takes nothing", "the trainer cannot send"


@pytest.mark.parametrize(
    ("what", "tensor", "error", "words"),
    [
        (REFUSED, LARGE, RefusedError, "no memory left"),  # nobody receives then, but the server's end is still open
        (SILENT, LARGE, ServerFailedError, "has not taken new weights for 0.5 s"),
        # A tensor without data stands for one that the trainer has no memory to copy. The words are those of Gloo, or
        # NCCL.
        (NOT_SENT, torch.ones(4, device="meta"), ValueError if ON_GPU else RuntimeError, "meta|must be CUDA"),
    ],
)
@in_a_loop
async def test_a_broadcast_that_fails_ends_with_its_error_and_the_next_server_gets_its_weights(
    what: str, tensor: torch.Tensor, error: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer_group, "_LONGEST_WITH_GLOO", timedelta(seconds=3))
    left, send = threading.Event(), TransferGroup.send

    def noted(group: TransferGroup, tensors: Iterable[torch.Tensor]) -> None:
        try:
            send(group, tensors)
        finally:
            left.set()

    monkeypatch.setattr(TransferGroup, "send", noted)
    stub = Stub()
    async with connected(tmp_path, stub) as server:
        if what != REFUSED:
            stub.answers.clear()
        transfer = BroadcastTransfer(tmp_path, TRAINER_DEVICE)
        await transfer.open(server)
        transfer.longest_s = 0.5 if what == SILENT else LONGEST_BROADCAST_S
        with pytest.raises(error, match=words):
            await transfer.send(server, {"weight": tensor}, "0" * 16)
        assert left.is_set()  # the tensors may change from now on
        stub.answers.set()
        monkeypatch.undo()
        following = BroadcastTransfer(tmp_path, TRAINER_DEVICE)
        await following.open(server)
        await following.send(
            server, {str(number): tensor.to(TRAINER_DEVICE) for number, tensor in enumerate(SENT)}, "0" * 16
        )
        assert await asyncio.to_thread(told, stub.pipes[1]) == values_of(SENT)
        assert await asyncio.to_thread(ended, stub.workers[1:]) == [0]


@pytest.mark.parametrize(("comes", "words"), [(True, "nowhere0"), (False, "it took more than 0.5 s")])
@pytest.mark.skipif(ON_GPU, reason="it names an interface for Gloo")
def test_what_keeps_both_from_connecting_is_said(
    comes: bool, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a remedy. The thread that waits for workers that never come ends, too: `asyncio.run` waits for it."""
    if comes:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")

    async def refused() -> None:
        async with connected(tmp_path, Stub(comes)) as server:
            with pytest.raises(
                ServerFailedError, match=rf"cannot be connected for new weights: .*{words}.*--vllm-transfer file"
            ):
                await BroadcastTransfer(tmp_path, TRAINER_DEVICE, longest_s=LONGEST_BROADCAST_S if comes else 0.5).open(
                    server
                )

    asyncio.run(refused())
