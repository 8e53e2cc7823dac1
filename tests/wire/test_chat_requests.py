"""Requests of OpenAI's API: conversations as templates expect them, and what is refused before anything is computed."""

import json
from typing import Any

import pytest

from tinsmith.errors import ParameterError
from tinsmith.wire.chat_requests import parse_chat, parse_completion

PIXEL = "data:image/png;base64,iVBORw0KGgo="


def chat(*messages: Any, **params: Any) -> Any:
    return parse_chat(json.dumps({"model": "m", "messages": messages, **params}).encode())


def call(arguments: str) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}


def test_a_conversation_is_what_templates_expect() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    image = {"type": "image_url", "image_url": {"url": PIXEL, "detail": "auto"}}
    answer = {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "annotations": [],
        "tool_calls": [call('{"a": 1}')],
    }
    found, images, begun = chat(
        {"role": "developer", "content": parts},
        {"role": "user", "content": [image, *parts], "name": "me"},
        answer,
        {"role": "tool", "content": "12", "tool_call_id": "c"},
    ).conversation()
    assert found == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": [{"type": "image"}, *parts], "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "12", "tool_call_id": "c"},
    ]
    assert images == [("png", "iVBORw0KGgo=")]
    assert begun == ""


@pytest.mark.parametrize("arguments", ["no json", "[1]", "[" * 5000, '"\\ud800"', '{"a": "\\ud800"}'])
def test_arguments_of_a_call_are_an_object_of_json(arguments: str) -> None:
    asked = chat({"role": "assistant", "content": "", "tool_calls": [call(arguments)]})
    with pytest.raises(ParameterError, match="no object of JSON") as refused:
        asked.conversation()
    assert refused.value.parameter == "messages.0.tool_calls.0.function.arguments"


def test_tools_are_offered_unless_none_may_be_called() -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
    said = {"role": "user", "content": "a"}
    assert chat(said, tools=[tool]).offered == chat(said, tools=[tool], tool_choice="auto").offered == [tool]
    assert chat(said, tools=[tool], tool_choice="none").offered == chat(said).offered == []


@pytest.mark.parametrize(
    ("prompt", "found"), [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([0], [0])]
)
def test_a_prompt_is_a_text_or_tokens(prompt: Any, found: Any) -> None:
    assert parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode()).prompted == found


@pytest.mark.parametrize("prompt", [[], ["a", "b"], [[1], [2]]])
def test_several_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt: send one, got"):
        parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize("prompt", [[[10**30]], [[-1]], [10**30]])
def test_token_ids_that_no_model_has_are_refused(prompt: Any) -> None:
    with pytest.raises(ParameterError, match="prompt"):
        parse_completion(json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_number_of_tokens_that_no_machine_counts_is_refused(name: str) -> None:
    with pytest.raises(ParameterError, match=f"^{name}: "):
        chat({"role": "user", "content": "a"}, **{name: 10**20})


@pytest.mark.parametrize("number", [128, 129])
def test_stop_strings_leave_room_for_the_end_of_a_turn(number: int) -> None:
    texts = [f"{place:03}" for place in range(number)]
    if number == 128:
        assert chat({"role": "user", "content": "a"}, stop=texts).stops == texts
        return
    with pytest.raises(ParameterError, match="stop: "):
        chat({"role": "user", "content": "a"}, stop=texts)
