"""Texts of prompts and answers for pages: excerpts, pieces, and tokens with a shade and a description each."""

import math
import re
from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]

SURPRISES = (0.1, 0.5, 1.0, 2.0, 4.0)
GAPS = (0.01, 0.05, 0.2, 0.5, 1.0)
SHARES = (0.01, 0.25, 0.5, 0.75, 0.999)
"""From where on each shade begins."""
_EXCERPT = 220
_CONTROL = re.compile(
    r"(<\|[^|<>\s]{1,40}\|>|</?(?:s|think|tool_call|tool_response|start_of_turn|end_of_turn|bos|eos)>)"
)
_SPEAKER = re.compile(r"<\|[^|<>\s]{1,40}\|>(?:system|user|assistant|tool|developer)\n")
"""Says in many templates whose message begins."""


def end_of(prompt: str) -> str:
    """The end of a prompt in one line, without control tokens."""
    text = " ".join(_CONTROL.sub(" ", _SPEAKER.sub(" ", prompt)).split())
    return text if len(text) <= _EXCERPT else "…" + text[-_EXCERPT:]


def pieces_of(text: str) -> list[Json]:
    """Pieces of a text; control tokens are pieces of their own."""
    return [{"text": piece, "is_control": bool(at % 2)} for at, piece in enumerate(_CONTROL.split(text)) if piece]


def shade_of_surprise(logprob: float) -> str:
    """The class of a token with this log-probability."""
    return f"h{_shade(-logprob, SURPRISES)}"


class ShadedTokens:
    """The sampled tokens of a sample, with a shade and a description each."""

    def __init__(self, sample: Json, colour: str, largest: float) -> None:
        self.sample, self.colour, self.largest = sample, colour, largest

    def spans(self, ends: Sequence[int], start: int, stop: int, first: int) -> list[Json]:
        """Those at positions `start` to `stop`, the first of which is the sample's `first` sampled one."""
        text, ids = self.sample["text"], self.sample["ids"]
        return [
            {"text": text[ends[at] : ends[at + 1]], "shade": self._shade(number), "about": self._about(number, ids[at])}
            for number, at in enumerate(range(start, stop), first)
        ]

    def _shade(self, number: int) -> str:
        sampler, trainer, advantage = self._values(number)
        if self.colour == "surprise":
            return shade_of_surprise(sampler)
        if self.colour == "gap":
            return "none" if trainer is None else _signed(trainer - sampler, GAPS)
        if self.colour == "advantage":
            return "none" if advantage is None else _signed(advantage / (self.largest or 1.0), SHARES)
        return "said"

    def _values(self, number: int) -> tuple[float, float | None, float | None]:
        sample = self.sample
        trainer, advantages = sample["trainer_logprobs"], sample["advantages"]
        return (
            sample["logprobs"][number] or 0.0,
            None if trainer is None else trainer[number],
            None if advantages is None else advantages[number],
        )

    def _about(self, number: int, token: int) -> str:
        sampler, trainer, advantage = self._values(number)
        facts = [f"token {token}", f"sampler {math.exp(min(sampler, 0.0)):.1%} ({sampler:.3f})"]
        if trainer is not None:
            facts.append(f"trainer {math.exp(min(trainer, 0.0)):.1%} ({trainer - sampler:+.4f})")
        if advantage is not None:
            facts.append(f"advantage {advantage:+.3g}")
        return " · ".join(facts)


def _shade(value: float, edges: Sequence[float]) -> int:
    return sum(value >= edge for edge in edges)


def _signed(value: float, edges: Sequence[float]) -> str:
    shade = _shade(abs(value), edges)
    return "none" if not shade else f"{'p' if value > 0 else 'm'}{shade}"
