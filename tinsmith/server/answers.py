"""Answers to applications, whole or as a stream of server-sent events, in the form of OpenAI's API.

`message_answers.py` has the form of Anthropic's.
"""

import itertools
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import orjson
from fastapi import Request

from tinsmith.chat.template import ChatFormat
from tinsmith.chat.text import AnswerText
from tinsmith.chat.tools import ToolCall, ToolCallStream
from tinsmith.server.replies import openai_error
from tinsmith.store.records import Used
from tinsmith.wire import tinker_pb2


@dataclass(frozen=True)
class AnswerPart:
    """A part of an answer, or all of it."""

    said: Sequence[str | ToolCall]
    """Its texts and calls, in order."""
    tokens: Sequence[int]
    """Those that were sampled, with the one that ended the answer."""
    logprobs: Sequence[float]
    """[tokens] at the temperature of the request."""
    top: Sequence[Sequence[tuple[int, float]]] = ()
    """[tokens] the likeliest tokens at each place, if they were asked for."""

    @property
    def text(self) -> str:
        """Its texts, joined."""
        return "".join(each for each in self.said if isinstance(each, str))

    @property
    def calls(self) -> list[ToolCall]:
        """Its calls alone."""
        return [each for each in self.said if isinstance(each, ToolCall)]

    def joined(self, more: "AnswerPart") -> "AnswerPart":
        """This part and the one behind it."""
        tokens, logprobs = [*self.tokens, *more.tokens], [*self.logprobs, *more.logprobs]
        return AnswerPart([*self.said, *more.said], tokens, logprobs, [*self.top, *more.top])


