"""SFT on one GPU: tokens per second and peak memory of the Backend, over those of a plain transformers + PEFT loop on the same card.

Qwen3-4B's shape with random weights (nothing is downloaded), LoRA of rank 32 on all linear layers, bfloat16, 4 sequences of 1024 tokens a
step. Each side runs alone on the card: 3 warm-up steps, then 3 times 5 steps of which the median counts. About 3 minutes and 10 GB of disk:

    python -m benchmarks.cuda_sft                  # on a machine with one CUDA GPU of 80 GB
    python -m benchmarks.cuda_sft --train-unembed  # the LM head in the adapter too, which is the SDK's default
    python -m benchmarks.cuda_sft --tiny           # the same steps with a small model, also on a CPU; its numbers mean nothing
"""

import argparse
import gc
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.loops import backend_step, peft_step, random_sequences
from benchmarks.timing import report, seconds
from tinsmith.models.tiny_tokenizer import train_tokenizer

QWEN3_4B: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
TINY = QWEN3_4B | {"vocab_size": 2048, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "head_dim": 16}

WARM_UP, ROUNDS, STEPS = 3, 3, 5


def write_model(directory: Path, shape: dict[str, Any], device: str) -> None:
    """A randomly initialised Qwen3 of that shape in bfloat16, with a small tokenizer (loading wants one; the benchmark does not use it)."""
    torch.manual_seed(0)
    config = Qwen3Config(**shape, rope_parameters={"rope_type": "default", "rope_theta": 1e6}, dtype="bfloat16")
    with torch.device(device):
        network: Any = Qwen3ForCausalLM(config)
    network.to(torch.bfloat16).save_pretrained(directory)
    train_tokenizer(2048).save_pretrained(directory)


def measure(make_step: Callable[[], Callable[[], None]], device: str) -> tuple[float, float]:
    """Median seconds of a step, and the most memory that PyTorch held from loading to the last step in GiB (0 on a CPU)."""
    on_cuda = device == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    step = make_step()

    def steps(count: int) -> None:
        for _ in range(count):
            step()
        if on_cuda:
            torch.cuda.synchronize()

    steps(WARM_UP)
    step_s = statistics.median(seconds(lambda: steps(STEPS)) / STEPS for _ in range(ROUNDS))
    return step_s, torch.cuda.max_memory_allocated() / 2**30 if on_cuda else 0.0


def release(device: str) -> None:
    """Give back what the side before held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    """Measure both sides and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small model, on whatever device there is")
    parser.add_argument("--train-unembed", action="store_true", help="train the LM head too")
    asked = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() or not asked.tiny else "cpu"
    shape = TINY if asked.tiny else QWEN3_4B
    batch = random_sequences([32 if asked.tiny else 1024] * 4, 2000)
    tokens = sum(len(sequence) for sequence in batch)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_model(directory, shape, device)
        release(device)
        ours_s, ours_gib = measure(lambda: backend_step(directory, device, "bfloat16", 32, asked.train_unembed, batch), device)
        release(device)
        loop_s, loop_gib = measure(lambda: peft_step(directory, device, torch.bfloat16, 32, asked.train_unembed, batch), device)
    memory = {"memory_ratio": ours_gib / loop_gib, "ours_gib": ours_gib, "loop_gib": loop_gib} if device == "cuda" else {}
    wanted = "at least 1.3 times the tokens per second at 0.8 times the memory"
    report("cuda_sft", loop_s / ours_s, wanted, ours_tokens_per_s=tokens / ours_s, loop_tokens_per_s=tokens / loop_s, **memory)


if __name__ == "__main__":
    main()
