"""Applications that use the real `openai` package, beside the SDK on the same server.

Invariant: An answer to an application is the sample that the SDK gets of the same prompt, token by token, streamed or
not, and of the weights that `model` names.
"""

import base64
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import tinker
from tinker import types
from transformers import AutoTokenizer

from tests.acceptance.conftest import API_KEY, for_applications, ready
from tests.acceptance.talking import RAW_STEP, datum, text_input, train, with_inputs
from tests.acceptance.test_keys import add_key, used
from tests.bases import png
from tests.preloaded import REAL_PYTHON
from tests.running import START_S, Server

TALK: list[Any] = [{"role": "user", "content": "Köln: hello there €"}]
IDS = {"return_token_ids": True}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'


@pytest.fixture(scope="module")
def server(family_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with for_applications(family_dir, tmp_path_factory) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with application(server) as found:
        yield found


def application(server: Server, prefix: str = "/v1", key: str = API_KEY) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + prefix, api_key=key, max_retries=0, timeout=START_S)


def sampler_of(service: tinker.ServiceClient, base_model: str = "text") -> tinker.SamplingClient:
    found: tinker.SamplingClient = service.create_sampling_client(base_model=base_model).result()
    return found


def sampled(
    sampler: tinker.SamplingClient, prompt: list[int], count: int = 1, **params: Any
) -> list[types.SampledSequence]:
    """The SDK's samples of these tokens."""
    asked = types.SamplingParams(**{"temperature": 0.0, "max_tokens": 12} | params)
    return list(sampler.sample(types.ModelInput.from_ints(prompt), count, asked).result().sequences)


def ask(client: openai.OpenAI, model: str = "text", messages: Any = None, **params: Any) -> Any:
    asked: dict[str, Any] = {"model": model, "messages": messages or TALK, "temperature": 0.0, "max_tokens": 12}
    create: Any = client.chat.completions.create
    return create(**asked | {"extra_body": IDS} | params)


def streamed(client: openai.OpenAI, model: str = "text", **params: Any) -> list[Any]:
    return list(ask(client, model, stream=True, **params))


def tokens_of(choice: Any) -> list[int]:
    found: list[int] = choice.model_extra["token_ids"]
    return found


def test_an_answer_is_the_sdks_sample_streamed_or_not(
    server: Server, service: tinker.ServiceClient, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir("qwen3"))
    text = tokenizer.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.encode(text, add_special_tokens=False)
    (expected,) = sampled(sampler_of(service), prompt, stop=[tokenizer.convert_tokens_to_ids("<|im_end|>")])
    words = tokenizer.decode(expected.tokens, skip_special_tokens=True)
    for prefix in ("/v1", "/oai/api/v1"):
        with application(server, prefix) as client:
            reply = ask(client, logprobs=True)
            (choice,) = reply.choices
            parts = streamed(client, logprobs=True, stream_options={"include_usage": True})
        assert (reply.model, reply.object, reply.model_extra["prompt_token_ids"]) == ("text", "chat.completion", prompt)
        assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", words, "length")
        assert tokens_of(choice) == expected.tokens
        assert [each.logprob for each in choice.logprobs.content] == pytest.approx(expected.logprobs, abs=1e-5)
        assert [each.token for each in choice.logprobs.content] == [tokenizer.decode([t]) for t in expected.tokens]
        usage = (len(prompt), 12, len(prompt) + 12)
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == usage
        *choices, last = [(part.choices or [None])[0] for part in parts]
        assert last is None
        assert parts[-1].usage == reply.usage.model_copy(
            update={"prompt_tokens_details": parts[-1].usage.prompt_tokens_details}
        )
        assert {(part.object, part.id) for part in parts} == {("chat.completion.chunk", parts[0].id)}
        assert [part.model_extra.get("prompt_token_ids") for part in parts] == [prompt] + [None] * len(choices)
        assert choices[0].delta.role == "assistant"
        assert [each.delta.role for each in choices[1:]] == [None] * (len(choices) - 1)
        assert "".join(each.delta.content or "" for each in choices) == words
        assert [token for each in choices for token in tokens_of(each)] == expected.tokens
        scores = [each.logprob for choice in choices if choice.logprobs for each in choice.logprobs.content]
        assert scores == pytest.approx(expected.logprobs, abs=1e-5)
        assert [each.finish_reason for each in choices] == [None] * (len(choices) - 1) + ["length"]
        assert len(choices) > 1


