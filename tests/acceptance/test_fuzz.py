"""Requests of every kind to every route of a real server.

None is answered 5xx, none fails by an internal error, and a model that was trained before computes the same to the bit.

`TINSMITH_TEST_FUZZ_REQUESTS=200000 pytest tests/acceptance/test_fuzz.py` runs longer, with other requests each time.

Invariant: Nothing that is sent to any route is answered 5xx or changes what a trained model computes.
"""

import asyncio
import importlib
import os
import pkgutil
import random
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import pytest

from tests.acceptance.bad_target import GOOD, Target
from tests.acceptance.conftest import API_KEY, ready
from tests.acceptance.fuzzing import BODIES, OUTSIDE, Shot, encode, shot
from tests.acceptance.talking import RAW_STEP
from tests.extent import amount
from tests.running import START_S, Server
from tinsmith.server import routes as server_routes
from tinsmith.wire import tinker_pb2 as pb

REQUESTS = int(os.environ.get("TINSMITH_TEST_FUZZ_REQUESTS", amount("500", "10000")))
AT_ONCE = 50
OPTIONS = ["--max-context", "64", "--long-poll-s", "0.5", "--held-operation-s", "0.5"]
NO_BODY = {"{path}", "training_runs/{run_id}/checkpoints/{segment}/{name}/publish", "forward_backward"}


def all_routes() -> list[tuple[str, str]]:
    """Method and path of every route, as the modules of the server declare them, and one that nobody declares.

    But for streams of pages, which do not end.
    """
    found = [("POST", "{path}")]
    for module in pkgutil.iter_modules(server_routes.__path__):
        for route in importlib.import_module(f"{server_routes.__name__}.{module.name}").router.routes:
            found += [(method, route.path.removeprefix("/").replace(":path}", "}")) for method in sorted(route.methods)]
    return [(method, path) for method, path in found if not path.startswith("live/")]


def test_every_route_that_reads_json_has_a_right_body() -> None:
    assert {path for method, path in all_routes() if method in ("POST", "PUT")} - NO_BODY == BODIES.keys()


Place = tuple[Target, int]
"""A model and a seq_id."""


class Range:
    """A server under fire: what the placeholders of a request stand for, and how it is sent."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.loop = asyncio.new_event_loop()
        self.http = httpx.AsyncClient(base_url=f"{server.url}/api/v1/", timeout=START_S, headers={"X-API-Key": API_KEY})
        self.text, self.eye, self.ending = Target(server, "text"), Target(server, "vision"), Target(server, "text")
        for kind in ("save_weights", "save_weights_for_sampler"):
            assert "path" in self.text.model.result(self.text.model.submit(kind, self.text.next(), path="kept"))

    def fill(self, value: Any, drawn: list[Place]) -> Any:
        """`value` with what its placeholders stand for; `drawn` gets the places in a model's sequence that it takes."""
        if isinstance(value, dict):
            return {self.fill(key, drawn): self.fill(item, drawn) for key, item in value.items()}
        if isinstance(value, list):
            return [self.fill(item, drawn) for item in value]
        if not isinstance(value, str):
            return value
        if value in ("{seq}", "{eye_seq}"):
            target = self.text if value == "{seq}" else self.eye
            drawn.append((target, target.next()))
            return drawn[-1][1]
        if value == "{sample}":
            return self.text.next_sample()
        value = value.replace("{ending}", self.ending.session_id)
        value = value.replace("{eye}", self.eye.model.model_id).replace("{eye_sampler}", self.eye.sampler)
        return self.text.fill(value)

    def _body(self, shot: Shot, drawn: list[Place]) -> bytes:
        body = shot.body
        if not isinstance(body, pb.ForwardBackwardRequest):
            return shot.content(encode(self.fill(body, drawn)))
        message = pb.ForwardBackwardRequest()
        message.CopyFrom(body)
        if (target := {"{model}": self.text, "{eye}": self.eye}.get(body.model_id)) is not None:
            drawn.append((target, target.next()))
            message.model_id, message.seq_id = target.model.model_id, drawn[-1][1]
        return shot.content(encode(message))

    async def fire(self, shots: Sequence[Shot]) -> None:
        await asyncio.gather(*[self._one(shot) for shot in shots])

    async def _one(self, shot: Shot) -> None:
        drawn: list[Place] = []
        headers = {"Content-Type": shot.media_type} | ({"Content-Encoding": "zstd"} if shot.compressed else {})
        body, path = self._body(shot, drawn), self.fill(shot.path, drawn)
        if path.startswith(OUTSIDE):
            path = f"{self.server.url}/{path}"
        reply = await self.http.request(shot.method, path, params=shot.query, content=body, headers=headers)
        assert reply.status_code < 500, (shot, reply.text)
        request_id = (
            reply.json().get("request_id", "") if reply.status_code == 200 and b'"request_id"' in reply.content else ""
        )
        await self._close_gaps(drawn, request_id)
        if request_id:
            await self._outcome(shot, request_id)

    async def _close_gaps(self, drawn: list[Place], request_id: str) -> None:
        """A refused request leaves its place in the sequence empty, and what comes behind it would wait."""
        for target, seq_id in drawn:
            if request_id != f"{target.model.model_id}/{seq_id}":
                await self.http.post(
                    "optim_step", json={"model_id": target.model.model_id, "seq_id": seq_id, "adam_params": {}}
                )
        model_id, _, taken = request_id.rpartition("/")
        for target in (self.text, self.eye):
            if target.model.model_id == model_id:
                target.seq_id = max(target.seq_id, int(taken))

    async def _outcome(self, shot: Shot, request_id: str) -> None:
        while (reply := await self.http.post("retrieve_future", json={"request_id": request_id})).status_code == 408:
            pass
        assert reply.status_code in (200, 404, 410), (shot, reply.text)
        if reply.headers["content-type"] == "application/json":
            assert reply.json().get("category") != "server", (shot, reply.text)


@pytest.fixture(scope="module")
def under_fire(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Range]:
    """A server of its own: its models and sessions are not for other tests."""
    with ready(tmp_path_factory.mktemp("fuzz"), *models, *OPTIONS) as server:
        yield Range(server)


@pytest.mark.timeout(1000)
def test_nothing_that_is_sent_harms_the_server(under_fire: Range) -> None:
    trained = Target(under_fire.server, "vision")
    trained.model.forward_backward(trained.next(), GOOD)
    step = trained.model.optim_step(trained.next(), RAW_STEP)
    before, engine = trained.scores(), under_fire.server.engine_pid()
    assert trained.model.grad_norm(step) > 0

    seed = random.getrandbits(32) if "TINSMITH_TEST_FUZZ_REQUESTS" in os.environ else 28
    print(f"the seed of these requests: {seed}")
    source, routes = random.Random(seed), all_routes()
    for _ in range(-(-REQUESTS // AT_ONCE)):
        under_fire.loop.run_until_complete(under_fire.fire([shot(source, routes) for _ in range(AT_ONCE)]))
    assert under_fire.server.wait_for_health().json() == {"status": "ok"}
    assert under_fire.server.engine_pid() == engine
    assert trained.scores() == before
    assert "Traceback" not in under_fire.server.log.read_text()
