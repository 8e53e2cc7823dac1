"""Sampling on a CPU through SDK, server and vLLM, against that vLLM asked directly; and how long publishing takes.

- 64 requests at once of 64 tokens, one sample of 64 or 256 tokens: tokens per second against vLLM's generate endpoint.
- The same with an image in every prompt, each used by 8 requests and new in every round. vLLM alone gets the encoded
  image each time.
- From save_weights_and_get_sampling_client to the first token sampled with a changed adapter of the tiny model.
- The same with the full weights of a model of 30 million parameters.

vLLM runs in the environment that `make test-vllm` sets up. Both sides take turns; medians.
Run it with: taskset -c 0,1 python -m benchmarks.with_vllm
"""

import asyncio
import base64
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import tinker
from tinker import types

from benchmarks.servers import API_KEY
from benchmarks.timing import in_turn, report
from tests.acceptance.talking import datum, text_input
from tests.bases import png
from tests.with_vllm.serving import sampling_with_vllm, wait_for_vllm
from tinsmith.models.tiny import TinyKind, write_tiny_model

REQUESTS, LENGTH, PUBLISHES = 64, 64, 5
ANSWERS = {64: 15, 256: 7}
"""Tokens of an answer, and rounds with answers so long."""
STEP = types.AdamParams(learning_rate=1e-3)

Body = dict[str, Any]


@contextmanager
def running(kind: TinyKind, hidden: int = 64, layers: int = 2) -> Iterator[tuple[tinker.ServiceClient, str]]:
    """An SDK client of a server of a random model, and the address of its vLLM server, which is ready."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model(kind, directory / "model", hidden=hidden, layers=layers)
        with sampling_with_vllm(directory, "--base-model", f"tiny={directory / 'model'}") as server:
            address = wait_for_vllm(server)
            with tinker.ServiceClient(base_url=server.url, api_key=API_KEY) as service:
                yield service, address


def through_sdk(client: tinker.SamplingClient, prompts: list[types.ModelInput], answer: int) -> None:
    """Send every prompt, then wait for all."""
    params = types.SamplingParams(max_tokens=answer, temperature=1.0, stop=[])
    futures = [client.sample(prompt, num_samples=1, sampling_params=params) for prompt in prompts]
    lengths = {len(future.result().sequences[0].tokens) for future in futures}
    if lengths != {answer}:
        raise RuntimeError(f"answers of {lengths} tokens")


def directly(address: str, bodies: list[Body], answer: int) -> None:
    """The same from vLLM's own endpoint."""
    params = {"max_tokens": answer, "temperature": 1.0, "ignore_eos": True, "detokenize": False, "logprobs": 0}

    async def ask(session: aiohttp.ClientSession, body: Body) -> None:
        async with session.post("/inference/v1/generate", json=body | {"sampling_params": params}) as reply:
            content = await reply.json()
            if len(content["choices"][0]["token_ids"]) != answer:
                raise RuntimeError(f"vLLM answered {content}")

    async def ask_all() -> None:
        connector = aiohttp.UnixConnector(address.removeprefix("unix:"), limit=0)
        async with aiohttp.ClientSession("http://vllm", connector=connector) as session:
            await asyncio.gather(*(ask(session, body) for body in bodies))

    asyncio.run(ask_all())


def texts() -> tuple[list[types.ModelInput], list[Body]]:
    """New prompts, for the SDK and for vLLM."""
    seed = next(SEEDS)
    prompts = [text_input(1000 * seed + i, LENGTH) for i in range(REQUESTS)]
    return prompts, [{"token_ids": prompt.to_ints()} for prompt in prompts]


def images(placeholder: int) -> tuple[list[types.ModelInput], list[Body]]:
    """New prompts of an image and text; eight share an image."""
    seed = next(SEEDS)
    encoded = [png(1000 * seed + i, 160, 96) for i in range(REQUESTS // 8)]
    prompts, bodies = [], []
    for i in range(REQUESTS):
        tokens, data = text_input(1000 * seed + i, LENGTH - 15).to_ints(), encoded[i // 8]
        chunks: list[types.ModelInputChunk] = [
            types.ImageChunk(data=data, format="png", expected_tokens=15),
            types.EncodedTextChunk(tokens=tokens),
        ]
        prompts.append(types.ModelInput(chunks=chunks))
        url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
        bodies.append({"token_ids": [placeholder, *tokens], "content_parts": [{"type": "image_url", "url": url}]})
    return prompts, bodies


SEEDS = count()


def throughput(
    client: tinker.SamplingClient, address: str, name: str, wanted: str, make: Callable[[], Any], answer: int
) -> None:
    """Tokens per second through everything, as a part of those of vLLM alone."""
    rounds = ANSWERS[answer]
    batches = iter([make() for _ in range(2 * (rounds + 1))])
    ours_s, bare_s = in_turn(
        lambda: through_sdk(client, next(batches)[0], answer),
        lambda: directly(address, next(batches)[1], answer),
        rounds=rounds,
    )
    tokens = REQUESTS * answer
    report(
        f"{name}_{answer}",
        bare_s / ours_s,
        wanted,
        ours_tokens_per_s=tokens / ours_s,
        vllm_tokens_per_s=tokens / bare_s,
    )


def publishing(client: tinker.TrainingClient, name: str, wanted: str) -> None:
    """Milliseconds from saving changed weights to a token sampled with them."""
    prompt, one = text_input(1, 16), types.SamplingParams(max_tokens=1)
    times = []
    for step in range(PUBLISHES + 1):
        client.forward_backward([datum(text_input(step, 16))], "cross_entropy").result()
        client.optim_step(STEP).result()
        started = time.perf_counter()
        client.save_weights_and_get_sampling_client().result().sample(prompt, 1, one).result()
        times.append(1000 * (time.perf_counter() - started))
    report(name, median(times[1:]), wanted, first_ms=times[0], slowest_ms=float(np.max(times[1:])))


def main() -> None:
    """Measure and print the lines."""
    with running("qwen3-vl") as (service, address):
        client = service.create_sampling_client(base_model="tiny").result()
        placeholder = (
            service.create_lora_training_client("tiny", rank=8).result().get_tokenizer().get_vocab()["<|image_pad|>"]
        )
        for answer in ANSWERS:
            throughput(client, address, "vllm_text", "at least 0.95 times as fast", texts, answer)
            throughput(
                client, address, "vllm_images", "at least 0.90 times as fast", lambda: images(placeholder), answer
            )
        publishing(service.create_lora_training_client("tiny", rank=8).result(), "vllm_publish_lora", "at most 150 ms")
    with running("qwen3", hidden=640, layers=8) as (service, _):
        publishing(
            service.create_lora_training_client("tiny", rank=0).result(), "vllm_publish_full_30m", "at most 1000 ms"
        )


if __name__ == "__main__":
    main()
