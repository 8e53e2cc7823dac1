"""Requests of Anthropic's Messages API on the wire. What is not built is refused by name, as in `chat_requests.py`."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tinsmith.errors import ParameterError, quoted
from tinsmith.wire.chat_requests import IMAGES, check_image, check_stop, only, parameters_of
from tinsmith.wire.json_body import FiniteFloat, Id, StrictModel, parse_json


class _CacheControl(StrictModel):
    """Beginnings of prompts are cached whatever this says."""

    type: Literal["ephemeral"]
    ttl: str | None = None


class _TextBlock(StrictModel):
    type: Literal["text"]
    text: str
    cache_control: _CacheControl | None = None
    citations: Annotated[Any, only([], "answers cite nothing")] = None


class _ImageSource(StrictModel):
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg"]
    data: str


class _ImageBlock(StrictModel):
    type: Literal["image"]
    source: _ImageSource
    cache_control: _CacheControl | None = None


_ShownBlock = Annotated[_TextBlock | _ImageBlock, Field(discriminator="type")]


class _ResultBlock(StrictModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[_ShownBlock] | None = None
    is_error: bool | None = None
    cache_control: _CacheControl | None = None


class _UseBlock(StrictModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: _CacheControl | None = None
    # Calls as the anthropic package gives them out
    caller: None = None
    toolset_name: None = None


class _UserTurn(StrictModel):
    role: Literal["user"]
    content: str | list[Annotated[_TextBlock | _ImageBlock | _ResultBlock, Field(discriminator="type")]]


class _AssistantTurn(StrictModel):
    role: Literal["assistant"]
    content: str | list[Annotated[_TextBlock | _UseBlock, Field(discriminator="type")]]


class _CustomTool(StrictModel):
    name: Annotated[str, Field(min_length=1, max_length=200)]
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] | None = None
    strict: bool | None = None
    cache_control: _CacheControl | None = None


class _ToolChoice(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class _AnswerFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _OutputConfig(StrictModel):
    format: _AnswerFormat | None = None
    effort: None = None


class _MessageMetadata(StrictModel):
    user_id: Id | None = None


class _NoThinking(StrictModel):
    type: Literal["disabled"]


class TokensRequest(StrictModel):
    """A request of messages/count_tokens: a conversation."""

    model: Annotated[str, Field(min_length=1, max_length=2000)]
    messages: Annotated[list[Annotated[_UserTurn | _AssistantTurn, Field(discriminator="role")]], Field(min_length=1)]
    system: str | list[_TextBlock] | None = None
    tools: list[_CustomTool] | None = None
    tool_choice: _ToolChoice | None = None
    thinking: _NoThinking | None = None
    output_config: _OutputConfig | None = None
    cache_control: _CacheControl | None = None

    @model_validator(mode="after")
    def _check_values(self) -> Self:
        choice = self.tool_choice or _ToolChoice(type="auto")
        if (choice.type == "tool") != (choice.name is not None):
            raise ParameterError(f"tool_choice.name: type={choice.type!r} with name={choice.name!r}; tool needs a name")
        if choice.type in ("any", "tool"):
            if not self.forced_tools:
                raise ParameterError(f"tool_choice: {quoted(choice.name)} calls no tool of tools; name one of them")
            if self.schema_of_answer is not None:
                raise ParameterError("output_config: an answer that must call a tool has no format; leave one out")
        elif choice.disable_parallel_tool_use and self.offered:
            raise ParameterError(
                "tool_choice.disable_parallel_tool_use: the model decides how many calls it makes, unless one is "
                "required; leave it out, or send type any"
            )
        elif self.offered and any(tool.strict for tool in self.tools or []):
            raise ParameterError("tools: strict holds where a call is required; leave it out, or send tool_choice any")
        return self

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as templates expect them."""
        tools = [] if self.tool_choice is not None and self.tool_choice.type == "none" else self.tools or []
        return [
            {
                "type": "function",
                "function": {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema},
            }
            for tool in tools
        ]

    @property
    def forced_tools(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools of which the answer must call one or more, with the schemas of their arguments."""
        choice = self.tool_choice
        if choice is None or choice.type not in ("any", "tool"):
            return {}
        return {name: each for name, each in parameters_of(self.offered).items() if choice.name in (None, name)}

    @property
    def most_calls(self) -> int | None:
        """The most calls of `forced_tools`; None sets no limit."""
        choice = self.tool_choice
        return 1 if choice is not None and (choice.type == "tool" or choice.disable_parallel_tool_use) else None

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer keeps to; None for a text."""
        wanted = None if self.output_config is None else self.output_config.format
        return None if wanted is None else wanted.schema_

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Options of the chat template, by the names that Qwen3 and others have for them."""
        return {} if self.thinking is None else {"enable_thinking": False}

    def conversation(self) -> tuple[list[dict[str, Any]], list[tuple[str, str]], str]:
        """The messages as templates expect them, format and base64 of their images, and the answer's beginning.

        That is the text of a last message of the assistant's.
        """
        images: list[tuple[str, str]] = []
        system = self.system if isinstance(self.system, str) else "\n".join(part.text for part in self.system or [])
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for index, each in enumerate(self.messages):
            where = f"messages.{index}.content"
            messages += _answered(each) if isinstance(each, _AssistantTurn) else _asked(where, each.content, images)
        begun = messages.pop() if messages[-1]["role"] == "assistant" else {"content": ""}
        if begun.get("tool_calls"):
            raise ParameterError("messages: the last one calls a tool; send its result behind it")
        return messages, images, str(begun["content"])


class MessagesRequest(TokensRequest):
    """A request of messages."""

    max_tokens: Annotated[int, Field(ge=1, le=2**63 - 1)]
    stop_sequences: Annotated[list[str] | None, AfterValidator(check_stop)] = None
    stream: bool | None = None
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    top_p: Annotated[FiniteFloat, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    metadata: _MessageMetadata | None = None
    """For the log."""
    service_tier: Annotated[str | None, only("auto", "there is one tier")] = None


def _answered(message: _AssistantTurn) -> list[dict[str, Any]]:
    content = message.content
    if isinstance(content, str):
        return [{"role": "assistant", "content": content}]
    texts = [part.text for part in content if isinstance(part, _TextBlock)]
    calls = [
        {"type": "function", "id": part.id, "function": {"name": part.name, "arguments": part.input}}
        for part in content
        if isinstance(part, _UseBlock)
    ]
    return [{"role": "assistant", "content": "\n".join(texts), **({"tool_calls": calls} if calls else {})}]


def _asked(
    where: str, content: str | Sequence[_TextBlock | _ImageBlock | _ResultBlock], images: list[tuple[str, str]]
) -> list[dict[str, Any]]:
    """The results of tools as messages of their own, and what the user says behind them."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    messages, said = [], list[tuple[int, _TextBlock | _ImageBlock]]()
    for index, part in enumerate(content):
        if isinstance(part, _ResultBlock):
            told = [] if part.content is None else part.content
            inside = told if isinstance(told, str) else _parts(f"{where}.{index}.content", [*enumerate(told)], images)
            error = "Error: " if part.is_error and isinstance(inside, str) else ""
            tool = {"role": "tool", "tool_call_id": part.tool_use_id}
            messages.append(tool | {"content": error + inside if isinstance(inside, str) else inside})
        else:
            said.append((index, part))
    if said or not messages:
        messages.append({"role": "user", "content": _parts(where, said, images)})
    return messages


def _parts(where: str, parts: Sequence[tuple[int, _TextBlock | _ImageBlock]], images: list[tuple[str, str]]) -> Any:
    """The parts as templates expect them; a text where there is nothing else, which every template takes."""
    if all(isinstance(part, _TextBlock) for _, part in parts):
        return "\n".join(part.text for _, part in parts if isinstance(part, _TextBlock))
    found: list[dict[str, str]] = []
    for index, part in parts:
        if isinstance(part, _TextBlock):
            found.append({"type": "text", "text": part.text})
        else:
            check_image(f"{where}.{index}.source.data", part.source.data)
            images.append((IMAGES[f"data:{part.source.media_type};base64"], part.source.data))
            found.append({"type": "image"})
    return found


def parse_messages(body: bytes) -> MessagesRequest:
    """A body of messages. Raises ParameterError naming the first wrong parameter."""
    return parse_json(MessagesRequest, body, ParameterError)


def parse_tokens(body: bytes) -> TokensRequest:
    """A body of messages/count_tokens. Raises as `parse_messages`."""
    return parse_json(TokensRequest, body, ParameterError)
