"""Answers to applications in the form of Anthropic's Messages API: one message, of texts and calls of tools."""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from fastapi import Request

from tinsmith.chat.tools import ToolCall
from tinsmith.server.answers import AnswerPart, GrowingAnswer, SampledAnswers, event
from tinsmith.server.replies import anthropic_error
from tinsmith.store.records import Used


@dataclass
class MessageForm:
    """The form of one message."""

    name: str
    """The model as the application has named it."""
    prompt_tokens: int
    """The prompt's tokens, as far as they are known before it is sampled: without its images."""
    message_id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    _begun: bool = False
    _blocks: int = 0
    """Blocks that were begun."""
    _in_text: bool = False
    """Whether the last block is a text that goes on."""

    def reply(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> dict[str, Any]:
        answer, sampled = answers[0], ended.sequences[0]
        piece = answer.add(sampled.tokens, sampled.logprobs).joined(answer.end())
        return self._message(_blocks(piece), _usage(ended.used)) | _ending(answer, ended.reasons[0])

    def part(self, index: int, answer: GrowingAnswer, piece: AnswerPart) -> bytes:
        events = []
        if not self._begun:
            self._begun = True
            usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
            message = self._message([], usage) | {"stop_reason": None, "stop_sequence": None}
            events.append(_event("message_start", message=message))
        for said in filter(None, piece.said):
            if isinstance(said, ToolCall):
                events += [self._stop(), self._start(_call(said) | {"input": {}})]
                events.append(self._delta({"type": "input_json_delta", "partial_json": said.arguments}))
                events.append(_event("content_block_stop", index=self._blocks - 1))
                continue
            if not self._in_text:
                events.append(self._start({"type": "text", "text": ""}))
                self._in_text = True
            events.append(self._delta({"type": "text_delta", "text": said}))
        return b"".join(events)

    def end(self, answers: Sequence[GrowingAnswer], ended: SampledAnswers) -> bytes:
        answer = answers[0]
        told = self.part(0, answer, answer.end()) + self._stop()
        delta = _event("message_delta", delta=_ending(answer, ended.reasons[0]), usage=_usage(ended.used))
        return told + delta + _event("message_stop")

    def error(self, request: Request, error: Exception) -> bytes:
        return event(anthropic_error(request, error), "error")

    def _message(self, content: list[dict[str, Any]], usage: dict[str, int]) -> dict[str, Any]:
        said = {"id": self.message_id, "type": "message", "role": "assistant", "model": self.name}
        return said | {"content": content, "usage": usage}

    def _start(self, block: dict[str, Any]) -> bytes:
        self._blocks += 1
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _stop(self) -> bytes:
        """End the text that goes on, if there is one."""
        goes_on, self._in_text = self._in_text, False
        return _event("content_block_stop", index=self._blocks - 1) if goes_on else b""


def _blocks(piece: AnswerPart) -> list[dict[str, Any]]:
    """The texts and calls of a message, in the order in which a stream tells them."""
    blocks: list[dict[str, Any]] = []
    for said in filter(None, piece.said):
        if isinstance(said, ToolCall):
            blocks.append(_call(said) | {"input": orjson.loads(said.arguments)})
        elif blocks and blocks[-1]["type"] == "text":
            blocks[-1]["text"] += said
        else:
            blocks.append({"type": "text", "text": said})
    return blocks or [{"type": "text", "text": ""}]


def _call(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call.name}


def _ending(answer: GrowingAnswer, reason: str) -> dict[str, Any]:
    """Why an answer has ended."""
    if answer.calls and reason == "stop":
        return {"stop_reason": "tool_use", "stop_sequence": None}
    if answer.stopped_by is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": answer.stopped_by}
    return {"stop_reason": "end_turn" if reason == "stop" else "max_tokens", "stop_sequence": None}


def _usage(used: Used) -> dict[str, int]:
    return {
        "input_tokens": used.prefilled_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": used.cached_tokens,
        "output_tokens": used.sampled_tokens,
    }


def _event(name: str, **content: Any) -> bytes:
    return event({"type": name, **content}, name)
