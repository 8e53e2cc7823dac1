"""A sample request on its way through vLLM."""

from dataclasses import dataclass, field
from typing import Any

from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.vllm.version import Version
from tinsmith.wire.prompt_scores import PromptAnswers
from tinsmith.wire.sample import SampledSequence, SampleRequest


@dataclass(eq=False)
class Draft:
    """What there is of one sample whose weights are replaced while it runs (`following.py`). It outlives the server where it began."""

    pieces: list[SampledSequence] = field(default_factory=list)
    """Each from one version, as the continuation of those before it; none is empty."""
    reply: dict[str, Any] | None = None
    """vLLM's, to the first piece: it also says what was asked about the prompt."""
    ended: bool = False

    @property
    def tokens(self) -> tuple[int, ...]:
        """All that was sampled so far."""
        return tuple(token for piece in self.pieces for token in piece.tokens)


@dataclass(frozen=True, eq=False)
class Job:
    """A sample request that vLLM can answer."""

    request_id: str
    request: SampleRequest
    rendered: RenderedInput
    version: Version
    max_tokens: int
    eos: frozenset[int]
    vocab_size: int
    tokenizer: Any
    keys: list[bytes]
    """Of the prompt's full blocks."""
    answers: PromptAnswers
    """What the trainer's model has answered about the prompt already."""
    drafts: list[Draft]
    """One for each sample; they stay empty unless new weights take the place of its own while it runs."""
