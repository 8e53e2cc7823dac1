"""OpenAI's API for applications: models, completions and chat completions, of base models, checkpoints and live runs.

A request becomes a sample like any other: checked, limited, metered and computed as those of the SDK. If its client
goes away, the sample is cancelled.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import orjson
from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from tinsmith.chat.template import BREAK, RESERVED, ChatFormat
from tinsmith.errors import ParameterError, TinsmithError
from tinsmith.protocol.serving import SampleDone
from tinsmith.server import calls
from tinsmith.server.access import caller_of, read_parsed
from tinsmith.server.answers import Form, GrowingAnswer, SampledAnswers, event
from tinsmith.server.body import SMALL_BYTES
from tinsmith.server.front import Front, front_of
from tinsmith.server.replies import OPENAI_PREFIXES, json_reply, openai_error
from tinsmith.server.sample_checks import receive_sample
from tinsmith.server.sample_start import SampledWeights, require_sampler, start_sample, weights_named
from tinsmith.server.samples import StreamedTokens
from tinsmith.store import catalog, ids
from tinsmith.wire.chat_requests import ChatRequest, CompletionRequest, parameters_of, parse_chat, parse_completion

log = logging.getLogger(__name__)

router = APIRouter()

_MOST_LISTED = 1000
"""Checkpoints that are listed as models, the newest."""

Result = TypeVar("Result")


# ---- models


async def list_models(request: Request) -> Response:
    """The names that `model` may have: base models, and the caller's newest checkpoints for sampling."""
    front, caller = front_of(request), caller_of(request)
    allowed = None if caller.key is None else caller.key.models
    found = [
        _described(facts.name, 0.0, max_model_len=facts.advertised_context)
        for facts in front.base_models.all()
        if allowed is None or facts.name in allowed
    ]
    saved, _ = await front.store.read(catalog.list_checkpoints, catalog.Page(_MOST_LISTED, 0), caller.tenant)
    found += [
        _described(row.tinker_path, row.created_at, parent=row.base_model) for row in saved if row.kind == "sampler"
    ]
    return json_reply({"object": "list", "data": found})


async def get_model(request: Request, name: str) -> Response:
    """One name, if it can be sampled."""
    weights = await weights_named(request, name)
    return json_reply(_described(name, 0.0, parent=weights.facts.name, max_model_len=weights.facts.advertised_context))


def _described(name: str, created: float, **more: Any) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(created), "owned_by": "tinsmith", **more}


# ---- completions


@dataclass(frozen=True)
class Prompted:
    """A request as far as it is the same for chats and texts."""

    asked: ChatRequest | CompletionRequest
    weights: SampledWeights
    model: ChatFormat
    chunks: Sequence[Mapping[str, Any]]
    """The prompt as asample takes it."""
    stop: list[str] | list[int] | None
    top_logprobs: int
    with_logprobs: bool
    tools: Mapping[str, Mapping[str, Any]]
    """JSON schemas of the arguments of tools, by name."""

    def body(self, answer_id: str, number: int) -> bytes:
        """The body of an asample request."""
        asked = self.asked
        params = {
            "max_tokens": asked.most_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "seed": asked.seed,
            "stop": self.stop,
        }
        content = {
            "sampling_session_id": answer_id,
            "seq_id": number,
            "num_samples": asked.count,
            "prompt": {"chunks": self.chunks},
            "sampling_params": {name: value for name, value in params.items() if value is not None},
            "topk_sample_logprobs": self.top_logprobs,
        }
        return orjson.dumps(content)

    def form(self) -> Form:
        """The form of the reply. Raises ParameterError for ids of a prompt with images."""
        ids = None
        if self.asked.return_token_ids:
            if any(chunk["type"] == "image" for chunk in self.chunks):
                raise ParameterError("return_token_ids: a prompt with images has no token ids of its own; leave it out")
            ids = [token for chunk in self.chunks for token in chunk["tokens"]]
        is_chat = isinstance(self.asked, ChatRequest)
        return Form(self.asked.model, self.model, is_chat, self.with_logprobs, ids)

    def answers(self) -> list[GrowingAnswer]:
        """An empty answer for each that is wanted."""
        return [GrowingAnswer(self.model, self.asked.stops, self.tools) for _ in range(self.asked.count)]