def test_a_stream_comes_while_it_is_sampled(client: openai.OpenAI) -> None:
    """What a busy machine has sampled together is told together."""
    assert len(streamed(client, max_tokens=600)) > 4


def test_a_long_conversation_is_parsed_and_rendered_beside_the_server(
    client: openai.OpenAI, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir("qwen3"))
    talk = [{"role": "user", "content": f"{number}: a kettle for Köln. " * 60} for number in range(30)]
    text = tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)
    reply = ask(client, messages=talk, max_tokens=1)
    assert reply.model_extra["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    assert reply.usage.prompt_tokens > 16_000


def test_settings_of_sampling_are_those_of_the_sdk(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    settings: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "seed": 7, "max_tokens": 9}
    reply = ask(client, n=3, extra_body=IDS | {"top_k": 40}, **settings)
    prompt, answers = reply.model_extra["prompt_token_ids"], [tokens_of(choice) for choice in reply.choices]
    expected = sampled(sampler_of(service), prompt, 3, top_k=40, stop=[], **settings)
    assert answers == [each.tokens for each in expected]
    assert len({tuple(each) for each in answers}) == 3
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage.completion_tokens == 27
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for part in streamed(client, n=3, extra_body=IDS | {"top_k": 40}, **settings):
        for choice in part.choices:
            found[choice.index] += tokens_of(choice)
    assert list(found.values()) == answers
    longer: dict[str, Any] = {"max_tokens": None, "max_completion_tokens": 5}
    assert len(tokens_of(ask(client, **longer).choices[0])) == 5


def test_penalties_are_those_of_the_formula(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    """The likeliest token by the SDK's log-probabilities, less the penalties of the tokens so far."""
    sampler = sampler_of(service)
    prompt, found = ask(client).model_extra["prompt_token_ids"], list[int]()
    one = types.SamplingParams(temperature=0.0, max_tokens=1, stop=[])
    for _ in range(24):
        text = types.ModelInput.from_ints(prompt + found)
        (sequence,) = sampler.sample(text, 1, one, topk_sample_logprobs=1024).result().sequences
        (top,) = sequence.topk_logprobs or []
        scores = {token: logprob + 2 * found.count(token) + 1.5 * (token in found) for token, logprob in top or []}
        found.append(max(scores, key=lambda token: scores[token]))
    penalties: dict[str, Any] = {"frequency_penalty": -2, "presence_penalty": -1.5, "max_tokens": 24}
    assert tokens_of(ask(client, **penalties).choices[0]) == found
    assert found != tokens_of(ask(client, max_tokens=24).choices[0])
    parts = streamed(client, **penalties)
    assert [token for part in parts for token in tokens_of(part.choices[0])] == found
    repeating = tokens_of(ask(client, max_tokens=24, extra_body=IDS | {"repetition_penalty": 0.1}).choices[0])
    assert len({*repeating}) < 12


def test_min_p_and_a_seed_are_obeyed(client: openai.OpenAI) -> None:
    """Batch mates with other settings change nothing."""
    settings: dict[str, Any] = {"temperature": 1.8, "seed": 3, "n": 3}
    assert tokens_of(ask(client, **settings, extra_body=IDS | {"min_p": 1.0}).choices[2]) == tokens_of(
        ask(client).choices[0]
    )
    few = IDS | {"min_p": 0.2, "repetition_penalty": 1.1}
    alone = [tokens_of(choice) for choice in ask(client, **settings, extra_body=few).choices]
    assert alone != [tokens_of(choice) for choice in ask(client, **settings).choices]
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(ask, client, seed=seed, n=2, temperature=1.0, max_tokens=40) for seed in range(2)]
        others.append(pool.submit(ask, client, presence_penalty=1.0, max_tokens=40))
        together = ask(client, **settings, extra_body=few)
        assert [tokens_of(choice) for choice in together.choices] == alone
        assert all(other.result().choices for other in others)


def test_an_answer_is_json_of_the_format_that_is_asked_for(client: openai.OpenAI) -> None:
    kettle = {
        "type": "object",
        "properties": {"tin": {"enum": ["pot", "can"]}, "many": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["tin", "many"],
        "additionalProperties": False,
    }
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "kettle", "strict": True, "schema": kettle}}
    settings: dict[str, Any] = {"response_format": wanted, "max_tokens": 400, "temperature": 1.0, "seed": 5}
    reply = ask(client, n=4, **settings)
    texts = [choice.message.content for choice in reply.choices]
    for choice in reply.choices:
        found = json.loads(choice.message.content)
        assert (choice.finish_reason, found.keys()) == ("stop", {"tin", "many"})
        assert found["tin"] in ("pot", "can")
        assert 0 <= found["many"] <= 99
    assert len(set(texts)) > 1
    parts = streamed(client, **settings)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == texts[0]
    some = ask(client, response_format={"type": "json_object"}).choices[0].message.content
    assert some.lstrip().startswith("{")


