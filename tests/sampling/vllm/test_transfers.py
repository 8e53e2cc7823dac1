"""Full weights on their way to a server that does not take them. `tests/with_vllm/test_transfers.py` has those that arrive.

On GPUs (TINSMITH_TEST_DEVICE=cuda) the trainer has the first, and the server's worker the second.
"""

import asyncio
import multiprocessing
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tests.running import START_S
from tests.sampling.vllm.receivers import ON_GPU, SIZE, TRAINER_DEVICE, join_and_ignore, join_and_receive
from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import TransferGroup
from tinsmith.sampling.vllm.connection import Connection, RefusedError, ServerFailedError
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, BroadcastTransfer, Tensors

PATIENCE_S = 3
SPAWN = multiprocessing.get_context("spawn")

pytestmark = pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="trainer and server need a GPU each")


def sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: Tensors,
    error: type[Exception],
    words: str,
    answers: bool = True,
    send_within_s: float = LONGEST_BROADCAST_S,
) -> None:
    """Send tensors to a server that refuses them, or does not answer at all, and whose worker receives nothing; it must be that error.

    The next server gets its weights.
    """
    monkeypatch.setattr(transfer_group, "_LONGEST_WITH_GLOO", timedelta(seconds=PATIENCE_S))
    workers: list[Any] = []
    asked_enough, left = asyncio.Event(), threading.Event()
    send = TransferGroup.send

    def noted(group: TransferGroup, tensors: Iterable[torch.Tensor]) -> None:
        try:
            send(group, tensors)
        finally:
            left.set()

    monkeypatch.setattr(TransferGroup, "send", noted)

    async def begin(request: web.Request) -> web.Response:
        meeting_point = (await request.json())["init_info"]["meeting_point"]
        work = join_and_receive if workers else join_and_ignore
        workers.append(SPAWN.Process(target=work, args=(meeting_point,), daemon=True))
        workers[-1].start()
        return web.Response()

    async def take_from_the_second_on(_: web.Request) -> web.Response:
        if len(workers) > 1:
            return web.Response()
        if not answers:
            await asked_enough.wait()
        return web.json_response({"error": {"message": "no memory left"}}, status=400)

    async def tell() -> None:
        app = web.Application()
        app.add_routes([web.post("/init_weight_transfer_engine", begin), web.post("/update_weights", take_from_the_second_on)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        server = Connection(f"unix:{tmp_path / 'socket'}")
        transfer = BroadcastTransfer(tmp_path, TRAINER_DEVICE)
        await transfer.open(server)
        transfer.longest_s = send_within_s
        with pytest.raises(error, match=words):
            await transfer.send(server, tensors, "0" * 16)
        assert left.is_set()  # the tensors may change from now on
        asked_enough.set()
        monkeypatch.undo()
        following = BroadcastTransfer(tmp_path, TRAINER_DEVICE)
        await following.open(server)
        await following.send(server, {"weight": torch.full((SIZE,), 2.0, device=TRAINER_DEVICE)}, "0" * 16)
        await asyncio.to_thread(workers[1].join, START_S)
        assert workers[1].exitcode == 0
        await server.close()
        await runner.cleanup()

    try:
        asyncio.run(tell())
    finally:
        for worker in workers:
            worker.kill()


def test_a_broadcast_that_the_server_refuses_ends_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody receives then, but the server's end is still open."""
    sent(tmp_path, monkeypatch, {"weight": torch.ones(SIZE, device=TRAINER_DEVICE)}, RefusedError, "no memory left")


def test_what_the_trainer_cannot_send_is_an_error_though_the_server_still_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without data stands for one that the trainer has no memory to copy."""
    # As Gloo says it, or NCCL.
    sent(
        tmp_path,
        monkeypatch,
        {"weight": torch.ones(4, device="meta")},
        ValueError if ON_GPU else RuntimeError,
        "meta|must be CUDA",
        answers=False,
    )


def test_a_server_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, words = {"weight": torch.ones(SIZE, device=TRAINER_DEVICE)}, "has not taken new weights for 0.5 s"
    sent(tmp_path, monkeypatch, tensors, ServerFailedError, words, answers=False, send_within_s=0.5)


def opened(tmp_path: Path, words: str, within_s: float = LONGEST_BROADCAST_S, come: bool = True) -> None:
    """Connect to a server that says it joins, and whose worker comes to the meeting or not; it must be that error."""
    workers: list[Any] = []

    async def begin(request: web.Request) -> web.Response:
        if come:
            workers.append(SPAWN.Process(target=join_and_ignore, args=((await request.json())["init_info"]["meeting_point"],), daemon=True))
            workers[0].start()
        return web.Response()

    async def tell() -> None:
        app = web.Application()
        app.add_routes([web.post("/init_weight_transfer_engine", begin)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        server = Connection(f"unix:{tmp_path / 'socket'}")
        with pytest.raises(ServerFailedError, match=rf"cannot be connected for new weights: .*{words}.*--vllm-transfer file"):
            await BroadcastTransfer(tmp_path, TRAINER_DEVICE, longest_s=within_s).open(server)
        await server.close()
        await runner.cleanup()

    try:
        asyncio.run(tell())
    finally:
        for worker in workers:
            worker.kill()


@pytest.mark.skipif(ON_GPU, reason="it names an interface for Gloo")
def test_what_keeps_trainer_and_server_from_connecting_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    opened(tmp_path, "nowhere0")


def test_workers_that_never_come_are_given_up(tmp_path: Path) -> None:
    """The thread that waits for them ends, too: `asyncio.run` waits for it, and this test for less long than a worker waits."""
    begun = time.monotonic()
    opened(tmp_path, "it took more than 0.5 s", within_s=0.5, come=False)
    assert time.monotonic() - begun < transfer_group._LONGEST.total_seconds()
