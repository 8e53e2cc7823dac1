"""The canary: a prompt on whose log-probabilities vLLM and the trainer must agree before a client gets a sample.

vLLM leaves out parts of an adapter that it cannot apply, pixel values may be normalized twice, a transfer may be half done: to vLLM none of
that is an error, but it changes these log-probabilities.
"""

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from tinsmith.errors import TinsmithError
from tinsmith.models.base import BaseModel
from tinsmith.models.full import FullWeights, Weights
from tinsmith.models.lora import Adapter
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.models.threads import threads_for
from tinsmith.protocol.weights import WeightsRef
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.rendering.renderer import Renderer
from tinsmith.sampling.prompt_scores import PromptScores
from tinsmith.sampling.vllm.replies import prompt_answers
from tinsmith.training.logprobs import head_logits, head_lora
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SamplingParams, StopRule

_TOKENS = 12
"""Text tokens before the picture, and behind it."""
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest mean difference in nats. Random tokens are unlikely, and there bfloat16 rounds coarsely."""
_QUESTIONS = PromptQuestions(logprobs=True)
_PARAMS = SamplingParams(None, 1.0, 1.0, -1, 0, StopRule(eos=False, strings=(), token_ids=()))


@dataclass(frozen=True, eq=False)
class ServedWeights:
    """Weights that vLLM servers are asked to sample from."""

    weights: Weights | None
    """None are the base's."""
    canary: NDArray[np.float32]
    """The trainer's log-probabilities of the canary with them."""
    ref: WeightsRef

    @property
    def full(self) -> FullWeights | None:
        """The full weights that replace the base's, if these are of that kind."""
        return self.weights if isinstance(self.weights, FullWeights) else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter that is applied to the base's weights, if these are of that kind."""
        return self.weights if isinstance(self.weights, Adapter) else None

    def __str__(self) -> str:
        kind = {Adapter: "adapter", FullWeights: "full weights"}.get(type(self.weights))
        return f"{kind} {self.ref.label}" if kind else "the base weights"


def score_prompt(base: BaseModel, rendered: RenderedInput, weights: Weights | None, scores: PromptScores, chunk: int) -> None:
    """Let the trainer's own model answer what `scores` asks about a prompt. Logits exist for `chunk` positions at a time."""
    with torch.no_grad(), threads_for(base, len(rendered)):
        row = pack([rendered], [weights], base.device)
        hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))
        adapter = weights if isinstance(weights, Adapter) else None
        scores.add(0, hidden, partial(_logits, base.head(weights), adapter), chunk)


def _logits(head: torch.Tensor, adapter: Adapter | None, hidden: torch.Tensor) -> torch.Tensor:
    return head_logits(hidden, head, *head_lora(adapter))


class Canary:
    """The canary prompt of one base model: random tokens, with a picture among them where the model takes pictures."""

    def __init__(self, base: BaseModel, renderer: Renderer) -> None:
        self.base = base
        tokens = np.random.default_rng(0).integers(0, base.vocab_size, 2 * _TOKENS).astype(np.int32)
        picture: list[Chunk] = [_picture()] if base.family.takes_images else []
        self.rendered = renderer.render([TextChunk(tokens[:_TOKENS]), *picture, TextChunk(tokens[_TOKENS:])])
        self.text = self.rendered.is_text.copy()
        self.text[0] = False

    def expected(self, weights: Weights | None) -> NDArray[np.float32]:
        """The trainer's log-probabilities [text tokens but the first] of the canary. To be called in the trainer's thread."""
        scores = PromptScores(self.rendered, _QUESTIONS, _PARAMS, 0)
        score_prompt(self.base, self.rendered, weights, scores, len(self.rendered))
        assert scores.answers.logprobs is not None
        return scores.answers.logprobs[self.text]

    def compare(self, scores: Sequence[dict[str, Any] | None], expected: NDArray[np.float32], what: str) -> None:
        """Compare vLLM's prompt_logprobs of the canary with the trainer's, for the weights `what`. Raises TinsmithError if they differ."""
        difference = self.difference(scores, expected)
        if not difference <= self.tolerance:
            raise TinsmithError(
                f"vLLM computes other log-probabilities than the trainer with {what}: {difference:.4g} nats apart on average on "
                f"{len(expected)} tokens, where {self.tolerance:g} is the limit; nothing is sampled from these weights"
            )

    def difference(self, scores: Sequence[dict[str, Any] | None], expected: NDArray[np.float32]) -> float:
        """How far vLLM's prompt_logprobs of the canary are from the trainer's on average, in nats; NaN if one of them is."""
        got = prompt_answers(scores, self.rendered, _QUESTIONS).logprobs
        assert got is not None
        return float(np.abs(got[self.text] - expected).mean())

    @property
    def tolerance(self) -> float:
        """The largest difference with which weights are sampled."""
        return _TOLERANCE[self.base.dtype]


def _picture() -> ImageChunk:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(file, "PNG")
    return ImageChunk(hashlib.sha256(file.getvalue()).digest(), file.getvalue(), "png", None)
