"""OpenAI's API for applications: models, completions, chat completions; of base models, checkpoints and live runs."""

from typing import Any

from fastapi import APIRouter, Request, Response

from tinsmith.errors import ParameterError
from tinsmith.server.access import caller_of
from tinsmith.server.answers import OpenAIForm
from tinsmith.server.application_samples import (
    AskedWeights,
    Prompted,
    asked_weights,
    beside,
    check_length,
    conversation_prompt,
    grammar_of,
    parsed,
    reply_to,
    token_ids,
)
from tinsmith.server.front import front_of
from tinsmith.server.replies import OPENAI_PREFIXES, json_reply
from tinsmith.server.sample_start import weights_named
from tinsmith.store import catalog
from tinsmith.wire.chat_requests import ChatRequest, CompletionRequest, parse_chat, parse_completion

router = APIRouter()

_MOST_LISTED = 1000
"""Checkpoints that are listed as models, the newest."""


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


async def chat_completions(request: Request) -> Response:
    """The model's answers to a conversation."""
    asked = await parsed(request, parse_chat)
    where = await asked_weights(request, asked.model)
    grammar = await grammar_of(where, asked)
    chunks = await conversation_prompt(request, where, asked)
    return await reply_to(
        request,
        Prompted(
            where,
            chunks,
            count=asked.count,
            settings=_settings(asked, asked.most_tokens),
            shaping=asked.shaping(grammar),
            stops=asked.stops,
            top_logprobs=asked.top_logprobs or 0,
            offered=asked.offered,
            is_chat=True,
            streams=bool(asked.stream),
            scored=bool(asked.logprobs),
            user=asked.user,
        ),
        _form(asked, where, chunks, bool(asked.logprobs)),
    )


async def completions(request: Request) -> Response:
    """The model's continuations of a text, or of tokens."""
    asked = await parsed(request, parse_completion)
    where = await asked_weights(request, asked.model)
    prompt = asked.prompted
    if isinstance(prompt, str):
        check_length("prompt", prompt, where)
        prompt = await beside(len(prompt), where.model.encode, prompt)
    chunks = [{"type": "encoded_text", "tokens": prompt}]
    return await reply_to(
        request,
        Prompted(
            where,
            chunks,
            count=asked.count,
            settings=_settings(asked, asked.most_tokens),
            shaping=asked.shaping(),
            stops=asked.stops,
            top_logprobs=asked.logprobs or 0,
            streams=bool(asked.stream),
            scored=asked.logprobs is not None,
            user=asked.user,
        ),
        _form(asked, where, chunks, asked.logprobs is not None),
    )


def _settings(asked: ChatRequest | CompletionRequest, most_tokens: int | None) -> dict[str, Any]:
    return {
        "max_tokens": most_tokens,
        "temperature": asked.temperature,
        "top_p": asked.top_p,
        "top_k": asked.top_k,
        "seed": asked.seed,
    }


def _form(
    asked: ChatRequest | CompletionRequest, where: AskedWeights, chunks: list[dict[str, Any]], with_logprobs: bool
) -> OpenAIForm:
    """The form of the reply. Raises ParameterError for ids of a prompt with images."""
    ids = None
    if asked.return_token_ids:
        ids = token_ids(chunks)
        if ids is None:
            raise ParameterError("return_token_ids: a prompt with images has no token ids of its own; leave it out")
    is_chat = isinstance(asked, ChatRequest)
    return OpenAIForm(asked.model, where.model, is_chat, with_logprobs, ids, asked.wants_usage)


# The same routes below each prefix
for _prefix in OPENAI_PREFIXES:
    router.add_api_route(f"{_prefix}/models", list_models, methods=["GET"])
    router.add_api_route(f"{_prefix}/models/{{name:path}}", get_model, methods=["GET"])
    router.add_api_route(f"{_prefix}/chat/completions", chat_completions, methods=["POST"])
    router.add_api_route(f"{_prefix}/completions", completions, methods=["POST"])
