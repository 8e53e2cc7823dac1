"""Applications that use the real `anthropic` package, on a server that OpenAI's package asks too.

Invariant: A message is the answer that OpenAI's API gives to the same conversation, streamed or not.
"""

import base64
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
import tinker

from tests.acceptance.conftest import API_KEY, for_applications
from tests.acceptance.test_openai import CALL, application, ask, taught_to_call
from tests.bases import png
from tests.running import START_S, Server
from tinsmith.chat.template import ChatFormat

TALK: list[Any] = [{"role": "user", "content": "Köln: hello there €"}]
WEATHER: Any = {"name": "weather", "description": "tells it", "input_schema": {"type": "object"}}
AS_OPENAI: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "tells it", "parameters": {"type": "object"}},
}
GREEDY = {"temperature": 0}


@pytest.fixture(scope="module")
def server(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with for_applications(family_dir, tmp_path_factory) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    url = f"{server.url}/anthropic/api"
    with anthropic.Anthropic(base_url=url, api_key=API_KEY, max_retries=0, timeout=START_S) as found:
        yield found


@pytest.fixture
def beside(server: Server) -> Iterator[openai.OpenAI]:
    with application(server) as found:
        yield found


def message(client: anthropic.Anthropic, model: str = "text", messages: Any = None, **params: Any) -> Any:
    create: Any = client.messages.create
    asked = {"model": model, "messages": messages or TALK, "max_tokens": 12, "extra_body": GREEDY}
    return create(**asked | params)


def streamed(client: anthropic.Anthropic, model: str = "text", messages: Any = None, **params: Any) -> tuple[Any, Any]:
    """The types of all events, and the message that the package puts together."""
    stream: Any = client.messages.stream
    asked = {"model": model, "messages": messages or TALK, "max_tokens": 12, "extra_body": GREEDY}
    with stream(**asked | params) as events:
        kinds = [event.type for event in events]
        return kinds, events.get_final_message()


def test_a_message_is_the_answer_of_openais_api(client: anthropic.Anthropic, beside: openai.OpenAI) -> None:
    talk: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "Köln?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Yes."}]},
        {"role": "user", "content": "More."},
    ]
    plain = [
        {"role": "system", "content": "Be brief."},
        *({**each, "content": text} for each, text in zip(talk, ("Köln?", "Yes.", "More."), strict=True)),
    ]
    expected = ask(beside, messages=plain)
    for system in ("Be brief.", [{"type": "text", "text": "Be brief."}]):
        found = message(client, messages=talk, system=system)
        assert (found.type, found.role, found.model, found.stop_reason) == (
            "message",
            "assistant",
            "text",
            "max_tokens",
        )
        assert [(block.type, block.text) for block in found.content] == [("text", expected.choices[0].message.content)]
        used = found.usage
        assert used.input_tokens + used.cache_read_input_tokens == expected.usage.prompt_tokens
        assert used.output_tokens == 12
        kinds, whole = streamed(client, messages=talk, system=system)
        assert [block.text for block in whole.content] == [block.text for block in found.content]
        assert (whole.stop_reason, whole.usage.output_tokens) == ("max_tokens", 12)
        assert kinds[0] == "message_start"
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        counted = client.messages.count_tokens(model="text", messages=talk, system=system)  # type: ignore[arg-type]
        assert counted.input_tokens == expected.usage.prompt_tokens


def test_a_message_comes_while_it_is_sampled(client: anthropic.Anthropic) -> None:
    """What a busy machine has sampled together is told together."""
    assert streamed(client, max_tokens=600)[0].count("text") > 4


def test_an_answer_goes_on_with_its_beginning(client: anthropic.Anthropic, beside: openai.OpenAI) -> None:
    whole = ask(beside).choices[0].message.content
    begun = [*TALK, {"role": "assistant", "content": whole[:4]}]
    create: Any = beside.completions.create
    prompt = "<|im_start|>user\nKöln: hello there €<|im_end|>\n<|im_start|>assistant\n" + whole[:4]
    expected = create(model="text", prompt=prompt, temperature=0, max_tokens=12).choices[0].text
    assert message(client, messages=begun).content[0].text == expected


def test_an_answer_ends_before_a_stop_sequence(client: anthropic.Anthropic) -> None:
    whole = message(client).content[0].text
    stop = whole[7:11]
    found = message(client, stop_sequences=["never such", stop])
    _, parts = streamed(client, stop_sequences=["never such", stop])
    for each in (found, parts):
        assert (each.stop_reason, each.stop_sequence) == ("stop_sequence", stop)
        assert each.content[0].text == whole[: whole.index(stop)]


