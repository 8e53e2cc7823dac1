"""An SFT step (forward_backward and optim_step) through the SDK and the server, against a bare transformers + PEFT loop on the same cores.

Qwen3 of width 512 with 8 layers and a vocabulary of 8192, LoRA of rank 8 with the LM head, float32. Two batches: 8 sequences of 128 tokens,
and 32 of 16 to 256 tokens, which the loop has to pad. Steps of both sides take turns; median of 3 rounds of 2 steps. About 3 minutes.

Run it with: taskset -c 0,1 python -m benchmarks.sft_step
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import tinker
import torch
from tinker import types

from benchmarks.loops import ADAM, Sequences, peft_step, random_sequences
from benchmarks.servers import sdk_datum, tinsmith_server, training_client
from benchmarks.timing import in_turn, report
from tinsmith.models.tiny import write_tiny_model

VOCABULARY = 8192
UNIFORM = [128] * 8
MIXED = [int(length) for length in np.linspace(16, 256, 32)]
STEP = types.AdamParams(learning_rate=ADAM.lr, beta1=ADAM.betas[0], beta2=ADAM.betas[1], eps=ADAM.eps)


def sdk_step(client: tinker.TrainingClient, batch: Sequences) -> None:
    """One step as a script takes it: both operations are sent, then both results awaited."""
    data = [sdk_datum(tokens) for tokens in batch]
    futures = client.forward_backward(data, "cross_entropy"), client.optim_step(STEP)
    for future in futures:
        future.result()


def compare(client: tinker.TrainingClient, directory: Path, lengths: Sequence[int]) -> tuple[float, float]:
    """Seconds of a step through the SDK and of the loop."""
    batch = random_sequences(lengths, VOCABULARY)
    loop = peft_step(directory, "cpu", torch.float32, 8, True, batch)
    ours_s, loop_s = in_turn(lambda: sdk_step(client, batch), loop, rounds=3, repeats=2)
    return ours_s, loop_s


def main() -> None:
    """Measure both batches and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tiny_model("qwen3", directory, hidden=512, layers=8, vocab=VOCABULARY)
        with tinsmith_server(hidden=512, layers=8, vocab=VOCABULARY) as url, training_client(url) as client:
            ours_s, loop_s = compare(client, directory, UNIFORM)
            report("sft_step_uniform", ours_s / loop_s, "at most 1.05 times the loop's seconds", ours_s=ours_s, loop_s=loop_s)
            ours_s, loop_s = compare(client, directory, MIXED)
    padding = len(MIXED) * max(MIXED) / sum(MIXED)
    wanted = f"at least {0.9 * padding:.3g} times as fast, 0.9 of the padding ratio"
    report("sft_step_mixed", loop_s / ours_s, wanted, ours_s=ours_s, loop_s=loop_s, padding_ratio=padding)


if __name__ == "__main__":
    main()
