"""Penalties, min_p and grammars: what changes the logits of a sequence before its next token is drawn.

All of it follows from the sequence's own prompt, tokens and request, which the host knows. So a step that has such rows
is launched once the tokens before are read, and batch mates change nothing.
"""

from array import array
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tinsmith.chat.grammar import GrammarState
from tinsmith.kernels.device import upload
from tinsmith.wire.sample import Shaping

_WORD = 32
"""Tokens for each number of a mask."""


class Shape:
    """Penalties, min_p and grammar of one sequence, with its tokens so far."""

    def __init__(
        self,
        shaping: Shaping,
        prompt: NDArray[np.int32],
        grammar: GrammarState | None = None,
        ends: Collection[int] = (),
    ) -> None:
        """`ends` are tokens that end the answer, beside those that the grammar knows."""
        self.shaping = shaping
        self.grammar = grammar
        self.ends = ends
        self.mask: NDArray[np.int32] | None = None
        """The tokens that the grammar allows next, as bits."""
        self._read = 0
        """Number of tokens of the answer that are counted."""
        known = np.unique(prompt) if shaping.repetition_penalty != 1 else prompt[:0]
        self._tokens, self._counts = array("q", known.tolist()), array("q", bytes(8 * len(known)))
        """Tokens of the answer, and with a repetition penalty of the prompt; how many of each the answer has."""
        self._places = dict(zip(self._tokens, range(len(known)), strict=True))

    def follow(self, tokens: Sequence[int]) -> "Shape":
        """Count the tokens of the answer, of which former calls have counted the first ones. Raises UserError.

        Returns itself.
        """
        if self.mask is None or self._read < len(tokens):
            self.mask = None
            self._count(tokens[self._read :])
            self._read = len(tokens)
            # Here, where an error is this sequence's alone
            self.mask = None if self.grammar is None else self.grammar.mask(self.ends)
        return self

    def _count(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if self.grammar is not None:
                self.grammar.add(token)
            place = self._places.setdefault(token, len(self._tokens))
            if place == len(self._tokens):
                self._tokens.append(token)
                self._counts.append(0)
            self._counts[place] += 1

    def counted(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the tokens that penalties concern, and how often the answer has each."""
        if not self.shaping.penalizes:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.array(self._tokens, np.int64), np.array(self._counts, np.int64)


def penalize(logits: Tensor, shapes: Sequence[Shape]) -> None:
    """Subtract the penalties of each row from its `logits` [rows, vocabulary], in place."""
    counted = [shape.counted() for shape in shapes]
    sizes = [len(tokens) for tokens, _ in counted]
    if not sum(sizes):
        return
    ids = np.concatenate([row * logits.shape[1] + tokens for row, (tokens, _) in enumerate(counted)])
    counts = np.concatenate([counts for _, counts in counted]).astype(np.float32)
    settings = [
        (each.shaping.presence_penalty, each.shaping.frequency_penalty, each.shaping.repetition_penalty)
        for each in shapes
    ]
    numbers = np.repeat(np.array(settings, np.float32), sizes, axis=0)  # [tokens, 3]
    places, count = upload(ids, logits.device), upload(counts, logits.device)
    presence, frequency, repetition = upload(numbers, logits.device).unbind(1)
    flat = logits.view(-1)
    found = flat[places]
    found = torch.where(found > 0, found / repetition, found * repetition)
    flat[places] = found - frequency * count - torch.where(count > 0, presence, 0.0)


def keep_to_grammars(logits: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """Return `logits` [rows, vocabulary] with -inf for tokens that the row's grammar does not allow."""
    if all(shape.mask is None for shape in shapes):
        return logits
    words = -(-logits.shape[1] // _WORD)
    masks = np.full((len(shapes), words), -1, np.int32)
    for mask, shape in zip(masks, shapes, strict=True):
        if shape.mask is not None:
            mask[:] = shape.mask[:words]
    bits = torch.arange(_WORD, device=logits.device, dtype=torch.int32)
    allowed = (upload(masks, logits.device).unsqueeze(-1) >> bits & 1).bool().flatten(1)  # [rows, words * 32]
    return logits.masked_fill(~allowed[:, : logits.shape[1]], -torch.inf)


def leave_unlikely(logprobs: Tensor, shapes: Sequence[Shape]) -> Tensor:
    """Return `logprobs` [rows, vocabulary] with -inf for tokens that the row's min_p leaves out."""
    least = np.array([shape.shaping.min_p for shape in shapes], np.float32)
    if not least.any():
        return logprobs
    border = logprobs.amax(-1, keepdim=True) + upload(least, logprobs.device).log().unsqueeze(1)
    return logprobs.masked_fill(logprobs < border, -torch.inf)
