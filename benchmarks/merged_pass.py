"""Time of one merged forward_backward pass of four models, 64 tokens each, against four separate passes.

The tiny model, LoRA of rank 8, float32; median of 5 rounds of 20.
Run it with: taskset -c 0,1 python -m benchmarks.merged_pass
"""

import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.timing import in_turn, report
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.models.base import load_base_model
from tinsmith.models.tiny import write_tiny_model
from tinsmith.protocol.shapes import LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES

MODELS = [f"model {number}" for number in range(4)]


def datum(model_id: str, tokens: NDArray[np.int32]) -> DatumWork:
    """Next-token prediction on `tokens`; the last position has weight 0, as its target is unknown."""
    targets = np.append(tokens[1:], 0).astype(np.int64)
    weights = np.append(np.ones(len(tokens) - 1), 0).astype(np.float32)
    rendered = RenderedInput(tokens, (), (), torch.arange(len(tokens)).unsqueeze(0))
    return DatumWork(model_id, rendered, targets, LOSSES["cross_entropy"], {"weights": weights})


def main() -> None:
    """Measure and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3", Path(folder))
        backend = LocalBackend(load_base_model("tiny", folder, ModelsConfig(device="cpu"), 0), TrainingConfig())
    for seed, model_id in enumerate(MODELS):
        backend.create_model(model_id, LoraShape(8, seed))
    tokens = np.random.default_rng(0).integers(0, 2000, (len(MODELS), 64)).astype(np.int32)
    work = [datum(model_id, row) for model_id, row in zip(MODELS, tokens, strict=True)]

    def merged() -> None:
        backend.run_pass(work, backward=True)

    def apart() -> None:
        for piece in work:
            backend.run_pass([piece], backward=True)

    merged_s, apart_s = in_turn(merged, apart, rounds=5, repeats=20)
    report(
        "merged_pass",
        merged_s / apart_s,
        "at most 0.5 times the time",
        merged_ms=1000 * merged_s,
        apart_ms=1000 * apart_s,
    )


if __name__ == "__main__":
    main()
