"""The protocol with a vLLM server: the connection, Tinker's sampling parameters as vLLM's, and replies as results.

What a server refuses and what it loses are different errors: only the second is worth sending again. Each parameter is
mapped or refused, because vLLM ignores parameters that it does not know.

vLLM 0.26, the newest for PyTorch 2.11, answers in another form than 0.32, and does not say which weights or adapter it
computed with: there the identity of what has arrived, and the canary, are the checks.
"""

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import aiohttp
import numpy as np
import orjson

from tinsmith.errors import TinsmithError, UserError
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.wire.prompt_scores import PromptAnswers, PromptQuestions, TopLogprobs
from tinsmith.wire.sample import SampledSequence, SampleRequest, Shaping, VersionSpan

_CONNECT_S = 10.0
_SOCKET_PREFIX = "unix:"
_LONGEST_MESSAGE = 2000
"""Characters of a server's error that are passed on."""
_EVENT = b"data: "
_LAST_EVENT = b"[DONE]"
_READ_BUFFER = 2**22
"""Bytes. A longer line is an error; an event with the likeliest tokens takes some hundred kilobytes."""


class ServerLostError(TinsmithError):
    """The server went away before it answered: the request can go to another one."""


class RefusedError(UserError):
    """The server answered with HTTP 4xx; the message is its own."""


class ServerFailedError(TinsmithError):
    """The server answered with HTTP 5xx, or with an error in the middle of a stream; the message is its own."""