class GrowingAnswer:
    """One answer while its tokens come."""

    def __init__(
        self, model: ChatFormat, stops: Sequence[str], parameters: Mapping[str, Mapping[str, Any]] | None = None
    ) -> None:
        """`parameters` are those of the tools that may be called."""
        self._text = AnswerText(model.tokenizer, stops, model.silent_ids)
        self._tools = ToolCallStream(model.calls, parameters) if parameters and model.calls else None
        self.calls = 0
        """Number of calls so far."""
        self.offset = 0
        """Characters of its tokens so far whose log-probabilities were told."""

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended it."""
        return self._text.stopped_by

    def add(self, tokens: Sequence[int], logprobs: Sequence[float]) -> AnswerPart:
        """Return what is certain now and was not before."""
        text = self._text.add(tokens)
        return self._part([text] if self._tools is None else self._tools.add(text), tokens, logprobs)

    def end(self) -> AnswerPart:
        """Return what was held back, when no more tokens come."""
        text = self._text.end()
        return self._part([text] if self._tools is None else [*self._tools.add(text), *self._tools.end()])

    def _part(
        self, said: Sequence[str | ToolCall], tokens: Sequence[int] = (), logprobs: Sequence[float] = ()
    ) -> AnswerPart:
        part = AnswerPart(said, tokens, logprobs)
        self.calls += len(part.calls)
        return part


@dataclass(frozen=True)
class SampledAnswers:
    """The result of a sample."""

    sequences: Sequence[AnswerPart]
    """Tokens, log-probabilities and likeliest tokens of each; nothing said."""
    reasons: Sequence[str]
    """`stop` or `length`."""
    used: Used

    @classmethod
    def read(cls, payload: bytes, used: Mapping[str, Any]) -> "SampledAnswers":
        """Read what an engine has answered (`SampleDone`)."""
        response = tinker_pb2.SampleResponse.FromString(payload)
        pieces, reasons = [], []
        for sequence in response.sequences:
            tokens, logprobs = np.frombuffer(sequence.tokens, "<i4"), np.frombuffer(sequence.logprobs, "<f4")
            pieces.append(AnswerPart((), tokens.tolist(), logprobs.tolist(), _top(sequence.topk_sampled_logprobs)))
            reasons.append("stop" if sequence.stop_reason == tinker_pb2.STOP_REASON_STOP else "length")
        return cls(pieces, reasons, Used(**used))

    @property
    def usage(self) -> dict[str, Any]:
        """The tokens that were used."""
        prompt, sampled = self.used.prefilled_tokens + self.used.cached_tokens, self.used.sampled_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": self.used.cached_tokens},
        }


def _top(found: tinker_pb2.TopkLogprobs) -> list[list[tuple[int, float]]]:
    if not found.k:
        return []
    ids = np.frombuffer(found.token_ids, "<i4").reshape(-1, found.k).tolist()
    logprobs = np.frombuffer(found.logprobs, "<f4").reshape(-1, found.k).tolist()
    return [list(zip(*row, strict=True)) for row in zip(ids, logprobs, strict=True)]


class Form(Protocol):
    """The form in which an application wants its answers. It knows what was told already."""

    def reply(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> dict[str, Any]:
        """The reply with all answers, which nothing was added to yet."""
        ...

    def part(self, index: int, answer: GrowingAnswer, piece: AnswerPart) -> bytes:
        """The events that tell a part of one answer; empty if there is nothing to tell."""
        ...

    def end(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> bytes:
        """The events that end all answers."""
        ...

    def error(self, request: Request, error: Exception) -> bytes:
        """The event that ends a stream whose sample has failed."""
        ...


@dataclass(frozen=True)
class OpenAIForm:
    """The form of OpenAI's API."""

    name: str
    """The model as the application has named it."""
    model: ChatFormat
    is_chat: bool
    """Whether they are messages; else they are texts."""
    with_logprobs: bool
    prompt_ids: Sequence[int] | None
    """The prompt; None unless token ids are wanted."""
    wants_usage: bool
    """Whether a stream ends with what was used."""
    answer_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    """Answers of which something was told."""

    def reply(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> dict[str, Any]:
        choices = []
        for index, (answer, sampled, reason) in enumerate(zip(answers, ended.sequences, ended.reasons, strict=True)):
            said = answer.add(sampled.tokens, sampled.logprobs).joined(answer.end())
            piece = replace(said, top=sampled.top)
            choices.append(self._choice(index, answer, piece, reason, _message(piece) if self.is_chat else None))
        whole = self._reply("chat.completion" if self.is_chat else "text_completion", choices)
        return whole | {"usage": ended.usage} | self._prompt()

    def part(self, index: int, answer: GrowingAnswer, piece: AnswerPart) -> bytes:
        told = piece.text or piece.calls or (piece.tokens and (self.with_logprobs or self.prompt_ids is not None))
        return self._told(index, answer, piece) if told else b""

    def end(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> bytes:
        events = [
            self._told(index, answer, answer.end(), reason)
            for index, (answer, reason) in enumerate(zip(answers, ended.reasons, strict=True))
        ]
        if self.wants_usage:
            events.append(event(self._event([]) | {"usage": ended.usage}))
        return b"".join([*events, event(b"[DONE]")])

    def error(self, request: Request, error: Exception) -> bytes:
        return event(openai_error(request, error))

    def _told(self, index: int, answer: GrowingAnswer, piece: AnswerPart, reason: str | None = None) -> bytes:
        """An event with a part of one answer; `reason` ends it."""
        first = index not in self._begun
        self._begun.add(index)
        role = {"role": "assistant"} if first else {}
        delta = {"delta": role | _delta(answer, piece)} if self.is_chat else None
        told = self._event([self._choice(index, answer, piece, reason, delta)])
        return event(told | self._prompt() if first and index == 0 else told)

    def _prompt(self) -> dict[str, Any]:
        return {} if self.prompt_ids is None else {"prompt_token_ids": list(self.prompt_ids)}

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._reply("chat.completion.chunk" if self.is_chat else "text_completion", choices)

    def _reply(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        answer_id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{self.answer_id}"
        return {"id": answer_id, "object": kind, "created": self.created, "model": self.name, "choices": choices}

    def _choice(
        self, index: int, answer: GrowingAnswer, piece: AnswerPart, reason: str | None, said: dict[str, Any] | None
    ) -> dict[str, Any]:
        ids = {} if self.prompt_ids is None else {"token_ids": list(piece.tokens)}
        logprobs = None
        if self.with_logprobs:
            logprobs = self._of_message(piece) if self.is_chat else self._of_text(answer, piece)
        reason = "tool_calls" if reason == "stop" and answer.calls else reason
        said = {"text": piece.text} if said is None else said
        return {"index": index, **said, "logprobs": logprobs, "finish_reason": reason, **ids}

    def _of_message(self, piece: AnswerPart) -> dict[str, Any]:
        top: Sequence[Sequence[tuple[int, float]]] = piece.top or [()] * len(piece.tokens)
        return {
            "content": [
                self._scored(token, logprob) | {"top_logprobs": [self._scored(*each) for each in likeliest]}
                for token, logprob, likeliest in zip(piece.tokens, piece.logprobs, top, strict=True)
            ],
            "refusal": None,
        }

    def _scored(self, token: int, logprob: float) -> dict[str, Any]:
        text = self.model.written(token)
        part_of_character = "\N{REPLACEMENT CHARACTER}" in text
        return {"token": text, "logprob": logprob, "bytes": None if part_of_character else list(text.encode())}

    def _of_text(self, answer: GrowingAnswer, piece: AnswerPart) -> dict[str, Any]:
        texts = [self.model.written(token) for token in piece.tokens]
        offsets = list(itertools.accumulate(map(len, texts), initial=answer.offset))
        answer.offset = offsets.pop()
        top = [{self.model.written(token): logprob for token, logprob in row} for row in piece.top] or None
        logprobs = list(piece.logprobs)
        return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": top, "text_offset": offsets}


def _message(piece: AnswerPart) -> dict[str, Any]:
    calls = {"tool_calls": [_call(call) for call in piece.calls]} if piece.calls else {}
    text = piece.text or (None if piece.calls else "")
    return {"message": {"role": "assistant", "content": text, "refusal": None, **calls}}


def _delta(answer: GrowingAnswer, piece: AnswerPart) -> dict[str, Any]:
    """The parts of a message. A call comes whole."""
    said: dict[str, Any] = {"content": piece.text} if piece.text or not piece.calls else {}
    first = answer.calls - len(piece.calls)
    calls = [{"index": index, **_call(call)} for index, call in enumerate(piece.calls, first)]
    return said | ({"tool_calls": calls} if calls else {})


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}


def event(content: Any, name: str = "") -> bytes:
    """One server-sent event."""
    named = f"event: {name}\n".encode() if name else b""
    return named + b"data: " + (content if isinstance(content, bytes) else orjson.dumps(content)) + b"\n\n"