async def chat_completions(request: Request) -> Response:
    """The model's answers to a conversation."""
    front = front_of(request)
    require_sampler(front)
    limit = front.config.requests.max_sample_mib * 2**20
    asked = await read_parsed(request, limit, "max_sample_mib", "application/json", parse_chat)
    options = asked.chat_template_kwargs or {}
    for name in RESERVED:
        if name in options:
            raise ParameterError(f"chat_template_kwargs.{name}: the server sets this itself; leave it out")
    weights = await weights_named(request, asked.model)
    model = await front.applications.format_of(weights.facts)
    tools = asked.offered
    if tools and model.calls is None:
        raise ParameterError(
            f"tools: the chat template of {weights.facts.name} has none, or its calls have a form that is not known "
            "here; describe them in a message"
        )
    # Beside the event loop, unless it is soon done
    is_plain = "content-encoding" not in request.headers
    size = int(request.headers.get("content-length", SMALL_BYTES + 1)) if is_plain else SMALL_BYTES + 1
    chunks = await _beside(size, _chunks, model, asked, tools, weights.facts.max_context)
    stop: list[str] | list[int] = model.stop_ids
    if asked.stops:
        stop = asked.stops + ([model.end_of_turn] if model.end_of_turn else [])
    top, with_logprobs = asked.top_logprobs or 0, bool(asked.logprobs)
    return await _sampled(
        request,
        Prompted(asked, weights, model, chunks, stop or None, top, with_logprobs, parameters_of(tools)),
    )


async def completions(request: Request) -> Response:
    """The model's continuations of a text, or of tokens."""
    front = front_of(request)
    require_sampler(front)
    limit = front.config.requests.max_sample_mib * 2**20
    asked = await read_parsed(request, limit, "max_sample_mib", "application/json", parse_completion)
    weights = await weights_named(request, asked.model)
    model = await front.applications.format_of(weights.facts)
    prompt = asked.prompted
    if isinstance(prompt, str):
        _check_length("prompt", prompt, model, weights.facts.max_context)
        tokens = await _beside(len(prompt), model.encode, prompt)
    else:
        tokens = prompt
    chunks = [{"type": "encoded_text", "tokens": tokens}]
    prompted = Prompted(
        asked, weights, model, chunks, asked.stops or None, asked.logprobs or 0, asked.logprobs is not None, {}
    )
    return await _sampled(request, prompted)


def _chunks(
    model: ChatFormat, asked: ChatRequest, tools: Sequence[Mapping[str, Any]], context: int
) -> list[dict[str, Any]]:
    """The prompt of a conversation as asample takes it."""
    if len(asked.messages) > context:
        raise ParameterError(f"messages: these are {len(asked.messages)}, and the context has {context} tokens")
    messages, images = asked.conversation()
    text = model.render(messages, tools, asked.chat_template_kwargs)
    _check_length("messages", text, model, context)
    first, *others = model.pieces(text, len(images))
    chunks: list[dict[str, Any]] = [{"type": "encoded_text", "tokens": first}]
    for (kind, data), tokens in zip(images, others, strict=True):
        chunks.append({"type": "image", "format": kind, "data": data})
        chunks.append({"type": "encoded_text", "tokens": tokens})
    return chunks


def _check_length(name: str, text: str, model: ChatFormat, context: int) -> None:
    """Raise ParameterError for a text that is too long however it is tokenized, which would take much memory."""
    if len(text) > context * model.longest_token or text.count(BREAK) > context:
        raise ParameterError(
            f"{name}: {len(text)} characters are more than the {context} tokens of the context; shorten them"
        )


