"""Loss curve and memory of training all parameters with a compact state, beside those with a float32 state.

A small Qwen3 in bfloat16 on the CPU learns sequences that count upwards in random steps: 200 steps of four sequences of
64 tokens, the same ones for all, in one pass each or in four. Prints the mean loss of every 20 steps, and how far the
curves are apart in the last 100.
Run it with: python -m benchmarks.compact_state
"""

import tempfile
from pathlib import Path

import numpy as np
import torch

from tinsmith.config import ModelsConfig, TrainingConfig
from tinsmith.memory.budget import full_bytes
from tinsmith.models.base import BaseModel, load_base_model
from tinsmith.models.full import FullState
from tinsmith.models.tiny import write_tiny_model
from tinsmith.protocol.shapes import AdamSettings, LoraShape
from tinsmith.rendering.rendered import RenderedInput
from tinsmith.training.backend import DatumWork, LocalBackend
from tinsmith.training.losses import LOSSES

STEPS, SEQUENCES, LENGTH, SHOWN = 200, 4, 64, 20
SETTINGS = AdamSettings(lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01, grad_clip_norm=1.0)
CURVES: dict[str, tuple[FullState, int]] = {
    "float32": ("float32", 1),
    "compact": ("compact", 1),
    "compact, 4 passes": ("compact", 4),
}
"""State, and passes in each step, by name."""


def sequence(generator: np.random.Generator) -> DatumWork:
    """Numbers that count upwards from a random one, in a random step of 1 to 3 that has to be found out."""
    tokens = (generator.integers(100, 500) + generator.integers(1, 4) * np.arange(LENGTH + 1)).astype(np.int64)
    rendered = RenderedInput(tokens[:-1].astype(np.int32), (), (), torch.arange(LENGTH).unsqueeze(0))
    weights = np.full(LENGTH, 1 / (SEQUENCES * LENGTH), dtype=np.float32)
    return DatumWork("a", rendered, tokens[1:], LOSSES["cross_entropy"], {"weights": weights})


def curve(base: BaseModel, state: FullState, passes: int) -> list[float]:
    """The loss of each step."""
    backend = LocalBackend(base, TrainingConfig(full_state=state))
    backend.create_model("a", LoraShape(0, seed=0))
    generator = np.random.default_rng(0)
    losses = []
    for _ in range(STEPS):
        work = [sequence(generator) for _ in range(SEQUENCES)]
        each = SEQUENCES // passes
        outcomes = [backend.run_pass(work[start : start + each], backward=True) for start in range(0, SEQUENCES, each)]
        losses.append(sum(result.loss for outcome in outcomes for result in outcome.results if result is not None))
        backend.optim_step("a", SETTINGS)
    return losses


def main() -> None:
    """Print the curves side by side."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model("qwen3", Path(directory), hidden=128, layers=4)
        base = load_base_model("small", directory, ModelsConfig(device="cpu", dtype="bfloat16"), 0)
        base.computed_fingerprint.result()
    parameters = sum(parameter.numel() for parameter in base.full_targets(LoraShape(0, seed=0)).values())
    curves = {name: np.array(curve(base, *how)) for name, how in CURVES.items()}
    print(f"{parameters:,} parameters; mean loss of steps".ljust(44) + "".join(name.rjust(20) for name in curves))
    for start in range(0, STEPS, SHOWN):
        means = "".join(f"{losses[start : start + SHOWN].mean():20.4f}" for losses in curves.values())
        print(f"{start + 1} to {start + SHOWN}".ljust(44) + means)
    exact = curves["float32"]
    for name, losses in curves.items():
        tail = slice(STEPS // 2, None)
        apart = abs(losses[tail] - exact[tail])
        size = full_bytes(parameters, torch.bfloat16, CURVES[name][0]).device / parameters
        print(
            f"{name}: {size:.2f} bytes a parameter; last {STEPS // 2} steps {losses[tail].mean():.4f}, "
            f"off by {apart.mean():.4f} a step"
        )


if __name__ == "__main__":
    main()
