"""Training of a hybrid model on one GPU: tokens per second and peak memory of the Backend, and of transformers + PEFT on the same card.

Qwen3.5-4B's language model with random weights (nothing is downloaded), LoRA of rank 32 on every linear layer that we train, bfloat16, 4
and 8 sequences of 1024 tokens. transformers takes the fastest kernels it finds (flash-linear-attention if that is installed and runs on
the card, its own PyTorch code otherwise), and its adapters are in bfloat16 like ours. The precision lines compare each side's bfloat16
with its own float32. Lines come as they are measured; about 100 s without flash-linear-attention, whose kernels are compiled first:

    python -m benchmarks.cuda_hybrid                          # on a machine with one CUDA GPU of 80 GB
    python -m benchmarks.cuda_hybrid --parts ours,precision   # some of: ours, theirs, precision
    TINY=1 python -m benchmarks.cuda_hybrid                   # the same with a small model, also on a CPU; its numbers mean nothing
"""

import argparse
import gc
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from benchmarks.loops import ADAM, LINEARS, backend_step, random_sequences
from benchmarks.timing import report, seconds
from tinsmith.config import ModelsConfig
from tinsmith.models.base import load_base_model
from tinsmith.models.delta_kernels import announce, kernels_for
from tinsmith.models.delta_rule import Lengths, gated_delta_rule_anew
from tinsmith.models.lora import LORA_ALPHA
from tinsmith.models.pass_plan import PackedPlan
from tinsmith.models.tiny_tokenizer import train_tokenizer
from tinsmith.rendering.packing import pack
from tinsmith.rendering.rendered import RenderedInput

