"""The way of an application's request, whatever its API: a prompt becomes a sample, and its tokens become a reply.

The sample is checked, limited, metered and computed as those of the SDK. If the client goes away, it is cancelled.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Protocol, TypeVar

import orjson
from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tinsmith.chat.format import BREAK
from tinsmith.chat.grammar import call_grammar, check_grammar, json_grammar
from tinsmith.chat.template import RESERVED, ChatFormat
from tinsmith.errors import ParameterError, TinsmithError
from tinsmith.protocol.serving import SampleDone
from tinsmith.server import calls
from tinsmith.server.access import caller_of, read_parsed
from tinsmith.server.answers import Form, GrowingAnswer, SampledAnswers
from tinsmith.server.body import SMALL_BYTES
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import json_reply
from tinsmith.server.sample_checks import receive_sample
from tinsmith.server.sample_start import SampledWeights, require_sampler, start_sample, weights_named
from tinsmith.server.samples import StreamedTokens
from tinsmith.store import ids
from tinsmith.wire.chat_requests import parameters_of

log = logging.getLogger(__name__)

STREAMED_PARTS_PER_S = 250
"""Parts of answers that all streams of a process send in a second, so many that each token of a few streams is a part.

One takes a client's core 0.3 ms, and the server's 0.1 ms, however many tokens it has; a sampler yields 10,000 a second.
"""

Result = TypeVar("Result")
Chunks = Sequence[Mapping[str, Any]]
"""A prompt as asample takes it."""


# ---- from a request to a prompt


class Conversation(Protocol):
    """A request of a conversation, in any API."""

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that the model may call, as templates expect them."""
        ...

    @property
    def template_options(self) -> Mapping[str, Any]:
        """Options of the chat template."""
        ...

    @property
    def forced_tools(self) -> Mapping[str, Mapping[str, Any]]:
        """The tools of which the answer must call one or more, with the schemas of their arguments."""
        ...

    @property
    def most_calls(self) -> int | None:
        """The most calls of `forced_tools`; None sets no limit."""
        ...

    @property
    def schema_of_answer(self) -> Mapping[str, Any] | None:
        """The JSON schema that the answer keeps to; None for a text."""
        ...

    def conversation(self) -> tuple[list[dict[str, Any]], list[tuple[str, str]], str]:
        """The messages as templates expect them, format and base64 of their images, and the answer's beginning."""
        ...


@dataclass(frozen=True)
class AskedWeights:
    """The weights that a request names, and how their model chats."""

    weights: SampledWeights
    model: ChatFormat

    @property
    def context(self) -> int:
        return self.weights.facts.max_context


async def parsed(request: Request, parse: Callable[[bytes], Result]) -> Result:
    """An application's request. Raises as `read_parsed`, and UserError on a server that does not sample."""
    front = front_of(request)
    require_sampler(front)
    limit = front.config.requests.max_sample_mib * 2**20
    return await read_parsed(request, limit, "max_sample_mib", "application/json", parse)


async def asked_weights(request: Request, name: str) -> AskedWeights:
    """The weights that `name` means. Raises as `weights_named` and `format_of`."""
    weights = await weights_named(request, name)
    return AskedWeights(weights, await front_of(request).applications.format_of(weights.facts))


async def grammar_of(where: AskedWeights, asked: Conversation) -> str | None:
    """The grammar that the answer keeps to.

    Raises ParameterError for tools that the model cannot call, and schemas that cannot be kept to.
    """
    if asked.offered and where.model.calls is None:
        raise ParameterError(
            f"tools: the chat template of {where.weights.facts.name} has none, or its calls have a form that is not "
            "known here; describe them in a message"
        )
    if not asked.forced_tools and asked.schema_of_answer is None:
        return None
    return await asyncio.to_thread(_grammar, where.model, asked)


def _grammar(model: ChatFormat, asked: Conversation) -> str:
    if asked.forced_tools:
        parameter, grammar = "tools", call_grammar(model, asked.forced_tools, asked.most_calls)
    else:
        parameter, grammar = "response_format", json_grammar(asked.schema_of_answer or {})
    check_grammar(parameter, grammar)
    return grammar


