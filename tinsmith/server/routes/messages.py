"""Anthropic's Messages API for applications: messages, and the number of tokens of a prompt."""

from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.errors import ParameterError
from tinsmith.server.application_samples import (
    Prompted,
    asked_weights,
    conversation_prompt,
    grammar_of,
    parsed,
    reply_to,
    token_ids,
)
from tinsmith.server.message_answers import MessageForm
from tinsmith.server.replies import ANTHROPIC_PREFIX, json_reply
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
    tokens = token_ids(await conversation_prompt(request, where, asked))
    if tokens is None:
        raise ParameterError("messages: the tokens of an image are counted when it is sampled; leave images out")
    return json_reply({"input_tokens": len(tokens)})
