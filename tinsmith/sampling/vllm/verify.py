"""Checks with each set of new weights that vLLM computes what the trainer does.

The canary is a prompt on whose log-probabilities vLLM and the trainer must agree before a client gets a sample. Pixel values that are
normalized twice, or a transfer that is half done, are no error to vLLM, but change these. `probes.py` tries out each new server.
"""

import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from tinsmith.sampling.vllm.generate import score
from tinsmith.sampling.vllm.instance import Instance
from tinsmith.sampling.vllm.protocol import prompt_answers, scoring_params
from tinsmith.training.logprobs import head_logits, head_lora
from tinsmith.wire.chunks import Chunk, ImageChunk, TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SamplingParams, StopRule

_TOKENS = 12
"""Text tokens before the image, and behind it."""
_WITHIN_LAYERS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Mean difference in nats that is allowed for rounding within layers. Random tokens are unlikely, where bfloat16 rounds coarsely."""
_ROUNDINGS = 2
"""The trainer rounds its logits to the base's dtype, and vLLM its own."""
Scores = Sequence[dict[str, Any] | None]
"""vLLM's prompt_logprobs of the canary."""
_QUESTIONS = PromptQuestions(logprobs=True)
_PARAMS = SamplingParams(None, 1.0, 1.0, -1, 0, StopRule(eos=False, strings=(), token_ids=()))


@dataclass(frozen=True, eq=False)
class Expectation:
    """The trainer's results for the canary with some weights."""

    logprobs: NDArray[np.float32]
    limit: float
    """Largest mean difference of vLLM's, in nats (`allowed_difference`)."""

    @property
    def is_finite(self) -> bool:
        """False if they cannot be compared: what is infinite or NaN agrees with anything, or with nothing."""
        return bool(np.isfinite(self.logprobs).all() and np.isfinite(self.limit))


def allowed_difference(logit_size: float, dtype: torch.dtype) -> float:
    """Return the allowed mean difference of log-probabilities in nats, where the largest logits have this absolute value.

        limit = (0.001 in float32, 0.1 in bfloat16) + 2 * unit * logit_size

    A logit of size x is rounded by up to x * unit, which is x * 2^-8 in bfloat16 (half of `eps`), and the logarithm of the sum over the
    vocabulary is no more exact than its largest logit. Trainer and vLLM each round once. The added part is less than a hundredth of the
    logits, to which the effect of wrong weights is in proportion too.
    """
    return _WITHIN_LAYERS[dtype] + _ROUNDINGS * torch.finfo(dtype).eps / 2 * logit_size


@dataclass(frozen=True, eq=False)
class PublishedWeights:
    """Weights to sample from at vLLM servers, with what a server must compute with them."""

    weights: Weights | None
    canary: Expectation
    ref: WeightsRef

    @property
    def full(self) -> FullWeights | None:
        """Full weights that replace the base's, if they are of that kind."""
        return self.weights if isinstance(self.weights, FullWeights) else None

    @property
    def adapter(self) -> Adapter | None:
        """The adapter over the base's weights, if they are of that kind."""
        return self.weights if isinstance(self.weights, Adapter) else None

    def __str__(self) -> str:
        kind = {Adapter: "adapter", FullWeights: "full weights"}.get(type(self.weights))
        return f"{kind} {self.ref.label}" if kind else "the base weights"


def score_prompt(
    base: BaseModel,
    rendered: RenderedInput,
    weights: Weights | None,
    scores: PromptScores,
    chunk: int,
    look_at: Callable[[torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Let the trainer's own model answer what `scores` asks about a prompt; returns the logits [1, vocabulary] behind it.

    Logits [positions, vocabulary] exist for `chunk` positions at a time; `look_at` is given them.
    """
    head, lora = base.head(weights), head_lora(weights)

    def logits(hidden: torch.Tensor) -> torch.Tensor:
        found = head_logits(hidden, head, *lora)
        if look_at is not None:
            look_at(found)
        return found

    with torch.no_grad(), threads_for(base, len(rendered)):
        row = pack([rendered], [weights], base.device)
        hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))
        scores.add(0, hidden, logits, chunk)
        return head_logits(hidden[-1:], head, *lora)


class Canary:
    """The canary prompt of one base model: random tokens, with an image among them where the model takes images."""

    def __init__(self, base: BaseModel, renderer: Renderer) -> None:
        self.base = base
        tokens = np.random.default_rng(0).integers(0, base.vocab_size, 2 * _TOKENS).astype(np.int32)
        image: list[Chunk] = [_image()] if base.family.takes_images else []
        self.rendered = renderer.render([TextChunk(tokens[:_TOKENS]), *image, TextChunk(tokens[_TOKENS:])])
        self.text = self.rendered.is_text.copy()
        self.text[0] = False

    def expected(self, weights: Weights | None) -> Expectation:
        """Compute the canary with the trainer's model, in the trainer's thread."""
        scores = PromptScores(self.rendered, _QUESTIONS, _PARAMS, 0)
        sizes: list[torch.Tensor] = []
        score_prompt(self.base, self.rendered, weights, scores, len(self.rendered), lambda logits: sizes.append(logits.abs().amax(-1)))
        assert scores.answers.logprobs is not None
        limit = allowed_difference(float(torch.cat(sizes).mean()), self.base.dtype)
        return Expectation(scores.answers.logprobs[self.text], limit)

    async def scored_by(self, instance: Instance, model: str | None) -> Scores:
        """Let a server score the canary with the weights or the adapter of this name."""
        scores: Scores = (await score(instance, self.rendered, scoring_params(0), model))["prompt_logprobs"]
        return scores

    def compare(self, scores: Scores, expected: Expectation, what: str) -> None:
        """Raise TinsmithError if a server's scores of the canary differ from the trainer's, or the trainer's are not all finite."""
        if not expected.is_finite:
            raise TinsmithError(
                f"the trainer itself computes infinite or NaN log-probabilities with {what}, so vLLM cannot be compared with it; nothing "
                "is sampled from these weights: go back to an earlier checkpoint, and train on with a lower learning rate"
            )
        difference = self.difference(scores, expected)
        if not difference <= expected.limit:
            raise TinsmithError(
                f"vLLM computes other log-probabilities than the trainer with {what}: {difference:.4g} nats apart on average on "
                f"{len(expected.logprobs)} tokens, where {expected.limit:.3g} is the limit; nothing is sampled from these weights"
            )

    def difference(self, scores: Scores, expected: Expectation) -> float:
        """Return the mean difference of a server's scores of the canary from the trainer's, in nats; NaN if one of them is."""
        got = prompt_answers(scores, self.rendered, _QUESTIONS).logprobs
        assert got is not None
        return float(np.abs(got[self.text] - expected.logprobs).mean())


def _image() -> ImageChunk:
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)).save(file, "PNG")
    return ImageChunk(hashlib.sha256(file.getvalue()).digest(), file.getvalue(), "png", None)
