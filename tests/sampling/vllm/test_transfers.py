"""Full weights on their way to a server that does not take them. `tests/with_vllm/test_transfers.py` has those that arrive."""

import asyncio
import multiprocessing
import threading
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TransferGroup
from tinsmith.sampling.vllm.connection import Connection, RefusedError, ServerFailedError
from tinsmith.sampling.vllm.weights import LONGEST_BROADCAST_S, BroadcastTransfer, Tensors

CPU = torch.device("cpu")
PATIENCE_S = 3


def join_and_ignore(meeting_point: str) -> None:
    """A server's worker that never receives anything."""
    group = TransferGroup(meeting_point, FIRST_WORKER, 2, CPU)
    multiprocessing.Event().wait(3600)
    del group


def sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tensors: Tensors,
    error: type[Exception],
    words: str,
    answers: bool = True,
    send_within_s: float = LONGEST_BROADCAST_S,
) -> None:
    """Send tensors to a server that refuses them, or does not answer at all, and whose worker receives nothing; it must be that error."""
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
        workers.append(multiprocessing.get_context("spawn").Process(target=join_and_ignore, args=(meeting_point,), daemon=True))
        workers[0].start()
        return web.Response()

    async def refuse(_: web.Request) -> web.Response:
        if not answers:
            await asked_enough.wait()
        return web.json_response({"error": {"message": "no memory left"}}, status=400)

    async def tell() -> None:
        app = web.Application()
        app.add_routes([web.post("/init_weight_transfer_engine", begin), web.post("/update_weights", refuse)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        server = Connection(f"unix:{tmp_path / 'socket'}")
        transfer = BroadcastTransfer(tmp_path, CPU)
        await transfer.open(server)
        transfer.longest_s = send_within_s
        with pytest.raises(error, match=words):
            await transfer.send(server, tensors, "0" * 16)
        assert left.is_set()  # the tensors may change from now on
        asked_enough.set()
        await server.close()
        await runner.cleanup()

    try:
        asyncio.run(tell())
    finally:
        workers[0].kill()


def test_a_broadcast_that_the_server_refuses_ends_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody receives then, but the server's end is still open."""
    sent(tmp_path, monkeypatch, {"weight": torch.ones(1 << 22)}, RefusedError, "no memory left")


def test_what_the_trainer_cannot_send_is_an_error_though_the_server_still_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor without data stands for one that the trainer has no memory to copy."""
    sent(tmp_path, monkeypatch, {"weight": torch.ones(4, device="meta")}, RuntimeError, "meta", answers=False)


def test_a_server_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, words = {"weight": torch.ones(1 << 22)}, "has not taken new weights for 0.5 s"
    sent(tmp_path, monkeypatch, tensors, ServerFailedError, words, answers=False, send_within_s=0.5)


def opened(tmp_path: Path, words: str, within_s: float = LONGEST_BROADCAST_S) -> None:
    """Connect to a server that says it joins, and whose workers never come; it must be that error."""

    async def tell() -> None:
        async def begin(_: web.Request) -> web.Response:
            return web.Response()

        app = web.Application()
        app.add_routes([web.post("/init_weight_transfer_engine", begin)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(tmp_path / "socket")).start()
        server = Connection(f"unix:{tmp_path / 'socket'}")
        with pytest.raises(ServerFailedError, match=rf"cannot be connected for new weights: .*{words}.*--vllm-transfer file"):
            await BroadcastTransfer(tmp_path, CPU, longest_s=within_s).open(server)
        await server.close()
        await runner.cleanup()

    asyncio.run(tell())


def test_what_keeps_trainer_and_server_from_connecting_is_said_with_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    opened(tmp_path, "nowhere0")


def test_workers_that_never_come_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer_group, "_LONGEST", timedelta(seconds=PATIENCE_S))
    opened(tmp_path, "it took more than 0.5 s", within_s=0.5)
