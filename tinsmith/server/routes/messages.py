"""Anthropic's Messages API for applications: messages, and the number of tokens of a prompt."""

import base64
from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.config import ImagesConfig
from tinsmith.errors import ParameterError
from tinsmith.protocol.facts import ModelFacts
from tinsmith.server.application_samples import (
    Chunks,
    Prompted,
    asked_weights,
    beside,
    conversation_prompt,
    grammar_of,
    parsed,
    reply_to,
)
from tinsmith.server.front import front_of
from tinsmith.server.message_answers import MessageForm
from tinsmith.server.replies import ANTHROPIC_PREFIX, json_reply
from tinsmith.wire.images import read_header
from tinsmith.wire.message_requests import parse_messages, parse_tokens

router = APIRouter(prefix=ANTHROPIC_PREFIX)


@router.post("/messages")
async def create_message(request: Request) -> Response:
    """The model's next message in a conversation."""
    asked = await parsed(request, parse_messages)
    where = await asked_weights(request, asked.model)
    grammar = await grammar_of(where, asked)
    chunks = await conversation_prompt(request, where, asked)
    settings: dict[str, Any] = {
        "max_tokens": asked.max_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
    }
    prompted = Prompted(
        where,
        chunks,
        settings=settings,
        shaping={} if grammar is None else {"grammar": grammar},
        stops=asked.stop_sequences or [],
        offered=asked.offered,
        is_chat=True,
        streams=bool(asked.stream),
        user=None if asked.metadata is None else asked.metadata.user_id,
    )
    known = sum(len(chunk["tokens"]) for chunk in chunks if chunk["type"] != "image")
    return await reply_to(request, prompted, MessageForm(asked.model, known))


@router.post("/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """The number of tokens of a conversation, as `create_message` would count them."""
    asked = await parsed(request, parse_tokens)
    where = await asked_weights(request, asked.model)
    chunks, config = await conversation_prompt(request, where, asked), front_of(request).config
    images = [chunk for chunk in chunks if chunk["type"] == "image"]
    if len(images) > (most := config.requests.max_images):
        raise ParameterError(f"messages: these are {len(images)} images, max_images allows {most}; send fewer")
    shown = sum(len(chunk["data"]) for chunk in images)
    counted = await beside(shown, _tokens_of, images, where.weights.facts, config.images)
    return json_reply({"input_tokens": counted + sum(len(chunk.get("tokens", ())) for chunk in chunks)})


def _tokens_of(images: Chunks, facts: ModelFacts, limits: ImagesConfig) -> int:
    headers = (read_header(base64.b64decode(chunk["data"]), chunk["format"], limits) for chunk in images)
    return sum(map(facts.image_tokens, headers))
