"""Getting weights onto a server and comparing them, with one that only says what it was asked: real sockets, made-up
answers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from tests.bases import new_ref, random_adapter, renderer
from tests.sampling.vllm.answering import Agreeing, answering, in_a_loop, instance_of
from tinsmith.errors import TinsmithError, UserError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import new_full_weights
from tinsmith.protocol.shapes import LoraShape, WeightsRef
from tinsmith.sampling.sampler import ref_of
from tinsmith.sampling.vllm.generate import generate
from tinsmith.sampling.vllm.instance import BASE, UNKNOWN, Instance
from tinsmith.sampling.vllm.loader import WeightLoader
from tinsmith.sampling.vllm.protocol import ServerFailedError, scoring_params
from tinsmith.sampling.vllm.publisher import Publisher
from tinsmith.sampling.vllm.verify import Canary, PublishedWeights, TryOut, make_probes
from tinsmith.sampling.vllm.weights import WeightFiles


class Bench(Agreeing):
    """A publisher, and a server that computes what the trainer does with the base's weights."""

    instance: Instance

    def __init__(self, base: BaseModel, files: WeightFiles) -> None:
        super().__init__()
        canary = Canary(base, renderer(base))
        loader = WeightLoader(files)
        self.publisher = Publisher(canary, loader, TryOut(canary, loader, base.device, ()))
        self.published = PublishedWeights(None, canary.expected(None), WeightsRef.of_base("tiny"))
        values = np.zeros(len(canary.rendered))
        values[canary.text] = self.published.canary.logprobs
        self.canary = values[1:].tolist()
        self.adapter = random_adapter(base, seed=1)
        self.published_adapter = PublishedWeights(self.adapter, self.published.canary, ref_of(self.adapter, "tiny"))
        self.answers, self.is_asked = asyncio.Event(), asyncio.Event()
        self.answers.set()  # while it is cleared, no request for tokens is answered

    async def take(self, weights: PublishedWeights) -> None:
        """Get weights onto the server, compare them, and let go of them."""
        async with self.publisher.using(self.instance, weights):
            pass

    async def generate(self, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        """What it says to one who asks for tokens."""
        self.is_asked.set()
        await self.answers.wait()
        return await super().generate(request, body)


@asynccontextmanager
async def bench_of(base: BaseModel, directory: Path) -> AsyncIterator[Bench]:
    files = WeightFiles(base, str(directory))
    bench = Bench(base, files)
    async with answering(directory, bench.answer) as connection:
        bench.instance = instance_of(connection)
        yield bench
    files.close()


@pytest.mark.parametrize("base", ["text_base", "vision_base"])
@in_a_loop
async def test_new_weights_are_compared_while_samples_fill_all_slots(
    base: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """They would wait for samples that wait for them. With images, one goes ahead."""
    async with bench_of(request.getfixturevalue(base), tmp_path) as bench:
        async with bench.instance.slots.reserve(1), asyncio.timeout(600):
            await bench.take(bench.published)
        assert bench.asked == ["/weight_info", *["/inference/v1/generate"] * (2 if base == "vision_base" else 1)]


@in_a_loop
async def test_after_a_transfer_everything_is_compared_anew(text_base: BaseModel, tmp_path: Path) -> None:
    """Adapters too: they lie over what has come."""
    async with bench_of(text_base, tmp_path) as bench:
        await bench.take(bench.published)
        bench.instance.checks["m/1"] = bench.instance.checks[BASE]
        bench.instance.weights_lock.weights = UNKNOWN
        async with bench.publisher.using(bench.instance, bench.published):
            assert "m/1" not in bench.instance.checks
        told = [path for path in bench.asked if path not in ("/inference/v1/generate", "/weight_info", "/pause")]
        assert told == [
            "/start_weight_update",
            "/update_weights",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/resume",
        ]
        assert bench.asked.count("/inference/v1/generate") == 2


@in_a_loop
async def test_a_comparison_that_nobody_waits_for_any_more_keeps_its_weights(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Else it would be computed with what comes next."""
    async with bench_of(text_base, tmp_path) as bench:
        bench.answers.clear()
        given_up = asyncio.create_task(bench.take(bench.published))
        await bench.is_asked.wait()
        given_up.cancel()
        await asyncio.wait([given_up])
        shape = LoraShape(rank=0, seed=0)
        weights = new_full_weights(shape, text_base.full_targets(shape), text_base.dtype)
        next_one = asyncio.create_task(bench.take(PublishedWeights(weights, bench.published.canary, new_ref())))
        await bench.instance.connection.get("/health")  # what would have come before has come
        assert bench.asked == ["/weight_info", "/inference/v1/generate", "/health"]
        assert len(bench.instance.weights_lock.queue) == 1
        bench.answers.set()
        await next_one
        assert bench.asked.count("/update_weights") == 1
        assert bench.instance.weights_lock.running == 0


@in_a_loop
async def test_a_reply_with_another_adapter_is_an_error(text_base: BaseModel, tmp_path: Path) -> None:
    """Its name says which weights it was computed with: the identity of these stands at its end."""
    async with bench_of(text_base, tmp_path) as bench:
        await bench.take(bench.published_adapter)  # the canary's reply has come and gone
        async with bench.publisher.using(bench.instance, bench.published_adapter) as loaded:
            name, rendered = loaded.model, bench.publisher.canary.rendered
            assert name is not None
            assert name.endswith(f"-{bench.publisher.loader.files.identity(bench.adapter)}")
            bench.name = name[:-1] + ("0" if name[-1] != "0" else "1")
            with pytest.raises(TinsmithError, match=f"asked for the adapter {name} and answered with {bench.name}"):
                await generate(bench.instance, rendered, scoring_params(0), name)
            bench.name = None
            await generate(bench.instance, rendered, scoring_params(0), name)


@in_a_loop
async def test_a_server_that_does_not_compare_adapters_is_not_sampled(text_base: BaseModel, tmp_path: Path) -> None:
    """It has not our worker extension."""
    async with bench_of(text_base, tmp_path) as bench:
        bench.failures = {"/collective_rpc": "unknown method"}
        with pytest.raises(
            TinsmithError, match="does not compare adapters with the trainer's; start it with --worker-extension-cls"
        ):
            await bench.take(bench.published_adapter)
        assert bench.asked == ["/weight_info", "/v1/load_lora_adapter", "/collective_rpc", "/v1/unload_lora_adapter"]


@in_a_loop
async def test_the_first_error_of_a_transfer_is_told_though_the_server_ends_then(
    text_base: BaseModel, tmp_path: Path
) -> None:
    async with bench_of(text_base, tmp_path) as bench:
        bench.failures = {"/update_weights": "no memory left", "/finish_weight_update": "", "/resume": ""}
        bench.instance.weights_lock.weights = UNKNOWN
        with pytest.raises(ServerFailedError, match="no memory left"):
            await bench.take(bench.published)
        assert bench.asked[-3:] == ["/update_weights", "/finish_weight_update", "/resume"]


@in_a_loop
async def test_probes_that_failed_come_before_the_first_adapter_is_sampled(
    text_base: BaseModel, tmp_path: Path
) -> None:
    """Without them an adapter would be sampled that the server does not apply.

    This one computes everything as with the base's weights.
    """
    async with bench_of(text_base, tmp_path) as bench:
        publisher = bench.publisher
        publisher.tryout.probes = make_probes(publisher.canary, publisher.loader.files)
        bench.failures = {"/inference/v1/generate": "not now"}
        for sample in (
            publisher.tryout.try_out(bench.instance),
            publisher.prepare(bench.instance, bench.published_adapter),
        ):
            with pytest.raises(ServerFailedError, match="not now"):
                await sample
        bench.failures = {}
        with pytest.raises(UserError, match=r"vLLM (applies no adapters to|cannot compute with)"):
            await bench.take(bench.published_adapter)
        asked = len(bench.asked)
        with pytest.raises(UserError):
            await publisher.prepare(bench.instance, bench.published_adapter)
        assert len(bench.asked) == asked, "they are known now"