async def conversation_prompt(request: Request, where: AskedWeights, asked: Conversation) -> list[dict[str, Any]]:
    """The prompt of a conversation. Raises ParameterError and UserError for what cannot be rendered."""
    for name in RESERVED:
        if name in asked.template_options:
            raise ParameterError(f"chat_template_kwargs.{name}: the server sets this itself; leave it out")
    # Beside the event loop, unless it is soon done
    is_plain = "content-encoding" not in request.headers
    size = int(request.headers.get("content-length", SMALL_BYTES + 1)) if is_plain else SMALL_BYTES + 1
    return await beside(size, _rendered, where, asked)


def _rendered(where: AskedWeights, asked: Conversation) -> list[dict[str, Any]]:
    messages, images, begun = asked.conversation()
    if len(messages) > where.context:
        raise ParameterError(f"messages: these are {len(messages)}, and the context has {where.context} tokens")
    text = where.model.render(messages, asked.offered, asked.template_options, begun=begun)
    check_length("messages", text, where)
    first, *others = where.model.pieces(text, len(images))
    chunks: list[dict[str, Any]] = [{"type": "encoded_text", "tokens": first}]
    for (kind, data), tokens in zip(images, others, strict=True):
        chunks.append({"type": "image", "format": kind, "data": data})
        chunks.append({"type": "encoded_text", "tokens": tokens})
    return chunks


def check_length(name: str, text: str, where: AskedWeights) -> None:
    """Raise ParameterError for a text that is too long however it is tokenized, which would take much memory."""
    if len(text) > where.context * where.model.longest_token or text.count(BREAK) > where.context:
        raise ParameterError(
            f"{name}: {len(text)} characters are more than the {where.context} tokens of the context; shorten them"
        )


def token_ids(chunks: Chunks) -> list[int] | None:
    """The tokens of a prompt; None if it has images."""
    if any(chunk["type"] == "image" for chunk in chunks):
        return None
    return [token for chunk in chunks for token in chunk["tokens"]]


async def beside(size: int, work: Callable[..., Result], *args: Any) -> Result:
    """`work(*args)`, in a thread if it reads more than a few bytes."""
    return work(*args) if size <= SMALL_BYTES else await asyncio.to_thread(work, *args)


# ---- from a prompt to a reply


