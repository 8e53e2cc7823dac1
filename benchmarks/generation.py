"""The same sampling work for Tinsmith's sampler and for transformers' batched `generate`: prompts, lengths, and the loop around each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Prompt:
    """One prompt and how many tokens to generate after it; nothing ends an answer earlier."""

    tokens: NDArray[np.int32]
    max_tokens: int


def prompts(sizes: Sequence[tuple[int, int]], vocabulary: int = 1500) -> list[Prompt]:
    """Random prompts, one for each (prompt length, answer length)."""
    generator = np.random.default_rng(0)
    return [Prompt(generator.integers(0, vocabulary, length).astype(np.int32), answer) for length, answer in sizes]


def load_generator(directory: Path) -> Any:
    """The model in transformers, as `generate_batch` uses it."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return model.eval()


@torch.no_grad()
def generate_batch(model: Any, asked: Sequence[Prompt]) -> None:
    """One call of `generate`: prompts padded on the left to the longest, and every answer as long as the longest of them."""
    longest = max(len(prompt.tokens) for prompt in asked)
    input_ids = torch.zeros(len(asked), longest, dtype=torch.int64)
    mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(asked):
        input_ids[row, longest - len(prompt.tokens) :] = torch.from_numpy(prompt.tokens)
        mask[row, longest - len(prompt.tokens) :] = 1
    answer = max(prompt.max_tokens for prompt in asked)
    model.generate(
        input_ids,
        attention_mask=mask,
        do_sample=True,
        top_k=0,
        min_new_tokens=answer,
        max_new_tokens=answer,
        output_logits=True,  # the sampler hands back log-probabilities, which come from these
        return_dict_in_generate=True,
    )
