"""Files of tensors are read by safetensors, to the last bit."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.bases import DEVICE
from tinsmith.kernels.device import STAGE_BYTES
from tinsmith.training.tensor_files import write_tensors


def neighbours() -> dict[str, Tensor]:
    """Cut from one memory, which has gaps, in another order than that of their names; more than two stages of it."""
    numbers = torch.randn(STAGE_BYTES // 4 * 2 + 1000, device=DEVICE)
    large, _, small, last = numbers.split([len(numbers) - 100, 30, 20, 50])
    return {"c": large, "b": small.view(4, 5), "a": last.view(5, 10), "d": torch.randn(3, device=DEVICE)}


def moments() -> dict[str, Tensor]:
    """One number of steps under several names."""
    step, numbers = torch.tensor(3.0, device=DEVICE), torch.randn(12, device=DEVICE)
    return {"x.step": step, "x.exp_avg": numbers[:6], "y.step": step, "y.exp_avg": numbers[6:].view(2, 3)}


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        neighbours(),
        moments(),
        {f"layers.{each}.weight{'x' * (each % 9)}": torch.randn(each, 7, device=DEVICE) for each in range(1, 40)},
        {'quoted "ä" \\ name': torch.randn(2, device=DEVICE)},
        {"turned": torch.randn(3, 5, device=DEVICE).t(), "b": torch.randn(0, 4, device=DEVICE)},
        {"half": torch.randn(3, device=DEVICE).bfloat16(), "whole": torch.randn(2, device=DEVICE, requires_grad=True)},
    ],
    ids=["none", "neighbours", "moments", "many", "odd name", "turned", "two precisions"],
)
def test_safetensors_reads_a_file(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    for name in ("one", "other"):
        write_tensors({key: tensor.detach().clone() for key, tensor in tensors.items()}, tmp_path / name)
    write_tensors(tensors, tmp_path / "ours")
    found = load_file(tmp_path / "ours")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor.detach().cpu())
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes()  # wherever they lie
