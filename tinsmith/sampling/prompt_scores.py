"""Answers about a request's own prompt, filled in as the prompt's positions are computed.

The hidden state of position p - 1 scores position p. Image positions have log-probability 0.0, the placeholder as
alternative, and an empty top-k.
"""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.choose import as_bits, draw, draws_needed, logprobs_at, uniforms
from tinsmith.wire.prompt_scores import Alternatives, PromptAnswers, PromptQuestions, TargetLogprobs, TopLogprobs
from tinsmith.wire.sample import SamplingParams

Logits = Callable[[Tensor], Tensor]
"""Hidden states [n, hidden] -> logits [n, vocabulary] in float32."""

DRAWS_PER_TOKEN = 16
"""Alternatives that take about as long to draw as a prompt token takes to compute: 2 to 3 us each on a CPU."""

ALTERNATIVE = 2**32
"""Added to the index of an alternative, so that it shares no random numbers with a sample."""


class PromptScores:
    """The answers about one prompt."""

    def __init__(self, rendered: RenderedInput, asked: PromptQuestions, params: SamplingParams, seed: int) -> None:
        length = len(rendered)
        self.asked = asked
        self.token_ids = rendered.token_ids
        self.temperature = params.temperature
        self.seed = seed
        self.text = rendered.is_text
        """[prompt tokens] False at image positions."""
        self.scored_from = asked.scored_from(length)
        self.answers = PromptAnswers(
            logprobs=self._blank_logprobs() if asked.logprobs else None,
            topk=TopLogprobs.empty(length, asked.topk) if asked.topk else None,
            targets=TargetLogprobs(asked.targets, np.zeros(len(asked.targets.ids), dtype=np.float32))
            if asked.targets
            else None,
            alternatives=self._blank_alternatives() if asked.alternatives else None,
        )
        self.needed_from = self._first_needed()
        """The first position whose hidden state is still needed."""

    @property
    def complete(self) -> bool:
        return self.needed_from >= len(self.token_ids) - 1

    @property
    def cost(self) -> int:
        """The time to compute and score one position, relative to a prompt token of which nothing is asked."""
        return 1 + self.asked.alternatives // DRAWS_PER_TOKEN

    def add(self, start: int, hidden: Tensor, logits: Logits, chunk: int) -> None:
        """Take the hidden states [n, hidden] of positions [start, start + n), of which `chunk` at a time become logits.

        Positions that were answered before are skipped.
        """
        first, last = max(start, self.needed_from), min(start + len(hidden), len(self.token_ids) - 1)
        for low, high in pairwise([*range(first, last, chunk), last] if first < last else []):
            self._score(low + 1, logits(hidden[low - start : high - start]))
        self.needed_from = max(self.needed_from, last)

    def _score(self, position: int, logits: Tensor) -> None:
        """Answer for the n positions from `position` on, which `logits` [n, vocabulary] predict."""
        logprobs = logits.log_softmax(-1)
        places = np.arange(position, position + len(logits))
        scored = torch.from_numpy(np.flatnonzero(self.text[places] & (places >= self.scored_from)))
        rows = scored.to(logits.device)
        where = places[scored.numpy()]
        if self.answers.logprobs is not None and len(where):
            ids = torch.from_numpy(self.token_ids[where]).to(logits.device, torch.int64)
            self.answers.logprobs[where] = logprobs[rows].gather(1, ids.unsqueeze(1)).squeeze(1).cpu().numpy()
        if self.answers.topk is not None and len(where):
            values, ids = logprobs[rows].topk(self.asked.topk)
            self.answers.topk.token_ids[where], self.answers.topk.logprobs[where] = (
                ids.cpu().numpy(),
                values.cpu().numpy(),
            )
        if self.answers.targets is not None:
            self._score_targets(self.answers.targets, position, logprobs)
        if self.answers.alternatives is not None:
            self._draw_alternatives(self.answers.alternatives, places, logits, logprobs)

    def _score_targets(self, found: TargetLogprobs, position: int, logprobs: Tensor) -> None:
        ids, places = found.asked.ids, found.asked.rows + 1
        low, high = np.searchsorted(places, [position, position + len(logprobs)])  # rows rise
        cells = low + np.flatnonzero((ids[low:high] >= 0) & self.text[places[low:high]])
        rows, columns = (
            torch.from_numpy(array).to(logprobs.device) for array in (places[cells] - position, ids[cells])
        )
        found.values[cells] = logprobs[rows, columns].cpu().numpy()

    def _draw_alternatives(
        self, found: Alternatives, places: NDArray[np.int64], logits: Tensor, logprobs: Tensor
    ) -> None:
        rows = np.flatnonzero(self.text[places])
        index = torch.from_numpy(rows).to(logits.device)
        k = self.asked.alternatives
        at = np.repeat(places[rows], k)
        which = np.tile(np.arange(ALTERNATIVE, ALTERNATIVE + k, dtype=np.uint64), len(rows))
        seeds, samples, positions = (
            as_bits(numbers).to(logits.device) for numbers in (np.full(len(at), self.seed, np.uint64), which, at)
        )
        u = uniforms(seeds, samples, positions, draws_needed(logits.shape[1])).view(-1, len(rows), k)
        if self.temperature == 0:
            tokens = logits[index].argmax(-1, keepdim=True).expand(-1, k)
        else:
            temperature = torch.tensor(self.temperature, dtype=torch.float32, device=logits.device)
            tokens = draw(logprobs_at(logits[index], temperature), u)
        found.token_ids[places[rows] - 1] = tokens.cpu().numpy()
        found.logprobs[places[rows] - 1] = logprobs[index].gather(1, tokens).cpu().numpy()

    def _blank_logprobs(self) -> NDArray[np.float32]:
        logprobs = np.full(len(self.token_ids), np.nan, dtype=np.float32)
        images = np.flatnonzero(~self.text)
        logprobs[images[images >= self.scored_from]] = 0.0
        return logprobs

    def _blank_alternatives(self) -> Alternatives:
        shape = len(self.token_ids) - 1, self.asked.alternatives
        return Alternatives(np.repeat(self.token_ids[1:], shape[1]).reshape(shape), np.zeros(shape, dtype=np.float32))

    def _first_needed(self) -> int:
        first = [len(self.token_ids) - 1]
        if self.asked.logprobs or self.asked.topk:
            first.append(self.scored_from - 1)
        if self.asked.targets is not None:
            first.append(self.asked.targets.first_row)
        if self.asked.alternatives:
            first.append(0)
        return min(first)
