"""Applications of OpenAI's and Anthropic's API on a server that samples with vLLM, through the real packages.

Invariant: An answer to an application over vLLM is the SDK's sample, streamed or not. Penalties and grammars are
obeyed, and log-probabilities that vLLM does not have are refused.
"""

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
import tinker
from tinker import types

from tests.running import Server

TALK: list[Any] = [{"role": "user", "content": "hello there"}]
ASKED: dict[str, Any] = {"model": "tiny", "messages": TALK, "temperature": 0.0, "max_tokens": 12}
KETTLE = {
    "type": "object",
    "properties": {"tin": {"enum": ["pot", "can"]}, "many": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["tin", "many"],
    "additionalProperties": False,
}


@pytest.fixture
def client(server: Server, socket: str) -> Iterator[openai.OpenAI]:
    assert socket
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="tml-vllm", max_retries=0, timeout=600) as found:
        yield found


def ask(client: openai.OpenAI, **params: Any) -> Any:
    create: Any = client.chat.completions.create
    return create(**ASKED | {"extra_body": {"return_token_ids": True}} | params)


def tokens_of(choice: Any) -> list[int]:
    found: list[int] = choice.model_extra["token_ids"]
    return found


def streamed(client: openai.OpenAI, **params: Any) -> tuple[list[int], str, int]:
    """Tokens, text and number of events."""
    parts = [part.choices[0] for part in ask(client, stream=True, **params)]
    tokens = [token for part in parts for token in tokens_of(part)]
    return tokens, "".join(part.delta.content or "" for part in parts), len(parts)


def test_an_answer_is_the_sdks_sample_streamed_or_not(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    reply = ask(client, logprobs=True)
    prompt = types.ModelInput.from_ints(reply.model_extra["prompt_token_ids"])
    sampler = service.create_sampling_client(base_model="tiny")
    expected = sampler.sample(prompt, 1, types.SamplingParams(temperature=0.0, max_tokens=12)).result().sequences[0]
    (choice,) = reply.choices
    assert tokens_of(choice) == expected.tokens
    assert [each.logprob for each in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-4)
    tokens, text, _ = streamed(client)
    assert (tokens, text) == (expected.tokens, choice.message.content)
    assert streamed(client, max_tokens=300)[2] > 4, "the tokens came together"


def test_messages_are_the_same_answer(server: Server, client: openai.OpenAI) -> None:
    expected = ask(client).choices[0].message.content
    with anthropic.Anthropic(base_url=f"{server.url}/anthropic/api", api_key="tml-vllm", timeout=600) as other:
        create: Any = other.messages.create
        asked: dict[str, Any] = {"model": "tiny", "messages": TALK, "max_tokens": 12}
        found = create(**asked, extra_body={"temperature": 0})
        assert (found.content[0].text, found.stop_reason) == (expected, "max_tokens")
        stream: Any = other.messages.stream
        with stream(**asked, extra_body={"temperature": 0}) as events:
            assert "".join(events.text_stream) == expected


def test_penalties_are_those_of_the_formula(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    """The likeliest token by the SDK's log-probabilities, with penalties below 0 that let tokens come again."""
    sampler = service.create_sampling_client(base_model="tiny")
    prompt, found = ask(client).model_extra["prompt_token_ids"], list[int]()
    one = types.SamplingParams(temperature=0.0, max_tokens=1, stop=[])
    for _ in range(8):
        text = types.ModelInput.from_ints(prompt + found)
        (sequence,) = sampler.sample(text, 1, one, topk_sample_logprobs=1024).result().sequences
        (top,) = sequence.topk_logprobs or []
        scores = {token: logprob + 2 * found.count(token) + 2 * (token in found) for token, logprob in top or []}
        found.append(max(scores, key=lambda token: scores[token]))
    penalties = {"frequency_penalty": -2, "presence_penalty": -2, "max_tokens": 8}
    assert tokens_of(ask(client, **penalties).choices[0]) == found
    assert streamed(client, **penalties)[0] == found
    assert found != tokens_of(ask(client, max_tokens=8).choices[0])
    likeliest = ask(client, temperature=1.0, extra_body={"return_token_ids": True, "min_p": 1.0}).choices[0]
    assert tokens_of(likeliest) == tokens_of(ask(client).choices[0])


def test_an_answer_is_json_of_the_format_that_is_asked_for(client: openai.OpenAI) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "kettle", "schema": KETTLE}}
    asked: dict[str, Any] = {"response_format": wanted, "max_tokens": 400, "seed": 3}
    for more in ({"temperature": 0.7, "n": 2}, {"temperature": 1.0, "logprobs": True}):
        for choice in ask(client, **asked, **more).choices:
            found = json.loads(choice.message.content)
            assert (choice.finish_reason, found["tin"] in ("pot", "can"), 0 <= found["many"] <= 99) == (
                "stop",
                True,
                True,
            )
    assert json.loads(streamed(client, **asked, temperature=1.0)[1]).keys() == {"tin", "many"}


def test_what_has_no_logprobs_is_refused_only_where_they_are_asked_for(client: openai.OpenAI) -> None:
    usual: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 1}
    assert len(tokens_of(ask(client, **usual).choices[0])) == 12
    assert len(streamed(client, **usual)[0]) == 12
    with pytest.raises(openai.BadRequestError, match="vLLM gives no log-probabilities over the whole vocabulary"):
        ask(client, **usual, logprobs=True)
