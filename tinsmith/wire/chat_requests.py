"""Requests of OpenAI's API on the wire: chat completions and completions, with some parameters of vLLM's.

A parameter that is not built is accepted with the value that changes nothing, such as an empty logit_bias. Any other
value, and any other parameter, is refused by name.
"""

import binascii
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import from_json

from tinsmith.errors import ParameterError, quoted, translated
from tinsmith.wire.json_body import FiniteFloat, Id, StrictModel, parse_json
from tinsmith.wire.sample import MAX_SAMPLES, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

MAX_TOP_LOGPROBS = 20
_MOST_STOPS, _MOST_STOP_CHARACTERS = MAX_STOP_STRINGS // 2, MAX_STOP_CHARACTERS // 2
"""Stop strings and their characters; the end of a turn comes to them."""
_FEW_TOKENS = 16
"""Most new tokens of a completion that does not say how many."""
IMAGES = {"data:image/png;base64": "png", "data:image/jpeg;base64": "jpeg", "data:image/jpg;base64": "jpeg"}
"""Formats of images, by the beginning of their URI."""


def only(allowed: Any, why: str) -> Any:
    """Make a check that a field is absent or has the one value that changes nothing."""

    def check(value: Any) -> Any:
        if value is not None and value != allowed:
            raise ValueError(f"{why}; leave it out")
        return value

    return AfterValidator(check)


def check_stop(value: Any) -> Any:
    """Check a stop string, or a list of them, which leaves place for the end of a turn."""
    texts = [value] if isinstance(value, str) else value or []
    characters = sum(map(len, texts))
    if "" in texts or len(texts) > _MOST_STOPS or characters > _MOST_STOP_CHARACTERS:
        raise ValueError(
            f"send at most {_MOST_STOPS} texts, of at most {_MOST_STOP_CHARACTERS} characters together, none empty"
        )
    return value


def _check_top_k(value: int | None) -> int | None:
    return None if value in (0, -1) else value


_MostTokens: TypeAlias = Annotated[int, Field(ge=1, le=2**63 - 1)]
_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
_Penalty: TypeAlias = Annotated[FiniteFloat, Field(ge=-2, le=2)]
_Nothing: TypeAlias = None


class _StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, only(False, "nothing is obfuscated here")] = None


class _Common(StrictModel):
    """The parameters of both requests."""

    model: Annotated[str, Field(min_length=1, max_length=2000)]
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_top_k)] | None = None
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    stop: Annotated[str | list[str] | None, AfterValidator(check_stop)] = None
    max_tokens: _MostTokens | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    return_token_ids: bool | None = None
    user: Id | None = None
    """For the log."""
    frequency_penalty: _Penalty | None = None
    presence_penalty: _Penalty | None = None
    repetition_penalty: Annotated[FiniteFloat, Field(ge=0.01, le=10)] | None = None
    min_p: Annotated[FiniteFloat, Field(ge=0, le=1)] | None = None
    logit_bias: Annotated[dict[str, float] | None, only({}, "the samplers take no bias")] = None

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def count(self) -> int:
        """Number of answers."""
        return self.n or 1

    def shaping(self, grammar: str | None = None) -> dict[str, Any]:
        """Return the fields of `Shaping` that are given."""
        given = {
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "min_p": self.min_p,
            "grammar": grammar,
        }
        return {name: value for name, value in given.items() if value is not None}

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with what was used."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options: they are for streams; set stream, or leave them out")
        return self


# ---- chat/completions


class _TextPart(StrictModel):
    type: Literal["text"]
    text: str


class _ImageUrl(StrictModel):
    url: str
    detail: Annotated[str | None, only("auto", "images are taken in the size that they have")] = None


class _ImagePart(StrictModel):
    type: Literal["image_url"]
    image_url: _ImageUrl


_Texts = str | list[_TextPart]


class _Spoken(StrictModel):
    role: Literal["system", "developer"]
    content: _Texts
    name: str | None = None


class _Asked(StrictModel):
    role: Literal["user"]
    content: str | list[Annotated[_TextPart | _ImagePart, Field(discriminator="type")]]
    name: str | None = None


class _Function(StrictModel):
    name: str
    arguments: str


class _Call(StrictModel):
    type: Literal["function"] = "function"
    id: str | None = None
    function: _Function


