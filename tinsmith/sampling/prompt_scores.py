"""What a request wants to know about its own prompt: filled in window by window, as the prompt's positions are computed."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tinsmith.rendering.rendered import RenderedInput

Score = Callable[[Tensor, Tensor], Tensor]
"""Hidden states [n, hidden] and targets [n, K] -> log-probabilities [n, K]."""


class PromptScores:
    """Log-probabilities of the tokens of one prompt."""

    def __init__(self, rendered: RenderedInput) -> None:
        self.rendered = rendered
        self.logprobs = np.full(len(rendered), np.nan, dtype=np.float32)
        """[prompt tokens]: NaN first and where nothing has been computed, 0.0 at image positions."""
        for span in rendered.spans:
            self.logprobs[span.offset : span.offset + span.length] = 0.0
        self.needed_from = 0
        """The first position whose hidden state is still wanted. Each gives the log-probability of the token behind it."""

    @property
    def complete(self) -> bool:
        """Whether nothing is wanted any more."""
        return self.needed_from >= len(self.rendered) - 1

    def add(self, start: int, hidden: Tensor, score: Score) -> None:
        """Take the hidden states [n, hidden] of positions [start, start + n). What is known already is not computed again."""
        first, last = max(start, self.needed_from), min(start + len(hidden), len(self.rendered) - 1)
        if first >= last:
            return
        targets = torch.from_numpy(self.rendered.token_ids[first + 1 : last + 1]).to(hidden.device, torch.int64).unsqueeze(1)
        self.logprobs[first + 1 : last + 1] = score(hidden[first - start : last - start], targets).squeeze(1).cpu().numpy()
        for span in self.rendered.spans:
            self.logprobs[span.offset : span.offset + span.length] = 0.0
        self.needed_from = last