class Connection:
    """A pool of connections to one server. Made and used in one event loop."""

    def __init__(self, url: str) -> None:
        """`url` is one of HTTP, or `unix:` and the path of a socket."""
        self.url = url
        in_file = url.startswith(_SOCKET_PREFIX)
        connector = (
            aiohttp.UnixConnector(url.removeprefix(_SOCKET_PREFIX), limit=0)
            if in_file
            else aiohttp.TCPConnector(limit=0)
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            base_url="http://vllm" if in_file else url,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            read_bufsize=_READ_BUFFER,
        )

    async def get(self, path: str) -> Any:
        """Return the JSON answer, None for an empty one. Raises as `post`."""
        async with self._reply("GET", path, None, {}) as reply:
            return _json(await reply.read())

    async def post(self, path: str, body: Any = None, **query: str) -> Any:
        """Return the JSON answer, None for an empty one. Raises ServerLostError, RefusedError or ServerFailedError.

        Each has a connection of its own: vLLM closes one on which it failed a moment after its answer, and the next
        request would be lost.
        """
        async with self._reply(
            "POST", path, None if body is None else orjson.dumps(body), query, {"Connection": "close"}
        ) as reply:
            return _json(await reply.read())

    async def stream(self, path: str, body: Any) -> AsyncGenerator[Any, None]:
        """Yield the JSON objects of an answer that is a stream of server-sent events. Raises as `post`."""
        async with self._reply("POST", path, orjson.dumps(body), {}) as reply:
            async for line in reply.content:
                event = line.strip().removeprefix(_EVENT)
                if event == _LAST_EVENT:
                    return
                if event:
                    answer = orjson.loads(event)
                    if "error" in answer:
                        raise ServerFailedError(f"vLLM failed while it answered {path}: {_message(event)}")
                    yield answer
            raise ServerLostError(f"the vLLM server at {self.url} ended an answer before it was whole")

    async def close(self) -> None:
        await self._session.close()

    @asynccontextmanager
    async def _reply(
        self,
        method: str,
        path: str,
        body: bytes | None,
        query: Mapping[str, str],
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a reply of status 2xx, to be read in the body; raises ServerLostError if the connection breaks."""
        if self._session.closed:
            raise ServerLostError(f"the vLLM server at {self.url} went away before it was asked")
        headers = {"Content-Type": "application/json", **headers}
        try:
            async with self._session.request(method, path, data=body, params=query, headers=headers) as reply:
                if reply.status >= 400:
                    kind = RefusedError if reply.status < 500 else ServerFailedError
                    raise kind(f"vLLM answered {reply.status} to {path}: {_message(await reply.read())}")
                yield reply
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLostError(f"the vLLM server at {self.url} went away: {error!r}") from error


def _json(content: bytes) -> Any:
    """Parse JSON. Other answers are plain texts, which say no more than the status."""
    return orjson.loads(content) if content[:1] in (b"{", b"[") else None


def _message(content: bytes) -> str:
    try:
        error = orjson.loads(content)["error"]
        text = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):  # an answer that is no error of vLLM's own
        text = content.decode(errors="replace")
    return str(text)[:_LONGEST_MESSAGE]


# Tinker's sampling parameters as vLLM's

LOWEST_TEMPERATURE = 0.01
"""vLLM silently raises a lower one to this."""
_ONE_REPLY = 2
"""One reply with all samples of a request (`RequestOutputKind.FINAL_ONLY`), which 0.32 sets itself.

Without it 0.26 answers with the last partial output, which lacks samples that ended earlier.
"""


def truncates(request: SampleRequest) -> bool:
    """Return whether tokens are drawn from a part of the vocabulary, which vLLM's logprobs alone cover then.

    It does not count where nobody is told the log-probabilities.
    """
    params, shaping = request.params, request.shaping
    few = params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or shaping.min_p > 0)
    return shaping.scored and (few or shaping.grammar is not None)


def longest_answer(request: SampleRequest, prompt: int, max_context: int, name: str) -> int:
    """Return `SampleRequest.most_tokens`, less a token where vLLM has to score the answer again."""
    longest = request.most_tokens(prompt, max_context, name)
    if truncates(request) and prompt + longest == max_context:
        if request.params.max_tokens is None and longest > 1:
            return longest - 1
        raise UserError(
            "with top_k or top_p, prompt length plus max_tokens must leave one token of the context window of "
            f"{max_context}: the answer is scored in a request of its own; ask for max_tokens={longest - 1}"
        )
    return longest


def check_parameters(request: SampleRequest) -> None:
    """Raise UserError for parameters that vLLM does not support, or would treat differently."""
    params, shaping = request.params, request.shaping
    if 0 < params.temperature < LOWEST_TEMPERATURE:
        raise UserError(f"temperature is {params.temperature}; vLLM accepts 0, and {LOWEST_TEMPERATURE} and above")
    if truncates(request) and (params.temperature not in (0, 1) or shaping.penalizes):
        raise UserError(
            f"top_k={params.top_k}, top_p={params.top_p}, min_p={shaping.min_p} at temperature {params.temperature}: "
            "vLLM gives no log-probabilities over the whole vocabulary for this; use temperature 1 and no penalties, "
            "or none of top_k, top_p, min_p and response_format"
        )


def sampling_params(
    request: SampleRequest, max_tokens: int, eos: Iterable[int], vocab_size: int, first: int, count: int, done: int = 0
) -> dict[str, Any]:
    """Return vLLM's parameters for the samples [first, first + count) of a request.

    `done` tokens of each answer are known already. The very first sample also brings the answers about the prompt.
    """
    params, stop = request.params, request.params.stop
    greedy = params.temperature == 0
    body: dict[str, Any] = {
        "n": count,
        "temperature": params.temperature,
        "top_p": 1.0 if greedy else params.top_p,
        "top_k": 0 if greedy or params.top_k < 0 else params.top_k,
        "max_tokens": max_tokens,
        "ignore_eos": True,  # end-of-sequence tokens are among `stop_token_ids`, if the request wants to stop at them
        "stop_token_ids": sorted({*stop.token_ids, *(eos if stop.eos else ())}),
        "stop": list(stop.strings),
        "detokenize": bool(stop.strings),
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "logprobs": likeliest(request.topk_sample_logprobs, vocab_size),
        "output_kind": _ONE_REPLY,
    }
    body |= _shaped(request.shaping, greedy, done)
    if params.seed is not None:
        body["seed"] = vllm_seed(params.seed, done) + first
    if first == done == 0 and (request.questions.logprobs or request.questions.topk):
        body["prompt_logprobs"] = request.questions.topk
    return body


def _shaped(shaping: Shaping, greedy: bool, done: int) -> dict[str, Any]:
    """Return vLLM's parameters for a `Shaping`. It would count tokens that are `done` as the prompt's."""
    if not shaping.changes:
        return {}
    if done and (shaping.penalizes or shaping.grammar is not None):
        raise UserError(
            "the weights were replaced while an answer with penalties or a response_format was sampled, with which "
            "vLLM cannot go on; send the request again"
        )
    grammar = {} if shaping.grammar is None else {"structured_outputs": {"grammar": shaping.grammar}}
    return grammar | {
        "presence_penalty": shaping.presence_penalty,
        "frequency_penalty": shaping.frequency_penalty,
        "repetition_penalty": shaping.repetition_penalty,
        "min_p": 0.0 if greedy else shaping.min_p,
    }


def scoring_params(topk: int) -> dict[str, Any]:
    """Return vLLM's parameters to score an answer as part of a prompt, at temperature 1 over the whole vocabulary."""
    return {"max_tokens": 1, "temperature": 0.0, "detokenize": False, "prompt_logprobs": topk}


def likeliest(k: int, vocab_size: int) -> int:
    """Return the number to ask vLLM for to get the k likeliest tokens: it counts the sampled one among them."""
    return min(k + 1, vocab_size) if k else 0


def vllm_seed(seed: int, done: int = 0) -> int:
    """Return the seed of the first sample from its token `done` on, to which vLLM adds 1, 2, and so on for the others.

    It is hashed: requests with neighbouring seeds would share samples, and a continued sample would draw again what it
    drew before.
    """
    text = seed.to_bytes(8, "little") + (done.to_bytes(8, "little") if done else b"")
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")


# Replies

_TOKEN_ID = "token_id:"


def in_new_form(reply: dict[str, Any]) -> dict[str, Any]:
    """Return a reply of the generate endpoint in the form of vLLM 0.32, changed in place if it is one of 0.26.

    Raises ServerFailedError where 0.32 answers 500, for a forgotten image, say.
    """
    if any(choice["finish_reason"] == "error" for choice in reply["choices"]):
        raise ServerFailedError("vLLM could not compute a request; its log says why")
    reply.setdefault("model", None)
    for choice in reply["choices"]:
        if "weight_versions" not in choice:
            choice["weight_versions"] = None
            for entry in (choice["logprobs"] or {"content": []})["content"]:
                for scored in (entry, *entry["top_logprobs"]):
                    scored["token_id"] = int(scored["token"].removeprefix(_TOKEN_ID))
    return reply


def joined_stream(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join the chunks of a stream with one sample to the reply that would have come without streaming.

    It does not name the adapter, and has no scores of the prompt. Raises ServerLostError if the stream ended before the
    sample.
    """
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    if not choices or choices[-1]["finish_reason"] is None:
        raise ServerLostError("vLLM ended a stream before its sample had ended")
    whole = choices[-1] | {
        "token_ids": [token for choice in choices for token in choice["token_ids"]],
        "logprobs": {
            "content": [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"]["content"]]
        },
    }
    return {"model": None, "choices": [whole], "prompt_logprobs": None, "usage": chunks[-1]["usage"] or {}}


def sequences_of(
    reply: dict[str, Any], count: int, topk: int, label: str | None, version: str, may_be_aborted: bool = False
) -> list[SampledSequence]:
    """Return the samples of a reply, with the `topk` likeliest tokens of each position.

    `version` is the clients' name of the weights. `label` is the server's name of the full weights that were asked for;
    None checks nothing. Raises TinsmithError for other weights, and ServerLostError for a sample that the server
    aborted, unless it `may_be_aborted`.
    """
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    if len(choices) != count:
        raise TinsmithError(f"vLLM answered {len(choices)} samples where {count} were asked for")
    return [_sequence(choice, topk, label, version, may_be_aborted) for choice in choices]


def _sequence(
    choice: dict[str, Any], topk: int, label: str | None, version: str, may_be_aborted: bool
) -> SampledSequence:
    reason, tokens = choice["finish_reason"], choice["token_ids"]
    if may_be_aborted and reason == "abort":
        reason = "length"
    if reason not in ("stop", "length"):
        raise ServerLostError(f"vLLM ended a sample with finish_reason={reason!r}")
    versions = {span["version"] for span in choice["weight_versions"] or ()}
    if label is not None and tokens and versions != {label}:
        raise TinsmithError(f"the sample was asked for from weights {label!r}; vLLM answered with {sorted(versions)}")
    content = choice["logprobs"]["content"]
    if [entry["token_id"] for entry in content] != tokens:
        raise TinsmithError("vLLM's log-probabilities are about other tokens than it sampled")
    top = None
    if topk:
        top = TopLogprobs.empty(len(tokens), topk)
        for row, entry in enumerate(content):
            _fill(top, row, {other["token_id"]: other["logprob"] for other in entry["top_logprobs"]}, topk)
    spans = (VersionSpan(version, 0, len(tokens)),)
    return SampledSequence(tokens, [entry["logprob"] for entry in content], reason, top, spans)


def _fill(top: TopLogprobs, row: int, logprobs: dict[int, float], k: int) -> None:
    """Write the k likeliest tokens of a position, the lowest id first among equals, as the local sampler does."""
    best = sorted(logprobs.items(), key=lambda pair: (-pair[1], pair[0]))[:k]
    top.token_ids[row, : len(best)] = [token for token, _ in best]
    top.logprobs[row, : len(best)] = [logprob for _, logprob in best]


def rescored(sequence: SampledSequence, scores: Sequence[dict[str, Any]], topk: int) -> SampledSequence:
    """Return a sample with new log-probabilities: `scores` are vLLM's prompt_logprobs of its positions."""
    logprobs = [entry[str(token)]["logprob"] for entry, token in zip(scores, sequence.tokens, strict=True)]
    top = None
    if topk:
        top = TopLogprobs.empty(len(scores), topk)
        for row, entry in enumerate(scores):
            _fill(top, row, _by_token(entry), topk)
    return replace(sequence, logprobs=logprobs, topk=top)


def _by_token(entry: dict[str, Any]) -> dict[int, float]:
    return {int(token): score["logprob"] for token, score in entry.items()}


def prompt_answers(
    scores: Sequence[dict[str, Any] | None], rendered: RenderedInput, questions: PromptQuestions
) -> PromptAnswers:
    """Return the answers about the prompt from vLLM's prompt_logprobs [prompt tokens], of which the first is None."""
    length = len(rendered)
    if len(scores) != length:
        raise TinsmithError(f"vLLM scored {len(scores)} positions of a prompt of {length} tokens")
    first = questions.scored_from(length)
    text = rendered.is_text
    logprobs = np.full(length, np.nan, dtype=np.float32)
    top = TopLogprobs.empty(length, questions.topk)
    for position, entry in enumerate(scores[first:], first):
        if not text[position]:
            logprobs[position] = 0.0
        elif entry is not None:
            logprobs[position] = entry[str(rendered.token_ids[position])]["logprob"]
            _fill(top, position, _by_token(entry), questions.topk)
    if first == 1 and not text[0]:
        logprobs[0] = 0.0
    return PromptAnswers(logprobs=logprobs if questions.logprobs else None, topk=top if questions.topk else None)