class _Answered(StrictModel):
    role: Literal["assistant"]
    content: _Texts | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    reasoning_content: str | None = None
    # Answers as the openai package gives them out
    refusal: _Nothing = None
    annotations: Annotated[list[Any] | None, only([], "answers here have none")] = None
    audio: _Nothing = None
    function_call: _Nothing = None


class _Result(StrictModel):
    role: Literal["tool"]
    content: _Texts
    tool_call_id: str | None = None
    name: str | None = None


_Message = Annotated[_Spoken | _Asked | _Answered | _Result, Field(discriminator="role")]


class _Described(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    """A tool that the model may call."""

    type: Literal["function"]
    function: _Described


class _ChosenName(StrictModel):
    name: str


class _Chosen(StrictModel):
    type: Literal["function"]
    function: _ChosenName


class _AnyText(StrictModel):
    type: Literal["text"]


class _AnyObject(StrictModel):
    type: Literal["json_object"]


class _Schema(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    description: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class _OfSchema(StrictModel):
    type: Literal["json_schema"]
    json_schema: _Schema


_Format = Annotated[_AnyText | _AnyObject | _OfSchema, Field(discriminator="type")]


class ChatRequest(_Common):
    """A request of chat/completions."""

    messages: Annotated[list[_Message], Field(min_length=1)]
    max_completion_tokens: _MostTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | _Chosen | None = None
    parallel_tool_calls: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: _Format | None = None
    modalities: Annotated[list[str] | None, only(["text"], "answers are text")] = None
    store: Annotated[bool | None, only(False, "answers are not stored")] = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ParameterError(
                f"max_tokens: {self.max_tokens} is not max_completion_tokens={self.max_completion_tokens}; send one"
            )
        if self.top_logprobs and not self.logprobs:
            raise ParameterError("top_logprobs: they come with logprobs; set logprobs too")
        if self.top_logprobs and self.stream:
            raise ParameterError("top_logprobs: they are known when an answer is complete; leave stream out")
        self._check_tools()
        return self

    def _check_tools(self) -> None:
        if self.forced_tools:
            if self.schema_of_answer is not None:
                raise ParameterError("response_format: an answer that must call a tool has no format; leave one out")
            return
        if self.tool_choice not in (None, "none", "auto"):
            raise ParameterError(f"tool_choice: {quoted(self.tool_choice)} calls no tool of tools; name one of them")
        if any(tool.function.strict for tool in self.tools or []) and self.offered:
            raise ParameterError(
                "tools: the arguments of a call are held to their schema where the call is required; "
                "leave strict out, or set tool_choice"
            )
        if self.parallel_tool_calls is False and self.offered:
            raise ParameterError(
                "parallel_tool_calls: the model decides how many calls it makes, unless one is required; "
                "leave it out, or set tool_choice"
            )

    @property
    def most_tokens(self) -> int | None:
        """The most tokens of an answer; None goes up to the context window."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as templates expect them."""
        tools = [] if self.tool_choice == "none" else self.tools or []
        return [tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools]

    @property
    def forced_tools(self) -> dict[str, dict[str, Any]]:
        """The tools of which the answer must call one or more, with the schemas of their arguments."""
        named = self.tool_choice.function.name if isinstance(self.tool_choice, _Chosen) else None
        if named is None and self.tool_choice != "required":
            return {}
        return {name: each for name, each in parameters_of(self.offered).items() if named in (None, name)}

    @property
    def most_calls(self) -> int | None:
        """The most calls of `forced_tools`; None sets no limit."""
        return 1 if self.parallel_tool_calls is False or isinstance(self.tool_choice, _Chosen) else None

    @property
    def schema_of_answer(self) -> dict[str, Any] | None:
        """The JSON schema that the answer keeps to; None for a text."""
        if isinstance(self.response_format, _OfSchema):
            return self.response_format.json_schema.schema_
        return {"type": "object"} if isinstance(self.response_format, _AnyObject) else None

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Options of the chat template."""
        return self.chat_template_kwargs or {}

    def conversation(self) -> tuple[list[dict[str, Any]], list[tuple[str, str]], str]:
        """The messages as templates expect them, format and base64 of their images in order, and no beginning.

        Raises ParameterError for images that are no data URIs, and arguments of calls that are no JSON.
        """
        images: list[tuple[str, str]] = []
        messages = [_for_template(f"messages.{index}", each, images) for index, each in enumerate(self.messages)]
        return messages, images, ""


def _for_template(
    where: str, message: _Spoken | _Asked | _Answered | _Result, images: list[tuple[str, str]]
) -> dict[str, Any]:
    found = message.model_dump(exclude_none=True, exclude={"content", "tool_calls", "annotations"})
    found["role"] = "system" if message.role == "developer" else message.role
    content = message.content or ""
    found["content"] = content if isinstance(content, str) else _parts(f"{where}.content", content, images)
    if isinstance(message, _Answered) and message.tool_calls:
        found["tool_calls"] = [
            _for_call(f"{where}.tool_calls.{index}", *each)
            for index, each in enumerate((call.id, call.function) for call in message.tool_calls)
        ]
    return found


def _for_call(where: str, call_id: str | None, function: _Function) -> dict[str, Any]:
    say = f"{where}.function.arguments: no object of JSON, got {quoted(function.arguments)}"
    with translated(ValueError, ParameterError, lambda _: say):
        arguments = from_json(function.arguments or "{}")  # neither half characters nor a depth that is no use
    if not isinstance(arguments, dict):
        raise ParameterError(say)
    call = {"type": "function", "function": {"name": function.name, "arguments": arguments}}
    return call if call_id is None else {"id": call_id, **call}


def _parts(where: str, content: Sequence[_TextPart | _ImagePart], images: list[tuple[str, str]]) -> Any:
    """The parts as templates expect them; a text where there is nothing else, which every template takes."""
    if all(isinstance(part, _TextPart) for part in content):
        return "\n".join(part.text for part in content if isinstance(part, _TextPart))
    parts: list[dict[str, str]] = []
    for index, part in enumerate(content):
        if isinstance(part, _TextPart):
            parts.append({"type": "text", "text": part.text})
        else:
            images.append(_image(f"{where}.{index}.image_url.url", part.image_url.url))
            parts.append({"type": "image"})
    return parts


def _image(where: str, url: str) -> tuple[str, str]:
    kind, comma, data = url.partition(",")
    if not comma or kind.lower() not in IMAGES:
        raise ParameterError(
            f"{where}: send the image itself, as data:image/png;base64,... or data:image/jpeg;base64,..., "
            f"got {quoted(url)}"
        )
    check_image(where, data)
    return IMAGES[kind.lower()], data


def check_image(where: str, data: str) -> None:
    """Raise ParameterError for an image that does not begin as base64 does."""
    with translated(ValueError, ParameterError, lambda error: f"{where}: no base64: {error}"):
        binascii.a2b_base64(data[:4096])


# ---- completions


class CompletionRequest(_Common):
    """A request of completions."""

    prompt: str | list[str] | list[_TokenId] | list[list[_TokenId]]
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    echo: Annotated[bool | None, only(False, "a prompt is not sent back")] = None
    suffix: Annotated[str | None, only("", "text is written behind a prompt alone")] = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        if self.best_of is not None and self.best_of != self.count:
            raise ParameterError(f"best_of: {self.best_of} is not n={self.count}; leave it out, and choose among n")
        if self.logprobs and self.stream:
            raise ParameterError("logprobs: above 0 they are known when an answer is complete; send 0 with stream")
        if isinstance(self.prompt, list) and (not self.prompt or (len(self.prompt) > 1 and not self._is_tokens)):
            raise ParameterError(f"prompt: send one, got {len(self.prompt)}; send a request for each")
        return self

    @property
    def _is_tokens(self) -> bool:
        return isinstance(self.prompt, list) and isinstance(self.prompt[0], int)

    @property
    def prompted(self) -> str | list[int]:
        """The prompt: a text, or token ids."""
        if isinstance(self.prompt, str) or self._is_tokens:
            return self.prompt  # type: ignore[return-value]
        return self.prompt[0]  # type: ignore[return-value]

    @property
    def most_tokens(self) -> int:
        """The most tokens of an answer."""
        return _FEW_TOKENS if self.max_tokens is None else self.max_tokens


def parse_chat(body: bytes) -> ChatRequest:
    """A body of chat/completions. Raises ParameterError naming the first wrong parameter."""
    return parse_json(ChatRequest, body, ParameterError)


def parse_completion(body: bytes) -> CompletionRequest:
    """A body of completions. Raises as `parse_chat`."""
    return parse_json(CompletionRequest, body, ParameterError)


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The JSON schemas of the arguments of `ChatRequest.offered`, by the name of the tool."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
