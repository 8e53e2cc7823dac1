"""A policy and an environment that do what they are told, and two chat templates, to assert whole sequences with."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import tinker
from numpy.typing import NDArray
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tinsmith.models.tiny import write_tiny_model
from tinsmith.rl.chat import ChatTemplate
from tinsmith.rl.env import ChatMessage, Env, Prompt, Step
from tinsmith.rl.policy import Completion, SamplingRequest
from tinsmith.rl.rollouts import RolloutSettings
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk

THINKING = """
{%- for message in messages -%}
    {{- "<|im_start|>" + message.role + "\\n" -}}
    {%- if message.role == "assistant" -%}
        {{- message.content.split("</think>")[-1].lstrip("\\n") -}}
    {%- elif message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {{- "<|vision_start|><|image_pad|><|vision_end|>" if part.type == "image" else part.text -}}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- "<|im_start|>assistant\\n<think>\\n" -}}
{%- endif -%}
"""
"""As thinking models have it: the prompt begins the thought, and earlier thoughts are left out."""

KEEPS_THOUGHTS = THINKING.replace('message.content.split("</think>")[-1].lstrip("\\n")', "message.content")
SHOUTS = THINKING.replace('message.content.split("</think>")[-1].lstrip("\\n")', "message.content | upper").replace("<think>\\n", "")
COUNTS = "{{- messages | length -}}" + THINKING


@cache
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tiny tokenizer with the files of a vision model beside it."""
    write_tiny_model("qwen3-vl", directory)
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return made


@dataclass
class Scripted:
    """A policy that answers with given tokens, the n-th with logprobs -n.0, -n.1, -n.2, ... and remembers what it was asked."""

    answers: Sequence[tuple[list[int], bool]]
    prompts: list[tinker.ModelInput] = field(default_factory=list)
    requests: list[SamplingRequest] = field(default_factory=list)

    async def complete(self, prompt: tinker.ModelInput, request: SamplingRequest) -> Completion:
        tokens, stopped = self.answers[len(self.prompts)]
        self.prompts.append(prompt)
        self.requests.append(request)
        return Completion(np.array(tokens, dtype=np.int32), self.logprobs(len(self.prompts), len(tokens)), stopped)

    @staticmethod
    def logprobs(turn: int, length: int) -> NDArray[np.float32]:
        return -(turn + np.arange(length) / 10).astype(np.float32)


class Script(Env):
    """Says given things: `opening`, then one (observations, reward, done) for each answer, which it keeps in `heard`."""

    heard: ClassVar[list[str]]

    def __init__(self, opening: list[ChatMessage], steps: list[tuple[list[ChatMessage], float, bool]]) -> None:
        self.opening, self.steps = opening, list(steps)
        Script.heard = []

    def init(self, prompt: Prompt) -> tuple[list[ChatMessage], dict[str, Any]]:
        return self.opening, {"seed": prompt.seed}

    def step(self, text: str) -> Step:
        Script.heard.append(text)
        return Step(*self.steps[len(Script.heard) - 1])

    def metrics(self) -> dict[str, float]:
        return {"heard": float(len(Script.heard))}


def settings(**changes: Any) -> RolloutSettings:
    """Eight turns in a context of 200, ten tokens a turn."""
    request = SamplingRequest(max_tokens=changes.pop("max_tokens", 10), stop=changes.pop("stop", ()))
    return RolloutSettings(**{"request": request, "max_turns": 8, "max_context": 200, **changes})


def ids(template: ChatTemplate, text: str) -> list[int]:
    """Tokens of a text with its special tokens."""
    return list(template.tokenizer.encode(text, add_special_tokens=False))


def chunk_of(chunk: tinker.ModelInputChunk) -> Chunk:
    """The chunk as it arrives at the server."""
    if isinstance(chunk, tinker.EncodedTextChunk):
        return TextChunk(np.array(chunk.tokens, np.int32))
    assert isinstance(chunk, tinker.types.ImageChunk)
    return ImageChunk(sha256(chunk.data).digest(), chunk.data, chunk.format, chunk.expected_tokens)