def test_an_answer_ends_before_a_stop_string(client: openai.OpenAI) -> None:
    whole = ask(client).choices[0].message.content
    stop = whole[7:11]
    for stops in (stop, [stop, "never such"]):
        (choice,) = ask(client, stop=stops).choices
        assert (choice.message.content, choice.finish_reason) == (whole[: whole.index(stop)], "stop")
        parts = streamed(client, stop=stops)
        assert "".join(part.choices[0].delta.content or "" for part in parts) == choice.message.content
        assert parts[-1].choices[0].finish_reason == "stop"


def test_likeliest_tokens_are_the_sdks(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    reply = ask(client, logprobs=True, top_logprobs=3)
    prompt = types.ModelInput.from_ints(reply.model_extra["prompt_token_ids"])
    asked = types.SamplingParams(temperature=0.0, max_tokens=12)
    response = sampler_of(service).sample(prompt, 1, asked, topk_sample_logprobs=3).result()
    expected = [[logprob for _, logprob in top or []] for top in response.sequences[0].topk_logprobs or []]
    found = [[each.logprob for each in place.top_logprobs] for place in reply.choices[0].logprobs.content]
    assert len(found) == 12
    for mine, theirs in zip(found, expected, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_texts_and_tokens_are_continued(
    client: openai.OpenAI, service: tinker.ServiceClient, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir("qwen3"))
    prompt = tokenizer("Once €")["input_ids"]
    (expected,) = sampled(sampler_of(service), prompt, max_tokens=16)
    words = tokenizer.decode(expected.tokens, skip_special_tokens=True)
    asked: Any
    create: Any = client.completions.create
    for asked in ("Once €", ["Once €"], prompt, [prompt]):
        reply = create(model="text:peft:1024", prompt=asked, temperature=0, logprobs=2)
        (choice,) = reply.choices
        assert (choice.text, choice.finish_reason, reply.object) == (words, "length", "text_completion")
        found = choice.logprobs
        assert found.token_logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert found.tokens == [tokenizer.decode([token]) for token in expected.tokens]
        assert found.text_offset[:2] == [0, len(found.tokens[0])]
        assert [len(top) for top in found.top_logprobs or []] == [2] * 16
    usage = {"include_usage": True}
    parts = list(create(model="text", prompt="Once €", temperature=0, logprobs=0, stream=True, stream_options=usage))
    assert "".join(part.choices[0].text for part in parts[:-1]) == words
    offsets = [at for part in parts[:-1] if part.choices[0].logprobs for at in part.choices[0].logprobs.text_offset]
    assert offsets == found.text_offset
    assert parts[-1].usage.completion_tokens == 16


def learn(client: tinker.TrainingClient, seed: int) -> None:
    client.forward_backward([datum(text_input(seed, 9), seed)], "cross_entropy").result()
    client.optim_step(RAW_STEP).result()


def test_a_model_names_its_weights(client: openai.OpenAI, service: tinker.ServiceClient) -> None:
    """The newest are those that were saved last, under a name or not."""
    trained = train(service, "text")
    live = f"live:{trained.model_id}"
    with pytest.raises(openai.NotFoundError, match="has no weights for sampling yet"):
        ask(client, live)
    seen = [tokens_of(ask(client).choices[0])]
    prompt = ask(client).model_extra["prompt_token_ids"]
    for step in range(4):
        learn(trained, step)
        if step % 2:
            snapshot = trained.save_weights_and_get_sampling_client().result()
            names = [live]
        else:
            path = trained.save_weights_for_sampler(f"step{step}").result().path
            snapshot = service.create_sampling_client(model_path=path).result()
            names = [live, path, f"text;{path}", f"text:peft:1024;{path}"]
            assert path in [model.id for model in client.models.list()]
            assert client.models.retrieve(path).id == path
        (expected,) = sampled(snapshot, prompt)
        assert expected.tokens not in seen
        seen.append(list(expected.tokens))
        for name in names:
            assert tokens_of(ask(client, name).choices[0]) == expected.tokens, (step, name)
    assert [model.id for model in client.models.list()][:3] == ["text", "vision", "tools"]
    inflight = trained.save_weights_and_get_sampling_client(kind="inflight").result()
    assert tokens_of(ask(client, live).choices[0]) == sampled(inflight, prompt)[0].tokens
    with pytest.raises(openai.NotFoundError, match="not served here") as absent:
        ask(client, "nothing")
    assert (absent.value.param, absent.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError, match="behind the semicolon stands a path") as refused:
        ask(client, "text;nothing")
    assert refused.value.param == "model"


def test_images_are_seen_as_by_the_sdk(
    client: openai.OpenAI, service: tinker.ServiceClient, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir("qwen3_vl"))
    before, behind = "<|im_start|>user\n<|vision_start|>", "<|vision_end|>what?<|im_end|>\n<|im_start|>assistant\n"
    answers = []
    for seed in (0, 1):
        url = {"url": "data:image/png;base64," + base64.b64encode(png(seed)).decode()}
        content = [{"type": "image_url", "image_url": url}, {"type": "text", "text": "what?"}]
        reply = ask(client, "vision", [{"role": "user", "content": content}], extra_body={}, logprobs=True)
        first, last = (tokenizer.encode(text, add_special_tokens=False) for text in (before, behind))
        image = types.ImageChunk(data=png(seed), format="png", expected_tokens=6)
        chunks: list[Any] = [types.EncodedTextChunk(tokens=first), image, types.EncodedTextChunk(tokens=last)]
        asked = types.SamplingParams(temperature=0.0, max_tokens=12)
        expected = sampler_of(service, "vision").sample(types.ModelInput(chunks=chunks), 1, asked).result().sequences[0]
        assert reply.choices[0].message.content == tokenizer.decode(expected.tokens, skip_special_tokens=True)
        answers.append([each.logprob for each in reply.choices[0].logprobs.content])
        assert answers[-1] == pytest.approx(expected.logprobs, abs=1e-5)
        assert reply.usage.prompt_tokens == len(first) + 6 + len(last)
    assert answers[0] != answers[1]
    for link, reason in (("https://host/a.png", "send the image itself"), ("data:image/png;base64,!", "")):
        with pytest.raises(openai.BadRequestError, match=reason) as refused:
            ask(client, "vision", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": link}}]}])
        if reason:
            assert refused.value.param == "messages.0.content.0.image_url.url"
    with pytest.raises(openai.BadRequestError, match="shows 0 of the conversation's 1 images"):
        ask(client, "text", [{"role": "user", "content": content}])


def taught_to_call(service: tinker.ServiceClient, prompts: list[list[int]], answers: list[list[int]]) -> str:
    """The live weights of a model that gives each prompt its answer."""
    trained = train(service, "tools", rank=16)
    data = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tokens = prompt + answer
        weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
        whole = types.ModelInput.from_ints(tokens[:-1])
        data.append(with_inputs(whole, target_tokens=tokens[1:], weights=weights))
    for _ in range(60):
        passed = trained.forward_backward(data, "cross_entropy")
        trained.optim_step(types.AdamParams(learning_rate=1e-2)).result()
        if passed.result().metrics["loss:sum"] < 0.05:
            break
    trained.save_weights_and_get_sampling_client().result()
    return f"live:{trained.model_id}"


def test_tools_are_called_and_their_results_are_read(
    client: openai.OpenAI, service: tinker.ServiceClient, family_dir: Callable[[str], Path]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(family_dir("qwen3"))
    question: Any = {"role": "user", "content": "Weather?"}
    asked = ask(client, "tools", [question], tools=[WEATHER], max_tokens=1)
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    told: list[Any] = [
        question,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "Sun."},
    ]
    again = ask(client, "tools", told, tools=[WEATHER], max_tokens=1)
    prompts = [reply.model_extra["prompt_token_ids"] for reply in (asked, again)]
    assert CALL in tokenizer.decode(prompts[1])
    texts = [CALL, "It is sunny.<|im_end|>"]
    model = taught_to_call(service, prompts, [tokenizer.encode(text, add_special_tokens=False) for text in texts])
    (choice,) = ask(client, model, [question], tools=[WEATHER], max_tokens=99).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (found,) = choice.message.tool_calls
    assert (found.function.name, found.function.arguments) == ("weather", '{"city": "Rome"}')
    parts = streamed(client, model, messages=[question], tools=[WEATHER], tool_choice="auto", max_tokens=99)
    deltas = [each for part in parts for each in part.choices[0].delta.tool_calls or []]
    assert [(each.index, each.function.name, each.function.arguments) for each in deltas] == [
        (0, "weather", '{"city": "Rome"}')
    ]
    assert "".join(part.choices[0].delta.content or "" for part in parts) == ""
    assert parts[-1].choices[0].finish_reason == "tool_calls"
    told[1] = choice.message.model_dump()
    told[2]["tool_call_id"] = found.id
    (choice,) = ask(client, model, told, tools=[WEATHER], max_tokens=99).choices
    assert (choice.finish_reason, choice.message.content, choice.message.tool_calls) == ("stop", "It is sunny.", None)
    without = ask(client, model, [question], tools=[WEATHER], tool_choice="none", max_tokens=1)
    assert without.model_extra["prompt_token_ids"] == ask(client, "tools", [question]).model_extra["prompt_token_ids"]
    with pytest.raises(openai.BadRequestError, match="the chat template of text has none"):
        ask(client, "text", tools=[WEATHER])


def test_a_call_that_is_required_is_made_by_a_model_that_was_taught_nothing(client: openai.OpenAI) -> None:
    days = {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"]} | {
        "additionalProperties": False
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": days, "strict": True}} for name in "ab"]
    asked: dict[str, Any] = {"tools": tools, "max_tokens": 400, "temperature": 1.0, "seed": 1}
    named = {"type": "function", "function": {"name": "b"}}
    for choice, names in (
        ({"tool_choice": "required", "parallel_tool_calls": False}, "ab"),
        ({"tool_choice": named}, "b"),
    ):
        (answer,) = ask(client, "tools", **asked, **choice).choices
        (call,) = answer.message.tool_calls
        assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
        assert call.function.name in names
        assert json.loads(call.function.arguments)["days"] in (1, 2)


def test_the_llm_command_line_chats(server: Server, client: openai.OpenAI, tmp_path: Path) -> None:
    """`llm` of PyPI, which streams unless it is told not to."""
    expected = ask(client).choices[0].message.content
    told = f"- {{model_id: tin, model_name: text, api_base: {server.url}/v1, supports_schema: true}}\n"
    (tmp_path / "extra-openai-models.yaml").write_text(told)

    def llm(*options: str, most: int = 12) -> str:
        command = [REAL_PYTHON, "-m", "llm", "-m", "tin", "--key", API_KEY, TALK[0]["content"], *options]
        settings = ("-o", "temperature", "0", "-o", "max_tokens", str(most))
        known = os.environ | {"LLM_USER_PATH": str(tmp_path)}
        done = subprocess.run([*command, *settings], env=known, capture_output=True, check=True, timeout=START_S)
        return done.stdout.decode().strip()

    assert llm() == llm("--no-stream") == expected.strip()
    schema = {"type": "object", "properties": {"tin": {"enum": ["pot"]}}, "required": ["tin"]}
    found = json.loads(llm("--schema", json.dumps(schema | {"additionalProperties": False}), most=400))
    assert found == {"tin": "pot"}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty"),
    ({"extra_body": {"repetition_penalty": 1e-9}}, "repetition_penalty"),  # a logit would be no number
    ({"logit_bias": {"5": 1}}, "logit_bias"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
        "response_format",
    ),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls"),
    ({"extra_body": {"min_p": 1.5}}, "min_p"),
    ({"extra_body": {"invented": 1}}, "invented"),
    ({"extra_body": {"chat_template_kwargs": {"messages": []}}}, "chat_template_kwargs.messages"),
    ({"reasoning_effort": "low"}, "reasoning_effort"),
    ({"temperature": -1}, "temperature"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 2, "stream": True}, "top_logprobs"),
    ({"max_completion_tokens": 3}, "max_tokens"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"store": True}, "store"),
    ({"n": 0}, "n"),
    ({"stop": [""]}, "stop"),
]


@pytest.mark.parametrize(("params", "named"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_obeyed_is_refused_by_name(client: openai.OpenAI, params: dict[str, Any], named: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, **params)
    assert (refused.value.param, refused.value.type) == (named, "invalid_request_error")
    assert str(refused.value.body["message"]).startswith(f"{named}: ")  # type: ignore[index]


def test_parameters_that_change_nothing_are_accepted(client: openai.OpenAI) -> None:
    same: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "store": False, "n": 1}
    same |= {"response_format": {"type": "text"}, "tool_choice": "none", "user": "me", "modalities": ["text"]}
    extra = IDS | {"min_p": 0, "repetition_penalty": 1.0, "top_k": -1, "chat_template_kwargs": {}}
    assert tokens_of(ask(client, **same, extra_body=extra).choices[0]) == tokens_of(ask(client).choices[0])


def test_a_client_that_goes_away_cancels_its_sample(server: Server) -> None:
    body = {"model": "text", "messages": TALK, "max_tokens": 30_000, "temperature": 0}
    for stream in (True, False):
        with httpx.Client(base_url=server.url, timeout=START_S) as client:
            if stream:
                with client.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as reply:
                    lines = reply.iter_lines()  # which ends the stream when it is forgotten
                    next(lines)
                    server.wait_for_status(lambda status: status["samples"]["running"] == 1)
            else:
                client.timeout = 0.5
                with pytest.raises(httpx.ReadTimeout):
                    client.post("/v1/chat/completions", json=body)
        began = time.monotonic()
        status = server.wait_for_status(lambda status: status["samples"] == {"running": 0, "waiting": 0})
        assert status["samples"]["running"] == 0
        assert time.monotonic() - began < 60, "the sample ran to its end"


def test_applications_have_the_keys_limits_and_budgets_of_their_tenants(text_only: list[str], tmp_path: Path) -> None:
    mine, foreign = (add_key(tmp_path / "data", name) for name in ("vision", "speech"))
    narrow = add_key(tmp_path / "data", "narrow", "--max-parallel", "1")
    with ready(tmp_path, *text_only) as server:
        with tinker.ServiceClient(base_url=server.url, api_key=mine) as service:
            trained = train(service, "text")
            path = trained.save_weights_for_sampler("a").result().path
            for model in (path, f"live:{trained.model_id}", f"text;{path}"):
                with application(server, key=foreign) as speech:
                    with pytest.raises(openai.NotFoundError) as refused:
                        ask(speech, model)
                    with pytest.raises(openai.NotFoundError) as absent:
                        ask(speech, model.replace(":train:0", ":train:1"))
                said = str(refused.value).replace(":train:0", ":train:1")
                assert said == str(absent.value)
                with application(server, key=mine) as vision:
                    assert len(tokens_of(ask(vision, model, max_tokens=2).choices[0])) == 2
        for wrong in ("tml-wrong", "none"):
            with application(server, key=wrong) as stranger, pytest.raises(openai.AuthenticationError):
                ask(stranger)
        with application(server, key=narrow) as client:
            with pytest.raises(openai.BadRequestError, match="more than key 'narrow' may run at a time"):
                ask(client, n=2)
            parts = iter(ask(client, stream=True, max_tokens=30_000))
            next(parts)
            with pytest.raises(openai.RateLimitError, match="send this sample later") as limited:
                ask(client)
            assert limited.value.response.headers["retry-after"] == "1"
        while (found := used(server, mine, {"sampling_sample", "sampling_prefill"}))["sampling_sample"] != 6:
            assert found["sampling_sample"] < 6
