"""A policy and an environment that do what they are told, and chat templates, to assert whole sequences with."""

import asyncio
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
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith_rl.chat import ChatTemplate
from tinsmith_rl.env import ChatMessage, Env, Prompt, Step, user
from tinsmith_rl.policy import Completion, SamplingRequest
from tinsmith_rl.rollouts import EnvRollouts, RolloutSettings
from tinsmith_rl.trajectory import EpisodeId, Trajectory
from tinsmith_rl.workers import InlineWorkers

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

_DROPS = 'message.content.split("</think>")[-1].lstrip("\\n")'
KEEPS_THOUGHTS = THINKING.replace(_DROPS, "message.content")
ON_DEMAND = THINKING.replace('assistant\\n<think>\\n"', 'assistant\\n"')
"""Without a thought begun for it, the model may think or not."""
SHOUTS = ON_DEMAND.replace(_DROPS, "message.content | upper")
COUNTS = "{{- messages | length -}}" + THINKING

END = "<|im_end|>"
OPENING = [user("hot or cold?")]


@cache
def tokenizer(directory: Path) -> PreTrainedTokenizerBase:
    """The tiny tokenizer with the files of a vision model beside it."""
    write_tiny_model("qwen3-vl", directory)
    made: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(directory)
    return made


@dataclass
class Scripted:
    """A policy that gives fixed answers, the n-th with logprobs -n.0, -n.1, ..., and remembers its requests."""

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
    """Says given things: `opening`, then one (observations, reward, done) per answer; `heard` keeps the answers."""

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


def play(
    template: ChatTemplate,
    said: Sequence[str | list[int]],
    steps: list[tuple[list[ChatMessage], float, bool]],
    opening: list[ChatMessage] = OPENING,
    stopped: bool = True,
    **changes: Any,
) -> tuple[Trajectory, Scripted]:
    """An episode of scripted answers, texts or tokens, and steps; the last answer `stopped` by itself, or was cut."""
    answers = [ids(template, text) if isinstance(text, str) else text for text in said]
    policy = Scripted([(tokens, stopped or number < len(said)) for number, tokens in enumerate(answers, 1)])
    options = {"opening": opening, "steps": steps}
    rollouts = EnvRollouts("tests.rl.scripted:Script", options, settings(**changes), template, InlineWorkers(600))
    return asyncio.run(rollouts.play(policy, Prompt(5), EpisodeId("script", 5))), policy


def ids(template: ChatTemplate, text: str) -> list[int]:
    """Tokens of a text with its special tokens."""
    return list(template.tokenizer.encode(text, add_special_tokens=False))


def chunk_of(chunk: tinker.ModelInputChunk) -> Chunk:
    """The chunk as it arrives at the server."""
    if isinstance(chunk, tinker.EncodedTextChunk):
        return TextChunk(np.array(chunk.tokens, np.int32))
    assert isinstance(chunk, tinker.types.ImageChunk)
    return ImageChunk(sha256(chunk.data).digest(), chunk.data, chunk.format, chunk.expected_tokens)