@dataclass(frozen=True)
class Prompted:
    """A request as far as it is the same for all APIs."""

    where: AskedWeights
    chunks: Chunks
    _: KW_ONLY
    count: int = 1
    settings: Mapping[str, Any]
    """Those of asample's `sampling_params` but for `stop`; None where the default holds."""
    shaping: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `Shaping`."""
    stops: Sequence[str]
    top_logprobs: int = 0
    offered: Sequence[Mapping[str, Any]] = ()
    """The tools that may be called."""
    is_chat: bool = False
    """Whether the end of a turn ends an answer."""
    streams: bool
    scored: bool = False
    """Whether log-probabilities are told."""
    user: str | None = None
    """For the log."""

    def body(self, answer_id: str, number: int) -> bytes:
        """The body of an asample request."""
        params = dict(self.settings) | {"stop": self._stop()}
        content = {
            "sampling_session_id": answer_id,
            "seq_id": number,
            "num_samples": self.count,
            "prompt": {"chunks": self.chunks},
            "sampling_params": {name: value for name, value in params.items() if value is not None},
            "topk_sample_logprobs": self.top_logprobs,
            "shaping": dict(self.shaping) | {"scored": self.scored},
        }
        return orjson.dumps(content)

    def _stop(self) -> list[str] | list[int] | None:
        model = self.where.model
        if self.stops:
            return [*self.stops, *([model.end_of_turn] if self.is_chat and model.end_of_turn else [])]
        return (model.stop_ids if self.is_chat else None) or None

    def answers(self) -> list[GrowingAnswer]:
        """An empty answer for each that is wanted."""
        tools = parameters_of(self.offered)
        return [GrowingAnswer(self.where.model, self.stops, tools) for _ in range(self.count)]


async def reply_to(request: Request, prompted: Prompted, form: Form) -> Response:
    """The reply to a request whose prompt is rendered."""
    front, answers = front_of(request), prompted.answers()
    owner_id, number = front.applications.new_answer(caller_of(request).tenant)
    body, config = prompted.body(owner_id, number), front.config
    received = await front.bodies.parse_made(request, body, receive_sample, config.requests, config.images, True)
    request_id = ids.request_id(owner_id, number)
    sample = StartedSample(front, request_id)
    with ExitStack() as unless_streamed:
        unless_streamed.callback(sample.give_up)  # its client may go away at any time
        await start_sample(request, request_id, prompted.where.weights, received, stream=prompted.streams)
        log.debug("sample=%s is an answer for user %s", request_id, prompted.user or "-")
        if not prompted.streams:
            done = await _unless_gone(request, sample.end())
            reply: Response = await beside(len(done.payload), _whole_reply, form, answers, done)
            return reply
        first = await _unless_gone(request, sample.more())  # an error has its own status until the stream begins
        unless_streamed.pop_all()
    return AnswerStream(sample, _told(request, form, answers, first, sample))


def _whole_reply(form: Form, answers: Sequence[GrowingAnswer], done: SampleDone) -> Response:
    return json_reply(form.reply(answers, SampledAnswers.read(done.payload, done.used)))


async def _told(
    request: Request,
    form: Form,
    answers: Sequence[GrowingAnswer],
    first: tuple[Sequence[StreamedTokens], SampleDone | None],
    sample: "StartedSample",
) -> AsyncIterator[bytes]:
    """The events of a stream. What comes until another part is due is sent together."""
    came, done = first
    try:
        while True:
            events = [
                form.part(index, answers[index], answers[index].add(tokens, logprobs))
                for index, (tokens, logprobs) in _by_answer(came).items()
            ]
            told = b"".join(events)
            if done is not None:
                break
            if told:
                yield told
            came, done = await sample.more(sample.pause_s if told else 0.0)
    except TinsmithError as error:
        yield form.error(request, error)
        return
    yield told + form.end(answers, SampledAnswers.read(done.payload, done.used))


def _by_answer(came: Sequence[StreamedTokens]) -> dict[int, tuple[list[int], list[float]]]:
    """The new tokens and log-probabilities of each answer."""
    found: dict[int, tuple[list[int], list[float]]] = {}
    for each in came:
        tokens, logprobs = found.setdefault(each.index, ([], []))
        tokens += each.tokens
        logprobs += each.logprobs
    return found


# ---- waiting for a sample, or following it


@dataclass
class StartedSample:
    """A sample whose client waits."""

    front: Front
    request_id: str
    _seen: int = 0
    """Events with tokens that were followed."""

    async def end(self) -> SampleDone:
        """Its end. Raises as `answer_end`."""
        return await self.front.ask(calls.answer_end, self.request_id)

    async def more(self, pause_s: float = 0.0) -> tuple[Sequence[StreamedTokens], SampleDone | None]:
        """Its next tokens, `pause_s` from now or later, and its end as soon as it has ended. Raises as `answer_tokens`.

        It waits in the hub: what comes during a pause costs neither this process nor the way to it.
        """
        applications, counted = self.front.applications, int(pause_s > 0)
        applications.streams += counted
        try:
            events, done = await self.front.ask(calls.answer_tokens, self.request_id, self._seen, pause_s)
        finally:
            applications.streams -= counted
        self._seen += len(events)
        return events, done

    @property
    def pause_s(self) -> float:
        """Seconds between two parts of each stream, with as many others as wait now."""
        return (self.front.applications.streams + 1) / STREAMED_PARTS_PER_S

    def give_up(self) -> None:
        """Let it be forgotten, and cancelled if it runs; does not wait, as its request may be cancelled itself."""
        task = asyncio.ensure_future(self.front.ask(calls.give_up_answer, self.request_id))
        _giving_up.add(task)
        task.add_done_callback(_giving_up.discard)


_giving_up: set[asyncio.Future[None]] = set()
"""Kept until they are done: the event loop itself does not keep them."""


async def _unless_gone(request: Request, work: Awaitable[Result]) -> Result:
    """Return what `work` does. Raises ClientDisconnect, and cancels it, if the client goes away before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class AnswerStream(StreamingResponse):
    """Server-sent events of a sample, which ends with them."""

    def __init__(self, sample: StartedSample, events: AsyncIterator[bytes]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._sample = sample

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._sample.give_up()
