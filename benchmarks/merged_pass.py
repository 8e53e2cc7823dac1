"""What merging models saves: one forward_backward pass of four models with 64 tokens each, against four passes of one model.

The tiny model, LoRA of rank 8, float32; median of 5 rounds of 20. Run it with: taskset -c 0,1 python -m benchmarks.merged_pass
"""

import tempfile
from pathlib import Path

from benchmarks.loops import datum, random_sequences
from benchmarks.timing import in_turn, report
from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.models.base import load_base_model
from tinsmith.models.tiny import write_tiny_model
from tinsmith.protocol.shapes import LoraShape
from tinsmith.training.backend import LocalBackend

MODELS = [f"model {number}" for number in range(4)]


def main() -> None:
    """Measure and print the line."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny_model("qwen3", Path(folder))
        backend = LocalBackend(load_base_model("tiny", folder, ModelsConfig(device="cpu"), 0), TrainingConfig())
    for seed, model_id in enumerate(MODELS):
        backend.create_model(model_id, LoraShape(8, seed))
    work = [datum(model_id, tokens) for model_id, tokens in zip(MODELS, random_sequences([64] * 4, 2000), strict=True)]

    def merged() -> None:
        backend.run_pass(work, backward=True)

    def apart() -> None:
        for piece in work:
            backend.run_pass([piece], backward=True)

    merged_s, apart_s = in_turn(merged, apart, rounds=5, repeats=20)
    report("merged_pass", merged_s / apart_s, "at most 0.5 times the time", merged_ms=1000 * merged_s, apart_ms=1000 * apart_s)


if __name__ == "__main__":
    main()
