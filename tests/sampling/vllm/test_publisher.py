"""Getting weights onto a server and comparing them, with one that only says what it was asked: real sockets, made-up answers."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.bases import new_ref, random_adapter, renderer
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import new_full_weights
from tinsmith.protocol.shapes import LoraShape
from tinsmith.protocol.weights import WeightsRef
from tinsmith.sampling.sampler import ref_of
from tinsmith.sampling.vllm.canary import Canary, ServedWeights
from tinsmith.sampling.vllm.connection import Connection, ServerFailedError
from tinsmith.sampling.vllm.generate import generate
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance, Slots
from tinsmith.sampling.vllm.parameters import scoring_params
from tinsmith.sampling.vllm.probes import make_probes
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.weights import WeightFiles


class Stub:
    """A server that computes what the trainer does."""

    def __init__(self, canary: Canary, served: ServedWeights) -> None:
        self.canary = canary
        self.served = served
        self.asked: list[str] = []
        """The paths that it was asked for."""
        self.answers = asyncio.Event()
        """Cleared, it answers to no request for tokens."""
        self.answers.set()
        self.is_asked = asyncio.Event()
        """Set by the first request for tokens."""
        self.name: str | None = None
        """What it calls the adapter that it computed with; None for what it was asked for."""
        self.compares = True
        """Whether it has our worker extension."""
        self.failures: dict[str, str] = {}
        """What it fails with, by path; with an empty text it breaks the connection instead."""

    async def answer(self, request: web.Request) -> web.Response:
        """What it says to any request."""
        self.asked.append(request.path)
        if (words := self.failures.get(request.path)) is not None:
            if not words:
                assert request.transport is not None
                request.transport.abort()
            return web.json_response({"error": {"message": words}}, status=500)
        if request.path == "/collective_rpc":
            return web.json_response({"results": [{"checked": True}]}) if self.compares else web.Response(status=500)
        if request.path != "/inference/v1/generate":
            return web.json_response({"weight_version": "default"})
        self.is_asked.set()
        await self.answers.wait()
        body = await request.json()
        ids = body["token_ids"]
        values = np.zeros(len(ids))
        values[self.canary.text] = self.served.canary.logprobs
        scores: list[Any] = [None, *({str(token): {"logprob": value}} for token, value in zip(ids[1:], values[1:].tolist(), strict=True))]
        return web.json_response({"choices": [], "prompt_logprobs": scores, "model": self.name or body["model"]})


def with_publisher(base: BaseModel, directory: Path, story: Callable[[Publisher, Instance, ServedWeights, Stub], Awaitable[None]]) -> None:
    """Tell the story to a publisher and the instance of a server that has a single slot."""

    async def tell() -> None:
        canary = Canary(base, renderer(base))
        served = ServedWeights(None, canary.expected(None), WeightsRef.of_base("tiny"))
        stub = Stub(canary, served)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", stub.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(directory / "socket")).start()
        instance = Instance(Connection(f"unix:{directory / 'socket'}"), Slots(1), 1, True, "file")
        files = WeightFiles(base, str(directory))
        try:
            await story(Publisher(files, canary, canary.base.device), instance, served, stub)
        finally:
            await instance.connection.close()
            await runner.cleanup()
            files.close()

    asyncio.run(tell())


@pytest.mark.parametrize("base", ["text_base", "vision_base"])
def test_new_weights_are_compared_while_samples_fill_all_slots(base: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """They would wait for samples that wait for them. With pictures, one goes ahead."""

    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        async with instance.slots.reserve(1), asyncio.timeout(600), publisher.serving(instance, served):
            pass
        assert stub.asked == ["/weight_info", *["/inference/v1/generate"] * (2 if base == "vision_base" else 1)]

    with_publisher(request.getfixturevalue(base), tmp_path, story)


def test_after_a_transfer_everything_is_compared_anew(text_base: BaseModel, tmp_path: Path) -> None:
    """Adapters too: they lie over what has come."""

    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        async with publisher.serving(instance, served):
            pass
        instance.checks["m/1"] = instance.checks[BASE]
        instance.weights_lock.weights = UNKNOWN
        async with publisher.serving(instance, served):
            assert "m/1" not in instance.checks
        assert stub.asked.count("/update_weights") == 1
        assert stub.asked.count("/inference/v1/generate") == 2

    with_publisher(text_base, tmp_path, story)


def test_a_comparison_that_nobody_waits_for_any_more_keeps_its_weights(text_base: BaseModel, tmp_path: Path) -> None:
    """Else it would be computed with what comes next."""

    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        stub.answers.clear()

        async def sample(of: ServedWeights) -> None:
            async with publisher.serving(instance, of):
                pass

        given_up = asyncio.create_task(sample(served))
        await stub.is_asked.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        weights = new_full_weights(LoraShape(rank=0, seed=0), text_base.full_targets(LoraShape(rank=0, seed=0)), text_base.dtype)
        next_one = asyncio.create_task(sample(ServedWeights(weights, served.canary, new_ref())))
        await instance.connection.get("/health")  # what would have come before has come
        assert stub.asked == ["/weight_info", "/inference/v1/generate", "/health"]
        assert len(instance.weights_lock.queue) == 1
        stub.answers.set()
        await next_one
        assert stub.asked.count("/update_weights") == 1
        assert instance.weights_lock.running == 0

    with_publisher(text_base, tmp_path, story)


def test_a_reply_with_another_adapter_is_an_error(text_base: BaseModel, tmp_path: Path) -> None:
    """Its name says which weights it was computed with: the identity of these stands at its end."""

    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        adapter = random_adapter(text_base, seed=1)
        mine = ServedWeights(adapter, served.canary, ref_of(adapter, "tiny"))
        async with publisher.serving(instance, mine):
            pass  # the canary's reply has come and gone
        async with publisher.serving(instance, mine) as serving:
            name = serving.model
            assert name is not None
            assert name.endswith(f"-{publisher.files.identity(adapter)}")
            rendered = publisher.canary.rendered
            stub.name = name[:-1] + ("0" if name[-1] != "0" else "1")
            with pytest.raises(TinsmithError, match=f"asked for the adapter {name} and answered with {stub.name}"):
                await generate(instance, rendered, scoring_params(0), name)
            stub.name = None
            await generate(instance, rendered, scoring_params(0), name)

    with_publisher(text_base, tmp_path, story)


def test_a_server_that_does_not_compare_adapters_is_not_sampled(text_base: BaseModel, tmp_path: Path) -> None:
    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        stub.compares = False
        adapter = random_adapter(text_base, seed=1)
        with pytest.raises(TinsmithError, match="does not compare adapters with the trainer's; start it with --worker-extension-cls"):
            async with publisher.serving(instance, ServedWeights(adapter, served.canary, ref_of(adapter, "tiny"))):
                raise AssertionError
        assert stub.asked == ["/weight_info", "/v1/load_lora_adapter", "/collective_rpc", "/v1/unload_lora_adapter"]

    with_publisher(text_base, tmp_path, story)


def test_the_first_error_of_a_transfer_is_told_though_the_server_ends_then(text_base: BaseModel, tmp_path: Path) -> None:
    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        stub.failures = {"/update_weights": "no memory left", "/finish_weight_update": "", "/resume": ""}
        instance.weights_lock.weights = UNKNOWN
        with pytest.raises(ServerFailedError, match="no memory left"):
            async with publisher.serving(instance, served):
                raise AssertionError
        assert stub.asked[-3:] == ["/update_weights", "/finish_weight_update", "/resume"]

    with_publisher(text_base, tmp_path, story)


def test_probes_that_failed_come_before_the_first_adapter_is_sampled(text_base: BaseModel, tmp_path: Path) -> None:
    """Without them an adapter would be sampled that the server does not apply. This one computes everything as with the base's weights."""

    async def story(publisher: Publisher, instance: Instance, served: ServedWeights, stub: Stub) -> None:
        publisher.probes = make_probes(publisher.canary, publisher.files)
        adapter = random_adapter(text_base, seed=1)
        mine = ServedWeights(adapter, served.canary, ref_of(adapter, "tiny"))
        stub.failures = {"/inference/v1/generate": "not now"}
        for sample in (publisher.try_probes(instance), publisher.prepare(instance, mine)):
            with pytest.raises(ServerFailedError, match="not now"):
                await sample
        stub.failures = {}
        with pytest.raises(UserError, match=r"vLLM (applies no adapters to|cannot compute with)"):
            async with publisher.serving(instance, mine):
                raise AssertionError
        asked = len(stub.asked)
        with pytest.raises(UserError):
            await publisher.prepare(instance, mine)
        assert len(stub.asked) == asked, "they are known now"

    with_publisher(text_base, tmp_path, story)