def test_images_are_seen(client: anthropic.Anthropic, beside: openai.OpenAI) -> None:
    data = base64.b64encode(png(1)).decode()
    shown: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}}
    text = {"type": "text", "text": "what?"}
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
    expected = ask(beside, "vision", [{"role": "user", "content": [url, text]}], extra_body={})
    found = message(client, "vision", [{"role": "user", "content": [shown, text]}])
    assert found.content[0].text == expected.choices[0].message.content
    assert found.usage.input_tokens + found.usage.cache_read_input_tokens == expected.usage.prompt_tokens
    with pytest.raises(anthropic.BadRequestError, match="shows 0 of the conversation's 1 images"):
        message(client, "text", [{"role": "user", "content": [shown]}])
    talk: Any = [{"role": "user", "content": [shown, text]}]
    counted = client.messages.count_tokens(model="vision", messages=talk)
    assert counted.input_tokens == expected.usage.prompt_tokens
    with pytest.raises(anthropic.BadRequestError, match="shows 0 of the conversation's 1 images"):
        client.messages.count_tokens(model="text", messages=[{"role": "user", "content": [shown]}])


def test_tools_are_called_and_their_results_are_read(
    client: anthropic.Anthropic, beside: openai.OpenAI, service: tinker.ServiceClient, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = ChatFormat(str(family_dir("qwen3"))).tokenizer
    question: Any = {"role": "user", "content": "Weather?"}
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    told = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sun."},
        {"role": "user", "content": "Well?"},
    ]
    prompts = [
        ask(beside, "tools", messages, tools=[AS_OPENAI], max_tokens=1).model_extra["prompt_token_ids"]
        for messages in ([question], told)
    ]
    answers = [tokenizer.encode(text, add_special_tokens=False).ids for text in (CALL, "It is sunny.<|im_end|>")]
    model = taught_to_call(service, prompts, answers)
    found = message(client, model, [question], tools=[WEATHER], max_tokens=99)
    kinds, whole = streamed(client, model, [question], tools=[WEATHER], max_tokens=99, tool_choice={"type": "auto"})
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 1
    for each in (found, whole):
        (block,) = each.content
        assert (each.stop_reason, block.type, block.name, block.input) == (
            "tool_use",
            "tool_use",
            "weather",
            {"city": "Rome"},
        )
    result = {"type": "tool_result", "tool_use_id": found.content[0].id, "content": [{"type": "text", "text": "Sun."}]}
    after = [
        question,
        {"role": "assistant", "content": [block.model_dump() for block in found.content]},
        {"role": "user", "content": [result, {"type": "text", "text": "Well?"}]},
    ]
    said = message(client, model, after, tools=[WEATHER], max_tokens=99)
    assert (said.stop_reason, said.content[0].text) == ("end_turn", "It is sunny.")
    schema = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]}
    must: Any = {"name": "b", "input_schema": schema | {"additionalProperties": False}, "strict": True}
    choice = {"type": "tool", "name": "b"}
    forced = message(client, "tools", [question], tools=[WEATHER, must], tool_choice=choice, max_tokens=400)
    (block,) = forced.content
    assert (block.name, block.input["days"] in (1, 2)) == ("b", True)


def test_an_answer_is_json_of_the_format_that_is_asked_for(client: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"tin": {"enum": ["pot"]}}, "required": ["tin"]}
    wanted = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    found = message(client, output_config=wanted, max_tokens=400)
    assert (json.loads(found.content[0].text), found.stop_reason) == ({"tin": "pot"}, "end_turn")


FROM_ELSEWHERE = {"type": "image", "source": {"type": "url", "url": "https://host/a.png"}}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"extra_body": {"invented": 1}}, "invented"),
    ({"extra_body": {"temperature": -1}}, "temperature"),
    ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_choice"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "a"}}]}]},
        "messages.0",
    ),
]


@pytest.mark.parametrize(("params", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_obeyed_is_refused_by_name(client: anthropic.Anthropic, params: Any, named: str) -> None:
    with pytest.raises(anthropic.BadRequestError) as refused:
        message(client, **params)
    body: Any = refused.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert body["error"]["message"].startswith(named)


def test_errors_have_the_form_of_the_api(server: Server, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="not served here") as absent:
        message(client, "nothing")
    assert absent.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_a_client_that_goes_away_cancels_its_sample(server: Server) -> None:
    body = {"model": "text", "messages": TALK, "max_tokens": 30_000, "temperature": 0, "stream": True}
    with (
        httpx.Client(base_url=server.url, timeout=START_S, headers={"x-api-key": API_KEY}) as client,
        client.stream("POST", "/anthropic/api/v1/messages", json=body) as reply,
    ):
        lines = reply.iter_lines()  # which ends the stream when it is forgotten
        assert next(lines) == "event: message_start"
        server.wait_for_status(lambda status: status["samples"]["running"] == 1)
    began = time.monotonic()
    server.wait_for_status(lambda status: status["samples"] == {"running": 0, "waiting": 0})
    assert time.monotonic() - began < 60, "the sample ran to its end"
