"""Full weights on their way to a server that does not take them. `tests/with_vllm/test_transfers.py` has those that arrive."""

import asyncio
import multiprocessing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from tinsmith.sampling.inside_vllm import transfer_group
from tinsmith.sampling.inside_vllm.transfer_group import FIRST_WORKER, TransferGroup
from tinsmith.sampling.vllm.connection import Connection, RefusedError
from tinsmith.sampling.vllm.weights import BroadcastTransfer

CPU = torch.device("cpu")
PATIENCE_S = 3


def join_and_ignore(meeting_point: str) -> None:
    """A server's worker that never receives anything."""
    group = TransferGroup(meeting_point, FIRST_WORKER, 2, CPU)
    multiprocessing.Event().wait(3600)
    del group


def test_a_broadcast_that_the_server_refuses_ends_with_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody receives then, but the server's end is still open."""
    monkeypatch.setattr(transfer_group, "_LONGEST_WITH_GLOO", timedelta(seconds=PATIENCE_S))
    workers: list[Any] = []

    async def begin(request: web.Request) -> web.Response:
        meeting_point = (await request.json())["init_info"]["meeting_point"]
        workers.append(multiprocessing.get_context("spawn").Process(target=join_and_ignore, args=(meeting_point,), daemon=True))
        workers[0].start()
        return web.Response()

    async def refuse(_: web.Request) -> web.Response:
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
        with pytest.raises(RefusedError, match="no memory left"):
            await transfer.send(server, {"weight": torch.ones(1 << 22)}, "0" * 16)
        await server.close()
        await runner.cleanup()

    try:
        asyncio.run(tell())
    finally:
        workers[0].kill()