async def _beside(size: int, work: Any, *args: Any) -> Any:
    return work(*args) if size <= SMALL_BYTES else await asyncio.to_thread(work, *args)


async def _sampled(request: Request, prompted: Prompted) -> Response:
    """The reply to a request whose prompt is rendered."""
    front = front_of(request)
    owner_id, number = front.applications.new_answer(caller_of(request).tenant)
    form, answers = prompted.form(), prompted.answers()
    body, config = prompted.body(owner_id, number), front.config
    received = await front.bodies.parse_made(request, body, receive_sample, config.requests, config.images)
    request_id = ids.request_id(owner_id, number)
    asked = prompted.asked
    sample = StartedSample(front, request_id)
    try:
        await start_sample(request, request_id, prompted.weights, received, stream=bool(asked.stream))
    except BaseException:  # its client may go away in between
        sample.give_up()
        raise
    log.debug("sample=%s is answer %s for user %s", request_id, form.answer_id, asked.user or "-")
    if not asked.stream:
        try:
            done = await _unless_gone(request, sample.end())
        finally:
            sample.give_up()
        reply: Response = await _beside(len(done.payload), _whole_reply, form, answers, done)
        return reply
    events = sample.tokens()
    try:
        first = await _unless_gone(request, anext(events))  # an error has its own status until the stream begins
    except BaseException:
        sample.give_up()
        raise
    return AnswerStream(sample, _told(request, prompted, form, answers, first, events))


def _whole_reply(form: Form, answers: Sequence[GrowingAnswer], done: SampleDone) -> Response:
    return json_reply(form.reply(answers, SampledAnswers.read(done.payload, done.used)))


# ---- waiting for a sample, or following it


@dataclass(frozen=True)
class StartedSample:
    """A sample whose client waits."""

    front: Front
    request_id: str

    async def end(self) -> SampleDone:
        """Its end. Raises as `answer_end`."""
        return await self.front.ask(calls.answer_end, self.request_id)

    async def tokens(self) -> AsyncIterator[StreamedTokens | SampleDone]:
        """Its tokens as they come, and then its end. Raises as `answer_tokens`."""
        seen, done = 0, None
        while done is None:
            events, done = await self.front.ask(calls.answer_tokens, self.request_id, seen)
            seen += len(events)
            for each in events:
                yield each
        yield done

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


async def _told(
    request: Request,
    prompted: Prompted,
    form: Form,
    answers: Sequence[GrowingAnswer],
    first: StreamedTokens | SampleDone,
    events: AsyncIterator[StreamedTokens | SampleDone],
) -> AsyncIterator[bytes]:
    """The events of a stream."""
    begun: set[int] = set()
    each = first
    try:
        while isinstance(each, StreamedTokens):
            answer = answers[each.index]
            piece = answer.add(each.tokens, each.logprobs)
            if not form.is_silent(piece):
                yield event(form.part(each.index, answer, piece, first=each.index not in begun))
                begun.add(each.index)
            each = await anext(events)
    except TinsmithError as error:
        yield event(openai_error(request, error))
        return
    ended = SampledAnswers.read(each.payload, each.used)
    for index, (answer, reason) in enumerate(zip(answers, ended.reasons, strict=True)):
        yield event(form.part(index, answer, answer.end(), reason, first=index not in begun))
    if prompted.asked.wants_usage:
        yield event(form.usage(ended))
    yield event(b"[DONE]")


# The same routes below each prefix
for _prefix in OPENAI_PREFIXES:
    router.add_api_route(f"{_prefix}/models", list_models, methods=["GET"])
    router.add_api_route(f"{_prefix}/models/{{name:path}}", get_model, methods=["GET"])
    router.add_api_route(f"{_prefix}/chat/completions", chat_completions, methods=["POST"])
    router.add_api_route(f"{_prefix}/completions", completions, methods=["POST"])
