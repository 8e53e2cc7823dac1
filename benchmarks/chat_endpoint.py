"""64 chats at once through the real `openai` package, against the SDK's samples of the same prompts.

Tokens per second with whole answers and with streamed ones, and the median wait for the first token, of answers of one
token on both sides. All take turns; medians of 5 rounds, of up to 64 tokens each, whose prompts are in the cache. The
model has 30 million parameters, or with `--tiny` so few that tokens cost next to nothing.
Run it with: taskset -c 0,1 python -m benchmarks.chat_endpoint
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from typing import Any

import openai
import tinker
from tinker import types

from benchmarks.servers import API_KEY, BASE_MODEL, tinsmith_server
from benchmarks.timing import report

REQUESTS, LENGTH, ROUNDS = 64, 64, 5
WORDS = "the tinsmith mends a kettle and a can for the miller, who pays with flour and a song. "


def conversation(number: int) -> list[dict[str, str]]:
    """A conversation that shares no beginning with the others."""
    return [{"role": "user", "content": f"{number * 7919} {WORDS * 2}"}]


async def ask_all(client: openai.AsyncOpenAI, **params: Any) -> list[int]:
    """Whole answers at once; returns their numbers of tokens."""
    create: Any = client.chat.completions.create

    async def one(number: int) -> int:
        reply = await create(model=BASE_MODEL, messages=conversation(number), temperature=0, **params)
        return int(reply.usage.completion_tokens)

    return await asyncio.gather(*[one(number) for number in range(REQUESTS)])


async def stream_all(client: openai.AsyncOpenAI, max_tokens: int) -> tuple[int, list[float]]:
    """Streamed answers at once; returns tokens, and the seconds until the first part of each."""
    create: Any = client.chat.completions.create
    began, firsts = time.perf_counter(), list[float]()

    async def one(number: int) -> int:
        stream = await create(
            model=BASE_MODEL,
            messages=conversation(number),
            temperature=0,
            max_tokens=max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},  # an event for each token, of which most are no text here
        )
        tokens, first = 0, 0.0
        async for part in stream:
            first = first or time.perf_counter() - began
            tokens = part.usage.completion_tokens if part.usage else tokens
        firsts.append(first)
        return tokens

    return sum(await asyncio.gather(*[one(number) for number in range(REQUESTS)])), firsts


def sdk_all(client: tinker.SamplingClient, prompts: list[list[int]], max_tokens: int) -> tuple[int, list[float]]:
    """The SDK's samples at once; returns tokens, and the seconds until each was there."""
    params, began, seconds = types.SamplingParams(max_tokens=max_tokens, temperature=0.0), time.perf_counter(), []
    futures = [client.sample(types.ModelInput.from_ints(prompt), 1, params) for prompt in prompts]
    tokens = 0
    for future in futures:
        tokens += len(future.result().sequences[0].tokens)
        seconds.append(time.perf_counter() - began)
    return tokens, seconds


def rate(action: Callable[[], int]) -> float:
    """Tokens per second of what returns a number of tokens."""
    began = time.perf_counter()
    return action() / (time.perf_counter() - began)


def main() -> None:
    """Measure and print the lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    shape: dict[str, Any] = {} if parser.parse_args().tiny else {"hidden": 512, "layers": 8, "vocab": 8192}
    with (
        tinsmith_server(**shape) as url,
        tinker.ServiceClient(base_url=url, api_key=API_KEY) as service,
        asyncio.Runner() as loop,
    ):
        sampler = service.create_sampling_client(base_model=BASE_MODEL).result()
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=API_KEY, timeout=600)
        create: Any = client.chat.completions.create

        async def prompt(number: int) -> list[int]:
            asked = {"model": BASE_MODEL, "messages": conversation(number), "max_tokens": 1}
            reply = await create(**asked, extra_body={"return_token_ids": True})
            return list(reply.model_extra["prompt_token_ids"])

        prompts = [loop.run(prompt(number)) for number in range(REQUESTS)]
        rates: dict[str, list[float]] = {"sdk": [], "whole": [], "streamed": []}
        waits: dict[str, list[float]] = {"sdk": [], "streamed": []}
        for _ in range(ROUNDS + 1):
            rates["sdk"].append(rate(lambda: sdk_all(sampler, prompts, LENGTH)[0]))
            rates["whole"].append(rate(lambda: sum(loop.run(ask_all(client, max_tokens=LENGTH)))))
            rates["streamed"].append(rate(lambda: loop.run(stream_all(client, LENGTH))[0]))
            waits["streamed"].append(statistics.median(loop.run(stream_all(client, 1))[1]))
            waits["sdk"].append(statistics.median(sdk_all(sampler, prompts, 1)[1]))
        rate_of, wait_of = (
            {name: statistics.median(each[1:]) for name, each in found.items()} for found in (rates, waits)
        )
        for name in ("whole", "streamed"):
            figures = {"chat_tokens_per_s": rate_of[name], "sdk_tokens_per_s": rate_of["sdk"]}
            report(f"chat_{name}", rate_of[name] / rate_of["sdk"], "at least 0.95 times as fast", **figures)
        seconds = {"chat_s": wait_of["streamed"], "sdk_s": wait_of["sdk"]}
        report("chat_first_token", wait_of["sdk"] / wait_of["streamed"], "at least 0.95 times as soon", **seconds)
        loop.run(client.close())


if __name__ == "__main__":
    main()
