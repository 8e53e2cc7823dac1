"""Tokens per second of the local sampler against transformers' batched `generate`, with the tiny model.

Two loads of 64 requests at temperature 1 with logprobs: prompts of 64 tokens with answers of 64, and mixed ones of 16
to 112 tokens each, which `generate` pads to the longest prompt and answer. Both sides take turns; median of 3 rounds.
Run it with: taskset -c 0,1 python -m benchmarks.sampler
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.timing import in_turn, report
from tinsmith.config import ModelsConfig, SamplingConfig
from tinsmith.models.base import load_base_model
from tinsmith.models.tiny import write_tiny_model
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.sampling.local.sampler import LocalSampler
from tinsmith.wire.chunks import TextChunk
from tinsmith.wire.prompt_scores import PromptQuestions
from tinsmith.wire.sample import SampleRequest, SamplingParams, StopRule

UNIFORM = [(64, 64)] * 64
_PROMPTS, _ANSWERS = (np.random.default_rng(seed).integers(16, 113, 64) for seed in (1, 2))
MIXED = [(int(prompt), int(answer)) for prompt, answer in zip(_PROMPTS, _ANSWERS, strict=True)]


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
    """Call `generate` once, prompts padded on the left to the longest, all answers as long as the longest of them."""
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


def sample_all(sampler: LocalSampler, asked: Sequence[Prompt]) -> None:
    """Add every request, then step until all are answered."""
    for number, prompt in enumerate(asked):
        rendered = RenderedInput(prompt.tokens, (), (), torch.arange(len(prompt.tokens)).unsqueeze(0))
        sampler.add(str(number), _request(prompt), rendered, None)
    finished = 0
    while sampler.has_work:
        finished += len(sampler.step())
    if finished != len(asked):
        raise RuntimeError(f"{finished} of {len(asked)} requests were answered")


def _request(prompt: Prompt) -> SampleRequest:
    stop = StopRule(eos=False, strings=(), token_ids=())
    params = SamplingParams(max_tokens=prompt.max_tokens, temperature=1.0, top_p=1.0, top_k=-1, seed=None, stop=stop)
    return SampleRequest("benchmark", 1, 1, [TextChunk(prompt.tokens)], params, PromptQuestions())


def compare(name: str, wanted: float, sampler: LocalSampler, model: Any, sizes: Sequence[tuple[int, int]]) -> None:
    """Measure one load and print its line."""
    asked = prompts(sizes)
    ours_s, generate_s = in_turn(lambda: sample_all(sampler, asked), lambda: generate_batch(model, asked))
    tokens = sum(answer for _, answer in sizes)
    rates = {"ours_tokens_per_s": tokens / ours_s, "generate_tokens_per_s": tokens / generate_s}
    report(name, generate_s / ours_s, f"at least {wanted} times as fast", **rates)


def main() -> None:
    """Measure both loads."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3", Path(folder))
        base = load_base_model("tiny", folder, ModelsConfig(device="cpu"), 0)
        model = load_generator(Path(folder))
    sampler = LocalSampler(base, SamplingConfig(kv_cache_gib=0.25), 1024)
    compare("sampler_uniform", 1.2, sampler, model, UNIFORM)
    compare("sampler_mixed", 2.2, sampler, model, MIXED)


if __name__ == "__main__":
    main()
