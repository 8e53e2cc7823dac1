"""Measures how far a model's numbers move when they are rounded otherwise: the noise that the self-check allows for."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NOISE = 3.0
"""The most by which we may differ from transformers in half precision, in units of what it differs from itself with other roundings."""
EXACT_NOISE = 10.0
"""The same in float32, for models that enlarge rounding, such as some that were trained with high learning rates. It is more than in half
precision: single values count there, not means, and sums inside of a module round more often than its output does here."""


@contextmanager
def rounded_otherwise(model: nn.Module) -> Iterator[None]:
    """Outputs of the model's linears, norms and so on change by up to one unit of their last place, at random."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(_module: object, _inputs: object, output: Any) -> Any:
        if not isinstance(output, Tensor):
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(0)
        drawn = torch.rand(output.shape, generator=generators[output.device], device=output.device)
        relative = torch.finfo(output.dtype).eps / 2 * (2 * drawn - 1)
        return (output * (1 + relative)).to(output.dtype)

    leaves = [module for module in model.modules() if not list(module.children())]
    handles = [module.register_forward_hook(change) for module in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
