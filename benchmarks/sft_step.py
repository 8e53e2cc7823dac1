"""Time of an SFT step through SDK and server, against a bare transformers + PEFT loop on the same cores.

A step is forward_backward and optim_step. Qwen3 of width 512 with 8 layers and a vocabulary of 8192, LoRA of rank 8
with the LM head, float32. Two batches: 8 sequences of 128 tokens, and 32 of 16 to 256 tokens, which the loop has to
pad. Steps of both sides take turns; median of 3 rounds of 2 steps. About 3 minutes.

Run it with: taskset -c 0,1 python -m benchmarks.sft_step
"""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
import torch
from peft import LoraConfig, get_peft_model
from tinker import types
from transformers import AutoModelForCausalLM

from benchmarks.servers import random_datums, tinsmith_server, training_client
from benchmarks.timing import in_turn, report
from tinsmith.models.lora import LORA_ALPHA
from tinsmith.models.tiny import write_tiny_model

VOCABULARY = 8192
UNIFORM = [128] * 8
MIXED = [int(length) for length in np.linspace(16, 256, 32)]
RATE, BETAS, EPS = 1e-4, (0.9, 0.95), 1e-12
STEP = types.AdamParams(learning_rate=RATE, beta1=BETAS[0], beta2=BETAS[1], eps=EPS)
TRAINED = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def peft_step(directory: Path, batch: Sequence[Sequence[int]]) -> Callable[[], None]:
    """Load the model into transformers + PEFT; each call is one step on `batch`, as a person would write it first."""
    network: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model: Any = get_peft_model(
        network, LoraConfig(r=8, lora_alpha=int(LORA_ALPHA), lora_dropout=0.0, target_modules=TRAINED)
    )
    model.train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    arguments = _padded(batch)

    def step() -> None:
        loss = model(**arguments, use_cache=False).loss
        loss.backward()
        loss.item()  # the server reports its loss too
        optimizer.step()
        optimizer.zero_grad()

    return step


def _padded(batch: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """[sequences, longest] each, padded on the right.

    A batch without padding needs no mask, and attention is faster without one.
    """
    longest = max(len(tokens) for tokens in batch)
    input_ids = torch.zeros(len(batch), longest, dtype=torch.int64)
    labels = torch.full_like(input_ids, -100)
    for row, tokens in enumerate(batch):
        input_ids[row, : len(tokens)] = labels[row, : len(tokens)] = torch.tensor(tokens)
    arguments = {"input_ids": input_ids, "labels": labels}
    return (
        arguments
        if len({len(tokens) for tokens in batch}) == 1
        else arguments | {"attention_mask": (labels != -100).long()}
    )


def sdk_step(client: tinker.TrainingClient, data: list[types.Datum]) -> None:
    """One step as a script takes it: both operations are sent, then both results awaited."""
    futures = client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)
    for future in futures:
        future.result()


def compare(client: tinker.TrainingClient, directory: Path, lengths: Sequence[int]) -> tuple[float, float]:
    """Seconds of a step through the SDK and of the loop."""
    data = random_datums(lengths, VOCABULARY)
    loop = peft_step(directory, [datum.model_input.to_ints() for datum in data])
    ours_s, loop_s = in_turn(lambda: sdk_step(client, data), loop, rounds=3, repeats=2)
    return ours_s, loop_s


def main() -> None:
    """Measure both batches and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model("qwen3", directory, hidden=512, layers=8, vocab=VOCABULARY)
        with tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as url, training_client(url) as client:
            ours_s, loop_s = compare(client, directory, UNIFORM)
            report(
                "sft_step_uniform",
                ours_s / loop_s,
                "at most 1.05 times the loop's seconds",
                ours_s=ours_s,
                loop_s=loop_s,
            )
            ours_s, loop_s = compare(client, directory, MIXED)
    padding = len(MIXED) * max(MIXED) / sum(MIXED)
    wanted = f"at least {0.9 * padding:.3g} times as fast, 0.9 of the padding ratio"
    report("sft_step_mixed", loop_s / ours_s, wanted, ours_s=ours_s, loop_s=loop_s, padding_ratio=padding)


if __name__ == "__main__":
    main()
