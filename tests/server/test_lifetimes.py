"""Sessions and results end by themselves."""

import asyncio
import time
from pathlib import Path

from tests.server.serving import Served, served
from tinsmith.config import Config, ServerConfig
from tinsmith.store.records import Outcome
from tinsmith.store.store import Store


def config(session_idle_s: float = 600.0, result_ttl_s: float = 86400.0) -> Config:
    return Config(server=ServerConfig(session_idle_s=session_idle_s, result_ttl_s=result_ttl_s))


async def finish(server: Served, model_id: str, seq_id: int) -> str:
    request_id = f"{model_id}/{seq_id}"
    server.finish(Outcome(request_id, b'{"metrics":{}}', "json", None, None))
    return request_id


def test_a_session_lives_as_long_as_it_shows_itself(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, config(session_idle_s=0.4)) as server:
            beating, asking, silent = [await server.new_session() for _ in range(3)]
            model_id = await server.new_model(asking)
            ended = []
            for seq_id in range(1, 7):
                await asyncio.sleep(0.1)
                await server.post("session_heartbeat", {"session_id": beating, "type": "session_heartbeat"})
                await server.post("optim_step", {"model_id": model_id, "seq_id": seq_id, "adam_params": {}})
                ended += await server.hub.lifetimes.end_idle_sessions()
            assert ended == [silent]
            assert (await server.post("session_heartbeat", {"session_id": silent, "type": "session_heartbeat"})).status_code == 410
            assert (await server.post("session_heartbeat", {"session_id": beating, "type": "session_heartbeat"})).status_code == 200

    asyncio.run(run())


def test_a_server_that_just_started_ends_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path) as server:
            session_id = await server.new_session()
        await asyncio.sleep(0.3)
        async with served(tmp_path, config(session_idle_s=0.2)) as server:
            assert await server.hub.lifetimes.end_idle_sessions() == []
            await asyncio.sleep(0.25)
            assert await server.hub.lifetimes.end_idle_sessions() == [session_id]

    asyncio.run(run())


def test_results_are_kept_for_their_time_or_until_their_session_ends(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, config(session_idle_s=0.4, result_ttl_s=1.0)) as server:
            session_id = await server.new_session()
            model_id = await server.new_model(session_id)
            first = await finish(server, model_id, 0)
            await server.hub.lifetimes.drop_results()
            assert (await server.post("retrieve_future", {"request_id": first})).json() == {"metrics": {}}
            await asyncio.sleep(1.1)
            await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
            second = await finish(server, model_id, 1)
            await server.hub.lifetimes.drop_results()
            gone = await server.post("retrieve_future", {"request_id": first})
            assert (gone.status_code, "is not kept any more" in gone.json()["detail"]) == (410, True)
            assert (await server.post("retrieve_future", {"request_id": second})).status_code == 200
            again = await server.post("optim_step", {"model_id": model_id, "seq_id": 1, "adam_params": {}})
            assert again.json()["request_id"] == second
            await server.post(f"sessions/{session_id}/finish", {"reason": {"type": "success"}, "detail": None})
            await server.hub.lifetimes.drop_results()
            assert (await server.post("retrieve_future", {"request_id": second})).status_code == 200
            await asyncio.sleep(0.2)
            await server.hub.lifetimes.drop_results()
            assert (await server.post("retrieve_future", {"request_id": second})).status_code == 410

    asyncio.run(run())


def test_a_snapshot_is_sampled_after_the_result_of_its_save_is_forgotten(tmp_path: Path) -> None:
    async def run() -> None:
        async with served(tmp_path, config(result_ttl_s=1.0)) as server:
            model_id = await server.new_model(await server.new_session())
            await server.post("save_weights_for_sampler", {"model_id": model_id, "seq_id": 1, "sampling_session_seq_id": 0})
            sampler = f"{model_id.partition(':')[0]}:sample:0"
            assert (await server.client.get(f"/api/v1/samplers/{sampler}")).status_code == 404
            await finish(server, model_id, 1)
            await server.hub.store.write(Store.drop_results, time.time() + 1, 0.0)
            assert (await server.client.get(f"/api/v1/samplers/{sampler}")).status_code == 200

    asyncio.run(run())