QWEN3_5_4B: dict[str, Any] = {
    "vocab_size": 248320,
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": True,
}
SMALL: dict[str, Any] = QWEN3_5_4B | {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
DELTA_LINEARS = ["in_proj_qkv", "in_proj_z", "out_proj"]
RANK = 32
PARTS = ("ours", "theirs", "precision")

Batch = list[NDArray[np.int32]]


@dataclass(frozen=True)
class Bench:
    """What is measured, and where."""

    shape: dict[str, Any]
    device: str
    length: int
    """Tokens of a sequence."""
    steps: int
    """Timed steps, after one to warm up."""

    def batch(self, sequences: int) -> Batch:
        """Random sequences."""
        return random_sequences([self.length] * sequences, 2000)

    def finish(self) -> None:
        """Wait for the card."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give back what was held."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def held_gib(self) -> float:
        """The most memory since `release`; 0 on a CPU."""
        return torch.cuda.max_memory_allocated() / 2**30 if self.device == "cuda" else 0.0


def write_model(directory: Path, shape: dict[str, Any], device: str) -> None:
    """A randomly initialised model of that shape in bfloat16, with a small tokenizer (loading wants one; the benchmark does not use it)."""
    torch.manual_seed(0)
    with torch.device(device):
        network: Any = Qwen3_5ForCausalLM._from_config(Qwen3_5TextConfig(**shape), dtype=torch.bfloat16)
    network.save_pretrained(directory)
    train_tokenizer(2048).save_pretrained(directory)


def measure(bench: Bench, name: str, sequences: int, make_step: Callable[[], Callable[[], None]]) -> float | None:
    """Prints tokens per second and memory of a side; None if its memory does not suffice."""
    bench.release()
    try:
        started = time.perf_counter()
        step = make_step()
        loaded = time.perf_counter() - started

        def finished_step() -> None:
            step()
            bench.finish()

        warm_s = seconds(finished_step)
        times = [seconds(finished_step) for _ in range(bench.steps)]
    except torch.OutOfMemoryError:
        print(f"side={name} sequences={sequences} out of memory", flush=True)
        return None
    rate = sequences * bench.length / statistics.median(times)
    spread = f"min_s={min(times):.3f} max_s={max(times):.3f} first_s={warm_s:.1f} load_s={loaded:.1f}"
    print(f"side={name} sequences={sequences} tokens_per_s={rate:.0f} gib={bench.held_gib():.1f} {spread}", flush=True)
    return rate


def peft_step(directory: Path, device: str, batch: Batch, checkpointing: bool) -> Callable[[], None]:
    """Loads the model into transformers + PEFT; each call is one step, all in bfloat16, which is faster than autocast."""
    network: Any = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, device_map=device)
    modules = [*LINEARS, *DELTA_LINEARS]
    config = LoraConfig(r=RANK, lora_alpha=int(LORA_ALPHA), lora_dropout=0.0, target_modules=modules)
    model: Any = get_peft_model(network, config, autocast_adapter_dtype=False)
    model.train()
    if checkpointing:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=ADAM.lr, betas=ADAM.betas, eps=1e-8, weight_decay=ADAM.weight_decay, fused=True)
    ids = torch.from_numpy(np.stack(batch)).long().to(device)

    def step() -> None:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()

    return step


def compare_rules(bench: Bench) -> None:
    """How far the delta rule in bfloat16 is from float64, values and gradients: ours, and the PyTorch code of transformers."""
    generator = torch.Generator().manual_seed(0)
    keys, values = bench.shape["linear_num_key_heads"], bench.shape["linear_num_value_heads"]
    width = bench.shape["linear_key_head_dim"]
    tokens = 2 * bench.length

    def drawn(*shape: int) -> Tensor:
        return torch.randn(tokens, *shape, generator=generator).to(torch.bfloat16)

    query, key, value = drawn(keys, width), drawn(keys, width), drawn(values, width)
    decay, beta = -drawn(values).float().abs() * 0.1, drawn(values).sigmoid()
    direction = drawn(values, width)

    def answers(rule: Callable[..., Tensor], dtype: torch.dtype | None) -> list[Tensor]:
        inputs = [x.to(bench.device, dtype or x.dtype).requires_grad_() for x in (query, key, value, decay, beta)]
        out = rule(*inputs)
        return [x.double() for x in (out, *torch.autograd.grad(out, inputs, direction.to(out)))]

    def ours(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        return gated_delta_rule_anew(query, key, value, decay, beta, Lengths((bench.length, bench.length)))

    def theirs(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        groups = values // keys
        repeated = query.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1), value
        rows = (x.unflatten(0, (2, -1)) for x in (*repeated, decay, beta))
        rule = getattr(torch_chunk_gated_delta_rule, "__wrapped__", torch_chunk_gated_delta_rule)
        out: Tensor = rule(*rows, use_qk_l2norm_in_kernel=True)[0]
        return out.flatten(0, 1)

    exact = answers(ours, torch.float64)
    rules: dict[str, Callable[..., Tensor]] = {"ours": ours, "transformers": theirs}
    for name, rule in rules.items():
        errors = [(a - b).norm() / b.norm() for a, b in zip(answers(rule, None), exact, strict=True)]
        named = zip(("out", "query", "key", "value", "decay", "beta"), errors, strict=True)
        print(f"rule={name} relative errors:", *(f"{part}={error:.2e}" for part, error in named), flush=True)


@torch.no_grad()
def compare_networks(bench: Bench) -> None:
    """Mean difference of log-probabilities between bfloat16 and float32, for us and for transformers, on a few layers."""
    few = bench.shape | {"num_hidden_layers": 4, "vocab_size": 2048}
    batch = bench.batch(2)
    ids = torch.from_numpy(np.stack(batch)).long().to(bench.device)  # [2, length]
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), few, bench.device)
        found: dict[str, list[Tensor]] = {"ours": [], "transformers": []}
        for dtype in ("float32", "bfloat16"):
            base = load_base_model("bench", folder, ModelsConfig(device=bench.device, dtype=dtype), 0)
            rendered = [RenderedInput(tokens, (), (), torch.arange(len(tokens)).unsqueeze(0)) for tokens in batch]
            row = pack(rendered, [None, None], base.device)
            hidden = base.hidden_states(row, PackedPlan(row.lengths, base.device, base.dtype))  # [tokens, hidden]
            found["ours"].append(_next(hidden @ base.lm_head.t(), ids))
            network: Any = Qwen3_5ForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map=bench.device)
            found["transformers"].append(_next(network(input_ids=ids, use_cache=False).logits.flatten(0, 1), ids))
    apart = {name: (half - full).abs().mean().item() for name, (full, half) in found.items()}
    report("bfloat16_precision", apart["ours"] / apart["transformers"], "at most 1.1", **apart)
    exact = (found["ours"][0] - found["transformers"][0]).abs().max().item()
    report("float32_difference", exact, "at most 1e-4")


def _next(logits: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities of the next tokens of logits [sequences · length, vocabulary]."""
    logprobs = logits.float().log_softmax(-1).unflatten(0, ids.shape)[:, :-1]
    chosen: Tensor = logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return chosen


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure, with commas between")
    parts = parser.parse_args().parts.split(",")
    tiny = os.environ.get("TINY") == "1"
    device = "cuda" if torch.cuda.is_available() or not tiny else "cpu"
    bench = Bench(SMALL if tiny else QWEN3_5_4B, device, 48 if tiny else 1024, steps=2 if tiny else 4)
    probe = torch.empty(0, dtype=torch.bfloat16, device=device)
    ours = "torch" if kernels_for(probe) is None else "flash-linear-attention"
    print(f"torch={torch.__version__} transformers={transformers.__version__} our delta rule: {ours}", flush=True)
    announce(torch.device(device), torch.bfloat16)
    rates: dict[tuple[str, int], float | None] = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        directory = Path(folder)
        if "ours" in parts or "theirs" in parts:
            write_model(directory, bench.shape, device)
        for sequences in (4, 8) if "ours" in parts else ():
            make = partial(backend_step, directory, device, "bfloat16", RANK, False, bench.batch(sequences))
            rates["ours", sequences] = measure(bench, "ours", sequences, make)
        if "precision" in parts:
            bench.release()
            compare_rules(bench)
            compare_networks(bench)
        for sequences in (4, 8) if "theirs" in parts else ():
            make = partial(peft_step, directory, device, bench.batch(sequences))
            rate = measure(bench, "peft", sequences, partial(make, False))
            if rate is None:
                rate = measure(bench, "peft+checkpointing", sequences, partial(make, True))
            rates["theirs", sequences] = rate
    for sequences in (4, 8):
        mine, other = rates.get(("ours", sequences)), rates.get(("theirs", sequences))
        if mine and other:
            report(f"cuda_hybrid_{sequences}", mine / other, "at least 1.5 times the tokens per second", ours=mine, theirs=other)


if __name__ == "__main__":
    main()
